"""Credit against hand computations and against the exact policy gradient of a small decision process."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl.algos.credit import reward_to_go, turn_advantages

# --- by hand ------------------------------------------------------------------------------------------------------


def test_two_members_one_of_which_stopped_early() -> None:
    got = turn_advantages(
        torch.tensor([1.0, 0.0]),
        torch.tensor([[0.5, 0.25, -0.25], [0.1, 99.0, 99.0]]),
        torch.tensor([3, 1]),
        torch.tensor([True, True]),
        baseline="leave_one_out",
        scale="none",
        process_weight=2.0,
    )
    # reward-to-go of member 0: 0.5, 0, -0.25; of member 1: 0.1, then 0 for it has stopped (99 is past its end)
    expected = [[1 + 2 * (0.5 - 0.1), 1 + 2 * 0.0, 1 + 2 * -0.25], [-1 + 2 * (0.1 - 0.5), 0, 0]]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_weight_zero_leaves_the_outcome_alone() -> None:
    got = turn_advantages(
        torch.tensor([1.0, 0.0, 0.5]),
        torch.rand(3, 2),
        torch.tensor([2, 2, 1]),
        torch.ones(3, dtype=torch.bool),
        baseline="leave_one_out",
        scale="none",
        process_weight=0.0,
    )
    torch.testing.assert_close(got, torch.tensor([[0.75, 0.75], [-0.75, -0.75], [0.0, 0.0]]))


def test_std_divides_by_the_spread_of_whole_returns() -> None:
    outcomes, rewards = torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    turns, scored = torch.tensor([2, 2]), torch.tensor([True, True])
    plain, scaled = (
        turn_advantages(outcomes, rewards, turns, scored, baseline="leave_one_out", scale=scale, process_weight=1.0)
        for scale in ("none", "std")
    )
    torch.testing.assert_close(scaled, plain / (2**0.5 + 1e-4))  # returns 2 and 0: deviation sqrt(2)


def test_an_episode_without_turns_takes_part_with_its_outcome() -> None:
    got = turn_advantages(
        torch.tensor([1.0, 0.0]),
        torch.zeros(2, 1),
        torch.tensor([1, 0]),
        torch.ones(2, dtype=torch.bool),
        baseline="leave_one_out",
        scale="none",
        process_weight=1.0,
    )
    assert got.tolist() == [[1.0], [0.0]]


def test_reward_to_go() -> None:
    assert reward_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist() == [[7.0, 6.0, 4.0]]


# --- exact --------------------------------------------------------------------------------------------------------

STOP, HORIZON, ACTIONS = 0, 3, 3
Path = tuple[int, ...]


def paths() -> list[Path]:
    """All action sequences: they end with STOP or at the horizon."""
    found: list[Path] = []
    for length in range(1, HORIZON + 1):
        for path in itertools.product(range(ACTIONS), repeat=length):
            if STOP not in path[:-1] and (path[-1] == STOP or length == HORIZON):
                found.append(path)
    return found


PATHS = paths()


def rewards(path: Path) -> list[float]:
    return [(0.3, -0.7, 1.1)[action] * (t + 1) + 0.2 for t, action in enumerate(path)]


def outcome(path: Path) -> float:
    return 2.0 * path.count(1) - 1.5 * (path[-1] == STOP) + 0.7 * len(path)


def logprob_grads(theta: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Probability of each path, and the score function of each of its actions. The state is (time, last action)."""
    probabilities: list[Tensor] = []
    scores: list[list[Tensor]] = []
    for path in PATHS:
        logprobs = [torch.log_softmax(theta[t, path[t - 1] if t else 0], -1)[action] for t, action in enumerate(path)]
        probabilities.append(torch.stack(logprobs).sum().exp())
        scores.append([torch.autograd.grad(value, theta, retain_graph=True)[0] for value in logprobs])
    return torch.stack(probabilities), scores


def expected_estimate(
    members: int,
    baseline: str,
    scale: str,
    weight: float,
    rewards: Callable[[Path], list[float]] = rewards,
) -> tuple[Tensor, Tensor]:
    """(exact expectation of the group estimator over all groups, exact policy gradient), by enumeration."""
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(HORIZON, ACTIONS, ACTIONS, generator=generator, dtype=torch.float64, requires_grad=True)
    probability_P, scores = logprob_grads(theta)
    returns_P = torch.tensor([outcome(path) + weight * sum(rewards(path)) for path in PATHS], dtype=torch.float64)
    exact = torch.autograd.grad((probability_P * returns_P).sum(), theta, retain_graph=True)[0]
    padded = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
    for index, path in enumerate(PATHS):
        padded[index, : len(path)] = torch.tensor(rewards(path), dtype=torch.float64)
    outcome_P = torch.tensor([outcome(path) for path in PATHS], dtype=torch.float64)
    turns_P = torch.tensor([len(path) for path in PATHS])
    estimate = torch.zeros_like(exact)
    for group in itertools.product(range(len(PATHS)), repeat=members):
        chosen = list(group)
        advantages = turn_advantages(
            outcome_P[chosen],
            padded[chosen],
            turns_P[chosen],
            torch.ones(members, dtype=torch.bool),
            baseline=baseline,
            scale=scale,
            process_weight=weight,
        ).tolist()
        mass = float(probability_P.detach()[chosen].prod()) / members
        for member, path in enumerate(chosen):
            for t, score in enumerate(scores[path]):
                estimate += mass * advantages[member][t] * score
    return estimate, exact


@pytest.mark.medium
@each_case(("members", "weight"), [(2, 0.0), (2, 1.0), (2, 0.4), (3, 1.0)])
def test_leave_one_out_is_unbiased_where_the_policy_decides_when_to_stop(members: int, weight: float) -> None:
    estimate, exact = expected_estimate(members, "leave_one_out", "none", weight)
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=1e-10)
    assert exact.abs().max() > 0.1


def test_without_a_baseline_it_is_unbiased_too() -> None:
    estimate, exact = expected_estimate(2, "none", "none", 1.0)
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=1e-10)


def test_the_group_mean_shrinks_the_gradient_by_one_member() -> None:
    estimate, exact = expected_estimate(2, "group_mean", "none", 1.0)
    torch.testing.assert_close(estimate, exact * (2 - 1) / 2, atol=1e-12, rtol=1e-10)


def test_dividing_by_the_spread_is_biased_in_direction() -> None:
    """What the docstring of `spread` says; also the proof that the tests above can fail."""
    estimate, exact = expected_estimate(2, "leave_one_out", "std", 1.0)
    cosine = torch.nn.functional.cosine_similarity(estimate.flatten(), exact.flatten(), dim=0)
    assert cosine < 0.999
