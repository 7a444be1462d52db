"""Repair of the lineage where the store lacks episodes of a checkpoint: after a loss of power, or with an older copy.

A checkpoint's folder lists the episodes that it trained. The list is trusted, since the folder was synced before the
store heard of it: those episodes are never trained again (law 2), whatever the store has left of them.
`tests/store/test_power_loss.py` cuts the power after each write of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.records import GroupState, StopReason
from agentrl.store.databases.database import StorePart, retried
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import LATE, TRAIN, scored
from agentrl.store.run_values import ATTEMPT_SQL

JOURNAL_LOST = "journal_lost"
"""Why a group, or a late member, left that a checkpoint trained, and whose end the store has lost."""

LINEAGE_LOST = "lineage_lost"
"""Why a group, or a late member, left that may have been trained in steps that neither the store nor a checkpoint
records."""

_SPARE = 1000  # ids skipped, as lost rows may have used them


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The lists in a checkpoint's folder: step `previous_step` + 1 + i trained `episodes[i]`."""

    previous_step: int
    episodes: tuple[tuple[int, ...], ...]


class Recovery(StorePart):
    """Bring the lineage up to what the checkpoints say."""

    @retried
    def reconcile(self, saved: Sequence[Saved], *, max_lag: int) -> int:
        """Add to the lineage the episodes that `saved` (the kept checkpoints, oldest first) trained and the store
        lacks. Returns how many that were. `max_lag` was the bound of their takes. Call it before `checkpoint`.

        A listed episode that is scored and whose group is closed counts as taken. Any other listed one, also without a
        row, is noted as lost, and its id is not used again. If no checkpoint is left of some steps that the store has
        not seen, they may have trained any group or late member that is not in the lineage: those are dropped."""
        with self._db.read():
            # Almost every start repairs nothing, and then nothing is written: a start that changed rows could not be
            # told from one that had lost some.
            if not self._unknown(saved) and not self._gap(saved):
                return 0
        with self._db.write(durable=True):
            unknown_episodes = self._unknown(saved)
            for episode_id, step in unknown_episodes:
                self._believe(episode_id, step, max_lag)
            if self._gap(saved):
                self._give_up()
            # Numbers of lost rows must not be given out again. A checkpoint names episodes by number, and an engine
            # tags tokens with a version: a new row under an old number would be taken for trained, or its tokens for
            # those of other weights. How many rows were lost nobody knows, so a thousand are skipped; a store has room
            # for 2^63.
            self._db.upkeep.skip_numbers(
                "episodes", max((unknown_id for unknown_id, _ in unknown_episodes), default=0), _SPARE
            )
            self._db.upkeep.skip_numbers("groups", 0, _SPARE)
            self._db.upkeep.skip_numbers("versions", 0, _SPARE)
        return len(unknown_episodes)

    def _unknown(self, saved: Sequence[Saved]) -> list[tuple[int, int]]:
        """(episode, step) pairs of which the store knows neither a take nor a loss."""
        listed_episodes = (
            (episode_id, step)
            for checkpoint in saved
            for step, episode_ids in enumerate(checkpoint.episodes, checkpoint.previous_step + 1)
            for episode_id in episode_ids
        )
        return [(episode_id, step) for episode_id, step in listed_episodes if not self._knows(episode_id)]

    def _knows(self, episode_id: int) -> bool:
        known_row = self._db.row(
            "SELECT 1 FROM lineage WHERE episode_id = ?1 AND undone_attempt IS NULL"
            " UNION ALL SELECT 1 FROM lost_members WHERE episode_id = ?1 LIMIT 1",
            (episode_id,),
        )
        return known_row is not None

    def _gap(self, saved: Sequence[Saved]) -> bool:
        """Whether the checkpoints begin after the last one that the store knows."""
        step_row = self._db.row("SELECT COALESCE(MAX(step), 0) FROM checkpoints WHERE undone_attempt IS NULL")
        return bool(saved) and step_row is not None and step_row[0] < saved[0].previous_step

    def _give_up(self) -> None:
        # Everything that might have been trained in steps of which no list is left is given up. That may drop episodes
        # that were never trained. The other mistake, to train one twice, is the one that law 2 forbids, and a dropped
        # one is counted.
        for (group_id,) in self._db.rows(
            "SELECT id FROM groups WHERE purpose = ? AND state IN ('waiting', 'running', 'scored')",
            (TRAIN,),
        ):
            self._drop_group(group_id, LINEAGE_LOST)
        for (episode_id,) in self._db.rows(f"SELECT id FROM episodes WHERE {LATE}"):
            self._drop_member(episode_id, LINEAGE_LOST)

    def _believe(self, episode_id: int, step: int, max_lag: int) -> None:
        episode_row = self._db.row(
            "SELECT g.id, g.state, e.stop_reason, e.outcome, e.late, e.dropped FROM episodes e"
            " JOIN groups g ON g.id = e.group_id WHERE e.id = ?",
            (episode_id,),
        )
        group_id, state, stop_reason, outcome, late, dropped = episode_row or (0, None, None, None, 0, None)
        closed_states = (GroupState.SCORED, GroupState.TAKEN, GroupState.TRAINED)
        is_closed = state in closed_states or (state == GroupState.EXPIRED and late)
        # The row of the episode is still there in full, and only its place in the lineage was lost: it can be written
        # as the take would have written it. Anything less is noted as lost. To rebuild a row from the checkpoint's list
        # would invent rewards and tokens that nobody has any more.
        if is_closed and dropped is None and stop_reason is not None and scored(stop_reason, outcome):
            self._db.execute(
                f"INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s) VALUES (?, ?, {ATTEMPT_SQL}, ?, ?)",
                (episode_id, step, max_lag, self._db.clock()),
            )
            self._db.execute("UPDATE episodes SET taken_step = ? WHERE id = ?", (step, episode_id))
            self._db.execute(
                "UPDATE groups SET state = 'taken', taken_step = ? WHERE id = ? AND state = 'scored'", (step, group_id)
            )
            return
        self._db.execute("INSERT INTO lost_members VALUES (?, ?, ?)", (episode_id, step, self._db.clock()))
        if state in (GroupState.WAITING, GroupState.RUNNING):
            self._drop_group(group_id, JOURNAL_LOST)
        elif late and dropped is None:
            self._drop_member(episode_id, JOURNAL_LOST)

    def _drop_group(self, group_id: int, reason: str) -> None:
        dropped_s = self._db.clock()
        for (episode_id,) in self._db.rows(
            "SELECT id FROM episodes WHERE group_id = ? AND late = 0 AND state IN ('waiting', 'running')", (group_id,)
        ):
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, dropped_s)
        self._db.execute(
            "UPDATE groups SET state = 'expired', reason = ?, closed_s = ? WHERE id = ?", (reason, dropped_s, group_id)
        )

    def _drop_member(self, episode_id: int, reason: str) -> None:
        """Drop a late member without its group."""
        member_row = self._db.row("SELECT stop_reason FROM episodes WHERE id = ?", (episode_id,))
        if member_row is not None and member_row[0] is None:
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, self._db.clock())
        self._db.execute("UPDATE episodes SET dropped = ? WHERE id = ?", (reason, episode_id))
