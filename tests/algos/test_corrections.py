"""Importance weights and gauges against hand computations and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algos.corrections import Origin, effective_sample_size, gauges, importance_weights


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
