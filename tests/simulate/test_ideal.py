"""What no schedule exceeds: by hand where times are equal, and beside our own where they are drawn."""

from __future__ import annotations

from itertools import cycle, islice
from random import Random

import pytest

from agentrl.planning.simulate.policies import parse_close, policies
from agentrl.planning.simulate.service import Constant, Play, parse_episodes
from agentrl.planning.simulate.simulation import SimulatedWorld, Simulation
from agentrl.planning.simulate.sweep import best_of_bound

LAG = 4


def world(spec: str, *, slots: int = 8, step_s: float = 1.0) -> SimulatedWorld:
    return SimulatedWorld(
        episodes=parse_episodes(spec, deadline_s=300.0),
        learner=Constant(step_s),
        slots=slots,
        group_size=8,
        groups_per_step=1,
    )


@pytest.mark.parametrize(
    ("spec", "step_s", "lag", "share"),
    [
        ("constant:1", 1.0, 1, 1.0),
        ("constant:1", 0.5, 4, 1.0),
        ("constant:1", 2.0, 4, 1.0),
        ("constant:1.5", 1.0, 0, 1.0),
        ("constant:1", 1.5, 0, 1.0),  # an ended episode keeps its slot, and the learner never waits
    ],
)
def test_equal_times_reach_the_bound(spec: str, step_s: float, lag: int, share: float) -> None:
    assert best_of_bound(world(spec, step_s=step_s), lag, steps=40, start_up=8) == pytest.approx(share)


class _InTurn:
    """Episodes of 1 s and of 3 s in turn."""

    def __init__(self) -> None:
        self._durations = cycle((1.0, 3.0))

    def group(self, size: int, chance: Random) -> list[Play]:
        return [Play(duration, ((0.0, duration, 1),), 1) for duration in islice(self._durations, size)]


@pytest.mark.parametrize(("lag", "share"), [(0, 0.8), (1, 1.0)])
def test_a_slot_waits_for_a_place_and_the_learner_for_an_episode(lag: int, share: float) -> None:
    """One slot and steps of one episode that take 2 s, so the bound is 2 s a step on both sides. Without lag each short
    episode keeps the slot for 1 s until the learner is free, and the learner waits 1 s for each long one: two steps
    take 5 s. A lag of 1 gives the short one a place."""
    given = SimulatedWorld(episodes=_InTurn(), learner=Constant(2.0), slots=1, group_size=1, groups_per_step=1)
    assert best_of_bound(given, lag, steps=40, start_up=2) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize("close", ["full", "7/8", "6/8", "5/8"])
def test_our_schedules_do_not_exceed_it(close: str) -> None:
    given = world("lognormal:1")
    (policy,) = policies(LAG, [parse_close(close, 8)])
    found = Simulation(given, policy, steps=800, start_up=9, seed=3).run()
    assert found.of_bound <= best_of_bound(given, LAG, steps=800, start_up=9, seed=3) + 0.002


def test_at_one_group_a_step_no_schedule_reaches_98_percent() -> None:
    """If the learner is exactly as fast as the slots. The number of episodes that end in a time t has the variance
    8 (e - 1) t, and none to five steps' episodes may wait: reflected Brownian motion loses 8 (e - 1) / (2 * 40) a
    second of 8, which is 2.1%; that the learner waits for eight at once costs a little more."""
    given = world("lognormal:1")
    assert 0.970 < best_of_bound(given, LAG, steps=8_000, start_up=9, seed=11) < 0.980
    assert best_of_bound(given, 4 * LAG, steps=8_000, start_up=9, seed=11) > 0.985
