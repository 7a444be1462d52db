"""Further algorithms: the loss of each, and its gradient, against its paper's formula as a loop over Python floats."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl import config
from agentrl.algos.algorithm import Outputs, Siblings
from agentrl.algos.cispo import CISPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.gspo import GSPO
from agentrl.algos.reinforce import Reinforce
from agentrl.algos.sapo import SAPO
from agentrl.errors import ConfigError

TURNS = [(1, 0), (1, 0), (1, 0), (2, 0), (1, 1), (1, 1), (2, 1), (2, 1), (2, 1), (2, 1)]  # episode and turn of a token


def drawn(seed: int, spread: float) -> tuple[dict[str, Tensor], Tensor]:
    """The columns of a pass, and the log-probs of now; a turn's tokens share its advantage."""
    rng = random.Random(seed)
    earned = {turn: rng.gauss(0, 1) for turn in dict.fromkeys(TURNS)}
    proximal = [rng.uniform(-3, -0.5) for _ in TURNS]
    columns = {
        "episode": torch.tensor([episode for episode, _ in TURNS]),
        "turn": torch.tensor([turn for _, turn in TURNS]),
        "advantage": torch.tensor([earned[turn] for turn in TURNS], dtype=torch.float64),
        "weight": torch.tensor([rng.random() for _ in TURNS], dtype=torch.float64),
        "proximal": torch.tensor(proximal, dtype=torch.float64),
        "behaviour": torch.tensor([value + rng.gauss(0, 0.5) for value in proximal], dtype=torch.float64),
    }
    now = torch.tensor([value + rng.gauss(0, spread) for value in proximal], dtype=torch.float64)
    return columns, now.requires_grad_()


def found(algo: GRPO | Reinforce, columns: dict[str, Tensor], now: Tensor) -> tuple[float, list[float], list[bool]]:
    loss = algo.loss(columns, Outputs(logprobs_K=now, entropy_K=now), step=0)
    return float(loss.total.detach()), torch.autograd.grad(loss.total, now)[0].tolist(), loss.clipped_K.tolist()


def of(columns: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in columns.items()}


@each_case("seed", range(4))
def test_gspo_is_its_formula(seed: int) -> None:
    algo = GSPO(clip_low=0.1, clip_high=0.2, importance_bounds=(0.0, 1.5))
    columns, now = drawn(seed, spread=0.5)
    c, logprob = of(columns), now.tolist()
    loss, gradient, clipped = 0.0, [0.0] * len(TURNS), []
    for k, turn in enumerate(TURNS):
        own = [j for j, other in enumerate(TURNS) if other == turn]
        s = math.exp(sum(logprob[j] - c["proximal"][j] for j in own) / len(own))
        held, advantage = min(max(s, 0.9), 1.2), c["advantage"][k]
        share = c["weight"][k] * min(1.5, math.exp(c["proximal"][k] - c["behaviour"][k]))
        loss -= share * min(s * advantage, held * advantage)
        clipped.append(held * advantage < s * advantage)
        if not clipped[-1]:
            for j in own:
                gradient[j] -= share * advantage * s / len(own)
    got = found(algo, columns, now)
    assert got[0] == pytest.approx(loss)
    assert got[1] == pytest.approx(gradient)
    assert got[2] == clipped


def test_gspo_clips_whole_turns() -> None:
    clipped = [turn for seed in range(4) for turn in found(GSPO(clip_low=0.1, clip_high=0.2), *drawn(seed, 0.5))[2]]
    assert 0 < sum(clipped) < len(clipped)


@each_case("seed", range(4))
def test_cispo_is_its_formula(seed: int) -> None:
    """Every token has a gradient: its weight is cut, it is not."""
    algo = CISPO(clip_low=0.3, clip_high=0.5)
    columns, now = drawn(seed, spread=0.5)
    c, logprob = of(columns), now.tolist()
    ratio = [math.exp(logprob[k] - c["behaviour"][k]) for k in range(len(TURNS))]
    weight = [min(max(r, 0.7), 1.5) for r in ratio]
    share = [c["weight"][k] * weight[k] * c["advantage"][k] for k in range(len(TURNS))]
    loss, gradient, clipped = found(algo, columns, now)
    assert loss == pytest.approx(-sum(s * p for s, p in zip(share, logprob, strict=True)))
    assert gradient == pytest.approx([-s for s in share])
    assert clipped == [w != r for w, r in zip(weight, ratio, strict=True)]
    assert 0 < sum(clipped) < len(clipped)
    plain = CISPO(clip_low=0.3, clip_high=0.5, importance="none")
    assert found(plain, columns, columns["proximal"].clone().requires_grad_())[1] == pytest.approx(
        [-a * b for a, b in zip(c["weight"], c["advantage"], strict=True)]
    )


