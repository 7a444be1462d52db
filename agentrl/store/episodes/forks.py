"""Continuations of a journaled episode from one of its turns: a new group of siblings, with a baseline of its own.

Each member begins with copies of the turns before that one. They do not learn: the tokens are context here, and train
in the origin alone (law 2). A member whose environment cannot be brought to that turn fails with the reason; it never
begins anew, as its siblings begin there. Never knows how an environment is restored, or which turns are worth it.
"""

from __future__ import annotations

from typing import Any

from agentrl.errors import StoreError, UsageError
from agentrl.records import GroupState
from agentrl.store.codec import unpack_task
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.groups import TRAIN, create_group
from agentrl.store.versions import latest_confirmed

_MOST = 1024  # continuations of one turn


class Forks(StorePart):
    """Fork episodes."""

    def fork(self, episode_id: int, *, turn: int, k: int) -> int:
        """Start a training group of `k` continuations of an episode, ended or not, whose turns from `turn` (counted
        from 0) on are played anew; returns the group's id. They are played as soon as workers have room.

        Raises StoreError for an unknown episode, UsageError if it has no such turn, an evaluation played it, or its
        tokens were dropped."""
        if not 2 <= k <= _MOST:
            words = f"{k} continuation{'s' * (k != 1)}"
            hint = f"ask for at most {_MOST}" if k > _MOST else "has no sibling to be compared with: ask for 2 or more"
            raise UsageError(f"{words} {hint}" if k < 2 else f"{words}: {hint}")
        with self._db.write():
            task, start, trial = self._origin(episode_id, turn)
            version = latest_confirmed(self._db)
            group_id = create_group(self._db, unpack_task(task), k, TRAIN, 0 if version is None else version.step)
            self._db.execute(
                "UPDATE groups SET fork_of = ?, fork_trial = ?, fork_turn = ?, played_again = 1 WHERE id = ?",
                (episode_id, trial, turn, group_id),
            )
            self._db.execute("UPDATE episodes SET start = ? WHERE group_id = ?", (start, group_id))
            for (member,) in self._db.rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY member", (group_id,)):
                self._begin(member, episode_id, trial, turn)
        return group_id

    def forked(self) -> frozenset[int]:
        """The groups of which a member was forked."""
        with self._db.read():
            origins = "SELECT fork_of FROM groups WHERE fork_of IS NOT NULL"
            rows = self._db.rows(f"SELECT DISTINCT group_id FROM episodes WHERE id IN ({origins})")
        return frozenset(id for (id,) in rows)

    def fork_states(self, limit: int) -> list[GroupState]:
        """The states of the latest forks that closed, the latest first."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT state FROM groups WHERE fork_turn IS NOT NULL AND state NOT IN ('waiting', 'running')"
                " ORDER BY id DESC LIMIT ?",
                (limit,),
            )
        return [GroupState(state) for (state,) in rows]

    def _origin(self, episode_id: int, turn: int) -> tuple[str, str, int]:
        """The task, first observation and trial of an episode that can be forked at `turn`."""
        row = self._db.row(
            "SELECT g.purpose, g.task, e.start, e.trial FROM episodes e JOIN groups g ON g.id = e.group_id"
            " WHERE e.id = ?",
            (episode_id,),
        )
        if row is None:
            raise StoreError(f"no episode {episode_id} in {self._db.path}: its table episodes lists them")
        purpose, task, start, trial = row
        if purpose != TRAIN:
            raise UsageError(f"episode {episode_id} is of {purpose}, which is never trained: fork one of training")
        turns = self._db.rows(
            "SELECT s.terminated = 1 OR s.truncated = 1, k.turn_id IS NOT NULL"
            " FROM turns t JOIN steps s ON s.turn_id = t.id"
            " LEFT JOIN tokens k ON k.turn_id = t.id WHERE t.episode_id = ? AND t.trial = ? ORDER BY t.idx",
            (episode_id, trial),
        )
        if not turns:
            raise UsageError(f"episode {episode_id} has no turn yet that its environment has answered")
        if turn < 1:
            raise UsageError(f"turn {turn} begins the episode: a fork starts at turn 1 or later")
        most = len(turns) - bool(turns[-1][0])
        if turn > most:
            how = "and its last one ended it" if turns[-1][0] else "as far as it was played"
            raise UsageError(f"episode {episode_id} has {len(turns)} turns, {how}: a fork starts at turn 1 to {most}")
        if not all(kept for _, kept in turns[:turn]):
            raise UsageError(f"retention has dropped the tokens of episode {episode_id}: fork a younger one")
        return task, start, trial

    def _begin(self, member: int, origin: int, trial: int, turn: int) -> None:
        """Copy the turns before `turn`, and a snapshot of their state if there is one."""
        db = self._db
        for (id,) in db.rows(
            "SELECT id FROM turns WHERE episode_id = ? AND trial = ? AND idx < ? ORDER BY idx", (origin, trial, turn)
        ):
            copy = db.insert(
                "INSERT INTO turns (episode_id, trial, idx, parent, role, learns, finish, text, spans, n_prompt,"
                " n_tokens, oldest_step, state, started_s, ended_s) SELECT ?, 0, idx, parent, role, 0, finish, text,"
                " spans, n_prompt, n_tokens, NULL, state, started_s, ended_s FROM turns WHERE id = ?",
                (member, id),
            )
            for table in ("tokens", "experts"):
                db.execute(f"INSERT INTO {table} SELECT ?, data FROM {table} WHERE turn_id = ?", (copy, id))
            columns = "observation, reward, terminated, truncated, info"
            db.execute(f"INSERT INTO steps SELECT ?, {columns} FROM steps WHERE turn_id = ?", (copy, id))
        state: tuple[Any, ...] = (member, origin, turn)
        db.execute(
            "INSERT INTO snapshots SELECT ?, turn, seconds, data FROM snapshots WHERE episode_id = ? AND turn < ?",
            state,
        )
