"""PPO's gradient in expectation against the exact policy gradient of a problem whose policy decides when to stop.

A path is an episode, an action is a turn of one token: its state is (time, last action). `theta` gives the policy that
learns, another table the one that sampled. The estimate is the whole object's: `prepare`, `advantages` and `loss`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl.algos.algorithm import Outputs, Siblings
from agentrl.algos.ppo import PPO

from .test_credit import ACTIONS, HORIZON, PATHS, outcome, rewards

UNCUT = 1e9


def tables(lag: int) -> tuple[Tensor, Tensor]:
    """The policy's table, and that of the policy `lag` steps of noise ago."""
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(HORIZON, ACTIONS, ACTIONS, generator=generator, dtype=torch.float64)
    older = theta + 0.15 * math.sqrt(lag) * torch.randn(theta.shape, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), older


def logprobs_of(theta: Tensor) -> Tensor:
    """Log-prob of each action of each path: [P, T], 0 past its end."""
    table = torch.log_softmax(theta, -1)
    rows = []
    for path in PATHS:
        own = [table[t, path[t - 1] if t else 0, action] for t, action in enumerate(path)]
        rows.append(torch.stack([*own, *[torch.zeros((), dtype=theta.dtype)] * (HORIZON - len(path))]))
    return torch.stack(rows)


LENGTH_P = torch.tensor([len(path) for path in PATHS])
ALIVE_PT = torch.arange(HORIZON) < LENGTH_P[:, None]
REWARDS_PT = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
for _at, _path in enumerate(PATHS):
    REWARDS_PT[_at, : len(_path)] = torch.tensor(rewards(_path), dtype=torch.float64)
OUTCOME_P = torch.tensor([outcome(path) for path in PATHS], dtype=torch.float64)
RETURN_P = OUTCOME_P + REWARDS_PT.sum(1)


def exact_gradient(theta: Tensor) -> Tensor:
    probability_P = logprobs_of(theta).sum(1).exp()
    return torch.autograd.grad((probability_P * RETURN_P).sum(), theta)[0]


def true_values(theta: Tensor) -> Tensor:
    """The expected return still to come before each action of each path, under `theta`: [P, T]."""
    probability_P = logprobs_of(theta).sum(1).exp().detach()
    values_PT = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
    for at, path in enumerate(PATHS):
        for t in range(len(path)):
            same = [i for i, other in enumerate(PATHS) if other[:t] == path[:t]]
            to_come = torch.stack([RETURN_P[i] - REWARDS_PT[i, :t].sum() for i in same])
            values_PT[at, t] = (probability_P[same] * to_come).sum() / probability_P[same].sum()
    return values_PT


