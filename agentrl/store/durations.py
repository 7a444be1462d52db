"""How long a run's episodes took, turn by turn, and its weights on their way. Never knows a token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from agentrl.records import StopReason
from agentrl.store.buffer.no_signal import Returns, silent
from agentrl.store.codec import unpack_record, unpack_task
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.groups import TRAIN, scored


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTimes:
    """One ended training episode, by the store's clock. `turns` are (start, end, sampled tokens) of those that the
    policy which learns played; `scored`: it could enter the loss."""

    group_id: int
    started_s: float
    ended_s: float
    scored: bool
    turns: tuple[tuple[float, float, int], ...]


class Durations(StorePart):
    """Read times back for a simulation."""

    def episode_times(self, limit: int) -> list[EpisodeTimes]:
        """The ended episodes of the newest `limit` training groups, by id. An episode that started anew, after its
        worker died for example, counts from its first claim, with the turns of its last trial."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT e.id, e.group_id, e.started_s, e.ended_s, e.stop_reason, e.outcome, t.started_s, t.ended_s,"
                " t.n_tokens FROM (SELECT id FROM groups WHERE purpose = ? ORDER BY id DESC LIMIT ?) g"
                " JOIN episodes e ON e.group_id = g.id"
                " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial AND t.learns = 1 AND t.n_tokens > 0"
                " WHERE e.ended_s IS NOT NULL AND e.started_s IS NOT NULL ORDER BY e.id, t.idx",
                (TRAIN, limit),
            )
        found: list[EpisodeTimes] = []
        for (_, group_id, began, ended, reason, outcome), turns in groupby(rows, key=lambda row: row[:6]):
            played = tuple((start, end, n) for *_, start, end, n in turns if n is not None)
            scores = scored(StopReason(reason), outcome)
            found.append(EpisodeTimes(group_id=group_id, started_s=began, ended_s=ended, scored=scores, turns=played))
        return found

    def silent_groups(self, limit: int, returns: Returns) -> frozenset[int]:
        """Ids of those of the newest `limit` training groups that give no signal, whether or not they were skipped."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT id, record, task FROM groups WHERE purpose = ? ORDER BY id DESC LIMIT ?", (TRAIN, limit)
            )
        closed = ((id, unpack_record(record), unpack_task(task)) for id, record, task in rows if record is not None)
        return frozenset(id for id, record, task in closed if silent(record, returns.of(task.env)))

    def push_times(self) -> list[float]:
        """Seconds from the minting of each weight version until the engines served it, oldest first."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT confirmed_s - minted_s FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
                " ORDER BY version"
            )
        return [seconds for (seconds,) in rows]
