"""Find episodes: by how they went, by their place in the run, by a text of theirs; their relatives. Never writes.

A filter costs one pass over the episodes and their groups, without their turns. A text is looked for in what the model
wrote, in the answers to it and in its prompts, newest episodes first, for a bounded time: no index of the texts is kept
beside a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

from agentrl.records import POLICY, StopReason, turn_id
from agentrl.store.codec import unpack_spans
from agentrl.store.databases.database import StorePart, retried
from agentrl.store.episodes.groups import TRAIN
from agentrl.store.reads import LAST_TRIAL, EpisodeRow, EpisodeState, episode_rows

EpisodeOrder = Literal["episode", "group", "outcome", "turns", "tokens", "seconds", "step", "ended"]
_COLUMNS: Final[dict[EpisodeOrder, str]] = {
    "episode": "e.id",
    "group": "e.group_id",
    "outcome": "e.outcome",
    "turns": "e.n_turns",
    "tokens": "e.n_tokens",
    "seconds": "e.ended_s - e.started_s",
    "step": "e.taken_step",
    "ended": "e.ended_s",
}
_ALWAYS: Final = ("episode", "group", "turns", "tokens")  # orders by what every episode has
_FROM = " FROM episodes e JOIN groups g ON g.id = e.group_id"
_CHUNK = 500  # episodes whose texts are searched in one statement
_SOME_TURNS = 2000  # whose roles stand for those of all
_MOST_MEMBERS = 500  # of the forks of one generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Conditions on episodes; None lets everything through. `step` is the optimizer step that trained them, `dropped`
    whether they left the buffer untrained, `least` and `most` bound the outcome reward (both included). `role` acted in
    a turn. The newest weights that sampled an episode are of the optimizer steps `from_weights` to `to_weights` (both
    included). `ids` names them."""

    purpose: str | None = TRAIN
    env: str | None = None
    group: int | None = None
    step: int | None = None
    state: EpisodeState | None = None
    stop_reason: StopReason | None = None
    success: bool | None = None
    late: bool | None = None
    dropped: bool | None = None
    least: float | None = None
    most: float | None = None
    least_turns: int | None = None
    most_turns: int | None = None
    role: str | None = None
    from_weights: int | None = None
    to_weights: int | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The episodes that contain a text, newest first; `back_to` is the oldest that was searched, None if all were."""

    ids: tuple[int, ...]
    back_to: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSize:
    """How long a turn is, in tokens, also after retention dropped them; the weight versions that sampled it."""

    index: int
    prompt_tokens: int
    tokens: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnTime:
    """Time at which a turn was sampled, Unix time, and its lengths in tokens. `trial` separates turns that were set
    aside from those of the trial that the episode went on with."""

    episode_id: int
    trial: int
    index: int
    role: str
    finish: str
    prompt_tokens: int
    tokens: int
    started_s: float
    ended_s: float

    @property
    def id(self) -> str:
        return turn_id(self.episode_id, self.trial, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A training group whose members go on from `turn` (the first that they played anew) of an episode."""

    group_id: int
    of: int
    trial: int
    turn: int
    members: tuple[int, ...]


