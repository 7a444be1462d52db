"""The sampling distribution against a plain-Python one, and the draws against the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded.batching import distribution, sample
from agentrl.records import SamplingParams

INFINITY = float("inf")


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


def by_hand(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Log-probs after temperature, min-p, top-k, top-p, by the definition."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if math.exp(scaled[i] - scaled[order[0]]) >= min_p]
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
    st.sampled_from([0.0, 0.043, 0.61]),
)
def test_the_distribution_is_that_of_the_definition(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    one, expected = params(temperature, top_p, top_k, min_p), by_hand(logits, temperature, top_p, top_k, min_p)
    assert distribution(torch.tensor([logits]), [one])[0].tolist() == pytest.approx(expected, abs=1e-5)
    _, _, kept = sample(torch.tensor([logits]), [one])
    inside = [i for i, logprob in enumerate(expected) if logprob > -INFINITY]
    assert kept == ({0: inside} if top_p < 1 or top_k > 0 or min_p > 0 else {})


def test_rows_do_not_touch_one_another() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    mixed = [params(), params(0.5, 0.9, 4), params(0.0, 0.1, 1), params(1.0, 0.5, 2, 0.1)]
    together = distribution(logits, mixed)
    for row, one in enumerate(mixed):
        torch.testing.assert_close(distribution(logits[row : row + 1], [one])[0], together[row])
    assert torch.equal(logits, before)
    torch.testing.assert_close(together[2], before[2].log_softmax(-1))  # greedy: the unscaled distribution


def test_draws_follow_the_distribution_and_carry_its_logprob() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125, 0.0])
    n = 40_000
    rows = probabilities.log().expand(n, -1)
    tokens, logprobs, _ = sample(rows, [params()] * n, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=6)
    assert counts[2] == counts[5] == 0  # what has no probability is never drawn, the last token included
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-6, rtol=0)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probabilities.tolist()) if p)
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_greedy_rows_take_the_argmax_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs, _ = sample(logits, [params(0.0)] * 2)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_tokens_as_likely_as_the_last_that_stays_stay_too() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert sample(logits, [params(top_k=2)])[2] == {0: [0, 1, 2, 3]}
    assert sample(logits, [params(min_p=math.exp(-1))])[2] == {0: [0, 1, 2, 3]}
    assert len(sample(logits, [params(top_p=0.5)])[2][0]) == 2  # enough of them, whichever


def test_a_draw_from_a_kept_set_has_its_log_prob_over_the_set() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]]).expand(200, -1)
    tokens, logprobs, kept = sample(logits, [params(top_p=0.7)] * 200, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 1} and all(ids == [0, 1] for ids in kept.values())
    expected = torch.tensor([math.log(2 / 3), math.log(1 / 3)])[tokens]
    torch.testing.assert_close(logprobs, expected)
