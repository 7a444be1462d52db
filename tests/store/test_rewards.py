"""What reward sources say joins its turn exactly once, and an episode waits for it no longer than it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentrl.algos.credit import turn_advantages
from agentrl.records import GroupState, StopReason, turn_id
from agentrl.store import Claim, Ending, LeaseLost, RunStore, Source, StoreError
from agentrl.store.audit import audit

from .play import START, Clock, admit, answer, play_all, turn

PRM = Source(name="prm", weight=0.5, deadline_s=10.0)


@pytest.fixture(autouse=True)
def admitted(store: RunStore) -> None:
    admit(store, limit=1)


def score_all(store: RunStore, source: str, value: float = 1.0) -> list[str]:
    turns = store.scores.awaiting(source, 100)
    for id in turns:
        assert store.scores.score(id, source, value)
    return turns


def rewards(store: RunStore, claim: Claim) -> list[dict[str, float]]:
    return [turn.rewards for turn in store.reads.trajectory(claim.episode_id).turns]


def sound(store: RunStore) -> bool:
    assert audit(store).violations == []
    return True


def test_a_group_is_scored_once_its_sources_have_said_of_every_turn(store: RunStore) -> None:
    store.scores.declare_sources([PRM, replace(PRM, name="style", weight=2.0)])
    first, second = play_all(store)
    assert (store.buffer.ready_count(), store.groups.counts()[GroupState.RUNNING]) == (0, 1)
    turns = [turn_id(claim.episode_id, 0, index) for claim in (first, second) for index in (0, 1)]
    assert score_all(store, "prm", 1.0) == turns
    assert store.buffer.ready_count() == 0
    for id in turns[:-1]:
        store.scores.score(id, "style", -0.25)
    assert (store.buffer.ready_count(), store.scores.awaiting("style", 10)) == (0, turns[-1:])
    assert store.reads.trajectory(first.episode_id).stop_reason is StopReason.DONE
    assert store.reads.trajectory(second.episode_id).stop_reason is None
    store.scores.score(turns[-1], "style", 3.0)
    assert store.buffer.ready_count() == 1 and sound(store)
    assert rewards(store, second) == [
        {"env": 0.0, "prm": 1.0, "style": -0.25},
        {"env": 0.25, "prm": 1.0, "style": 3.0},
    ]
    (group,) = store.buffer.take(1, 1, max_lag=1) or []
    assert [one.rewards for one in group.trajectories] == [(0.0, 0.25 + 0.5 - 0.5), (0.0, 0.25 + 0.5 + 6.0)]
    assert [(one.outcome, one.success) for one in group.trajectories] == [(1.0, True)] * 2
    assert group.record is not None
    assert [group.record[one.member] for one in group.trajectories] == [one.record for one in group.trajectories]
    assert group.record[1].rewards == {"policy": (0.0, 0.25 + 0.5 + 6.0)}, "siblings are judged against the same sum"
    assert group.record[1].streams == {"policy": {"env": (0.0, 0.25), "prm": (1.0, 1.0), "style": (-0.25, 3.0)}}
    assert group.record[1].weights == {"prm": 0.5, "style": 2.0}, "and a late member on the same scale"


def test_turns_are_scored_while_their_episode_goes_on_and_wait_for_the_answer(store: RunStore) -> None:
    store.scores.declare_sources([PRM])
    claim, _ = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    assert store.scores.awaiting("prm", 10) == []
    store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))
    (id,) = store.scores.awaiting("prm", 10)
    assert store.scores.awaiting("prm", 10, skip=[id]) == []
    assert store.scores.score(id, "prm", 0.5) and store.scores.awaiting("prm", 10) == []
    assert rewards(store, claim) == [{"env": 0.0, "prm": 0.5}]


def test_who_played_an_episode_that_waits_has_it_no_longer(store: RunStore) -> None:
    store.scores.declare_sources([PRM])
    claim, _ = play_all(store)
    with pytest.raises(LeaseLost):
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
    assert store.leases.claim("other", 10, lease_s=30.0, now=9e9) == [], "nobody plays it again"
    assert admit(store, max_running=2, limit=1) == 1, "and it takes nobody's place"


def test_after_a_restart_of_the_run_an_episode_goes_on_waiting(store: RunStore, clock: Clock) -> None:
    store.scores.declare_sources([PRM])
    play_all(store)
    clock.now += 5000.0  # nobody could score it while no run was there
    store.deaths.release_all()
    store.lineage.rollback(0, ahead=0)
    assert store.leases.claim("anew", 2, lease_s=30.0) == [], "it was played, and nobody plays it again"
    assert store.scores.expire_sources(clock.now + 10.0) == {}
    assert set(store.scores.expire_sources(clock.now + 10.1)) == {"prm"}
    assert sound(store)


@pytest.mark.parametrize(("late", "rewarded"), [("neutral", (0.0, 0.25)), ("partial", (0.5, 0.25))])
def test_a_source_that_does_not_answer_in_time_is_waited_for_no_longer(
    store: RunStore, clock: Clock, late: str, rewarded: tuple[float, ...]
) -> None:
    store.scores.declare_sources([replace(PRM, late=late)])  # pyright: ignore[reportArgumentType]
    first, second = play_all(store)
    first_turn, slow_turn = (turn_id(first.episode_id, 0, index) for index in (0, 1))
    store.scores.score(first_turn, "prm", 1.0)
    assert store.scores.expire_sources(clock.now + 10.0) == {}
    assert store.scores.expire_sources(clock.now + 10.1) == {"prm": [first.episode_id, second.episode_id]}
    assert store.buffer.ready_count() == 1 and sound(store)
    assert store.reads.trajectory(first.episode_id).rewards == rewarded
    assert store.scores.score(slow_turn, "prm", 7.0), "a late word is kept"
    assert store.reads.trajectory(first.episode_id).rewards == rewarded, "and changes nothing"
    assert not store.scores.recorded("prm")[-1].counts


def test_law_3_an_episode_that_a_source_left_unscored_leaves_loss_and_baseline(store: RunStore, clock: Clock) -> None:
    store.leases.claim("nobody", 2, lease_s=1e9)
    admit(store, group_size=3, limit=1)
    store.scores.declare_sources([replace(PRM, late="drop")])
    claims = play_all(store)
    for claim in claims[:2]:
        for index in (0, 1):
            store.scores.score(turn_id(claim.episode_id, 0, index), "prm", float(claim.member))
    store.scores.score(turn_id(claims[2].episode_id, 0, 0), "prm", 100.0)
    assert store.scores.expire_sources(clock.now + 11.0) == {"prm": [claims[2].episode_id]}
    (group,) = store.buffer.take(1, 1, max_lag=1) or []
    members = {one.member: one for one in group.trajectories}
    assert [members[member].scored for member in (0, 1)] == [True, True]
    dropped = store.reads.trajectory(claims[2].episode_id)
    assert (dropped.stop_reason, dropped.outcome, dropped.scored) == (StopReason.ENV_FAILED, None, False)
    assert store.metrics.failures().detail == "reward source 'prm' did not score all turns within 10 s of the end"
    rewards_GT = torch.tensor(
        [store.reads.trajectory(claim.episode_id).rewards for claim in claims], dtype=torch.float64
    )
    advantages_GT = turn_advantages(
        torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64),
        rewards_GT,
        torch.tensor([2, 2, 2]),
        torch.tensor([True, True, False]),
        baseline="leave_one_out",
        scale="none",
        process_weight=1.0,
    )
    # rewards to go: 0 + 0.25 against 0.5 + 0.25 + 0.5; then 0.25 against 0.75. What the third had counts nowhere.
    assert advantages_GT.tolist() == [[-1.0, -0.5], [1.0, 0.5], [0.0, 0.0]]
    assert sound(store)


def test_evaluations_and_turns_of_frozen_roles_are_not_scored(store: RunStore) -> None:
    store.scores.declare_sources([PRM])
    store.groups.add_groups([], size=1, purpose="none")
    claim, _ = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    store.journal.journal_turn(claim.episode_id, claim.fence, replace(turn(0, 1, step=answer(0)), learns=False))
    assert store.scores.awaiting("prm", 10) == []


@pytest.mark.parametrize(
    ("id", "value", "message"),
    [
        ("1.0.7", 1.0, r"has no turn 1\.0\.7"),
        ("seven", 1.0, r"'seven' is no turn's id: give one such as '12\.0\.3'"),
        ("1.0.0", float("nan"), r"turn 1\.0\.0: 'prm' gave nan: give a finite number"),
        ("1.0.0", 1e300, r"turn 1\.0\.0: 'prm' gave 1e\+300: give a number within 1e\+30 of 0"),
    ],
)
def test_a_score_that_is_none_is_one_line(store: RunStore, id: str, value: float, message: str) -> None:
    play_all(store)
    with pytest.raises(StoreError, match=message):
        store.scores.score(id, "prm", value)


def test_what_a_source_says_is_progress_and_asking_again_afterwards_is_none(store: RunStore) -> None:
    store.scores.declare_sources([PRM])
    play_all(store)
    seen = [store.metrics.progress()]
    for id in store.scores.awaiting("prm", 100):
        store.scores.score(id, "prm", 1.0)
        seen.append(store.metrics.progress())
    assert len(set(seen)) == 5, "one for each of four turns"
    store.scores.score(turn_id(1, 0, 0), "prm", 2.0, version=2)
    assert store.metrics.progress() == seen[-1]


def test_what_a_source_says_of_a_score_is_kept_for_people(store: RunStore) -> None:
    """It may quote the work: what drives a terminal, and what no database takes, is kept as an escape."""
    store.scores.declare_sources([PRM])
    first, second = play_all(store)
    assert store.scores.score(turn_id(first.episode_id, 0, 1), "prm", 0.5, reason="ran it\n\x1b[31m<b>\0\ud800")
    assert store.scores.score(turn_id(second.episode_id, 0, 0), "prm", 0.5)
    (told,) = store.scores.recorded(episode=first.episode_id)
    assert (told.turn_id, told.reason) == (turn_id(first.episode_id, 0, 1), "ran it\n\\x1b[31m<b>\\x00\\xd800")
    assert [one.reason for one in store.scores.recorded("prm", episode=second.episode_id)] == [""]
    assert len(store.scores.recorded()) == 2 and sound(store)
