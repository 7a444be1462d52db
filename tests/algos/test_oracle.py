"""Every registered algorithm's expected gradient against the exact policy gradient, by enumeration of all groups.

The problem is that of `test_credit`: a policy over three actions that decides when to stop, three tokens at most. The
first two are one turn and the third another, and both turns have process rewards. The estimate is the whole object's,
at its default settings: `prepare`, `advantages` and `loss`, every token with the same weight. How far it is off stands
in benchmarks/staleness.md for each kind, so a new one has to say so before it is offered.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl import config, registry
from agentrl.algos.algorithm import Algorithm, Outputs, Siblings

from .test_credit import HORIZON, PATHS
from .test_page import STALENESS
from .test_ppo import LENGTH_P, OUTCOME_P, REWARDS_PT, any_values, exact_gradient, logprobs_of, tables

TURN_T = torch.tensor([0, 0, 1])
REWARDS_P2 = torch.stack([REWARDS_PT[:, :2].sum(1), REWARDS_PT[:, 2]], 1)
TURNS_P = TURN_T[LENGTH_P - 1] + 1
STATES_P2 = torch.tensor([[0, 1 + path[1] if len(path) > 2 else -1] for path in PATHS])  # the last action, if any
KINDS = [kind for kind in registry.ids("algorithms") if kind != "distil"]  # it follows no return: `test_divergence`
SAMPLES = 1_000_000


class Enumerated(NamedTuple):
    """Groups, as they differ: how often each comes and the gradient that it gives; and the exact gradient."""

    mass_N: Tensor
    gradient_NK: Tensor
    exact_K: Tensor

    @property
    def mean_K(self) -> Tensor:
        return self.mass_N @ self.gradient_NK

    @property
    def scale(self) -> float:
        """The multiple of the exact gradient that is nearest to the expected one."""
        return float(self.mean_K @ self.exact_K / self.exact_K.square().sum())

    @property
    def bias(self) -> float:
        """The part of the expected gradient that is not along the exact one, as a share of its length."""
        return float((self.mean_K - self.scale * self.exact_K).norm() / self.mean_K.norm())


class Problem:
    """The policy that learns, the one that sampled, and what the learner would say of each token of each path."""

    def __init__(self, lag: int) -> None:
        theta, older = tables(lag)
        logprob_PT = logprobs_of(theta)
        self.proximal_PT, self.behaviour_PT = logprob_PT.detach(), logprobs_of(older)
        self.other_PT = logprobs_of(tables(30)[1])
        self.mass_P = self.behaviour_PT.sum(1).exp()
        self.exact_K = exact_gradient(theta).flatten()
        self.score_PTK = torch.stack(
            [
                torch.stack([torch.autograd.grad(one, theta, retain_graph=True)[0].flatten() for one in row])
                for row in (logprob_PT + 0 * theta.sum())  # past its end a path has none
            ]
        )
        self.values_PT = any_values()

    def gradient(self, algo: Algorithm, group: tuple[int, ...], judges: int) -> Tensor:
        """What each member of a group adds to the gradient, [G, K]: the first `judges` form its baseline."""
        chosen, size = list(group), len(group)
        siblings = Siblings(
            outcomes_G=OUTCOME_P[chosen],
            rewards_GT=REWARDS_P2[chosen],
            turns_G=TURNS_P[chosen],
            scored_G=torch.ones(size, dtype=torch.bool),
            judges_G=torch.arange(size) < judges,
            streams_KGT=REWARDS_P2[chosen][None],
            weights_K=torch.ones(1, dtype=torch.float64),
            states_GT=STATES_P2[chosen],
        )
        alive_GT = torch.arange(HORIZON) < LENGTH_P[chosen][:, None]
        prepared = {name: column[:, TURN_T][alive_GT] for name, column in algo.prepare(siblings).items()}
        n = int(alive_GT.sum())
        tokens: dict[str, Any] = {
            "behaviour": self.behaviour_PT[chosen][alive_GT],
            "weight": torch.ones(n, dtype=torch.float64),
            "lag": torch.zeros(n, dtype=torch.long),
            "origin": torch.zeros(n, dtype=torch.long),
            "episode": torch.arange(size)[:, None].expand(-1, HORIZON)[alive_GT],
            "role": torch.zeros(n, dtype=torch.long),
            "turn": TURN_T.expand(size, -1)[alive_GT],
            "proximal": self.proximal_PT[chosen][alive_GT],
            "values": self.values_PT[chosen][alive_GT],
            **dict.fromkeys(algo.slots.frozen, self.other_PT[chosen][alive_GT]),
            **prepared,
        }
        tokens |= algo.advantages(tokens)
        now_K = tokens["proximal"].clone().requires_grad_()
        outputs = Outputs(logprobs_K=now_K, entropy_K=torch.zeros(n), values_K=tokens["values"])
        total = algo.loss(tokens, outputs, step=99).total  # long after any warm-up
        weight_GT = torch.zeros(size, HORIZON, dtype=torch.float64)
        weight_GT[alive_GT] = -torch.autograd.grad(total, now_K)[0]
        return torch.einsum("gt,gtk->gk", weight_GT, self.score_PTK[chosen])


@cache
def problem(lag: int) -> Problem:
    return Problem(lag)


def multiplicity(group: tuple[int, ...]) -> int:
    """In how many orders the members may come."""
    return math.factorial(len(group)) // math.prod(math.factorial(group.count(path)) for path in set(group))


@cache
def enumerated(kind: str, lag: int) -> Enumerated:
    """All groups of two, or of as many as the kind needs."""
    algo, of = config.algorithm(kind)(), problem(lag)
    size = max(2, algo.least_members)
    groups = list(itertools.combinations_with_replacement(range(len(PATHS)), size))
    mass = [multiplicity(group) * float(of.mass_P[list(group)].prod()) for group in groups]
    gradients = [of.gradient(algo, group, size).mean(0) for group in groups]
    return Enumerated(torch.tensor(mass, dtype=torch.float64), torch.stack(gradients), of.exact_K)


def late(kind: str) -> Enumerated:
    """Members that end after their group closed: every path beside all groups that judge it."""
    algo, of = config.algorithm(kind)(), problem(0)
    size, every = max(2, algo.least_members), tuple(range(len(PATHS)))
    mass, gradients = [], []
    for group in itertools.combinations_with_replacement(every, size):
        mass.append(multiplicity(group) * float(of.mass_P[list(group)].prod()))
        gradients.append(of.mass_P @ of.gradient(algo, (*group, *every), size)[size:])
    return Enumerated(torch.tensor(mass, dtype=torch.float64), torch.stack(gradients), of.exact_K)


def stated(kind: str) -> list[str]:
    """What the page has to say of a kind: scale, bias at lag 0, 4 and 8, bias of late members."""
    algo = config.algorithm(kind)()
    fresh = enumerated(kind, 0)
    of_late = f"{late(kind).bias:.3f}" if algo.compares else "as others"
    return [f"{fresh.scale:.3f}", *(f"{enumerated(kind, lag).bias:.3f}" for lag in (0, 4, 8)), of_late]


@pytest.mark.medium
@each_case("kind", KINDS)
def test_the_page_says_how_far_off_each_algorithm_is(kind: str) -> None:
    row = f"| `{kind}`, as it is | {' | '.join(stated(kind))} |"
    assert row in STALENESS.splitlines(), f"benchmarks/staleness.md lacks: {row}"


@pytest.mark.medium
@each_case("kind", KINDS)
def test_a_million_samples_agree_with_the_enumeration(kind: str) -> None:
    """Of groups sampled by the present policy: within three standard errors of a multiple of the exact gradient if the
    page says that there is no bias, and beyond them if it says that there is."""
    found = enumerated(kind, 0)
    generator = torch.Generator().manual_seed(1)
    drawn_N = torch.bincount(
        torch.multinomial(found.mass_N, SAMPLES, replacement=True, generator=generator), minlength=len(found.mass_N)
    ).double()
    mean_K = drawn_N @ found.gradient_NK / SAMPLES
    variance_K = drawn_N @ (found.gradient_NK - mean_K).square() / (SAMPLES - 1)
    reached_K = variance_K > 0  # the first token has one last action only
    errors_K = (mean_K - found.scale * found.exact_K)[reached_K] / (variance_K[reached_K] / SAMPLES).sqrt()
    assert reached_K.sum() > 10
    assert bool(errors_K.abs().max() < 3) == (found.bias < 1e-6)


def test_two_are_exact_and_the_measure_sees_what_is_not() -> None:
    """Length and direction: the leave-one-out baseline, also for late members, and a critic that is wrong."""
    for kind in ("grpo", "ppo"):
        torch.testing.assert_close(enumerated(kind, 0).mean_K, problem(0).exact_K, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(late("grpo").mean_K, problem(0).exact_K, atol=1e-10, rtol=1e-10)
    assert enumerated("grpo", 8).bias > 0.05


def test_one_late_member_is_judged_as_if_no_other_were_late() -> None:
    """So all of them may be enumerated at once."""
    for kind in KINDS:
        algo = config.algorithm(kind)()
        if not algo.compares:
            continue
        size = max(2, algo.least_members)
        group = (0, 4, 7, 9)[:size]
        together = problem(0).gradient(algo, (*group, 3, 11), size)
        alone = problem(0).gradient(algo, (*group, 11), size)
        torch.testing.assert_close(together[-1], alone[-1])
        torch.testing.assert_close(together[:size], alone[:size])
