"""The journal of running episodes: a turn is written before the environment sees it, its answer before the next turn.

Owns how an episode is written while it runs; never hands one out (leases) and never reads one back (readers). Every
call carries the fence of its claim and raises LeaseLost if another worker, or nobody, holds the episode now.

Beside the turns it keeps the newest saved state of the environment (bytes that only the environment understands, one
row per episode, deleted when it ends or starts anew), and the declared files of the agent's work after a turn, written
before the turn's answer, so that a turn which waits for a score has them. With `rollout.resume` it gives up interrupted
work on purpose, a turn or a whole group: that stays in the store, is counted and never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.errors import StoreError
from agentrl.records import NO_TOOLS, Messages, ShownTools, Step, StopReason, Turn
from agentrl.store.codec import pack_files, pack_messages, printable, unpack_files, without_images
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import EndEntry, Ending, end_episode
from agentrl.store.episodes.entries import PartEntry, StepEntry, TurnEntry, write_images, write_tools
from agentrl.store.episodes.groups import TRAIN, create_again
from agentrl.store.episodes.leases import check_fence, held
from agentrl.store.episodes.partial_turns import Partial, discard_partial
from agentrl.store.episodes.scores import turn_row
from agentrl.store.versions import Versions, latest_confirmed


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSnapshot:
    """The state of an environment after its answer to turn `turn`; the policy had used `seconds` of its time then."""

    turn: int
    data: bytes
    seconds: float = 0.0


def drop_snapshot(db: Database, episode_id: int) -> None:
    """Forget an episode's snapshot: it begins anew, or is over."""
    for table_name in ("snapshots", "unsaved"):
        db.execute(f"DELETE FROM {table_name} WHERE episode_id = ?", (episode_id,))


# The index of the last turn of the row `e` of an episode.
_LAST = "COALESCE((SELECT MAX(t.idx) FROM turns t WHERE t.episode_id = e.id AND t.trial = e.trial), -1)"


