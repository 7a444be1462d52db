"""Losses against hand computations and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl.algos.kl_penalty import kl_penalty
from agentrl.algos.losses import Normalise, clipped_surrogate, policy_loss, token_weights

from .test_credit import ACTIONS, HORIZON, PATHS, logprob_grads, outcome

LOW, HIGH = 0.2, 0.28


@each_case(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),  # inside the wider upper bound
        (1.5, 2.0, -2.56, True),  # (1 + 0.28) * 2
        (0.5, 2.0, -1.0, False),  # pessimism: a good token that became rarer is not clipped
        (0.5, -2.0, 1.6, True),  # (1 - 0.2) * 2
        (1.5, -2.0, 3.0, False),
    ],
)
def test_the_clip_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    logprob = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    got, cut = clipped_surrogate(
        logprob,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=LOW,
        clip_high=HIGH,
    )
    assert got.item() == pytest.approx(loss)
    assert cut.item() is clipped
    (gradient,) = torch.autograd.grad(got.sum(), logprob)
    assert gradient.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def whole_loss(logits: Tensor) -> Tensor:
    """All terms at once, on a softmax over 5 tokens at 6 places."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, (6,), generator=generator)
    proximal = -torch.rand(6, generator=generator, dtype=torch.float64) * 2
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    importance = torch.rand(6, generator=generator, dtype=torch.float64) + 0.5
    reference = -torch.rand(6, generator=generator, dtype=torch.float64) * 2
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs[torch.arange(6), tokens]
    surrogate, _ = clipped_surrogate(chosen, proximal, advantages, clip_low=LOW, clip_high=HIGH)
    return policy_loss(
        surrogate,
        token_weights(torch.tensor([0, 0, 0, 1, 2, 2]), "sequence").double(),
        importance,
        kl_T=kl_penalty(chosen, reference),
        kl_weight=0.3,
        entropy_T=-(logprobs.exp() * logprobs).sum(-1),
        entropy_weight=0.1,
    )


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(whole_loss, (logits,), eps=1e-6, atol=1e-7)


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    logprob = torch.log_softmax(logits, -1)[1:2]
    surrogate, _ = clipped_surrogate(
        logprob, logprob.detach(), torch.tensor([1.7], dtype=torch.float64), clip_low=LOW, clip_high=HIGH
    )
    (got,) = torch.autograd.grad(surrogate.sum(), logits)
    expected = -1.7 * (torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) - torch.softmax(logits.detach(), -1))
    torch.testing.assert_close(got, expected)


def test_token_and_sequence_weights_by_hand() -> None:
    episodes = torch.tensor([7, 7, 7, 2, 9, 9])
    torch.testing.assert_close(token_weights(episodes, "token"), torch.full((6,), 1 / 6))
    torch.testing.assert_close(
        token_weights(episodes, "sequence"), torch.tensor([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 6, 1 / 6])
    )
    assert token_weights(torch.zeros(0, dtype=torch.long), "sequence").shape == (0,)


def test_policy_loss_by_hand() -> None:
    weights, importance = torch.tensor([0.25, 0.75]), torch.tensor([2.0, 1.0])
    surrogate, kl, entropy = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.0]), torch.tensor([1.0, 2.0])
    got = policy_loss(surrogate, weights, importance, kl_T=kl, kl_weight=0.2, entropy_T=entropy, entropy_weight=0.1)
    assert got.item() == pytest.approx(0.25 * (2 * (1 + 0.1) - 0.1) + 0.75 * (-1 - 0.2))


def test_k3_estimates_the_divergence_without_bias() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    mean = (policy * kl_penalty(policy.log(), reference.log())).sum()
    exact = (policy * (policy / reference).log()).sum()
    assert mean.item() == pytest.approx(exact.item())
    assert (kl_penalty(policy.log(), reference.log()) >= 0).all()


def expected_gradients(policy: Tensor, reference: Tensor, gradient: str) -> tuple[Tensor, Tensor]:
    """Of the penalty on tokens of the policy, by enumeration: its mean, and the mean of its gradient by the logits."""
    logits = policy.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    penalty = kl_penalty(logprobs, reference.log(), gradient)  # pyright: ignore[reportArgumentType]
    (mean,) = torch.autograd.grad((policy * penalty).sum(), logits)  # tokens come with their probability, as samples do
    return (policy * penalty).sum().detach(), mean


@pytest.mark.parametrize("gradient", ["k3", "k2"])
def test_the_gradient_of_the_penalty_is_that_of_the_divergence_it_says(gradient: str) -> None:
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.05, 0.25], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    moving = torch.softmax(logits, -1)
    reverse = (moving * (moving / reference).log()).sum()
    forward = (reference * (reference / moving).log()).sum()
    (exact_reverse,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (exact_forward,) = torch.autograd.grad(forward, logits)
    value, found = expected_gradients(policy, reference, gradient)
    assert value.item() == pytest.approx(reverse.item())
    torch.testing.assert_close(found, exact_forward if gradient == "k3" else exact_reverse)
    assert (exact_forward - exact_reverse).abs().max() > 0.05  # the two are told apart


def test_the_straight_through_gradient_is_the_score_function_form_of_k1_and_of_k3() -> None:
    logprobs = torch.tensor([-0.2, -1.5, -4.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    k1 = (logprobs - reference).detach()
    k3 = kl_penalty(logprobs, reference)
    forms = [kl_penalty(logprobs, reference, "k2"), k1 * logprobs, k3.detach() * logprobs + k3]
    one, two, three = (torch.autograd.grad(form.sum(), logprobs, retain_graph=True)[0] for form in forms)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(one, three)
    torch.testing.assert_close(forms[0], k3)


# --- normalisation against the exact policy gradient ----------------------------------------------------------------


def expected_direction(normalise: Normalise) -> float:
    """Cosine of the expected gradient under a normalisation and the exact one, by enumeration of all groups of two, in
    a problem whose policy decides when to stop."""
    theta = torch.randn(HORIZON, ACTIONS, ACTIONS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theta.requires_grad_()
    probability_P, scores = logprob_grads(theta)
    returns = [outcome(path) for path in PATHS]
    exact = torch.autograd.grad((probability_P * torch.tensor(returns)).sum(), theta, retain_graph=True)[0]
    estimate = torch.zeros_like(exact)
    for i, j in itertools.product(range(len(PATHS)), repeat=2):
        sequence_T = torch.tensor([0] * len(PATHS[i]) + [1] * len(PATHS[j]))
        share_T = token_weights(sequence_T, normalise).double()
        advantage = returns[i] - returns[j]
        signed = [advantage * score for score in scores[i]] + [-advantage * score for score in scores[j]]
        mass = float((probability_P[i] * probability_P[j]).detach())
        estimate += mass * torch.stack([share * one for share, one in zip(share_T, signed, strict=True)]).sum(0)
    if normalise == 3:
        torch.testing.assert_close(estimate, exact / 3, atol=1e-7, rtol=1e-5)  # shares are float32
    return float(torch.nn.functional.cosine_similarity(estimate.flatten(), exact.flatten(), dim=0))


def test_a_constant_divisor_gives_the_true_gradient_and_lengths_turn_it_away() -> None:
    cosine = {kind: expected_direction(kind) for kind in ("token", "sequence", 3)}
    assert cosine[3] == pytest.approx(1, abs=1e-9)
    assert cosine["token"] < 0.999
    assert cosine["sequence"] < 0.99
