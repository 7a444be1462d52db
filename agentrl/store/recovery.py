"""A store that knows less than the newest checkpoint has trained: after a loss of power, or where a copy was put back.

A checkpoint's folder lists the groups that it trained, and is believed: what it lists is never trained again (law 2).
Owns that comparison and nothing else; where the folders lie, and who reads them, it never knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.records import GroupState, StopReason
from agentrl.store.database import Part
from agentrl.store.groups import TRAIN
from agentrl.store.journal import end_episode

JOURNAL_LOST = "journal_lost"
"""Why a group left that a checkpoint trained, and whose end the store has lost."""

LINEAGE_LOST = "lineage_lost"
"""Why a group left that may have been trained in steps of which neither the store nor a checkpoint tells."""

_SPARE = 1000  # numbers left out, as lost rows may have used them


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint's folder says: `groups`, in order, were trained in the steps after `previous_step` up to
    `step`."""

    step: int
    previous_step: int
    groups: tuple[int, ...]

    def step_of(self, place: int) -> int:
        """The step of the group at `place`: exact where all batches were of one size."""
        return self.previous_step + 1 + place * (self.step - self.previous_step) // len(self.groups)


class Recovery(Part):
    """Bring the lineage up to what the checkpoints say."""

    def reconcile(self, saved: Sequence[Saved], *, max_lag: int) -> int:
        """Write into the lineage what `saved`, the checkpoints that are kept, oldest first, trained and the store does
        not know; how many groups that were. `max_lag` was the bound of their takes. Call it before `checkpoint`.

        A listed group that is scored was taken; one that is not, or is not there at all, is noted as lost, and its
        number is not given again. Where no checkpoint is left of steps that the store has not seen, every group that
        is not in the lineage may have been trained in them: it expires."""
        with self._db.read():
            if not self._unknown(saved) and not self._gap(saved):
                return 0
        with self._db.write(durable=True):
            unknown = self._unknown(saved)
            for group_id, step in unknown:
                self._believe(group_id, step, max_lag)
            if self._gap(saved):
                for (group_id,) in self._db.rows(
                    "SELECT id FROM groups WHERE purpose = ? AND state IN ('waiting', 'running', 'finished', 'scored')",
                    (TRAIN,),
                ):
                    self._drop(group_id, LINEAGE_LOST)
            highest = max((group_id for group_id, _ in unknown), default=0)
            self._leave_out("groups", highest)
            self._leave_out("versions", 0)
        return len(unknown)

    def _unknown(self, saved: Sequence[Saved]) -> list[tuple[int, int]]:
        """Groups, and the steps that trained them, of which the store knows neither a take nor a loss."""
        known = {id for (id,) in self._db.rows("SELECT group_id FROM lineage WHERE undone_attempt IS NULL")}
        known |= {id for (id,) in self._db.rows("SELECT group_id FROM lost")}
        return [(id, one.step_of(place)) for one in saved for place, id in enumerate(one.groups) if id not in known]

    def _gap(self, saved: Sequence[Saved]) -> bool:
        """Whether the checkpoints begin after the last one that the store knows."""
        row = self._db.row("SELECT COALESCE(MAX(step), 0) FROM checkpoints WHERE undone_attempt IS NULL")
        return bool(saved) and row is not None and row[0] < saved[0].previous_step

    def _leave_out(self, table: str, highest: int) -> None:
        """Give no number of `table` again that a lost row may have had."""
        row = self._db.row("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
        self._db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        given = 0 if row is None else row[0]
        self._db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, max(given, highest) + _SPARE))

    def _believe(self, group_id: int, step: int, max_lag: int) -> None:
        row = self._db.row("SELECT state FROM groups WHERE id = ?", (group_id,))
        if row is not None and row[0] == GroupState.SCORED:
            self._db.execute(
                "INSERT INTO lineage (group_id, step, attempt, max_lag, taken_s)"
                " VALUES (?, ?, (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'attempt'), ?, ?)",
                (group_id, step, max_lag, self._db.clock()),
            )
            self._db.execute("UPDATE groups SET state = 'taken', taken_step = ? WHERE id = ?", (step, group_id))
            return
        self._db.execute("INSERT INTO lost VALUES (?, ?, ?)", (group_id, step, self._db.clock()))
        if row is not None and row[0] in (GroupState.WAITING, GroupState.RUNNING, GroupState.FINISHED):
            self._drop(group_id, JOURNAL_LOST)

    def _drop(self, group_id: int, reason: str) -> None:
        now = self._db.clock()
        for (episode_id,) in self._db.rows(
            "SELECT id FROM episodes WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,)
        ):
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
        self._db.execute(
            "UPDATE groups SET state = 'expired', reason = ?, closed_s = ? WHERE id = ?", (reason, now, group_id)
        )