@each_case("seed", range(4))
def test_sapo_is_its_formula(seed: int) -> None:
    algo = SAPO(tau=(0.8, 3.0), importance_bounds=(0.0, 1.5))
    columns, now = drawn(seed, spread=0.8)
    c, logprob = of(columns), now.tolist()
    loss, gradient = 0.0, []
    for k, advantage in enumerate(c["advantage"]):
        r, tau = math.exp(logprob[k] - c["proximal"][k]), 0.8 if advantage > 0 else 3.0
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        share = c["weight"][k] * min(1.5, math.exp(c["proximal"][k] - c["behaviour"][k]))
        loss -= share * 4 / tau * gate * advantage
        gradient.append(-share * 4 * gate * (1 - gate) * r * advantage)
    got = found(algo, columns, now)
    assert got[0] == pytest.approx(loss)
    assert got[1] == pytest.approx(gradient)
    assert not any(got[2])


@each_case("kind", ["grpo", "gspo"])
@each_case("seed", range(4))
def test_the_dual_clip_bounds_the_loss_of_a_token_that_became_likelier(kind: str, seed: int) -> None:
    algo = config.algorithm(kind)(clip_low=0.1, clip_high=0.2, dual_clip=1.4)
    columns, now = drawn(seed, spread=0.8)
    c, logprob = of(columns), now.tolist()
    loss, clipped = 0.0, []
    for k, turn in enumerate(TURNS):
        own = [j for j, other in enumerate(TURNS) if other == turn] if kind == "gspo" else [k]
        r = math.exp(sum(logprob[j] - c["proximal"][j] for j in own) / len(own))
        advantage, gained = c["advantage"][k], min(r * c["advantage"][k], min(max(r, 0.9), 1.2) * c["advantage"][k])
        bounded = max(gained, 1.4 * advantage) if advantage < 0 else gained
        clipped.append(bounded != r * advantage)
        loss -= c["weight"][k] * min(2.0, math.exp(c["proximal"][k] - c["behaviour"][k])) * bounded
    got = found(algo, columns, now)
    assert got[0] == pytest.approx(loss)
    assert got[2] == clipped
    if kind == "grpo":
        assert [slope == 0 for slope in got[1]] == clipped


def test_the_dual_clip_cuts_what_the_clip_alone_does_not() -> None:
    cut = [sum(sum(found(GRPO(dual_clip=c), *drawn(seed, 1.0))[2]) for seed in range(4)) for c in (0.0, 1.5)]
    assert cut[0] < cut[1]


@each_case("kind", ["grpo", "reinforce++"])
@each_case("spread", [0.0, 0.3])
def test_a_stale_token_that_has_moved_far_enough_says_nothing_where_the_clip_is_from_behaviour(
    kind: str, spread: float
) -> None:
    """Spread 0 is a step with one update, where the clip from the proximal policy cuts nothing."""
    near, far = (config.algorithm(kind)(clip_from=policy) for policy in ("proximal", "behaviour"))
    cut = 0
    for seed in range(4):
        columns, now = drawn(seed, spread)
        c, plain, got = of(columns), found(near, columns, now), found(far, columns, now)
        for k, logprob in enumerate(now.tolist()):
            moved = math.exp(logprob - c["behaviour"][k])
            over = moved > 1.28 if c["advantage"][k] > 0 else moved < 0.8
            assert got[1][k] == (0.0 if over else plain[1][k])
            assert got[2][k] == (over or plain[2][k])
            cut += over
        if not spread:
            assert not any(plain[2])
    assert 0 < cut < 4 * len(TURNS)


@each_case("kind", ["grpo", "ppo", "cispo", "gspo", "sapo"])
def test_without_a_choice_the_clip_is_from_behaviour_for_old_tokens_alone(kind: str) -> None:
    """Of the kinds that have such a clip; a token is old at three steps."""
    algorithm = config.algorithm(kind)
    has = "clip_from" not in algorithm.unused
    columns, now = drawn(0, 0.0)
    columns |= dict.fromkeys(("values", "target"), columns["advantage"]) | {"value_share": columns["weight"]}
    columns["importance"] = torch.ones_like(columns["weight"])
    lag_K = torch.tensor([0, 1, 2, 3, 4, 8, 3, 2, 9, 3])

    def slopes(lag_K: Tensor | None, **settings: Any) -> list[float]:
        tokens = columns if lag_K is None else columns | {"lag": lag_K}
        outputs = Outputs(logprobs_K=now, entropy_K=now, values_K=columns["values"])
        return torch.autograd.grad(algorithm(**settings).loss(tokens, outputs, step=99).total, now)[0].tolist()

    plain = slopes(None)
    far = slopes(lag_K, clip_from="behaviour") if has else plain
    assert slopes(lag_K) == [far[k] if lag > 2 else plain[k] for k, lag in enumerate(lag_K.tolist())]
    assert slopes(lag_K.clamp(max=2)) == plain
    assert (slopes(lag_K) != plain) == has


