"""Groups that were played elsewhere: no worker of the run journaled them, but weights of the run sampled their tokens.

A group comes in whole, in one transaction, and is closed as its members ended. Never knows who played it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import StoreError
from agentrl.records import NO_TOOLS, Messages, ShownTools, Task, Turn
from agentrl.store.codec import pack_messages, without_images
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import Ending, conclude
from agentrl.store.episodes.entries import PackedTurn, TurnRows, write_images, write_tools
from agentrl.store.episodes.groups import TRAIN, create_group
from agentrl.store.versions import Versions, latest_confirmed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedMember:
    """An ended episode. `start` is None if it ended before its environment was reset."""

    start: Messages | None = None
    turns: tuple[Turn, ...] = ()
    ending: Ending
    tools: ShownTools = NO_TOOLS


class PlayedGroups(StorePart):
    """Take groups in."""

    def __init__(self, db: Database, versions: Versions) -> None:
        super().__init__(db)
        self._versions = versions

    @retried
    def put_group(self, task: Task, members: Sequence[PlayedMember]) -> int:
        """Take a group in, its `members` in their order; returns its id. Raises StoreError for turns that do not follow
        each other, or a version that was never minted."""
        for member in members:
            if fault := _fault(member):
                raise StoreError(f"member {fault}")
        with self._db.write(durable=True):
            sampled_versions = {
                version_span.version
                for member in members
                for member_turn in member.turns
                if member_turn.learns
                for version_span in member_turn.spans
            }
            # Frozen roles are left out: their versions are numbers of another model's engines, which this run never
            # minted.
            for version in sampled_versions:
                self._versions.step_of(version)  # raises
            ended_s, latest_version = self._db.clock(), latest_confirmed(self._db)
            group_id = create_group(
                self._db, task, len(members), TRAIN, 0 if latest_version is None else latest_version.step
            )
            self._db.execute("UPDATE groups SET state = 'running' WHERE id = ?", (group_id,))
            episode_rows = self._db.rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY member", (group_id,))
            # Two passes: all turns are written before any member ends. The last end closes the group, and its record is
            # made of the turns of all members.
            for (episode_id,), member in zip(episode_rows, members, strict=True):
                self._write(episode_id, member)
            for (episode_id,), member in zip(episode_rows, members, strict=True):  # the last one closes the group
                self._db.execute("UPDATE episodes SET state = 'running' WHERE id = ?", (episode_id,))
                conclude(self._db, episode_id, member.ending, ended_s)
        return group_id

    def _write(self, episode_id: int, member: PlayedMember) -> None:
        if member.start is not None:
            image_data, start_label = dict[str, bytes](), "the start of a member"
            packed_start = pack_messages(without_images(member.start, image_data, start_label), start_label)
            write_images(self._db, image_data)
            self._db.execute("UPDATE episodes SET start = ? WHERE id = ?", (packed_start, episode_id))
            write_tools(self._db, episode_id, member.tools)
        turn_rows = TurnRows()
        for turn_row_id, turn in zip(self._db.numbers("turns", len(member.turns)), member.turns, strict=True):
            packed_turn = PackedTurn.of(turn, f"turn {turn.index}", self._step)
            turn_rows.turn(
                turn_row_id, episode_id, 0, packed_turn, self._db.any_text(packed_turn.text), is_scored=turn.learns
            )
        turn_rows.write(self._db)

    def _step(self, version: int) -> int:
        step_row = self._db.row("SELECT step FROM versions WHERE version = ?", (version,))
        assert step_row is not None
        return step_row[0]


def _fault(member: PlayedMember) -> str:
    """Why a member cannot be an episode; empty if it can."""
    if member.start is None and member.turns:
        return "has not begun, and has turns"
    for position, turn in enumerate(member.turns):
        turn_step = turn.step
        if turn.index != position or (turn.parent is not None and not 0 <= turn.parent < position):
            return f"has turn {turn.index} after turn {turn.parent} at place {position}"
        if position < len(member.turns) - 1 and (turn_step is None or turn_step.terminated or turn_step.truncated):
            return f"goes on after turn {position}, which has no answer or was the last"
    return ""
