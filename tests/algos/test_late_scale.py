"""No member is blown up by a divisor: over random groups, a late member earns what it would have earned in time."""

from __future__ import annotations

import statistics
from itertools import product

import pytest
import torch
from each_case import each_case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algos.algorithm import Siblings
from agentrl.algos.gigpo import GiGPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import DAPO, MaxRL

SCALED = {
    "dapo": DAPO(),
    "leave_one_out": GRPO(scale="std"),
    "no baseline": GRPO(scale="std", baseline="none"),
    "process": GRPO(scale="std", process_weight=1.0),
    "discounted": GRPO(scale="std", process_weight=1.0, discount=0.9),
    "maxrl": MaxRL(),
    "maxrl, process": MaxRL(process_weight=1.0, baseline="leave_one_out"),
    "sources": GRPO(scale="std_by_source", process_weight=1.0),
    "siblings' sources": GRPO(scale="leave_one_out_by_source", process_weight=1.0),
    "gigpo": GiGPO(scale="std", baseline="group_mean", process_weight=1.0),
    "gigpo, leave_one_out": GiGPO(scale="std", process_weight=1.0),
}

Episode = tuple[float, list[float], list[int]]
"""Outcome, process rewards, states."""


def siblings(episodes: list[Episode], *, late: int = 0) -> Siblings:
    """The last `late` members ended after their group had closed."""
    members, steps = len(episodes), max(len(process) for _, process, _ in episodes)
    rewards_GT = torch.zeros(members, steps, dtype=torch.float64)
    states_GT = torch.full((members, steps), -1)
    for at, (_, process, states) in enumerate(episodes):
        rewards_GT[at, : len(process)] = torch.tensor(process, dtype=torch.float64)
        states_GT[at, : len(states)] = torch.tensor(states)
    return Siblings(
        outcomes_G=torch.tensor([outcome for outcome, *_ in episodes], dtype=torch.float64),
        rewards_GT=rewards_GT,
        turns_G=torch.tensor([len(process) for _, process, _ in episodes]),
        scored_G=torch.ones(members, dtype=torch.bool),
        judges_G=torch.arange(members) < members - late,
        streams_KGT=rewards_GT[None],
        weights_K=torch.ones(1, dtype=torch.float64),
        states_GT=states_GT,
    )


def outcomes(*values: float) -> list[Episode]:
    return [(value, [0.0], [0]) for value in values]


def advantages(algo: GRPO, group: Siblings) -> Tensor:
    return algo.prepare(group)["advantage"]


_DEVIATIONS = ["dapo", "leave_one_out", "sources", "siblings' sources"]


@each_case(("kind", "others"), [*product(_DEVIATIONS, (0.0, 0.1)), ("maxrl", 0.0)])  # a mean is a scale
def test_equal_judges_say_nothing_of_the_scale_of_a_late_member(kind: str, others: float) -> None:
    found = advantages(SCALED[kind], siblings(outcomes(*[others] * 7, 1.0), late=1))
    assert found.flatten().tolist() == [0.0] * 8


def test_equal_returns_say_nothing_without_a_baseline_either() -> None:
    assert advantages(SCALED["no baseline"], siblings(outcomes(1.0, 1.0, 1.0))).flatten().tolist() == [0.0] * 3


def test_one_judge_says_nothing_of_the_scale() -> None:
    for kind in ("dapo", "leave_one_out", "sources"):
        assert advantages(SCALED[kind], siblings(outcomes(0.0, 1000.0), late=1)).flatten().tolist() == [0.0, 0.0]


def test_a_late_member_is_divided_by_half_the_deviation_with_itself_where_that_is_larger() -> None:
    """Judges 0, 1: deviation sqrt(1/2), mean 1/2. With 8: mean 3, deviation sqrt(38 / 2) = 4.36. With 2: deviation 1,
    so that of the judges stays."""
    far, near = (advantages(DAPO(), siblings(outcomes(0.0, 1.0, value), late=1)) for value in (8.0, 2.0))
    assert far[2, 0].item() == pytest.approx(7.5 / (19**0.5 / 2), rel=1e-3)
    assert near[2, 0].item() == pytest.approx(1.5 / (0.5**0.5 + 1e-4))
    assert far[1, 0].item() == near[1, 0].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-4)), "judges are as before"
    nearly = advantages(DAPO(), siblings(outcomes(0.0, 1e-6, 1.0), late=1))
    assert nearly[2, 0].item() == pytest.approx(2 / (1 / 3**0.5), rel=1e-3)  # 0, 0, 1: variance 1/3


@each_case("n", range(2, 9))
def test_the_divisor_of_a_late_member_does_not_see_it_if_outcomes_are_0_or_1(n: int) -> None:
    for successes in range(1, n):
        judges = [1.0] * successes + [0.0] * (n - successes)
        for algo in (DAPO(), MaxRL()):
            up, down = (advantages(algo, siblings(outcomes(*judges, own), late=1))[-1, 0].item() for own in (1.0, 0.0))
            divisor = statistics.stdev(judges) + 1e-4 if isinstance(algo, DAPO) else statistics.fmean(judges)
            assert (up - down) * divisor == pytest.approx(1)