def any_values() -> Tensor:
    """Values that depend on the state alone, and are wrong."""
    table = torch.randn(HORIZON, ACTIONS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.stack(
        [torch.stack([table[t, path[t - 1] if 0 < t < len(path) else 0] for t in range(HORIZON)]) for path in PATHS]
    )


def weights(
    algo: PPO, theta: Tensor, older: Tensor, values_PT: Tensor, episodes: Sequence[int] = range(len(PATHS))
) -> Tensor:
    """What the loss multiplies each action's score with in a step of these paths, importance and advantage: [P, T]."""
    rows_P = torch.tensor(list(episodes))
    logprobs_PT, older_PT, alive_PT = logprobs_of(theta)[rows_P], logprobs_of(older)[rows_P], ALIVE_PT[rows_P]
    prepared = algo.prepare(
        Siblings(
            outcomes_G=OUTCOME_P[rows_P],
            rewards_GT=REWARDS_PT[rows_P],
            turns_G=LENGTH_P[rows_P],
            scored_G=torch.ones(len(rows_P), dtype=torch.bool),
            judges_G=torch.zeros(len(rows_P), dtype=torch.bool),  # no siblings are needed
            streams_KGT=REWARDS_PT[rows_P][None],
            weights_K=torch.ones(1),
        )
    )
    episode_PT = torch.arange(len(rows_P))[:, None].expand(-1, HORIZON)
    turn_PT = torch.arange(HORIZON).expand(len(rows_P), -1)
    tokens: dict[str, Any] = {
        "episode": episode_PT[alive_PT],
        "role": torch.zeros(int(alive_PT.sum()), dtype=torch.long),
        "turn": turn_PT[alive_PT],
        "to_go": prepared["to_go"][alive_PT],
        "own_turn": prepared["own_turn"][alive_PT],
        "values": values_PT[rows_P][alive_PT],
        "proximal": logprobs_PT.detach()[alive_PT],
        "behaviour": older_PT[alive_PT],
        "weight": torch.ones(int(alive_PT.sum()), dtype=torch.float64),
    }
    tokens |= algo.advantages(tokens)
    now_K = tokens["proximal"].clone().requires_grad_()
    outputs = Outputs(logprobs_K=now_K, entropy_K=now_K, values_K=tokens["values"])
    loss = algo.loss(tokens, outputs, step=99)
    found_PT = torch.zeros(len(rows_P), HORIZON, dtype=torch.float64)
    found_PT[alive_PT] = -torch.autograd.grad(loss.total, now_K)[0]
    return found_PT


def expected_gradient(algo: PPO, lag: int, values_PT: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expectation over all paths of the policy that sampled, exact policy gradient)."""
    theta, older = tables(lag)
    values_PT = any_values() if values_PT is None else values_PT
    algo = algo.model_copy(update={"centre": False})  # all paths in one step: each knows what the others are
    mass_P = logprobs_of(older).sum(1).exp()
    weight_PT = weights(algo, theta, older, values_PT)
    estimate = torch.autograd.grad((mass_P[:, None] * weight_PT * logprobs_of(theta)).sum(), theta)[0]
    return estimate, exact_gradient(theta)


@each_case("level", ["token", "turn"])
@each_case("lag", [0, 4, 8])
def test_the_gradient_is_exact_whatever_the_critic_says_and_whoever_sampled(lag: int, level: str) -> None:
    algo = PPO.model_validate(
        {"importance": "prefix", "importance_bounds": (0.0, UNCUT), "trace_cap": UNCUT, "level": level}
    )
    estimate, exact = expected_gradient(algo, lag)
    torch.testing.assert_close(estimate, exact, atol=1e-10, rtol=1e-10)
    assert exact.abs().max() > 0.1


def test_with_the_true_values_a_shorter_trace_is_exact_too() -> None:
    theta, _ = tables(0)
    algo = PPO(importance="prefix", importance_bounds=(0.0, UNCUT), trace_cap=UNCUT, gae_lambda=0.3)
    estimate, exact = expected_gradient(algo, 0, true_values(theta))
    torch.testing.assert_close(estimate, exact, atol=1e-10, rtol=1e-10)
    estimate, exact = expected_gradient(algo, 8, true_values(theta))  # and for stale actions: they are reweighted
    torch.testing.assert_close(estimate, exact, atol=1e-10, rtol=1e-10)
    estimate, exact = expected_gradient(algo, 0)
    assert (estimate - exact).abs().max() > 0.05, "with a wrong critic it is biased, as its docstring says"


def distance(lag: int, **settings: Any) -> float:
    estimate, exact = expected_gradient(PPO.model_validate(settings), lag, true_values(tables(lag)[0]))
    return float((estimate - exact).norm() / exact.norm())


def test_plain_gae_is_biased_for_stale_actions_and_each_correction_is_nearer() -> None:
    """What the module says of its kinds of importance; also the proof that the tests above can fail."""
    for lag in (4, 8):
        plain, token = (
            distance(lag, importance="none"),
            distance(lag, importance="token", importance_bounds=(0.0, UNCUT), trace_cap=UNCUT),
        )
        assert plain > 0.1
        assert 0.02 < token < plain
        assert distance(lag, importance="prefix", importance_bounds=(0.0, UNCUT), trace_cap=UNCUT) < 1e-9
    assert distance(0, importance="none") < 1e-9


@pytest.mark.medium
def test_less_the_others_mean_it_is_as_exact() -> None:
    """All steps of two episodes, each as likely as it is, eight steps late."""
    theta, older = tables(8)
    algo = PPO(importance="prefix", importance_bounds=(0.0, UNCUT), trace_cap=UNCUT)
    mass_P, logprobs_PT = logprobs_of(older).sum(1).exp(), logprobs_of(theta)
    total, moved = torch.zeros((), dtype=torch.float64), 0.0
    for pair in itertools.product(range(len(PATHS)), repeat=2):
        weight_2T = weights(algo, theta, older, any_values(), pair)
        plain_2T = weights(algo.model_copy(update={"centre": False}), theta, older, any_values(), pair)
        moved = max(moved, float((weight_2T - plain_2T).abs().max()))
        total = total + mass_P[list(pair)].prod() / 2 * (weight_2T * logprobs_PT[list(pair)]).sum()
    torch.testing.assert_close(torch.autograd.grad(total, theta)[0], exact_gradient(theta), atol=1e-10, rtol=1e-10)
    assert moved > 0.5, "or nothing was taken off"


def test_a_critic_that_is_wrong_by_a_constant_changes_no_advantage() -> None:
    theta, older = tables(8)
    for level in ("token", "turn"):
        algo = PPO.model_validate({"level": level, "importance": "none"})
        right, wrong = (weights(algo, theta, older, any_values() + shift) for shift in (0.0, 5.0))
        torch.testing.assert_close(wrong, right)
        plain = algo.model_copy(update={"centre": False})
        uncentred = weights(plain, theta, older, any_values() + 5) - weights(plain, theta, older, any_values())
        torch.testing.assert_close(uncentred, -5.0 * ALIVE_PT.double())  # all that was sampled is unlearned


def test_a_sample_is_within_three_standard_errors() -> None:
    """A million stale episodes, drawn; the mean of their gradients, by parameter."""
    theta, older = tables(8)
    n = 1_000_000
    weight_PT = weights(
        PPO(importance="prefix", importance_bounds=(0.0, UNCUT), trace_cap=UNCUT, centre=False),
        theta,
        older,
        any_values(),
    )
    scores = []  # of each path: the gradient that one episode of it gives
    for at in range(len(PATHS)):
        scores.append(torch.autograd.grad((weight_PT[at] * logprobs_of(theta)[at]).sum(), theta)[0].flatten())
    scores_PK = torch.stack(scores)
    mass_P = logprobs_of(older).sum(1).exp()
    drawn_P = torch.bincount(
        torch.multinomial(mass_P, n, replacement=True, generator=torch.Generator().manual_seed(1)), minlength=len(PATHS)
    ).double()
    mean_K = (drawn_P[:, None] * scores_PK).sum(0) / n
    spread_K = (drawn_P[:, None] * (scores_PK - mean_K).square()).sum(0) / (n - 1)
    reached_K = spread_K > 0  # the first state has one last action only
    error_K = (mean_K - exact_gradient(theta).flatten())[reached_K] / (spread_K[reached_K] / n).sqrt()
    assert reached_K.sum() > 10
    assert error_K.abs().max() < 3


# --- the critic's loss ----------------------------------------------------------------------------------------------


def test_a_value_is_held_near_the_one_before() -> None:
    """Old value 0, target 1. At 0.5 the clip of 0.2 holds: (0.2 - 1)^2 is the larger error, without gradient."""
    old_K = torch.zeros(3)
    values_K = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    tokens = {
        "values": old_K,
        "target": torch.ones(3),
        "value_share": torch.full((3,), 1 / 3),
        "proximal": torch.zeros(3),
        "advantage": torch.zeros(3),
        "importance": torch.ones(3),
        "weight": torch.full((3,), 1 / 3),
    }
    outputs = Outputs(logprobs_K=torch.zeros(3), entropy_K=torch.zeros(3), values_K=values_K)
    loss = PPO(value_weight=1.0).loss(tokens, outputs, step=99)
    assert float(loss.total.detach()) == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 3 / 2)
    (gradient,) = torch.autograd.grad(loss.total, values_K)
    assert gradient.tolist() == pytest.approx([-0.9 / 3, 0.0, -1.5 / 3])
    free = PPO(value_weight=1.0, value_clip=0).loss(tokens, outputs, step=99)
    assert float(free.total.detach()) == pytest.approx((0.9**2 + 0.5**2 + 1.5**2) / 3 / 2)


def test_a_turns_critic_learns_at_the_turns_first_token() -> None:
    tokens = {
        "episode": torch.zeros(3, dtype=torch.long),
        "role": torch.zeros(3, dtype=torch.long),
        "turn": torch.tensor([0, 0, 1]),
        "to_go": torch.tensor([3.0, 3.0, 1.0]),
        "own_turn": torch.tensor([0.0, 0.0, 1.0]),
        "values": torch.tensor([0.5, 99.0, 0.25]),
        "proximal": torch.zeros(3),
        "behaviour": torch.zeros(3),
        "weight": torch.full((3,), 1 / 3),
    }
    got = PPO(level="turn", gae_lambda=0.0, value_lambda=1.0).advantages(tokens)
    assert got["advantage"].tolist() == pytest.approx([2 + 0.25 - 0.5, 2 + 0.25 - 0.5, 1 - 0.25])
    assert got["target"].tolist() == pytest.approx([3, 3, 1])
    assert got["value_share"].tolist() == pytest.approx([0.5, 0, 0.5])
