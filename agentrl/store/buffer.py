"""The buffer between rollout and learner: what the learner takes, and what is too old to be taken.

Taking and writing it into the lineage is one transaction, and the schema allows one live lineage row a group: that is
how a group is trained exactly once (law 2). What is too old leaves as expired with a reason, and is counted (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import StoreError
from agentrl.records import Group, GroupState, StopReason
from agentrl.store.database import Part
from agentrl.store.groups import TRAIN, close_if_ended, scored
from agentrl.store.journal import end_episode
from agentrl.store.readers import load_group
from agentrl.store.versions import lag, latest_confirmed

STALE = "stale"
DEADLINE = "deadline"


class Buffer(Part):
    """Take groups for a learner step; expire those that the learner may no longer have."""

    def take(self, step: int, n: int, *, max_lag: int) -> list[Group] | None:
        """`n` scored groups for optimizer step `step`, oldest admitted first; None, and nothing taken, if fewer remain.

        Groups with a scored member's token of a lag above `max_lag` expire first, whether or not enough remain (see
        `versions` for how lag counts). Raises StoreError if groups were taken for this step or a later one already:
        after a crash, `rollback` puts them back."""
        with self._db.read():  # a waiting learner asks often, and must not take the write lock to hear no
            fresh, stale = self._takable(step, max_lag)
        if len(fresh) < n and not stale:
            return None
        now = self._db.clock()
        with self._db.write(durable=True):  # before it is trained: a checkpoint may outlive a loss of power
            fresh, stale = self._takable(step, max_lag)
            self._expire(stale, STALE, now)
            if len(fresh) >= n:
                del fresh[n:]
                self._db.execute_many(
                    "INSERT INTO lineage (group_id, step, attempt, max_lag, taken_s)"
                    " VALUES (?, ?, (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'attempt'), ?, ?)",
                    [(id, step, max_lag, now) for id in fresh],
                )
                self._db.execute_many(
                    "UPDATE groups SET state = 'taken', taken_step = ? WHERE id = ?", [(step, id) for id in fresh]
                )
        if len(fresh) < n:
            return None
        with self._db.read():
            return [load_group(self._db, id) for id in fresh]

    def expire(self, now: float, group_deadline_s: float, *, max_lag: int | None = None) -> dict[str, list[int]]:
        """Close running groups whose first episode was claimed more than `group_deadline_s` before `now`, and, given
        `max_lag`, running training groups with a token already too old for any step to come. Group ids by reason.

        A training group expires; an evaluation group keeps what ended and is scored. Running members end with
        `StopReason.EXPIRED`: their workers hear LeaseLost at their next journal call."""
        with self._db.read():
            if not self._overdue(now - group_deadline_s) and not self._doomed(max_lag):
                return {}
        with self._db.write():
            late = self._overdue(now - group_deadline_s)
            self._expire(late, DEADLINE, now)
            doomed = self._doomed(max_lag)  # after it: a group counts once
            self._expire(doomed, STALE, now)
        return {reason: ids for reason, ids in ((DEADLINE, late), (STALE, doomed)) if ids}

    def _takable(self, step: int, max_lag: int) -> tuple[list[int], list[int]]:
        """Scored training groups, oldest admitted first: those that step `step` may train, and the stale ones."""
        later = self._db.row("SELECT MAX(step) FROM lineage WHERE undone_attempt IS NULL AND step >= ?", (step,))
        if later is not None and later[0] is not None:
            raise StoreError(f"step {step}: groups were taken for step {later[0]} already: roll back first")
        rows = self._db.rows(
            "SELECT id, oldest_step FROM groups WHERE purpose = ? AND state = 'scored' ORDER BY id", (TRAIN,)
        )
        fresh = [id for id, oldest in rows if lag(step, oldest) <= max_lag]
        stale = [id for id, oldest in rows if lag(step, oldest) > max_lag]
        return fresh, stale

    def _overdue(self, started_before: float) -> list[int]:
        rows = self._db.rows(
            "SELECT g.id FROM group_counts c CROSS JOIN groups g ON g.purpose = c.purpose AND g.state = c.state"
            " WHERE c.state = 'running' AND c.n > 0 AND g.started_s < ? ORDER BY g.id",
            (started_before,),
        )
        return [id for (id,) in rows]

    def _doomed(self, max_lag: int | None) -> list[int]:
        version = None if max_lag is None else latest_confirmed(self._db)
        if version is None or max_lag is None:
            return []
        rows = self._db.rows(
            "SELECT DISTINCT g.id, e.stop_reason, e.outcome FROM groups g JOIN episodes e ON e.group_id = g.id"
            " JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial"
            " WHERE g.purpose = ? AND g.state = 'running' AND t.oldest_step < ? ORDER BY g.id",
            (TRAIN, version.step - max_lag),
        )
        return sorted({id for id, stop_reason, outcome in rows if stop_reason is None or scored(stop_reason, outcome)})

    def _expire(self, group_ids: Sequence[int], reason: str, now: float) -> None:
        for group_id in group_ids:
            open_members = self._db.rows(
                "SELECT id FROM episodes WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,)
            )
            for (episode_id,) in open_members:
                end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
            expired = self._db.execute(
                "UPDATE groups SET state = ?, reason = ?, closed_s = ? WHERE id = ? AND purpose = ?",
                (GroupState.EXPIRED, reason, now, group_id, TRAIN),
            )
            if expired.rowcount == 0:
                close_if_ended(self._db, group_id, now)
