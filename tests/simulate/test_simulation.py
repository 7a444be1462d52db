"""Simulated runs whose numbers can be worked out by hand, and what our policy promises under heavy tails."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from agentrl.planning.simulate.policies import Policy, parse_close, policies
from agentrl.planning.simulate.service import Constant, Play, parse_episodes
from agentrl.planning.simulate.simulation import SimulatedWorld, Simulation, SimulationResult
from agentrl.store import FULL, ClosePolicy, Quorum

SIZE = 8
LAG = 4


def world(spec: str, slots: int, *, step_s: float, groups: int | None = None) -> SimulatedWorld:
    """Episodes of mean 1 s, and by default as many a step as there are slots."""
    return SimulatedWorld(
        episodes=parse_episodes(spec, deadline_s=300.0),
        learner=Constant(step_s),
        slots=slots,
        group_size=SIZE,
        groups_per_step=groups or slots // SIZE,
        group_deadline_s=600.0,
    )


def run(where: SimulatedWorld, policy: Policy, *, steps: int = 40, seed: int = 1) -> SimulationResult:
    return Simulation(where, policy, steps=steps, start_up=policy.max_lag + 4, seed=seed).run()


def quorum(text: str) -> Policy:
    return policies(LAG, [parse_close(text, SIZE)])[0]


def test_a_synchronous_run_of_equal_episodes_waits_for_each_of_them() -> None:
    """One second of waiting before each step of two."""
    found = run(world("constant:1", 64, step_s=2.0), Policy(name="", max_lag=0))
    assert found.idle == pytest.approx(1 / 3)
    assert found.episodes_s == pytest.approx(64 / 3)
    assert (found.age_mean, found.tokens_discarded, found.tokens_unavoidable) == (0, 0, 0)


def test_a_step_ahead_the_learner_never_waits_and_every_token_is_one_step_old() -> None:
    found = run(world("constant:1", 64, step_s=2.0), Policy(name="", max_lag=1))
    assert found.idle == pytest.approx(0)
    assert found.of_bound == pytest.approx(1)
    assert (found.age_mean, found.age_p99) == (1, 1)


def test_weights_on_their_way_keep_a_synchronous_run_waiting() -> None:
    found = run(replace(world("constant:1", 64, step_s=2.0), push_s=1.0), Policy(name="", max_lag=0))
    assert found.idle == pytest.approx(2 / 4)


class HalfSilent:
    """Episodes of one second; every second group gives no signal."""

    def __init__(self) -> None:
        self._groups = 0

    def group(self, size: int, chance: Random) -> list[Play]:
        self._groups += 1
        return [Play(1.0, ((0.0, 1.0, 20),), 20, silent=self._groups % 2 == 0)] * size


@pytest.mark.parametrize(("skip_at_most", "rounds"), [(0.0, 1), (0.5, 2), (1.0, 5)])
def test_a_learner_waits_for_the_groups_that_take_the_place_of_skipped_ones(skip_at_most: float, rounds: int) -> None:
    """Steps of 2 s and 8 groups; 8 run at once. Of the 8 in the first second 4 are silent, of the 4 in their place 2,
    then 1, and of the two seconds that bring the last one the first is lost: the second step begins with a silent
    group, and so does each after it. If only 4 may be skipped, the 2 silent ones of the second round are taken."""
    where = replace(world("constant:1", 64, step_s=2.0), episodes=HalfSilent(), skip_at_most=skip_at_most)
    found = run(where, Policy(name="", max_lag=0))
    assert found.idle == pytest.approx(rounds / (rounds + 2))
    assert found.episodes_s == pytest.approx(64 / (rounds + 2))
    assert (found.tokens_discarded, found.episodes_discarded, found.outcomes_discarded) == (0, 0, 0)
    skipped = {0.0: 0, 0.5: 1 / 3, 1.0: 1 / 2}[skip_at_most]
    assert found.bound_s == pytest.approx(min(64 / 2, 64 * (1 - skipped)))


class OneSlow:
    """The last member of each group takes 20 s, its siblings one."""

    def group(self, size: int, chance: Random) -> list[Play]:
        return [Play(s, ((0.0, s, round(20 * s)),), round(20 * s)) for s in [*[1.0] * (size - 1), 20.0]]


@pytest.mark.parametrize(("close", "waits"), [(FULL, True), (Quorum(7, 0.0), False)])
def test_one_slow_member_in_eight_is_waited_for_or_trained_late(close: ClosePolicy, waits: bool) -> None:
    """It takes ten steps: at a lag of one all but its last tokens are too old, and no schedule could save them."""
    where = replace(world("constant:1", 4096, step_s=2.0, groups=8), episodes=OneSlow())
    found = run(where, Policy(name="", max_lag=1, close=close))
    assert (found.idle > 0.5) is waits
    assert found.played_s == pytest.approx((7 + 20) / 8)
    if not waits:
        assert found.episodes_discarded == 0
        assert found.trained_s == pytest.approx(found.played_s)
        assert found.tokens_discarded <= found.tokens_unavoidable
        assert found.tokens_unavoidable > 0.5


def test_a_run_repeats_itself_from_its_seed() -> None:
    where = world("pareto:1.5", 64, step_s=1.0)
    assert run(where, quorum("6/8")) == run(where, quorum("6/8"))
    assert run(where, quorum("6/8")) != run(where, quorum("6/8"), seed=2)


@pytest.mark.parametrize(("slots", "steps"), [(8, 400), (64, 60), (512, 30)])
@pytest.mark.parametrize("step_s", [0.8, 1.0, 1.25])
def test_under_lognormal_times_our_quorum_reaches_the_bound(slots: int, steps: int, step_s: float) -> None:
    found = run(world("lognormal:1", slots, step_s=step_s), quorum("6/8"), steps=steps)
    assert found.of_bound >= 0.98
    promised(found)


@pytest.mark.parametrize(("slots", "steps"), [(64, 60), (512, 30)])
def test_under_pareto_times_our_quorum_trains_four_times_what_a_synchronous_run_does(slots: int, steps: int) -> None:
    where = world("pareto:1.5", slots, step_s=1.0)
    found = run(where, quorum("6/8"), steps=steps)
    assert found.episodes_s >= 4 * run(where, Policy(name="", max_lag=0), steps=steps).episodes_s
    promised(found)


def test_a_group_that_waits_for_all_its_members_pays_with_speed_alone() -> None:
    found = run(world("lognormal:1", 64, step_s=1.0), quorum("full"), steps=60)
    assert found.of_bound < 0.9
    promised(found)


def test_other_systems_that_wait_for_all_members_lose_episodes() -> None:
    found = run(world("lognormal:1", 64, step_s=1.0), Policy(name="", max_lag=LAG), steps=60)
    assert found.tokens_discarded > found.tokens_unavoidable + 0.05


class OneHangs:
    """Episodes of one second. In one group of four, the last member hangs after that until its time limit, at 20 s."""

    def __init__(self) -> None:
        self._groups = 0

    def group(self, size: int, chance: Random) -> list[Play]:
        self._groups += 1
        last_s = 1.0 if self._groups % 4 else 20.0
        return [Play(s, ((0.0, 1.0, 20),), 20) for s in [*[1.0] * (size - 1), last_s]]


@pytest.mark.parametrize("close", ["full", "6/8@10"])
@pytest.mark.parametrize("lag", [1, 4])
def test_law_3_a_member_that_hangs_to_its_time_limit_is_trained_as_its_siblings_are(close: str, lag: int) -> None:
    """Steps of 2 s: at the end of the 20 s its tokens would be nine steps old."""
    where = replace(world("constant:1", 256, step_s=2.0, groups=4), episodes=OneHangs())
    [policy] = policies(lag, [parse_close(close, SIZE)])
    found = run(where, policy)
    assert [share.episodes for share in (*found.by_length, found.longest)] == [1.0] * 5
    assert found.tokens_discarded == 0
    without = run(replace(where, episodes=OneHangs()), Policy(name="", max_lag=lag, close=policy.close))
    assert without.longest.episodes < 0.1
    assert found.idle > without.idle, "this is the price"


def test_patience_bounds_what_waiting_costs() -> None:
    """It waits for as long as it works, which is too short for some: these are lost, and no quick one is."""
    where = replace(world("constant:1", 256, step_s=2.0, groups=4), episodes=OneHangs())
    [policy] = policies(LAG, [parse_close("6/8@10", SIZE)], wait=0.5)
    found = run(where, policy)
    assert found.held <= 1 / 3 + 0.02
    assert [share.episodes for share in found.by_length[:3]] == [1.0] * 3
    assert found.longest.episodes < 1.0


def promised(found: SimulationResult) -> None:
    """Nothing is thrown away that a schedule could save, and no length is favoured."""
    assert found.tokens_discarded <= found.tokens_unavoidable + 0.01
    assert found.episodes_discarded <= 0.001
    assert found.outcomes_discarded == 0
    assert found.trained_s == pytest.approx(found.played_s, rel=0.01)
