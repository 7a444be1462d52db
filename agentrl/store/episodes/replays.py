"""Replays of what infrastructure failed: those by rule are counted here, those that somebody asks for begin here.

    failed member of an open group           waits again, in a new trial
    … of a closed group that no step took    the same, as a late member: the group's record stays as it is
    lost group without replays left          its task is played again, in a group of its own (see `groups`)

Nothing that a step took changes, and no task has two groups for one loss (law 2). What was sampled before is set aside
with the reason, as of any episode that began anew. Owns which failures may be played again; never knows why one failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from agentrl.errors import UsageError
from agentrl.store.buffer.admission import AdmissionBounds
from agentrl.store.codec import pack_identity, unpack_task
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import FAILURES
from agentrl.store.episodes.groups import LOST, LOST_REASONS, TRAIN, create_again, lost_groups, quarantined
from agentrl.store.versions import latest_confirmed

_FAILED = ", ".join(f"'{reason}'" for reason in FAILURES)
_COLUMNS = "e.id, g.id, g.purpose, g.state, g.started_step, g.fork_turn IS NOT NULL, g.task"
_MEMBERS = (
    f"SELECT {_COLUMNS} FROM episodes e JOIN groups g ON g.id = e.group_id"
    f" WHERE e.stop_reason IN ({_FAILED})"
    " AND (g.purpose <> 'train' OR g.state NOT IN ('expired', 'failed'))"
    f" UNION ALL SELECT {_COLUMNS} FROM groups g JOIN episodes e ON e.group_id = g.id"
    " WHERE g.purpose = 'train' AND g.state = 'scored' AND e.dropped = 'deadline' ORDER BY 1"
)
_GROUPS = (
    "SELECT id, task, replays, played_again, fork_turn IS NOT NULL FROM groups"
    f" WHERE purpose = 'train' AND state IN ('expired', 'failed') AND reason IN {LOST_REASONS} ORDER BY id"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """Failures that are played again: ids of `members` of open groups, of `late` members of closed groups, and of lost
    `groups`. `left`: how many failures are not, by the reason."""

    members: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    left: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Counts of tasks lost to infrastructure: `played` again, `waiting` for it, and without replays left."""

    played: int
    waiting: int
    exhausted: int