@each_case(
    ("algo", "said"),
    [
        ({"kind": "gspo", "clip_from": "behaviour"}, "kind = 'gspo' does not use clip_from: leave it out"),
        (
            {"kind": "grpo", "dual_clip": 1.1},
            r"dual_clip = 1\.1: must be above 1 \+ clip_high = 1\.28, or 0",
        ),
        ({"kind": "sapo", "clip_high": 0.3}, "kind = 'sapo' does not use clip_high: leave it out"),
        (
            {"kind": "cispo", "importance_bounds": (0.0, 3.0)},
            "kind = 'cispo' does not use importance_bounds: leave it out",
        ),
        (
            {"kind": "grpo", "discount": 0.9, "scale": "std_by_source"},
            "discount = 0.9 and scale = 'std_by_source': leave one",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(algo: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.parse({"model": "m", "env": {"id": "e"}, "algo": algo})


def test_another_kind_on_the_command_line_leaves_what_it_does_not_use() -> None:
    document: dict[str, Any] = {"algo": {"clip_high": 0.3, "scale": "std"}}
    config.apply_override(document, "algo.kind=sapo")
    assert document["algo"] == {"kind": "sapo", "scale": "std"}


def test_names_of_papers_are_settings_of_grpo() -> None:
    """Each differs from GRPO in what its paper says, and in nothing else."""
    changes = {
        "rloo": {},
        "dr_grpo": {"baseline": "group_mean", "normalise": 256},
        "dapo": {"baseline": "group_mean", "scale": "std"},
        "maxrl": {"baseline": "group_mean", "scale": "mean"},
    }
    for kind, changed in changes.items():
        of_kind = config.parse({"model": "m", "env": {"id": "e"}, "algo": {"kind": kind}}).algo
        assert of_kind.model_dump() == GRPO().model_dump() | changed | {"kind": kind}


@each_case("algo", [GSPO(), CISPO(clip_high=1.0), SAPO()])
def test_at_one_update_a_step_they_are_grpo(algo: GRPO) -> None:
    columns, _ = drawn(1, spread=0.0)
    now = columns["proximal"].clone().requires_grad_()
    expected = found(GRPO(importance_bounds=(0.0, 2.0)), columns, now)[1]
    turns = torch.tensor([episode * 10 + turn for episode, turn in TURNS])
    if isinstance(algo, GSPO):  # it spreads a turn's gradient evenly over its tokens
        means = [torch.tensor(expected)[turns == turn].mean() for turn in turns]
        assert found(algo, columns, now)[1] == pytest.approx([float(mean) for mean in means], rel=1e-6)
    else:
        assert found(algo, columns, now)[1] == pytest.approx(expected)


def test_reinforce_compares_with_the_whole_step() -> None:
    algo = Reinforce(process_weight=2.0)
    siblings = Siblings(
        outcomes_G=torch.tensor([1.0, 0.0], dtype=torch.float64),
        rewards_GT=torch.tensor([[0.5, 0.25], [0.1, 0.0]], dtype=torch.float64),
        turns_G=torch.tensor([2, 1]),
        scored_G=torch.tensor([True, True]),
        judges_G=torch.tensor([False, False]),
        streams_KGT=torch.zeros(1, 2, 2, dtype=torch.float64),
        weights_K=torch.ones(1),
    )
    to_go = algo.prepare(siblings)["to_go"]
    assert to_go[0].tolist() == [1 + 2 * 0.75, 1 + 2 * 0.25]
    assert float(to_go[1, 0]) == pytest.approx(0.2)
    returns = [2.5, 2.5, 1.5, 0.2]  # tokens: two, one, one
    mean = sum(returns) / 4
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / 4)
    got = algo.advantages({"to_go": torch.tensor(returns, dtype=torch.float64)})["advantage"]
    assert got.tolist() == pytest.approx([(value - mean) / (deviation + 1e-4) for value in returns])
    for n in (3, 7, 1001):  # equal returns say nothing, however their mean is rounded
        assert not algo.advantages({"to_go": torch.full((n,), 0.7)})["advantage"].any()
    assert (algo.ahead, algo.compares) == (False, False)
