"""Importance weights and gauges against hand computations and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from each_case import each_case

from agentrl import config
from agentrl.algos.algorithm import Loss, Outputs
from agentrl.algos.clipped_loss import Clipped
from agentrl.algos.grpo import GRPO
from agentrl.algos.importance import Origin, effective_sample_size, gauges, importance_weights
from agentrl.errors import ConfigError


def test_weights_are_ratios_up_to_the_cap_and_carry_no_gradient() -> None:
    proximal = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    weights = importance_weights(proximal, torch.tensor([-1.0, -4.0, -1.0]), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-2)]))
    assert not weights.requires_grad


def test_an_impossible_token_is_capped_not_infinite() -> None:
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-1e4]), cap=2.0).item() == 2.0


def test_uncapped_weights_make_behaviour_samples_unbiased_for_the_proximal_policy() -> None:
    """Exact policy gradient of a bandit from another policy's samples; with a cap the bias is there and is known."""
    logits = torch.tensor([0.5, -0.3, 0.1, 1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    policy = torch.softmax(logits, -1)
    (exact,) = torch.autograd.grad((policy * rewards).sum(), logits, retain_graph=True)
    scores = torch.eye(4, dtype=torch.float64) - policy.detach()

    def expectation(cap: float) -> torch.Tensor:
        weights = importance_weights(policy.log(), behaviour.log(), cap)
        return ((behaviour * weights * rewards)[:, None] * scores).sum(0)

    torch.testing.assert_close(expectation(1e9), exact)
    ratio = policy.detach() / behaviour
    lost = (behaviour * (ratio - ratio.clamp(max=1.5)) * rewards)[:, None] * scores
    torch.testing.assert_close(expectation(1.5), exact - lost.sum(0))
    assert lost.abs().max() > 0.1


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.ones(5)).item() == 1
    assert effective_sample_size(torch.tensor([3.0, 1.0])).item() == pytest.approx(16 / (2 * 10))


def test_gauges_by_hand() -> None:
    behaviour = torch.tensor([-1.0, -2.0, -1.5, -0.5])
    proximal = torch.tensor([-1.1, -1.0, -1.5, -0.6])
    got = gauges(proximal, behaviour, torch.tensor([0, 3, 1, 0]), torch.zeros(4, dtype=torch.long), cap=2.0)
    gap = [-0.1, 1.0, 0.0, -0.1]
    ratio = [math.exp(value) for value in gap]
    assert got.kl_k1 == pytest.approx(-sum(gap) / 4, abs=1e-6)
    assert got.kl_k3 == pytest.approx(sum(r - 1 - g for r, g in zip(ratio, gap, strict=True)) / 4, abs=1e-6)
    assert got.ess == pytest.approx(sum(ratio) ** 2 / (4 * sum(r * r for r in ratio)), abs=1e-6)
    assert got.truncated == 0.25  # e > 2
    assert (got.lag_mean, got.lag_max) == (1.0, 3)


def test_each_token_counts_in_one_kind_of_mismatch() -> None:
    plain, mixed, undone = Origin.PLAIN, Origin.MIXED_KV, Origin.UNDONE
    tokens = [(0.1, 0, plain), (-0.3, 0, plain), (0.5, 1, plain), (0.6, 3, plain), (0.7, 9, plain)]
    tokens += [(2.0, 0, mixed), (-4.0, 5, mixed), (8.0, 0, undone)]
    gap, lag, origin = (torch.tensor(column) for column in zip(*tokens, strict=True))
    got = gauges(gap - 1.0, torch.full_like(gap, -1.0), lag, origin, cap=2.0).mismatch
    expected = {
        "fresh": (2, 0.2, 0.3),
        "lag_1": (1, 0.5, 0.5),
        "lag_2_3": (1, 0.6, 0.6),
        "lag_4_up": (1, 0.7, 0.7),
        "mixed_kv": (2, 3.0, 4.0),
        "undone": (1, 8.0, 8.0),
    }
    assert got.keys() == expected.keys()
    for name, numbers in expected.items():
        assert (got[name].tokens, got[name].mean, got[name].max) == pytest.approx(numbers, abs=1e-6)


def test_a_kind_without_tokens_is_not_measured() -> None:
    got = gauges(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2]), torch.tensor([Origin.PLAIN]), cap=2.0)
    assert got.mismatch.keys() == {"lag_2_3"}


# --- weights of tokens, sequences and their geometric means; rejection ------------------------------------------------

TOKENS = [(1, 0), (2, 0), (1, 0), (1, 1), (2, 0), (1, 1), (3, 0)]  # episode and role of each token, in any order
GAPS = [0.4, -0.1, 0.5, -0.2, 0.15, 0.05, -1.5]  # proximal - behaviour