class ReplayedFailures(StorePart):
    """Count and begin replays of what infrastructure failed."""

    @retried
    def counts(self, max_replays: int) -> Replays:
        """Count replays, past and to come, with at most `max_replays` per task. A quarantined task has none left."""
        with self._db.read():
            played_row = self._db.row("SELECT COUNT(*) FROM groups WHERE replay_of IS NOT NULL")
            lost_row = self._db.row(f"SELECT COUNT(*) FROM groups INDEXED BY groups_lost WHERE {LOST}")
            waiting_count = len(lost_groups(self._db, max_replays))
        assert played_row is not None and lost_row is not None
        return Replays(played=played_row[0], waiting=waiting_count, exhausted=lost_row[0] - waiting_count)

    @retried
    def requeue(
        self, group_ids: Collection[int] | None = None, *, bounds: AdmissionBounds, dry_run: bool = False
    ) -> Requeued:
        """Play again what infrastructure failed, of these groups or of all (None): see the module. A second call finds
        nothing of the first. Evaluations stay as they were measured; a group that is too old for the next step by
        `bounds` is left, as is a lost one which admission plays again by itself. Deadlines of a group begin anew. With
        `dry_run` nothing changes.

        Raises UsageError for a group that there is not."""
        # The same code for both: a preview of its own would say something else than what happens as soon as one of them
        # is changed.
        transaction: AbstractContextManager[object] = self._db.read() if dry_run else self._db.write()
        with transaction:
            requeued = self._find(group_ids, bounds)
            if not dry_run:
                self._wait_again(requeued.members, late=False)
                self._wait_again(requeued.late, late=True)
                self._play_again(requeued.groups)
        return requeued

    def _find(self, requested: Collection[int] | None, bounds: AdmissionBounds) -> Requeued:
        db = self._db
        next_step, quarantined_tasks = _next_step(db), quarantined(db)
        for group_id in requested or ():
            if db.row("SELECT 1 FROM groups WHERE id = ?", (group_id,)) is None:
                raise UsageError(f"no group {group_id} in {db.path}: agentrl tasks RUN --failed names what failed")
        # Every failure that is not played again is counted under its reason. A command that replays "12 of 40" and is
        # silent about the others would send its user looking for a bug (law 8).
        refusals, unaffected_ids = Counter[str](), set(requested or ())
        member_ids, late_ids, replayed_ids = list[int](), list[int](), list[int]()
        for episode_id, group_id, purpose, group_state, started_step, fork_origin, packed_task in db.rows(_MEMBERS):
            if requested is not None and group_id not in requested:
                continue
            unaffected_ids.discard(group_id)
            # In this order the first reason is the one that cannot be changed: an evaluation stays, what a step took
            # stays, and only after these does age or quarantine matter.
            if purpose != TRAIN:
                refusals["of an evaluation, which stays as it was measured"] += 1
            elif group_state in ("taken", "trained"):
                refusals["of a group that a step has taken"] += 1
            elif age_refusal := bounds.too_old(next_step, started_step):
                refusals[f"of a group {age_refusal}"] += 1
            elif refusal := _never(fork_origin, packed_task, quarantined_tasks):
                refusals[refusal] += 1
            else:
                (late_ids if group_state == "scored" else member_ids).append(episode_id)
        for group_id, packed_task, replay_count, played_again, fork_origin in db.rows(_GROUPS):
            if requested is not None and group_id not in requested:
                continue
            unaffected_ids.discard(group_id)
            if refusal := _never(fork_origin, packed_task, quarantined_tasks):
                refusals[refusal] += 1
            elif played_again:
                refusals["a group that was played again already"] += 1
            elif replay_count < bounds.max_replays:
                refusals[f"a group that is played again by itself (rollout.max_replays = {bounds.max_replays})"] += 1
            else:
                replayed_ids.append(group_id)
        if unaffected_ids:
            refusals["a group of which nothing failed"] += len(unaffected_ids)
        return Requeued(
            members=tuple(member_ids), late=tuple(late_ids), groups=tuple(replayed_ids), left=dict(refusals)
        )

    def _wait_again(self, episode_ids: Collection[int], *, late: bool) -> None:
        """Have failed members wait, in a new trial."""
        db = self._db
        for episode_id in episode_ids:
            ending_row = db.row("SELECT stop_reason, group_id FROM episodes WHERE id = ?", (episode_id,))
            assert ending_row is not None
            stop_reason, group_id = ending_row
            db.execute(
                "INSERT INTO restarts SELECT id, trial, start, 'requeued after ' || stop_reason || ': ' || detail, ?"
                " FROM episodes WHERE id = ?",
                (db.clock(), episode_id),
            )
            db.execute(  # the newest count of this ending: whose attempt it was is not written down; 0 stays
                "UPDATE ending_counts SET n = n - 1 WHERE evaluation = 0 AND stop_reason = ?1 AND attempt ="
                " (SELECT MAX(attempt) FROM ending_counts WHERE evaluation = 0 AND stop_reason = ?1 AND n > 0)",
                (stop_reason,),
            )
            db.execute(
                "UPDATE episodes SET state = 'waiting', trial = trial + 1, start = NULL, stop_reason = NULL,"
                " outcome = NULL, success = NULL, outcomes = '{}', detail = '', started_s = NULL, ended_s = NULL,"
                " n_turns = 0, n_tokens = 0, newest_step = NULL, dropped = NULL, deaths = 0, died_at = NULL, late = ?"
                " WHERE id = ?",
                (int(late), episode_id),
            )
            db.execute("UPDATE groups SET started_s = NULL WHERE id = ?", (group_id,))  # the next claim sets it

    def _play_again(self, group_ids: Collection[int]) -> None:
        latest_version = latest_confirmed(self._db)
        for group_id in group_ids:
            ((group_size,),) = self._db.rows("SELECT size FROM groups WHERE id = ?", (group_id,))
            create_again(self._db, group_id, group_size, 0 if latest_version is None else latest_version.step)


def _next_step(db: Database) -> int:
    """The optimizer step that takes members next. Inside a transaction."""
    step_row = db.row(
        "SELECT 1 + MAX(step) FROM (SELECT MAX(step) AS step FROM lineage WHERE undone_attempt IS NULL"
        " UNION ALL SELECT MAX(step) FROM versions WHERE undone_attempt IS NULL) made"
    )
    return 1 if step_row is None or step_row[0] is None else step_row[0]


def _never(fork: bool, task: str, kept_out: Collection[str]) -> str:
    """Why a failure can never be played again; "" if it can."""
    if fork:
        return "of a fork, which cannot begin anew"
    if kept_out and pack_identity(unpack_task(task)) in kept_out:
        return "of a task in quarantine, which killed its workers"
    return ""
