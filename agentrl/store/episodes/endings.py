"""How episodes end: as they were played, held until reward sources have scored them, or cut off by a deadline.

Owns what an ending writes, and the closing of groups whose last open member it was. However many episodes of a process
end at once, one look says how they stand, and a server gets no more requests than for one. An ending that may not be
written leaves the others as they are. Never knows a token.

Failures of one cause at one time are one outage: an engine that hangs fails a hundred episodes, and counts once.
A failure belongs to the latest outage of its cause (its stop reason) if its episode's last sign of life was before that
outage began, or if the outage began less than `OUTAGE_S` ago. The second rule holds only after an episode of this
attempt ended well: a run that never worked is not in an outage, and its user should soon read why. A failure that names
the place in somebody's code which raised it is no outage: it counts by itself, as RAISED. Where a task raised and is
played again, what it raises then counts with its first plays: a budget is a share of what was tried, and replays of a
few bad tasks would use it up.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import LeaseLost, StoreError, split_place
from agentrl.records import StopReason
from agentrl.store.databases.calls_together import BatchedCall, Result
from agentrl.store.databases.database import Database
from agentrl.store.episodes.groups import close, scored
from agentrl.store.episodes.leases import check_held

OUTAGE_S = 30.0
RAISED = "raised"
FAILURES = (StopReason.ENGINE_FAILED, StopReason.SANDBOX_FAILED, StopReason.ENV_FAILED)


def note_failure(db: Database, episode_id: int, cause: StopReason, detail: str, now: float) -> None:
    """Count an episode that failed by `cause`, with its `detail` in one line: in its outage, in a new one, by itself,
    or with the first plays of its task. Inside a transaction."""
    attempt, ended_count = ended_well(db)
    has_raised = bool(split_place(detail)[1])
    outage_cause = RAISED if has_raised else cause
    insert_sql = "INSERT INTO outages (attempt, cause, began_s, episodes, well) VALUES (?, ?, ?, 1, ?)"
    count_sql = "UPDATE outages SET episodes = episodes + 1 WHERE id = ?"
    latest_outage = db.row(
        "SELECT id, began_s FROM outages WHERE attempt = ? AND cause = ? ORDER BY id DESC LIMIT 1",
        (attempt, outage_cause),
    )
    if has_raised:
        if latest_outage is not None and _raised_before(db, episode_id):
            db.execute(count_sql, (latest_outage[0],))
        else:
            db.execute(insert_sql, (attempt, RAISED, now, ended_count))
        return
    life_row = db.row(
        "SELECT e.started_s, MAX(t.ended_s) FROM episodes e"
        " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial WHERE e.id = ? GROUP BY e.id",
        (episode_id,),
    )
    assert life_row is not None
    started_s, last_turn_s = life_row
    # The last sign of life, not the time of the failure: a hundred requests to one engine that hangs time out over
    # minutes, each by its own deadline. All of them were last heard of before the outage began, and so belong to it.
    last_sign_s = max(now if started_s is None else started_s, last_turn_s or 0.0)
    if latest_outage is not None and (
        last_sign_s < latest_outage[1] or (ended_count and now - latest_outage[1] < OUTAGE_S)
    ):
        db.execute(count_sql, (latest_outage[0],))
    else:
        db.execute(insert_sql, (attempt, cause, now, ended_count))


def _raised_before(db: Database, episode_id: int) -> bool:
    """Whether the episode's group plays a task again whose last play raised an exception."""
    detail_rows = db.rows(
        "SELECT b.detail FROM episodes e JOIN groups g ON g.id = e.group_id"
        " JOIN episodes b ON b.group_id = g.replay_of WHERE e.id = ?",
        (episode_id,),
    )
    return any(split_place(detail or "")[1] for (detail,) in detail_rows)


def ended_well(db: Database) -> tuple[int, int]:
    """The current attempt, and how many of its episodes the policy or its environment ended."""
    count_rows = db.rows(
        "SELECT m.value, c.stop_reason, c.n FROM meta m LEFT JOIN ending_counts c ON c.attempt = CAST(m.value AS"
        " INTEGER) WHERE m.key = 'attempt'"
    )
    return int(count_rows[0][0]), sum(
        ended_count
        for _, stop_reason, ended_count in count_rows
        if stop_reason is not None and StopReason(stop_reason).by_policy
    )


