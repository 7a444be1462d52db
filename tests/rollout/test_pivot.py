"""Pivot resampling: which turn a rule chooses, and forks that a run makes by itself in the places of new groups."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from each_case import each_case
from store.play import admit, bounds, play_all, task, turn

from agentrl.config import parse
from agentrl.env.tasks import Seeds
from agentrl.errors import ConfigError
from agentrl.records import Group, GroupState, Step, StopReason, Trajectory, Turn
from agentrl.rollout.admitter import Admitter
from agentrl.rollout.branching import LowReward, Pivot, PivotRule, Pivots, entropy, uniform
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

CHANCE = random.Random(0)


def group(*members: Sequence[Turn], stop: StopReason | None = StopReason.DONE) -> Group:
    trajectories = [
        Trajectory(
            episode_id=10 + m, group_id=1, member=m, task=task(0), start=(), turns=tuple(turns), stop_reason=stop
        )
        for m, turns in enumerate(members)
    ]
    return Group(
        id=1,
        task=task(0),
        state=GroupState.SCORED,
        size=len(members),
        trajectories=tuple(trajectories),
        started_step=0,
        taken_step=None,
    )


def said(index: int, *logprobs: float, reward: float = 0.0, learns: bool = True) -> Turn:
    made = turn(index, 1, n=len(logprobs), step=Step(observation=(), reward=reward))
    return replace(made, logprobs=logprobs, learns=learns)


TWO = group([said(0, -9.0), said(1, -1.0, -1.0), said(2, -0.1)], [said(0, -9.0), said(1, -0.5, -4.0)])


def test_uniform_takes_every_turn_but_the_first_as_often() -> None:
    counts = Counter(uniform(TWO, CHANCE) for _ in range(3000))
    assert set(counts) == {Pivot(10, 1), Pivot(10, 2), Pivot(11, 1)}
    assert min(counts.values()) > 850


def test_entropy_takes_the_turn_whose_tokens_were_least_expected_in_the_mean() -> None:
    assert entropy(TWO, CHANCE) == Pivot(11, 1)


def test_low_reward_takes_the_first_such_turn_of_an_episode_that_has_one() -> None:
    low = [
        said(0, -1.0, reward=-5.0),
        said(1, -1.0, reward=0.5),
        said(2, -1.0, reward=-1.0),
        said(3, -1.0, reward=-9.0),
    ]
    assert LowReward(0.0)(group([said(0, -1.0), said(1, -1.0)], low), CHANCE) == Pivot(11, 2)
    assert LowReward(-10.0)(group(low), CHANCE) is None


@each_case("rule", [uniform, entropy, LowReward(9.0)])
def test_no_rule_takes_a_turn_that_cannot_be_forked(rule: PivotRule) -> None:
    """Of one turn; not ended; ended by infrastructure; of a frozen role; without tokens."""
    turns = [said(0, -1.0), said(1, -1.0)]
    for none in (
        group(turns[:1]),
        group(turns, stop=None),
        group(turns, stop=StopReason.ENGINE_FAILED),
        group([turns[0], said(1, -1.0, learns=False)]),
        group([turns[0], said(1)]),
    ):
        assert rule(none, CHANCE) is None


# --- in a run --------------------------------------------------------------------------------------------------------


def admitter(store: RunStore, *, share: float = 1.0, rule: PivotRule = uniform, size: int | None = None) -> Admitter:
    pivots = Pivots(store.groups, store.reads, rule, share=share, k=2, seed=0)
    return Admitter(store, Seeds("test/Env", size=size), bounds(max_lag=99), lambda: None, pivots)


def forks(store: RunStore) -> list[int]:
    return sorted(store.groups.forked())


def test_law_2_a_closed_group_is_forked_once_in_the_place_of_a_new_one(store: RunStore) -> None:
    one = admitter(store)
    assert one.admit(2) == 2 and forks(store) == [], "nothing has ended yet"
    play_all(store, turns=3)
    assert one.admit(3) == 3
    assert forks(store) == [1, 2] and store.groups.tasks_started() == 3, "two forks, one new group"
    for claim in play_all(store, turns=3):
        assert all(not each.learns for each in claim.turns), "what its origin sampled is context"
    assert one.admit(1) == 1 and forks(store) == [1, 2, 5], "the new group; no fork is forked"
    assert admitter(store).admit(1) == 1 and forks(store) == [1, 2, 5], "nor any group twice, after a restart"
    assert audit(store).violations == [] and OutsideAuditor(store.path).look() == []


def test_a_share_of_the_groups_is_forked_and_after_a_restart_the_same_ones(store: RunStore) -> None:
    admit(store, limit=200, max_lag=99)
    play_all(store, turns=2)
    while (one := admitter(store, share=0.25)).pivots is not None and one.pivots.fork():  # another one each time
        pass
    found = forks(store)
    assert 30 < len(found) < 70
    assert found != list(range(1, len(found) + 1))


def test_forks_do_not_widen_the_bounds_of_admission(store: RunStore) -> None:
    one = admitter(store)
    one.bounds = bounds(max_lag=1, groups_per_step=2)
    assert one.admit(99) == 4
    play_all(store, turns=2)
    assert one.admit(99) == 0, "four groups wait to be trained: no place for forks either"
    assert store.buffer.take(1, 2, max_lag=1) is not None
    assert forks(store) == []


def test_no_fork_takes_the_place_of_a_task_that_is_not_there(store: RunStore) -> None:
    """A finite run ends once its tasks are played."""
    one = admitter(store, size=2)
    assert one.admit(9) == 2
    play_all(store, turns=2)
    assert one.admit(9) == 0 and forks(store) == []


def test_forks_whose_environment_cannot_be_restored_are_given_up(
    store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    admit(store, limit=8, max_lag=99)
    play_all(store, turns=2)
    one = admitter(store)
    assert one.pivots is not None
    for _ in range(4):
        assert one.pivots.fork()
        play_all(store, turns=2, stop=StopReason.ENV_FAILED, outcome=None)
    assert not one.pivots.fork() and not one.pivots.fork()
    assert capsys.readouterr().err.count("must be replayable or offer snapshots") == 1


def test_a_turn_that_a_users_rule_made_up_costs_the_run_nothing(store: RunStore) -> None:
    admit(store, limit=2, max_lag=99)
    play_all(store, turns=2)
    one = admitter(store, rule=lambda group, _: Pivot(group.trajectories[0].episode_id, 7))
    assert one.admit(1) == 1 and forks(store) == []


@each_case(
    ("pivot", "words"),
    [
        ({"rule": "best"}, "rollout.pivot.rule = 'best': give uniform, entropy, low_reward, or the module:function"),
        ({"k": 9}, "rollout.pivot.k = 9: must be at most rollout.group_size = 8"),
        ({"share": 0.0}, "rollout.pivot.share"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(pivot: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"model": "m", "env": {"id": "e"}, "rollout": {"pivot": pivot}})
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_file_names_a_rule_of_the_users(store: RunStore) -> None:
    own = {"rule": "rollout.test_pivot:uniform", "share": 1.0, "k": 2}
    pivots = Pivots.of(parse({"model": "m", "env": {"id": "e"}, "rollout": {"pivot": own}}), store.groups, store.reads)
    admit(store, limit=1)
    play_all(store, turns=2)
    assert pivots is not None and pivots.fork()
    assert Pivots.of(parse({"model": "m", "env": {"id": "e"}}), store.groups, store.reads) is None
