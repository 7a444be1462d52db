"""Failures that are played again because somebody asks: each once, no law broken, nothing of a step changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UsageError
from agentrl.records import GroupState, StopReason, Task
from agentrl.store import Claim, Ending, Quorum, Requeued, RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .play import Clock, admit, bounds, play, serve

FAILED = StopReason.ENGINE_FAILED


def failing(store: RunStore, fails: Sequence[int] = (), ends: Sequence[int] = ()) -> list[Claim]:
    """Claim what waits; of each group the members `fails` fail, those in `ends` end well, the others go on."""
    claims = store.leases.claim("w", 99, lease_s=1e9)
    for claim in claims:
        if claim.member in fails:
            play(store, claim, turns=1, stop=FAILED, outcome=None)
        elif claim.member in ends:
            play(store, claim, outcome=float(claim.member))
    return claims


def requeue(store: RunStore, *groups: int, dry_run: bool = False, **changes: Any) -> Requeued:
    return store.replays.requeue(groups or None, bounds=bounds(**changes), dry_run=dry_run)


def sound(auditor: OutsideAuditor, store: RunStore) -> bool:
    return audit(store).violations == [] and auditor.look() == []


def test_a_failed_member_of_an_open_group_waits_again_and_is_trained_with_it(store: RunStore) -> None:
    auditor = OutsideAuditor(store.path)
    admit(store, limit=1, group_size=3)
    failing(store, fails=[0], ends=[1])
    assert requeue(store, dry_run=True) == requeue(store) == Requeued(members=(1,))
    assert requeue(store) == Requeued(), "the second time there is nothing left"
    assert store.reads.restarts(1)[0].reason == "requeued after engine_failed: "
    assert store.metrics.failures().failed == 1 and sound(auditor, store)
    (again,) = failing(store, ends=[0])
    assert (again.episode_id, again.trial, again.start, again.turns) == (1, 1, None, ())
    assert store.groups.counts() == {GroupState.RUNNING: 1}
    store.buffer.expire(1e12, 600.0)
    taken = store.buffer.take(1, 1, max_lag=1)
    assert taken is not None and [one.episode_id for one in taken[0].trajectories] == [1, 2]
    assert store.lineage.episodes_of(1) == [1, 2] and sound(auditor, store)


def test_a_failed_member_of_a_closed_group_is_a_late_one_and_its_record_stays(store: RunStore, clock: Clock) -> None:
    auditor = OutsideAuditor(store.path)
    admit(store, limit=1, group_size=3)
    failing(store, fails=[2], ends=[0, 1])
    assert store.groups.counts() == {GroupState.SCORED: 1}
    record = store.reads.group(1).record
    clock.now += 5000.0
    assert requeue(store) == Requeued(late=(3,))
    assert store.buffer.late_open() == 1 and store.reads.group(1).record == record and sound(auditor, store)
    assert not store.buffer.expire(clock(), 600.0).members, "its deadline begins anew"
    assert store.buffer.take(1, 1, max_lag=1) is not None
    assert requeue(store, 1) == Requeued(left={"a group of which nothing failed": 1})
    (claim,) = store.leases.claim("w", 9, lease_s=1e9)
    serve(store, 1)
    play(store, claim, outcome=1.0)
    (late,) = store.buffer.take(2, 0, max_lag=1) or []
    assert late.record == record and store.lineage.episodes_of(2) == [3] and sound(auditor, store)


def test_a_late_member_that_was_given_up_is_played_again(store: RunStore, clock: Clock) -> None:
    auditor = OutsideAuditor(store.path)
    admit(store, limit=1, group_size=3)
    failing(store, ends=[0, 1])
    store.buffer.expire(clock(), 600.0, close_policy=Quorum(2, after_s=0.0))
    clock.now += 5000.0
    assert store.buffer.expire(clock(), 600.0).members == (3,)
    assert requeue(store) == Requeued(late=(3,)) and sound(auditor, store)
    failing(store, ends=[2])
    assert [one.episode_id for one in (store.buffer.take(1, 1, max_lag=1) or [])[0].trajectories] == [1, 2, 3]
    assert sound(auditor, store)


def test_a_lost_group_that_was_given_up_is_played_once_more_for_each_loss(store: RunStore, path: Path) -> None:
    auditor = OutsideAuditor(path)
    admit(store, limit=1, max_replays=1)
    failing(store, fails=[0, 1])
    left = {"a group that is played again by itself (rollout.max_replays = 1)": 1}
    assert requeue(store, max_replays=1) == Requeued(left=left)
    admit(store, limit=1, max_replays=1)
    failing(store, fails=[0, 1])
    assert store.replays.counts(1).exhausted == 1
    assert requeue(store, max_replays=1) == Requeued(groups=(2,), left={"a group that was played again already": 1})
    assert requeue(store, max_replays=1) == Requeued(left={"a group that was played again already": 2})
    assert {row.task.seed for row in store.reads.episodes("train", group_id=3)} == {100} and sound(auditor, store)
    failing(store, ends=[0, 1])
    assert (
        store.buffer.take(1, 1, max_lag=1) is not None
        and store.lineage.episodes_of(1) == [5, 6]
        and sound(auditor, store)
    )


def test_what_may_not_be_played_again_is_left_with_the_reason(store: RunStore) -> None:
    auditor = OutsideAuditor(store.path)
    store.groups.add_groups([Task(index=0, env="test/Env-v0", seed=7)], size=1, purpose="eval:set:before")
    failing(store, fails=[0])
    admit(store, limit=1, group_size=3)
    failing(store, fails=[0], ends=[1, 2])
    fork = store.groups.fork(3, turn=1, k=2)
    for claim in store.leases.claim("w", 1, lease_s=1e9):
        store.journal.finish(claim.episode_id, claim.fence, Ending(stop_reason=FAILED, outcome=None, success=None))
    assert store.buffer.take(1, 1, max_lag=1) is not None
    serve(store, 1)
    admit(store, limit=1, group_size=3)
    failing(store, fails=[0], ends=[1])
    serve(store, 4)
    assert requeue(store, max_lag=2) == Requeued(
        left={
            "of an evaluation, which stays as it was measured": 1,
            "of a group that a step has taken": 1,
            "of a group older than step 5 may train (buffer.max_lag = 2)": 1,
            "of a fork, which cannot begin anew": 1,
        }
    )
    assert requeue(store, fork) == Requeued(left={"of a fork, which cannot begin anew": 1})
    with pytest.raises(UsageError, match=r"no group 99 in \S+: agentrl tasks RUN --failed"):
        requeue(store, 99)
    assert sound(auditor, store)