_KEPT = ("unscored", "endings", "partials", "snapshots", "unsaved")
"""The tables with rows of an episode that go with its end."""

_LOOK = f"""
SELECT e.id, e.state, e.fence, e.group_id, g.state IN ('waiting', 'running'),
    (SELECT COUNT(*) FROM episodes m WHERE m.group_id = e.group_id AND m.state IN ('waiting', 'running')),
    {", ".join(f"(SELECT 1 FROM {table} k WHERE k.episode_id = e.id LIMIT 1)" for table in _KEPT)}
FROM json_each(?) i CROSS JOIN episodes e ON e.id = CAST(i.value AS BIGINT) CROSS JOIN groups g ON g.id = e.group_id
"""
# One statement with sub-selects instead of a read and a write: on a server each answer that has to be waited for is
# time under the lock of the whole run. `newest_step` looks at turns that learn alone, since a frozen opponent's
# versions say nothing about staleness.
_END = (
    "UPDATE episodes SET state = ?, stop_reason = ?, ended_s = ?, holder = NULL, outcome = ?, success = ?,"
    " outcomes = ?, detail = ?, (n_turns, n_tokens) = (SELECT COUNT(*), COALESCE(SUM(t.n_tokens), 0) FROM turns t"
    "  WHERE t.episode_id = episodes.id AND t.trial = episodes.trial), newest_step ="
    " (SELECT MAX(v.step) FROM turns t CROSS JOIN json_each(t.spans) s"
    "  JOIN versions v ON v.version = CAST(json_extract(s.value, '$[0]') AS INTEGER)"
    "  WHERE t.episode_id = episodes.id AND t.trial = episodes.trial AND t.learns = 1) WHERE id = ?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended. `outcomes` are the outcomes by role; `detail` is the cause of a failure in one line."""

    stop_reason: StopReason
    outcome: float | None = None
    success: bool | None = None
    outcomes: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: str = ""

    @property
    def scored(self) -> bool:
        return scored(self.stop_reason, self.outcome)

    @property
    def columns(self) -> tuple[Any, ...]:
        """The values of an ending's columns, without its reason."""
        return (self.outcome, self.success, json.dumps(dict(self.outcomes)), self.detail)


class EndEntry(BatchedCall):
    """The end of an episode that is held under `fence`, see `Journal.finish`."""

    __slots__ = ("db", "ending", "episode_id", "fence")

    def __init__(self, db: Database, episode_id: int, fence: int, ending: Ending) -> None:
        for any_outcome in (ending.outcome, *ending.outcomes.values()):
            if any_outcome is not None and not math.isfinite(any_outcome):
                raise StoreError(f"episode {episode_id}: outcome {any_outcome} is not finite")
        self.db, self.episode_id, self.fence, self.ending = db, episode_id, fence, ending

    def __call__(self) -> None:
        (call_result,) = self.all([self])
        if call_result.error is not None:
            raise call_result.error

    @classmethod
    def all(cls, calls: Sequence[EndEntry]) -> list[Result]:
        """End episodes in their order. Raises StoreError if the database fails, and then all may be half written."""
        database, entry_results = calls[0].db, list[Result]()
        ended_s = database.clock()
        with database.write():
            episode_ends = _Ends(database, [end_entry.episode_id for end_entry in calls], ended_s)
            for end_entry in calls:
                try:
                    episode_ends.check(end_entry.episode_id, end_entry.fence)
                except LeaseLost as error:
                    entry_results.append(Result(error=error))
                    continue
                episode_ends.conclude(end_entry.episode_id, end_entry.ending)
                entry_results.append(Result())
            episode_ends.close_groups()
        return entry_results


@dataclass(slots=True)
class _Standing:
    """How an episode stands; `kept`: the tables that have rows which go with its end."""

    state: str
    fence: int
    group_id: int
    kept: Sequence[str]


class _Ends:
    """Endings of one transaction, inside it. `close_groups` comes last."""

    def __init__(self, db: Database, episode_ids: Iterable[int], now: float) -> None:
        self._db, self._now = db, now
        self._stands = dict[int, _Standing]()
        self._left = dict[int, int]()  # open members of open groups
        self._scored = Counter[int]()  # by group
        for episode_id, episode_state, fence, group_id, group_is_open, open_count, *has_rows in db.rows(
            _LOOK, (json.dumps(sorted(episode_ids)),)
        ):
            kept_tables = [table_name for table_name, is_kept in zip(_KEPT, has_rows, strict=True) if is_kept]
            self._stands[episode_id] = _Standing(episode_state, fence, group_id, kept_tables)
            if group_is_open:
                self._left[group_id] = open_count

    def check(self, episode_id: int, fence: int) -> None:
        """Raise LeaseLost unless an episode is held under `fence`."""
        standing = self._stands.get(episode_id)
        check_held(self._db, episode_id, fence, None if standing is None else (standing.state, standing.fence))

    def conclude(self, episode_id: int, ending: Ending) -> None:
        """End an episode, or hold it until its sources have scored it."""
        if ending.scored and "unscored" in self._stands[episode_id].kept:
            self._hold(episode_id, ending)
        else:
            self.end(episode_id, ending)

    def end(self, episode_id: int, ending: Ending) -> None:
        """End an episode."""
        standing = self._stands[episode_id]
        _end(self._db, episode_id, "finished", ending, self._now, standing.kept)
        if ending.scored:
            self._scored[standing.group_id] += 1
        if standing.state in ("waiting", "running") and standing.group_id in self._left:
            self._left[standing.group_id] -= 1
        standing.state = "finished"

    def _hold(self, episode_id: int, ending: Ending) -> None:
        """Keep an episode's ending until its sources have scored it. The fence rises: nobody holds it."""
        self._db.execute(
            "INSERT INTO endings VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (episode_id, self._now, ending.stop_reason, *ending.columns),
        )
        self._db.execute("UPDATE episodes SET holder = NULL, fence = fence + 1 WHERE id = ?", (episode_id,))
        self._stands[episode_id].fence += 1

    def close_groups(self) -> None:
        """Count the scored members, and close the open groups that have no open member left."""
        self._db.execute_many(
            "UPDATE groups SET n_scored = n_scored + ? WHERE id = ?",
            [(member_count, group_id) for group_id, member_count in self._scored.items()],
        )
        if ended_groups := sorted(group_id for group_id, member_count in self._left.items() if not member_count):
            close(self._db, ended_groups, self._now)


def conclude(db: Database, episode_id: int, ending: Ending, now: float) -> None:
    """End an episode, or hold it until its sources have scored it. Inside a transaction."""
    episode_ends = _Ends(db, [episode_id], now)
    episode_ends.conclude(episode_id, ending)
    episode_ends.close_groups()


def end_as(db: Database, episode_id: int, ending: Ending, now: float) -> None:
    """End an episode; close its open group if it was the last open member. Inside a transaction."""
    episode_ends = _Ends(db, [episode_id], now)
    episode_ends.end(episode_id, ending)
    episode_ends.close_groups()


def held_ending(db: Database, episode_id: int) -> Ending | None:
    """The ending of an episode that waits for its sources; None if it does not wait."""
    ending_row = db.row(
        "SELECT stop_reason, outcome, success, outcomes, detail FROM endings WHERE episode_id = ?", (episode_id,)
    )
    if ending_row is None:
        return None
    stop_reason, outcome, success, packed_outcomes, detail = ending_row
    return Ending(
        stop_reason=StopReason(stop_reason),
        outcome=outcome,
        success=None if success is None else bool(success),
        outcomes=json.loads(packed_outcomes),
        detail=detail,
    )


def end_episode(db: Database, episode_id: int, state: str, stop_reason: StopReason, now: float) -> None:
    """End an episode that nobody reported on, but not its group. Inside a transaction."""
    _end(db, episode_id, state, Ending(stop_reason=stop_reason), now, _KEPT)


def _end(db: Database, episode_id: int, state: str, ending: Ending, now: float, kept: Iterable[str]) -> None:
    """Write an ending, with the length of the episode and the step of its newest token, and drop its rows in `kept`."""
    db.execute(_END, (state, ending.stop_reason, now, *ending.columns, episode_id))
    # Only tables that hold a row of the episode, which the look before knows. Five deletes for each ending would mostly
    # delete nothing, and on a server each is a statement.
    for table_name in kept:
        db.execute(f"DELETE FROM {table_name} WHERE episode_id = ?", (episode_id,))
    # In the transaction of the ending: counted before, a crash in between counts a failure that did not happen; counted
    # after, one that is never counted keeps a broken run alive.
    if ending.stop_reason in FAILURES:
        note_failure(db, episode_id, ending.stop_reason, ending.detail, now)
