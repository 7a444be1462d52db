"""Further algorithms: the loss of each, and its gradient, against its paper's formula as a loop over Python floats."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from agentrl.algos.algorithm import Outputs, Siblings
from agentrl.algos.cispo import CISPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.gspo import GSPO
from agentrl.algos.reinforce import Reinforce

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


@pytest.mark.parametrize("seed", range(4))
def test_gspo_is_its_formula(seed: int) -> None:
    algo = GSPO(clip_low=0.1, clip_high=0.2, importance_cap=1.5)
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


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("algo", [GSPO(), CISPO(clip_high=1.0)], ids=["gspo", "cispo"])
def test_at_one_update_a_step_they_are_grpo(algo: GRPO) -> None:
    columns, _ = drawn(1, spread=0.0)
    now = columns["proximal"].clone().requires_grad_()
    expected = found(GRPO(importance_cap=2.0), columns, now)[1]
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