def loop_weights(level: str, mode: str, floor: float, cap: float) -> list[float]:
    """The definition, over Python floats."""
    weights = []
    for own, gap in zip(TOKENS, GAPS, strict=True):
        gaps = [other for sequence, other in zip(TOKENS, GAPS, strict=True) if sequence == own]
        log_ratio = {"token": gap, "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}[level]
        ratio = math.exp(log_ratio)
        inside = floor <= ratio <= cap
        weights.append(ratio if inside else min(max(ratio, floor), cap) if mode == "truncate" else 0.0)
    return weights


def columns(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    behaviour = torch.linspace(-2.0, -1.0, len(TOKENS), dtype=dtype)
    return {
        "episode": torch.tensor([episode for episode, _ in TOKENS]),
        "role": torch.tensor([role for _, role in TOKENS]),
        "turn": torch.tensor([role for _, role in TOKENS]),
        "behaviour": behaviour,
        "proximal": behaviour + torch.tensor(GAPS, dtype=dtype),
        "advantage": torch.linspace(-1.1, 2.0, len(TOKENS), dtype=dtype),
        "weight": torch.full((len(TOKENS),), 1 / len(TOKENS), dtype=dtype),
    }


def loss_of(algo: Clipped, tokens: dict[str, torch.Tensor]) -> tuple[Loss, list[float]]:
    """The loss at the step's start, and its gradient by the log-probs."""
    now = tokens["proximal"].clone().requires_grad_()
    loss = algo.loss({**tokens, **algo.advantages(tokens)}, Outputs(logprobs_K=now, entropy_K=-now.detach()), step=0)
    return loss, torch.autograd.grad(loss.total, now)[0].tolist()


@each_case("mode", ["truncate", "mask"])
@each_case("level", ["token", "sequence", "geometric"])
def test_the_weights_of_each_level_and_mode_are_their_definition(level: str, mode: str) -> None:
    bounds = {"importance_bounds": (0.8, 1.45)}
    tokens = columns()
    algo = GRPO.model_validate({"importance": level, "importance_mode": mode, **bounds})
    expected = loop_weights(level, mode, *bounds["importance_bounds"])
    assert len({*expected}) > 2 and expected != loop_weights(level, mode, 0.0, 9.0)  # bounds cut some, not all
    loss, gradient = loss_of(algo, tokens)
    assert loss.importance_K is not None and loss.importance_K.tolist() == pytest.approx(expected, rel=1e-12)
    shares = (tokens["weight"] * tokens["advantage"]).tolist()
    assert gradient == pytest.approx([-weight * share for weight, share in zip(expected, shares, strict=True)])


def test_a_masked_token_stays_in_the_mean() -> None:
    """The loss is a mean over all seven tokens, however many are masked: no other one weighs more."""
    tokens = columns()
    masked = GRPO(importance_mode="mask", importance_bounds=(0.5, 5.0))  # IcePop's bounds
    _, gradient = loss_of(masked, tokens)
    _, free = loss_of(GRPO(importance_bounds=(0.0, 1e9)), tokens)
    assert [at for at, one in enumerate(gradient) if one == 0] == [6]  # exp(-1.5) < 0.5
    assert gradient[:6] == free[:6]


@each_case(
    ("level", "below", "above", "rejected"),
    [
        ("token", 0.5, 2.0, {3}),
        ("token", 0.5, 1.6, {1, 3}),  # a token of episode 1 has exp(0.5)
        ("sequence", 0.5, 2.0, {1, 3}),  # of which the first role's product is exp(0.9)
        ("geometric", 0.5, 2.0, {3}),
        ("geometric", 0.0, 1.5, {1}),
    ],
)
def test_a_rejected_sequence_has_no_part_in_the_loss_and_stays_in_the_mean(
    level: str, below: float, above: float, rejected: set[int]
) -> None:
    """The other role of a rejected sequence's episode is judged by itself."""
    settings = {"reject": level, "reject_bounds": (below, above), "importance": "none"}
    algo = GRPO.model_validate({**settings, "kl_weight": 0.5, "entropy_weight": 0.5})
    plain = GRPO(importance="none", kl_weight=0.5, entropy_weight=0.5)
    tokens = {**columns(), "reference": columns()["proximal"] - 0.3}
    out = [episode in rejected and role == 0 for episode, role in TOKENS]
    kept = algo.advantages(tokens)["kept"].tolist()
    assert kept == [not one for one in out]
    loss, gradient = loss_of(algo, tokens)
    of_kept = {**tokens, "weight": tokens["weight"] * ~torch.tensor(out)}
    expected, free = loss_of(plain, of_kept)
    assert loss.total.item() == pytest.approx(expected.total.item())
    assert gradient == pytest.approx(free)
    assert all((one == 0) == left for one, left in zip(gradient, out, strict=True))


@each_case(
    ("settings", "wrong"),
    [
        ({"importance_bounds": (2.0, 2.0)}, r"importance_bounds = \[2.0, 2.0\]: the first must be below"),
        ({"reject": "token", "reject_bounds": (3.0, 2.0)}, r"reject_bounds = \[3.0, 2.0\]: the first must be below"),
        ({"importance": "none", "importance_mode": "mask"}, "give importance = 'token'"),
        ({"kind": "cispo", "importance_mode": "mask"}, "does not use importance_mode"),
        ({"kind": "cispo", "importance": "sequence"}, "algo.importance.*'token' or 'none'"),
    ],
)
def test_impossible_corrections_are_refused(settings: dict[str, object], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config.parse({"model": "m", "env": {"id": "e"}, "algo": settings})


@each_case("kind", ["grpo", "gspo", "cispo", "sapo", "reinforce++", "ppo"])
def test_every_clipped_kind_takes_the_corrections(kind: str) -> None:
    algo = config.algorithm(kind).model_validate({"reject": "geometric", "reject_bounds": (0.0, 1.5)})
    assert algo.ahead
    tokens = {**columns(), "to_go": columns()["advantage"], "values": torch.zeros(len(TOKENS), dtype=torch.float64)}
    tokens |= {"own_turn": tokens["turn"]}
    tokens |= algo.advantages(tokens)
    assert tokens["kept"].tolist() == [(episode, role) != (1, 0) for episode, role in TOKENS]
    now = tokens["proximal"].clone().requires_grad_()
    values = tokens["values"].clone().requires_grad_()
    loss = algo.loss(tokens, Outputs(logprobs_K=now, entropy_K=now, values_K=values), step=99).total
    by_token, by_value = torch.autograd.grad(loss, [now, values], allow_unused=True)
    assert not by_token[~tokens["kept"]].any() and by_token[tokens["kept"]].any()
    assert by_value is None or (not by_value[~tokens["kept"]].any() and by_value[tokens["kept"]].any())