class Journal(StorePart):
    """Write a running episode down, turn by turn."""

    def __init__(self, db: Database, versions: Versions) -> None:
        super().__init__(db)
        self._versions = versions

    @retried
    def begin(self, episode_id: int, fence: int, start: Messages, tools: ShownTools = NO_TOOLS) -> None:
        """The environment was reset and answered `start`, with `tools` beside it. Raises StoreError if turns are
        journaled already."""
        image_data, start_label = dict[str, bytes](), f"episode {episode_id}: start"
        packed_start = pack_messages(without_images(start, image_data, start_label), start_label)
        # Packed before the transaction begins, and `shared`: it writes rows of this episode alone, under its fence, so
        # journals of other processes need not wait for it.
        with self._db.write(shared=True):
            (last_index,) = held(self._db, episode_id, fence, _LAST)
            if last_index >= 0:
                raise StoreError(f"episode {episode_id} has turns already: restart_episode sets them aside")
            write_images(self._db, image_data)
            self._db.execute("UPDATE episodes SET start = ? WHERE id = ?", (packed_start, episode_id))
            write_tools(self._db, episode_id, tools)

    @retried
    def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None:
        """Write a turn; call it before the environment sees the action. If the turn has its step, that is written too.

        Raises StoreError if the turn is not the next one, a version was never minted, or a log-prob is not finite."""
        self.turn_entry(episode_id, fence, turn)()

    @retried
    def journal_partial(self, episode_id: int, fence: int, part: Partial) -> None:
        """Write more tokens of the turn that is sampled now; a claim has them until the turn is journaled.

        Raises StoreError if the turn is not the next one, or `part` does not begin right after the written tokens."""
        self.part_entry(episode_id, fence, part)()

    @retried
    def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        """Write the answer to turn `turn_index`. Raises StoreError if that turn is not journaled or has an answer."""
        self.step_entry(episode_id, fence, turn_index, step)()

    def turn_entry(self, episode_id: int, fence: int, turn: Turn) -> TurnEntry:
        """`journal_turn` as a call that `together` makes at once with others of the journal."""
        return TurnEntry(self._db, episode_id, fence, turn, self._versions.step_of)

    def part_entry(self, episode_id: int, fence: int, part: Partial) -> PartEntry:
        """Return `journal_partial` as a call that `together` makes at once with others of the journal."""
        return PartEntry(self._db, episode_id, fence, part)

    def step_entry(self, episode_id: int, fence: int, turn_index: int, step: Step) -> StepEntry:
        """Return `journal_step` as a call that `together` makes at once with others of the journal."""
        return StepEntry(self._db, episode_id, fence, turn_index, step)

    @retried
    def restart_episode(self, episode_id: int, fence: int, reason: str) -> None:
        """Start an episode anew under the same fence, as its environment could not be restored. The turns so far are
        set aside with the reason (`restarts` reads them); they are counted and never trained."""
        with self._db.write():
            old_trial = check_fence(self._db, episode_id, fence)
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
            self._db.execute("UPDATE episodes SET trial = ?, start = NULL WHERE id = ?", (old_trial + 1, episode_id))
            for table_name in ("unscored", "endings"):
                self._db.execute(f"DELETE FROM {table_name} WHERE episode_id = ?", (episode_id,))
            # The snapshot is of the trial that is set aside. If it stayed, a second crash would restore the new trial
            # into the middle of the old one.
            drop_snapshot(self._db, episode_id)

    @retried
    def finish(self, episode_id: int, fence: int, ending: Ending) -> None:
        """End the episode. If it is the last open member, its open group closes in the same transaction. A scored
        episode that reward sources have yet to score is held instead (see `Scores`): nobody plays it any more. Raises
        StoreError for an outcome that is not finite."""
        self.end_entry(episode_id, fence, ending)()

    def end_entry(self, episode_id: int, fence: int, ending: Ending) -> EndEntry:
        """`finish` as a call that `together` makes at once with others."""
        return EndEntry(self._db, episode_id, fence, replace(ending, detail=printable(ending.detail)))

    @retried
    def discard_turn(self, episode_id: int, fence: int) -> None:
        """Give up the turn under way; it is sampled anew."""
        with self._db.write():
            check_fence(self._db, episode_id, fence)
            discard_partial(self._db, episode_id)

    @retried
    def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        """Play the task of the episode's group anew, in a group of its own: this one leaves as "restarted", and its
        ended members with it. Deaths that count against a member go on counting in the new group, and the restart
        counts as a replay of the task. Returns False, and does nothing, for a group that is not of training, has closed
        already, was played again `max_replays` times, or is a fork, whose turns before the fork cannot be repeated."""
        with self._db.write():
            check_fence(self._db, episode_id, fence)
            group_row = self._db.row(
                "SELECT g.id, g.size FROM episodes e JOIN groups g ON g.id = e.group_id"
                " WHERE e.id = ? AND g.purpose = ? AND g.state = 'running' AND g.fork_turn IS NULL"
                " AND g.replays < ?",
                (episode_id, TRAIN, max_replays),
            )
            if group_row is None:
                return False
            group_id, group_size = group_row
            restarted_s, latest_version = self._db.clock(), latest_confirmed(self._db)
            for (member_id,) in self._db.rows(
                "SELECT id FROM episodes WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,)
            ):
                discard_partial(self._db, member_id)
                end_episode(self._db, member_id, "expired", StopReason.EXPIRED, restarted_s)
            self._db.execute(
                "UPDATE groups SET state = 'expired', reason = ?, closed_s = ? WHERE id = ?",
                (RESTARTED, restarted_s, group_id),
            )
            new_group_id = create_again(
                self._db, group_id, group_size, 0 if latest_version is None else latest_version.step
            )
            self._db.execute(
                # If the count began anew, a task that kills its worker would be played again for ever: each restart of
                # its group would make it innocent.
                "UPDATE episodes SET (deaths, died_at) = (SELECT old.deaths, old.died_at FROM episodes old"
                " WHERE old.group_id = ? AND old.member = episodes.member) WHERE group_id = ?",
                (group_id, new_group_id),
            )
        return True

    @retried
    def keep_snapshot(self, episode_id: int, fence: int, snapshot: EnvSnapshot) -> None:
        """Replace the episode's snapshot. Raises LeaseLost if it is no longer held under `fence`."""
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            self._db.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?) ON CONFLICT (episode_id)"
                " DO UPDATE SET turn = excluded.turn, seconds = excluded.seconds, data = excluded.data",
                (episode_id, snapshot.turn, snapshot.seconds, snapshot.data),
            )

    @retried
    def snapshot(self, episode_id: int) -> EnvSnapshot | None:
        """The newest snapshot of an episode that has not ended; None if there is none."""
        with self._db.read():
            newest = self._db.row("SELECT turn, seconds, data FROM snapshots WHERE episode_id = ?", (episode_id,))
        return None if newest is None else EnvSnapshot(turn=newest[0], seconds=newest[1], data=newest[2])

    @retried
    def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None:
        """Note that no snapshot can be taken from `turn` on, and why; the one before it stays. Raises LeaseLost if the
        episode is no longer held under `fence`."""
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            self._db.execute(
                "INSERT INTO unsaved VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (episode_id, turn, printable(reason))
            )

    @retried
    def unsaved(self, episode_id: int) -> str:
        """Why no snapshot of a running episode was taken any more; empty if there is no such reason."""
        with self._db.read():
            reason_row = self._db.row("SELECT turn, reason FROM unsaved WHERE episode_id = ?", (episode_id,))
        return "" if reason_row is None else f"no snapshot from turn {reason_row[0]} on: {reason_row[1]}"

    @retried
    def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None:
        """Write the files of a journaled turn, by path; those written before are replaced. Raises LeaseLost if the
        episode is no longer held under `fence`, StoreError for an unknown turn."""
        # Compressed before the lock is taken: the files of an agent's work may be megabytes.
        packed_files = pack_files(files)
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            turn_row_id, _ = turn_row(self._db, turn)
            self._db.execute(
                "INSERT INTO artifacts VALUES (?, ?) ON CONFLICT (turn_id) DO UPDATE SET data = excluded.data",
                (turn_row_id, packed_files),
            )

    @retried
    def artifacts(self, turn: str) -> dict[str, bytes] | None:
        """The files of a turn by path; None if none were written, or retention dropped them. Raises StoreError for an
        unknown turn."""
        with self._db.read():
            turn_row_id, _ = turn_row(self._db, turn)
            artifact_row = self._db.row("SELECT data FROM artifacts WHERE turn_id = ?", (turn_row_id,))
        return None if artifact_row is None else unpack_files(artifact_row[0])


RESTARTED = "restarted"