def test_rewards_that_cancel_do_not_divide_by_what_is_left_of_them() -> None:
    """Returns are 0 and 1e-6; from the second turn on they are -5 and 0, whose deviation is 5 / sqrt(2)."""
    group = siblings([(0.0, [5.0, -5.0], [0, 1]), (0.0, [1e-6, 0.0], [0, 1])])
    found = advantages(SCALED["process"], group)
    assert found[:, 1].tolist() == pytest.approx([-2 * 2**0.5, 2 * 2**0.5], rel=1e-3)
    turns = advantages(MaxRL(), siblings([(0.0, [0.1], [0]), (1.0, [-1.0, 0.0], [0, 1])]))
    assert turns[1].tolist() == pytest.approx([-0.2, 2.0]), "0.1 and 0, then 0 and 1: over half the mean of the latter"
    negative = advantages(MaxRL(), siblings(outcomes(-1.0, 1.0 + 1e-6)))
    assert negative.flatten().tolist() == pytest.approx([-2.0, 2.0], rel=1e-3)  # less their mean, over half mean size


values = st.sampled_from([0.0, 1.0, 0.1, 0.5, 0.5 + 1e-6, 1e-8, -1.0]) | st.floats(-10, 10) | st.floats(0, 1)


@st.composite
def groups(draw: st.DrawFn) -> list[Episode]:
    def episode() -> Episode:
        length = draw(st.integers(1, 3))
        process = draw(st.lists(values, min_size=length, max_size=length))
        return draw(values), process, draw(st.permutations(range(3)))[:length]

    return [episode() for _ in range(draw(st.integers(2, 6)))]


@pytest.mark.medium
@each_case("kind", list(SCALED))
@settings(max_examples=25, deadline=None)
@given(episodes=groups())
@example(episodes=outcomes(0.5, 0.5 + 1e-6, 1.0))
@example(episodes=outcomes(0.0, 1e-8, 1.0))
def test_a_late_member_earns_at_most_what_it_would_in_time(kind: str, episodes: list[Episode]) -> None:
    """The stated factor is 2 (n + 1) / n for n judges: in time a group mean has the member in it. Two parts of an
    advantage may cancel in time, so only one of them is there: of sources the process rewards, of GiGPO the states."""
    algo, n = SCALED[kind], len(episodes) - 1
    if algo.scale.endswith("by_source"):
        episodes = [(0.0, process, states) for _, process, states in episodes]

    def of(late: int) -> Tensor:
        group = siblings(episodes, late=late)
        if isinstance(algo, GiGPO):
            same = algo.model_dump(exclude={"kind", "step_weight", "step_discount"})
            return advantages(algo, group) - advantages(GRPO(**same), group)
        return advantages(algo, group)

    late, in_time = of(1), of(0)
    assert torch.isfinite(late).all()
    if isinstance(algo, GiGPO):
        n = 2  # judges in a state, of which there must be as many
    assert (late[-1].abs() <= in_time[-1].abs() * 2 * (n + 1) / n + 1e-9).all()


@pytest.mark.medium
@each_case("kind", [kind for kind in SCALED if kind not in ("no baseline", "siblings' sources", "maxrl, process")])
@settings(max_examples=25, deadline=None)
@given(episodes=groups(), late=st.integers(0, 1))
@example(episodes=outcomes(0.5, 0.5 + 1e-6, 1.0), late=1)
@example(episodes=[(0.0, [0.0], [0]), (0.1, [0.0], [0]), (-1.0, [1.0, 0.0], [0, 1])], late=1)
def test_no_advantage_is_larger_than_groups_of_this_size_allow(kind: str, episodes: list[Episode], late: int) -> None:
    """A value less the mean of n is at most (n - 1) / sqrt(n) of their deviations away from it, n / (n - 1) as much of
    the mean of others, twice that where a later turn's values are further apart than the divisor tells. Late it is at
    most 2 n / (n - 1) times as much, by the test above."""
    algo, members, turns = SCALED[kind], len(episodes), sum(len(process) for _, process, _ in episodes)
    found = advantages(algo, siblings(episodes, late=late)).abs().max().item()
    bound = {"maxrl": 2.0 * members, "sources": 2 * (members * 3) ** 0.5}.get(kind, members**0.5)
    if isinstance(algo, GiGPO):
        bound += turns  # of all turns, one state at most
    factor = 2 * members / (members - 1) if late else 1
    assert found <= 2 * bound * factor + 1e-9


def test_the_scale_of_turns_in_a_state_holds_for_late_members_too() -> None:
    algo = GiGPO(scale="std", baseline="group_mean", step_discount=1.0)
    base = [(0.5, [0.0], [7]), (0.5, [0.0], [7]), (1.0, [0.0], [7])]
    assert advantages(algo, siblings(base, late=1)).flatten().tolist() == [0.0] * 3
    nearly = advantages(algo, siblings([base[0], (0.5 + 1e-6, [0.0], [7]), base[2]], late=1))
    assert nearly[2, 0].item() == pytest.approx(2 * 0.5 / (0.5 / 3**0.5 / 2), rel=1e-3)  # as an episode, as a turn
