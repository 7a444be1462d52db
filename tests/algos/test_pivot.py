"""Forks of an episode at a turn: their expected gradient, by enumeration, against that of the value where they begin.

An action is a turn of one token, as in `test_ppo`. A fork begins with the history h of its origin; its members are
drawn on from there, judge each other, and h itself does not learn. It estimates the gradient of V(h), with h held
fixed. The policy gradient of the whole problem is another sum of the same terms: how far each rule is off stands in
benchmarks/staleness.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl import config
from agentrl.algos.algorithm import Algorithm, Outputs, Siblings

from .test_credit import HORIZON, PATHS
from .test_oracle import multiplicity, problem
from .test_ppo import LENGTH_P, OUTCOME_P, RETURN_P, REWARDS_PT, exact_gradient, logprobs_of, tables

PAGE = (Path(__file__).parents[2] / "benchmarks" / "staleness.md").read_text()
SHARE = 0.25
Rule = Callable[[tuple[int, ...]], list[int]]  # the turns at which a path is forked, each as likely

HISTORIES = list(dict.fromkeys(path[:turn] for turn in (1, 2) for path in PATHS if len(path) > turn))


def gradient(algo: Algorithm, group: tuple[int, ...], fork: int) -> Tensor:
    """The gradient that a group gives in which turns from `fork` on learn, the mean over its members."""
    of, chosen, size = problem(0), list(group), len(group)
    own_GT = (torch.arange(HORIZON) < LENGTH_P[chosen][:, None]) & (torch.arange(HORIZON) >= fork)
    siblings = Siblings(
        outcomes_G=OUTCOME_P[chosen],
        rewards_GT=REWARDS_PT[chosen],
        turns_G=LENGTH_P[chosen],
        scored_G=torch.ones(size, dtype=torch.bool),
        judges_G=torch.ones(size, dtype=torch.bool),
        streams_KGT=REWARDS_PT[chosen][None],
        weights_K=torch.ones(1, dtype=torch.float64),
        states_GT=torch.zeros(size, HORIZON, dtype=torch.long),
    )
    n = int(own_GT.sum())
    tokens = {name: column[own_GT] for name, column in algo.prepare(siblings).items()} | {
        "behaviour": of.behaviour_PT[chosen][own_GT],
        "proximal": of.proximal_PT[chosen][own_GT],
        "weight": torch.ones(n, dtype=torch.float64),
        "lag": torch.zeros(n, dtype=torch.long),
        "origin": torch.zeros(n, dtype=torch.long),
        "episode": torch.arange(size)[:, None].expand(-1, HORIZON)[own_GT],
        "role": torch.zeros(n, dtype=torch.long),
        "turn": torch.arange(HORIZON).expand(size, -1)[own_GT],
    }
    tokens |= algo.advantages(tokens)
    now_K = tokens["proximal"].clone().requires_grad_()
    total = algo.loss(tokens, Outputs(logprobs_K=now_K, entropy_K=torch.zeros(n), values_K=None), step=99).total
    weight_GT = torch.zeros(size, HORIZON, dtype=torch.float64)
    weight_GT[own_GT] = -torch.autograd.grad(total, now_K)[0]
    return torch.einsum("gt,gtk->k", weight_GT, of.score_PTK[chosen]) / size


def expected(kind: str, history: tuple[int, ...], k: int = 2) -> Tensor:
    """The expected gradient of a fork of `k` after a history."""
    algo, fork = config.algorithm(kind)(), len(history)
    on = [at for at, path in enumerate(PATHS) if path[:fork] == history and len(path) > fork]
    mass_P = problem(0).proximal_PT[:, fork:].sum(1).exp()
    groups = itertools.combinations_with_replacement(on, k)
    return sum(
        (multiplicity(group) * float(mass_P[list(group)].prod()) * gradient(algo, group, fork) for group in groups),
        torch.zeros(()),
    )


def value_gradient(history: tuple[int, ...]) -> Tensor:
    """The exact gradient of the expected return after a history, by the policy from there on."""
    theta, _ = tables(0)
    on = [at for at, path in enumerate(PATHS) if path[: len(history)] == history and len(path) > len(history)]
    mass_P = logprobs_of(theta)[on][:, len(history) :].sum(1).exp()
    return torch.autograd.grad((mass_P * RETURN_P[on]).sum(), theta)[0].flatten()


@pytest.mark.parametrize("k", [2, 3])
def test_a_forks_expected_gradient_is_that_of_the_value_where_it_begins(k: int) -> None:
    """For every history, after one turn or two, also where the continuations decide when to stop."""
    for history in HISTORIES:
        torch.testing.assert_close(expected("grpo", history, k), value_gradient(history), atol=1e-10, rtol=1e-10)


def test_the_measure_sees_an_estimator_that_is_not_unbiased() -> None:
    off = [float((expected("dapo", h) - value_gradient(h)).norm() / value_gradient(h).norm()) for h in HISTORIES]
    assert max(off) > 0.05


def visits(rule: Rule) -> dict[tuple[int, ...], float]:
    """How often forks begin after each history."""
    found = dict.fromkeys(HISTORIES, 0.0)
    for path, mass in zip(PATHS, problem(0).mass_P.tolist(), strict=True):
        turns = rule(path)
        for turn in turns:
            found[path[:turn]] += mass / len(turns)
    return found


def uniform(path: tuple[int, ...]) -> list[int]:
    return list(range(1, len(path)))


def least_expected(path: tuple[int, ...]) -> list[int]:
    logprob_T = problem(0).proximal_PT[PATHS.index(path)]
    return sorted(uniform(path), key=lambda turn: float(logprob_T[turn]))[:1]


def first_low(path: tuple[int, ...]) -> list[int]:
    rewards_T = REWARDS_PT[PATHS.index(path)]
    return [turn for turn in uniform(path) if rewards_T[turn] < 0][:1]


def off(rule: Rule, forks: float, whole: float) -> float:
    """The part of the expected gradient of so many forks and `whole` ordinary groups that is not along the exact
    one."""
    theta, _ = tables(0)
    exact_K = exact_gradient(theta).flatten()
    forks_K = torch.stack([p * value_gradient(h) for h, p in visits(rule).items()]).sum(0)
    mean_K = forks * forks_K + whole * exact_K
    along = float(mean_K @ exact_K / exact_K.square().sum())
    return float((mean_K - along * exact_K).norm() / mean_K.norm())


RULES: list[tuple[str, Rule]] = [("uniform", uniform), ("entropy", least_expected), ("low_reward", first_low)]


@each_case(("name", "rule"), RULES)
def test_the_page_says_how_far_off_each_rule_is(name: str, rule: Rule) -> None:
    row = f"| `{name}` | {off(rule, 1.0, 0.0):.3f} | {off(rule, SHARE, 1.0):.3f} |"
    assert row in PAGE.splitlines(), f"benchmarks/staleness.md lacks: {row}"
