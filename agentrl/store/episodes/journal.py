"""The journal of running episodes: a turn is written before the environment sees it, its answer before the next turn.

Owns how an episode is written while it runs; never hands one out (leases) and never reads one back (readers). Every
call carries the fence of its claim and raises LeaseLost if another worker, or nobody, holds the episode now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.errors import StoreError
from agentrl.records import Messages, Step, StopReason, Turn
from agentrl.store.codec import pack_messages, printable
from agentrl.store.episodes.endings import EndEntry, Ending
from agentrl.store.episodes.entries import PartEntry, StepEntry, TurnEntry
from agentrl.store.episodes.env_snapshots import drop_snapshot
from agentrl.store.episodes.leases import check_fence, held
from agentrl.store.episodes.partial_turns import Partial, discard_partial
from agentrl.store.versions import MintedVersions

# The index of the last turn of the row `e` of an episode.
_LAST = "COALESCE((SELECT MAX(t.idx) FROM turns t WHERE t.episode_id = e.id AND t.trial = e.trial), -1)"


class Journal(MintedVersions):
    """Write a running episode down, turn by turn."""

    def begin(self, episode_id: int, fence: int, start: Messages) -> None:
        """The environment was reset and answered `start`. Raises StoreError if turns are journaled already."""
        packed = pack_messages(start, f"episode {episode_id}: start")
        with self._db.write(shared=True):
            (last,) = held(self._db, episode_id, fence, _LAST)
            if last >= 0:
                raise StoreError(f"episode {episode_id} has turns already: restart_episode sets them aside")
            self._db.execute("UPDATE episodes SET start = ? WHERE id = ?", (packed, episode_id))

    def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None:
        """Write a turn; call it before the environment sees the action. If the turn has its step, that is written too.

        Raises StoreError if the turn is not the next one, a version was never minted, or a log-prob is not finite."""
        self.turn_entry(episode_id, fence, turn)()

    def journal_partial(self, episode_id: int, fence: int, part: Partial) -> None:
        """Write more tokens of the turn that is sampled now; a claim has them until the turn is journaled.

        Raises StoreError if the turn is not the next one, or `part` does not begin right after the written tokens."""
        self.part_entry(episode_id, fence, part)()

    def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        """Write the answer to turn `turn_index`. Raises StoreError if that turn is not journaled or has an answer."""
        self.step_entry(episode_id, fence, turn_index, step)()

    def turn_entry(self, episode_id: int, fence: int, turn: Turn) -> TurnEntry:
        """`journal_turn` as a call that `together` makes at once with others of the journal."""
        return TurnEntry(self._db, episode_id, fence, turn, self.step_of)

    def part_entry(self, episode_id: int, fence: int, part: Partial) -> PartEntry:
        """The same of `journal_partial`."""
        return PartEntry(self._db, episode_id, fence, part)

    def step_entry(self, episode_id: int, fence: int, turn_index: int, step: Step) -> StepEntry:
        """The same of `journal_step`."""
        return StepEntry(self._db, episode_id, fence, turn_index, step)

    def restart_episode(self, episode_id: int, fence: int, reason: str) -> None:
        """Start an episode anew under the same fence, as its environment could not be restored. The turns so far are
        set aside with the reason (`restarts` reads them); they are counted and never trained."""
        with self._db.write():
            trial = check_fence(self._db, episode_id, fence)
            if self._db.row(
                "SELECT 1 FROM episodes e JOIN groups g ON g.id = e.group_id"
                " WHERE e.id = ? AND g.fork_turn IS NOT NULL",
                (episode_id,),
            ):
                raise StoreError(f"episode {episode_id}: a fork cannot start anew, its siblings begin at a later turn")
            self._db.execute(
                "INSERT INTO restarts SELECT id, trial, start, ?, ? FROM episodes WHERE id = ?",
                (printable(reason), self._db.clock(), episode_id),
            )
            discard_partial(self._db, episode_id)
            self._db.execute("UPDATE episodes SET trial = ?, start = NULL WHERE id = ?", (trial + 1, episode_id))
            for table in ("unscored", "endings"):
                self._db.execute(f"DELETE FROM {table} WHERE episode_id = ?", (episode_id,))
            drop_snapshot(self._db, episode_id)

    def finish(
        self,
        episode_id: int,
        fence: int,
        *,
        stop_reason: StopReason,
        outcome: float | None,
        success: bool | None,
        outcomes: Mapping[str, float] | None = None,
        detail: str = "",
    ) -> None:
        """End the episode. If it is the last open member, its open group closes in the same transaction. A scored
        episode that reward sources have yet to score is held instead (see `scores`): nobody plays it any more.

        `outcomes` are the outcomes by role; `detail` is the one-line cause of a failure. Raises StoreError for an
        outcome that is not finite."""
        given: dict[str, Any] = {"outcome": outcome, "success": success, "outcomes": outcomes, "detail": detail}
        self.finish_entry(episode_id, fence, stop_reason=stop_reason, **given)()

    def finish_entry(
        self, episode_id: int, fence: int, *, outcomes: Mapping[str, float] | None = None, **ending: Any
    ) -> EndEntry:
        """`finish` as a call that `together` makes at once with others. Raises StoreError as it."""
        return self.end_entry(episode_id, fence, Ending(outcomes=outcomes or {}, **ending))

    def end_entry(self, episode_id: int, fence: int, ending: Ending) -> EndEntry:
        """The same of an ending."""
        return EndEntry(self._db, episode_id, fence, replace(ending, detail=printable(ending.detail)))
