"""Groups that the learner has not taken, with all that is journaled of them: out of one run's store, into another's.

A group comes in whole and once. Tokens of another run's weights get versions of this run that no engine ever serves:
as old here as they were there when they left, and marked as undone (law 5): the loss sees weights that are not its own.
Never knows a file, nor whether two runs play the same tasks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import StoreError
from agentrl.records import Messages, StopReason, Task, Turn, VersionSpan
from agentrl.store.codec import pack_messages, unpack_task, without_images
from agentrl.store.episodes.endings import Ending, conclude, held_ending
from agentrl.store.episodes.entries import PackedTurn, TurnRows, write_images
from agentrl.store.episodes.groups import LATE, TRAIN, create_group, scored
from agentrl.store.episodes.journal import EnvSnapshot
from agentrl.store.episodes.partial_turns import Partial, load_partials, pack_part
from agentrl.store.reads import Shown, load_turns
from agentrl.store.run_values import ATTEMPT_SQL, RUN_ID
from agentrl.store.versions import MintedVersions, latest_confirmed

Spans = tuple[VersionSpan, ...]

_MOVABLE = "purpose = 'train' AND state IN ('waiting', 'running', 'scored')"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedMember:
    """An episode as far as it went; `ending` is None if it goes on. One that infrastructure ended is played anew."""

    start: Messages | None = None
    turns: tuple[Turn, ...] = ()
    partial: Partial | None = None
    snapshot: EnvSnapshot | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedGroup:
    """A group and all its members, in their order. `id` is its id in the run that it comes from."""

    id: int
    task: Task
    fork_turn: int | None = None
    members: tuple[MovedMember, ...]


class Moving(MintedVersions):
    """Take groups out, and in."""

    def run_id(self) -> str:
        """The run's own name, made at the first question; no other run has it."""
        with self._db.write():
            self._db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", (RUN_ID.key, uuid.uuid4().hex))
            found = RUN_ID.within(self._db)
        assert found is not None
        return found

    def movable(self) -> list[int]:
        """Training groups that no step has taken, nor dropped."""
        with self._db.read():
            return [id for (id,) in self._db.rows(f"SELECT id FROM groups WHERE {_MOVABLE} ORDER BY id")]

    def left_behind(self) -> int:
        """Open late members of groups that a step has taken: they cannot leave without their group."""
        with self._db.read():
            row = self._db.row(
                f"SELECT COUNT(*) FROM (SELECT * FROM episodes WHERE {LATE}) e JOIN groups g ON g.id = e.group_id"
                " WHERE e.state IN ('waiting', 'running') AND g.state NOT IN ('waiting', 'running', 'scored')"
            )
        return 0 if row is None else row[0]

    def move_out(self, group_id: int) -> MovedGroup | None:
        """A group as it stands; None if a step took it, or it was dropped. Nothing is changed."""
        with self._db.read():
            group = self._db.row(f"SELECT task, fork_turn FROM groups WHERE id = ? AND {_MOVABLE}", (group_id,))
            if group is None:
                return None
            members = self._db.rows(
                "SELECT id, start, stop_reason, outcome, success, outcomes, detail FROM episodes WHERE group_id = ?"
                " ORDER BY member",
                (group_id,),
            )
            moved = [self._member(id, group[1] or 0, *row) for id, *row in members]
        return MovedGroup(id=group_id, task=unpack_task(group[0]), fork_turn=group[1], members=tuple(moved))

    def move_in(self, run: str, group: MovedGroup, steps: Mapping[int, int]) -> int | None:
        """Take a group of run `run` in as a new group; its id, None if it came in before. `steps` has, for each version
        that sampled a token of a turn that learns, the step of this run that stands for its age.

        Raises StoreError for turns that do not follow each other, or a version that `steps` has not."""
        if run == self.run_id():
            raise StoreError(f"group {group.id} is this run's own: it goes on by itself")
        for member in group.members:
            if fault := _fault(member, group.fork_turn or 0):
                raise StoreError(f"member {fault}")
        with self._db.write(durable=True):
            if self._db.row("SELECT 1 FROM imports WHERE run = ? AND group_there = ?", (run, group.id)):
                return None
            return self._take_in(run, group, self._versions(run, group, steps))

    def _versions(self, run: str, group: MovedGroup, steps: Mapping[int, int]) -> dict[int, int]:
        """The versions of this run that stand for those that sampled a group."""
        learning = [turn for one in group.members for turn in one.turns if turn.learns]
        parts = [one.partial for one in group.members if one.partial is not None]
        sampled = sorted({span.version for one in (*learning, *parts) for span in one.spans})
        if unknown := sorted(set(sampled) - steps.keys()):
            raise StoreError(f"group {group.id} has tokens of versions {unknown}, whose age is not told")
        return {version: self._version(run, version, steps[version]) for version in sampled}

    def put_group(self, group: MovedGroup) -> int:
        """Take in a group that weights of this run sampled, but no worker of it journaled; its id. Raises StoreError
        for turns that do not follow each other, or a version that was never minted."""
        for member in group.members:
            if fault := _fault(member, 0):
                raise StoreError(f"member {fault}")
        with self._db.write(durable=True):
            learning = [turn for one in group.members for turn in one.turns if turn.learns]
            versions = {span.version for turn in learning for span in turn.spans}
            for version in versions:
                self.step_of(version)  # raises
            return self._write_group(group, {version: version for version in versions})

    def _take_in(self, run: str, group: MovedGroup, versions: Mapping[int, int]) -> int:
        here = self._write_group(group, versions)
        self._db.execute("INSERT INTO imports VALUES (?, ?, ?, ?)", (run, group.id, here, self._db.clock()))
        return here

    def _write_group(self, group: MovedGroup, versions: Mapping[int, int]) -> int:
        """A new group with all its members; `versions` of this run stand for those of its tokens."""
        now, current = self._db.clock(), latest_confirmed(self._db)
        step = 0 if current is None else current.step
        here = create_group(self._db, group.task, len(group.members), TRAIN, step)
        self._db.execute(
            "UPDATE groups SET fork_turn = ?, played_again = ? WHERE id = ?",
            (group.fork_turn, group.fork_turn is not None, here),
        )
        if any(one.ending for one in group.members):
            self._db.execute("UPDATE groups SET state = 'running' WHERE id = ?", (here,))

        def here_of(spans: Spans) -> Spans:
            return tuple(replace(span, version=versions[span.version]) for span in spans)

        ids = self._db.rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY member", (here,))
        for (episode_id,), member in zip(ids, group.members, strict=True):
            self._write(episode_id, member, here_of)
        for (episode_id,), member in zip(ids, group.members, strict=True):
            if member.ending is not None:
                self._db.execute("UPDATE episodes SET state = 'running' WHERE id = ?", (episode_id,))
                conclude(self._db, episode_id, member.ending, now)
        return here

    def _member(self, id: int, fork_turn: int, start: str | None, *ended: Any) -> MovedMember:
        stop_reason, outcome, success, outcomes, detail = ended
        messages = None if start is None else Shown(self._db).messages(start)
        turns, ending = load_turns(self._db, id), held_ending(self._db, id)
        if stop_reason is not None:
            if not scored(stop_reason, outcome):
                return MovedMember(start=messages if fork_turn else None, turns=turns[:fork_turn])
            ending = Ending(
                stop_reason=StopReason(stop_reason),
                outcome=outcome,
                success=None if success is None else bool(success),
                outcomes=json.loads(outcomes),
                detail=detail,
            )
        snapshot = self._db.row("SELECT turn, seconds, data FROM snapshots WHERE episode_id = ?", (id,))
        return MovedMember(
            start=messages,
            turns=turns,
            partial=load_partials(self._db, [id])[0],
            snapshot=None if snapshot is None else EnvSnapshot(turn=snapshot[0], seconds=snapshot[1], data=snapshot[2]),
            ending=ending,
        )

    def _write(self, episode_id: int, member: MovedMember, here: Callable[[Spans], Spans]) -> None:
        """Write a member that comes in; `here` gives spans in versions of this run."""
        if member.start is not None:
            images, what = dict[str, bytes](), "the start of a member"
            start = pack_messages(without_images(member.start, images, what), what)
            write_images(self._db, images)
            self._db.execute("UPDATE episodes SET start = ? WHERE id = ?", (start, episode_id))
        rows = TurnRows()
        for id, turn in zip(self._db.numbers("turns", len(member.turns)), member.turns, strict=True):
            ours = replace(turn, spans=here(turn.spans)) if turn.learns else turn
            packed = PackedTurn.of(ours, f"turn {turn.index}", self._step)
            rows.turn(id, episode_id, 0, packed, self._db.any_text(packed.text), asked=turn.learns)
        if member.partial is not None:
            part = replace(member.partial, spans=here(member.partial.spans))
            rows.parts[episode_id] = [pack_part(episode_id, part)]
        rows.write(self._db)
        if (kept := member.snapshot) is not None:
            self._db.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?)", (episode_id, kept.turn, kept.seconds, kept.data)
            )

    def _step(self, version: int) -> int:
        row = self._db.row("SELECT step FROM versions WHERE version = ?", (version,))
        assert row is not None
        return row[0]

    def _version(self, run: str, version: int, step: int) -> int:
        """The version of this run that stands for one of `run`."""
        known = self._db.row(
            "SELECT version FROM imported_versions WHERE run = ? AND version_there = ?", (run, version)
        )
        if known is not None:
            return known[0]
        minted = self._db.insert(
            "INSERT INTO versions (step, path, attempt, minted_s, undone_attempt)"
            f" VALUES (?, NULL, {ATTEMPT_SQL}, ?, {ATTEMPT_SQL})",
            (step, self._db.clock()),
        )
        self._db.execute("INSERT INTO imported_versions VALUES (?, ?, ?)", (run, version, minted))
        return minted


