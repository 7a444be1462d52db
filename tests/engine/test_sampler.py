"""The sampling distribution against a plain-Python one, and the draws against the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded.sampler import Settings, distribution, sample

INFINITY = float("inf")


def by_hand(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Log-probs after temperature, top-k, top-p, by the definition."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[:top_k] if top_k > 0 else order
    weights = {i: math.exp(scaled[i] - scaled[kept[0]]) for i in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if nucleus and reached >= top_p:
            break
        nucleus.append(i)
        reached += weights[i] / total
    inside = sum(weights[i] for i in nucleus)
    return [math.log(weights[i] / inside) if i in nucleus else -INFINITY for i in range(len(logits))]


# Well apart, so that no rounding decides which side of a cut a token falls on.
logits_lists = st.lists(st.integers(-8, 8).map(lambda x: x * 0.37), min_size=2, max_size=12, unique=True)


@settings(max_examples=150, deadline=None)
@given(
    logits_lists,
    st.sampled_from([0.5, 1.0, 1.9]),
    st.sampled_from([0.05, 0.313, 0.717, 0.951, 1.0]),
    st.sampled_from([-1, 0, 1, 3, 100]),
)
def test_the_distribution_is_that_of_the_definition(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    one = Settings(temperature_B=[temperature], top_p_B=[top_p], top_k_B=[top_k])
    got = distribution(torch.tensor([logits]), one)[0].tolist()
    assert got == pytest.approx(by_hand(logits, temperature, top_p, top_k), abs=1e-5)


def test_rows_do_not_touch_one_another() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    mixed = Settings(temperature_B=[1.0, 0.5, 0.0, 1.0], top_p_B=[1.0, 0.9, 0.1, 0.5], top_k_B=[-1, 4, 1, 2])
    together = distribution(logits, mixed)
    for row in range(4):
        alone = Settings(
            temperature_B=[mixed.temperature_B[row]], top_p_B=[mixed.top_p_B[row]], top_k_B=[mixed.top_k_B[row]]
        )
        torch.testing.assert_close(distribution(logits[row : row + 1], alone)[0], together[row])
    assert torch.equal(logits, before)
    torch.testing.assert_close(together[2], before[2].log_softmax(-1))  # greedy: the unscaled distribution


def test_draws_follow_the_distribution_and_carry_its_logprob() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125, 0.0])
    n = 40_000
    rows = probabilities.log().expand(n, -1)
    same = Settings(temperature_B=[1.0] * n, top_p_B=[1.0] * n, top_k_B=[-1] * n)
    tokens, logprobs = sample(rows, same, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=6)
    assert counts[2] == counts[5] == 0  # what has no probability is never drawn, the last token included
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-6, rtol=0)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probabilities.tolist()) if p)
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_greedy_rows_take_the_argmax_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    greedy = Settings(temperature_B=[0.0, 0.0], top_p_B=[1.0, 1.0], top_k_B=[-1, -1])
    tokens, logprobs = sample(logits, greedy)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])