class EpisodeSearch(StorePart):
    """Look for episodes, for lists and pages."""

    @retried
    def find_episodes(
        self,
        episode_filter: EpisodeFilter,
        *,
        by: EpisodeOrder = "episode",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> list[EpisodeRow]:
        """Find at most `limit` episodes that a filter lets through, in an order; those without a value come last."""
        condition, parameters = _from_where(episode_filter)
        column, way = _COLUMNS[by], "DESC" if descending else "ASC"
        # the newest come without a look at all others, unless an expression hides that ids are in order
        nulls_last = "" if by in _ALWAYS else f"{column} IS NULL, "
        with self._db.read():
            ordered_ids = self._db.rows(
                f"SELECT e.id{condition} ORDER BY {nulls_last}{column} {way}, e.id {way} LIMIT ? OFFSET ?",
                (*parameters, limit, offset),
            )
            rows_by_id = {
                episode_row.id: episode_row
                for episode_row in episode_rows(self._db, *_among([episode_id for (episode_id,) in ordered_ids]))
            }
        return [rows_by_id[episode_id] for (episode_id,) in ordered_ids]

    @retried
    def outcomes(self, episode_filter: EpisodeFilter) -> dict[float | None, int]:
        """How many of the episodes that a filter lets through have which outcome reward; None: none yet."""
        condition, parameters = _from_where(episode_filter)
        with self._db.read():
            outcome_rows = self._db.rows(f"SELECT e.outcome, COUNT(*){condition} GROUP BY e.outcome", parameters)
        return dict(outcome_rows)

    @retried
    def search_texts(
        self,
        text: str,
        *,
        purpose: str | None = TRAIN,
        limit: int = 500,
        budget_s: float = 1.0,
        before: int | None = None,
    ) -> Searched:
        """Find at most `limit` episodes with a text in their last trial, and with ids below `before`, after about
        `budget_s` seconds at most. Letters of ASCII match in either case; on PostgreSQL not in what the model wrote."""
        deadline_s, matching_ids = time.monotonic() + budget_s, list[int]()
        with self._db.read():
            newest_row = self._db.row("SELECT MAX(id) FROM episodes")
        newest_id = newest_row[0] or 0 if newest_row else 0
        newest_id = newest_id if before is None else min(newest_id, before - 1)
        # A read transaction for each chunk, not one for the search: as long as one is open, SQLite cannot fold its
        # write-ahead log into the file, and a search over a long run would let the log grow by all that the run
        # journals meanwhile.
        for upper_id in range(newest_id, 0, -_CHUNK):
            lower_id = max(0, upper_id - _CHUNK)
            with self._db.read():
                matching_ids += self._with_text(text, purpose, lower_id, upper_id)
            if lower_id and (len(matching_ids) >= limit or time.monotonic() > deadline_s):
                return Searched(ids=tuple(matching_ids[:limit]), back_to=lower_id + 1)
        return Searched(ids=tuple(matching_ids[:limit]), back_to=None)

    @retried
    def turn_sizes(self, episode_id: int) -> list[TurnSize]:
        """The turns of an episode's last trial, in order."""
        with self._db.read():
            turn_rows = self._db.rows(
                f"SELECT t.idx, t.n_prompt, t.n_tokens, t.spans FROM turns t WHERE {LAST_TRIAL} ORDER BY t.idx",
                (episode_id,),
            )
        return [
            TurnSize(
                index=turn_index,
                prompt_tokens=prompt_count,
                tokens=token_count,
                versions=tuple(dict.fromkeys(span.version for span in unpack_spans(packed_spans))),
            )
            for turn_index, prompt_count, token_count, packed_spans in turn_rows
        ]

    @retried
    def turn_times(self, first: int, last: int) -> list[TurnTime]:
        """The turns of the episodes `first` to `last`, both included, by episode, trial and place. Reads no texts."""
        with self._db.read():
            turn_rows = self._db.rows(
                "SELECT episode_id, trial, idx, role, finish, n_prompt, n_tokens, started_s, ended_s FROM turns"
                " WHERE episode_id BETWEEN ? AND ? ORDER BY episode_id, trial, idx",
                (first, last),
            )
        return [TurnTime(*turn_row) for turn_row in turn_rows]

    @retried
    def roles(self) -> list[str]:
        """The roles that acted in the first and the newest turns."""
        newest_turns = "SELECT role FROM (SELECT role FROM turns ORDER BY id DESC LIMIT ?) t"
        with self._db.read():
            role_rows = self._db.rows(
                f"SELECT role FROM turns WHERE id <= ? UNION {newest_turns}", (_SOME_TURNS, _SOME_TURNS)
            )
        return sorted(role_name for (role_name,) in role_rows)

    @retried
    def family(self, episode_id: int, *, most: int = 100) -> list[Fork]:
        """The forks among the relatives of an episode: those of the episode that all of them come from, and of its
        descendants, at most `most`, parents first. Empty for an episode that neither is one nor has any."""
        with self._db.read():
            origin_query = "SELECT g.fork_of FROM episodes e JOIN groups g ON g.id = e.group_id WHERE e.id = ?"
            root_id = episode_id
            # Bounded, although a fork is always younger than its origin and there can be no circle: the rows may have
            # been changed by hand, and a page must not hang on them.
            for _ in range(most):
                if (origin_row := self._db.row(origin_query, (root_id,))) is None or origin_row[0] is None:
                    break
                root_id = origin_row[0]
            if self._db.row("SELECT 1 FROM groups WHERE fork_of IS NOT NULL LIMIT 1") is None:
                return []
            forks: list[Fork] = []
            parent_ids = [root_id]
            while parent_ids and len(forks) < most:
                placeholders = ", ".join("?" * len(parent_ids))
                fork_rows = self._db.rows(
                    "SELECT g.id, g.fork_of, g.fork_trial, g.fork_turn, e.id FROM groups g"
                    f" JOIN episodes e ON e.group_id = g.id WHERE g.fork_of IN ({placeholders})"
                    " ORDER BY g.id, e.id LIMIT ?",
                    (*parent_ids, _MOST_MEMBERS),
                )
                for (group_id, origin_id, trial, fork_turn), member_rows in groupby(fork_rows, key=lambda row: row[:4]):
                    member_ids = tuple(member_id for *_, member_id in member_rows)
                    forks.append(Fork(group_id=group_id, of=origin_id, trial=trial, turn=fork_turn, members=member_ids))
                parent_ids = [member_id for *_, member_id in fork_rows]
        return forks[:most]

    def _with_text(self, text: str, purpose: str | None, low: int, high: int) -> Iterator[int]:
        text_pattern = self._db.any_text(f"%{_escaped(text)}%")
        # Answers are stored as JSON, so a line break or a quote of the text stands there as an escape, and is looked
        # for as one. What the model wrote is stored as it is.
        answer_pattern = f"%{_escaped(json.dumps(text, ensure_ascii=False)[1:-1]).lower()}%"
        episode_rows = self._db.rows(
            f"SELECT e.id{_FROM} WHERE e.id > ?1 AND e.id <= ?2 AND g.purpose = COALESCE(?3, g.purpose)"
            " AND (lower(e.start) LIKE ?5 ESCAPE '!' OR EXISTS (SELECT 1 FROM turns t"
            " LEFT JOIN steps s ON s.turn_id = t.id WHERE t.episode_id = e.id AND t.trial = e.trial"
            " AND (t.text LIKE ?4 ESCAPE '!' OR lower(s.observation) LIKE ?5 ESCAPE '!'))) ORDER BY e.id DESC",
            (low, high, purpose, text_pattern, answer_pattern),
        )
        return (episode_id for (episode_id,) in episode_rows)


def _from_where(episode_filter: EpisodeFilter) -> tuple[str, list[str | int | float]]:
    """FROM and WHERE of a filter, with their parameters. Groups are joined only if the filter has a condition on
    them."""
    conditions, parameters = ["TRUE"], list[str | int | float]()
    compared_values: dict[str, str | int | float | None] = {
        "e.evaluation = ?": 0 if episode_filter.purpose == TRAIN else None,
        "g.purpose = ?": None if episode_filter.purpose == TRAIN else episode_filter.purpose,
        "g.task LIKE ? ESCAPE '!'": None if episode_filter.env is None else _task_of(episode_filter.env),
        "e.group_id = ?": episode_filter.group,
        "e.taken_step = ?": episode_filter.step,
        "e.state = ?": episode_filter.state,
        "e.stop_reason = ?": None if episode_filter.stop_reason is None else episode_filter.stop_reason.value,
        "e.success = ?": None if episode_filter.success is None else int(episode_filter.success),
        "e.late = ?": None if episode_filter.late is None else int(episode_filter.late),
        "e.outcome >= ?": episode_filter.least,
        "e.outcome <= ?": episode_filter.most,
        "e.n_turns >= ?": episode_filter.least_turns,
        "e.n_turns <= ?": episode_filter.most_turns,
        "e.newest_step >= ?": episode_filter.from_weights,
        "e.newest_step <= ?": episode_filter.to_weights,
    }
    for condition, filter_value in compared_values.items():
        if filter_value is not None:
            conditions.append(condition)
            parameters.append(filter_value)
    if episode_filter.step is not None:
        conditions.append("e.dropped IS NULL")
    if episode_filter.role is not None:
        # the condition of the index `turns_of_roles`
        index_condition = "" if episode_filter.role == POLICY else " AND t.role <> 'policy'"
        role_condition = f"t.episode_id = e.id AND t.trial = e.trial AND t.role = ?{index_condition}"
        conditions.append(f"EXISTS (SELECT 1 FROM turns t WHERE {role_condition})")
        parameters.append(episode_filter.role)
    if episode_filter.dropped is not None:
        drop_condition = "(e.dropped IS NOT NULL OR (e.late = 0 AND g.state IN ('expired', 'failed')))"
        conditions.append(drop_condition if episode_filter.dropped else f"NOT {drop_condition}")
    if episode_filter.ids is not None:
        ids_condition, episode_ids = _among(episode_filter.ids)
        conditions.append(ids_condition)
        parameters += episode_ids
    where_clause = " AND ".join(conditions)
    return f"{_FROM if 'g.' in where_clause else ' FROM episodes e'} WHERE {where_clause}", parameters


def _among(ids: list[int] | tuple[int, ...]) -> tuple[str, list[int]]:
    return (f"e.id IN ({', '.join('?' * len(ids))})", list(ids)) if ids else ("FALSE", [])


def _task_of(env: str) -> str:
    """The pattern of a packed task of an environment, see `codec.pack_task`."""
    return f'{{"index":%,"env":{_escaped(json.dumps(env, ensure_ascii=False))},%'


def _escaped(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