def _fault(member: MovedMember, fork_turn: int) -> str:
    """Why a member cannot be what an episode came to; empty if it can."""
    turns = member.turns
    if member.start is None and (turns or member.partial or member.ending):
        return "has not begun, and has turns or an end"
    if len(turns) < fork_turn:
        return f"is a fork at turn {fork_turn}, and has {len(turns)} turns"
    for at, turn in enumerate(turns):
        step, last = turn.step, at == len(turns) - 1
        if turn.index != at or (turn.parent is not None and not 0 <= turn.parent < at):
            return f"has turn {turn.index} after turn {turn.parent} at place {at}"
        if turn.learns and at < fork_turn:
            return f"is a fork, and learns from turn {at} of its origin"
        if not last and (step is None or step.terminated or step.truncated):
            return f"goes on after turn {at}, which has no answer or was the last"
    answered = not turns or turns[-1].step is not None
    part, kept = member.partial, member.snapshot
    if part is not None and (part.index != len(turns) or part.at or not answered or member.ending):
        return f"has a turn {part.index} under way after {len(turns)} turns"
    if part is not None and part.parent is not None and not 0 <= part.parent < len(turns):
        return f"has a turn under way that extends turn {part.parent}"
    if kept is not None and not 0 <= kept.turn < len(turns) - (not answered):
        return f"has a snapshot of turn {kept.turn}, which was not answered"
    return ""
