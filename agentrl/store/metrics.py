"""Measured values by kind and step, and numbers computed from the rows: drops, endings, length bias.

Never knows what a kind means. Values of steps that a rollback undid are kept and flagged: a curve shows the lineage
that counts, and the others can still be looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from agentrl.records import Json, StopReason, Task
from agentrl.store.codec import pack_identity, to_json, unpack_task
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.groups import TRAIN
from agentrl.store.episodes.outages import RAISED, ended_well
from agentrl.store.learner_fence import check_lead
from agentrl.store.run_values import ATTEMPT_SQL


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Values recorded together. `undone` says that a rollback abandoned the step they belong to."""

    kind: str
    step: int
    attempt: int
    time_s: float
    values: dict[str, Json]
    undone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLengths:
    """Mean length of `episodes` episodes, in turns, in sampled tokens and in seconds from first claim to end (nan if
    there are none)."""

    episodes: int
    turns: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Whether dropping favours short episodes (law 5): lengths of trained and of dropped members, the latter also by
    reason. The reason is that of the group, or of the member alone: "stale" (no token young enough), "deadline" (late,
    and too long) or the failure that ended it.

    A member cut off while it ran counts with the length it had, so a dropped mean is a lower bound."""

    trained: EpisodeLengths
    dropped: EpisodeLengths
    by_reason: dict[str, EpisodeLengths]


# Word for word the condition of the index `episodes_failed`.
_FAILED = "stop_reason IN ('engine_failed', 'sandbox_failed', 'env_failed')"


class Failures(NamedTuple):
    """Of `ended` episodes, `failed` failed through no doing of the policy: `raised` of them by an exception of
    somebody's code, each by itself, the others in so many `outages` (see `outages`). Of both, `raised_in_a_row` and
    `in_a_row` came after the last episode that ended well; `well` episodes did, `running` ones may. `detail` is the
    cause of the latest failed one."""

    failed: int
    ended: int
    detail: str
    outages: int = 0
    in_a_row: int = 0
    well: int = 0
    raised: int = 0
    raised_in_a_row: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask:
    """How often episodes of one task failed for one reason that the policy could not have caused: `detail` in one line,
    which names its place if somebody's code raised it (see `errors.split_place`). `episode` is the last of them."""

    task: Task
    purpose: str
    reason: StopReason
    detail: str
    times: int
    episode: int
    last_s: float


class Waits(NamedTuple):
    """Seconds that all ended training episodes waited, added up: for an engine's answers (its queue included), and for
    their environments with tools and boxes."""

    engine_s: float
    env_s: float


class Metrics(StorePart):
    """Record values and read them back; count what was dropped and why."""

    def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        """Record values under the current attempt. Numbers that are not finite become null."""
        data = to_json({key: finite(value) for key, value in values.items()}, f"metrics {kind!r}")
        with self._db.write(shared=True):
            check_lead(self._db)
            self._db.execute(
                f"INSERT INTO metrics (kind, step, attempt, time_s, data) VALUES (?, ?, {ATTEMPT_SQL}, ?, ?)",
                (kind, step, self._db.clock(), data),
            )

    def metrics(self, kind: str, *, undone: bool = False, after: int = -1) -> list[Metric]:
        """Values of a kind by step, then by time, of steps above `after`; with `undone` also undone ones."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT kind, step, attempt, time_s, data, undone_attempt FROM metrics"
                " WHERE kind = ? AND step > ? AND (undone_attempt IS NULL OR ? = 1) ORDER BY step, id",
                (kind, after, undone),
            )
        return [
            Metric(
                kind=kind, step=step, attempt=attempt, time_s=time_s, values=json.loads(data), undone=gone is not None
            )
            for kind, step, attempt, time_s, data, gone in rows
        ]

    def drops(self) -> dict[str, int]:
        """Training groups that never enter the loss, by reason, such as "stale" or "engine_failed"."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT reason, COUNT(*) FROM groups WHERE purpose = ? AND state IN ('expired', 'failed')"
                " GROUP BY reason ORDER BY 1",
                (TRAIN,),
            )
        return dict(rows)

    def endings(self, *, evaluation: bool = False) -> dict[StopReason, int]:
        """How the ended training episodes ended, or those of all evaluations. Constant time."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT stop_reason, SUM(n) FROM ending_counts WHERE evaluation = ? GROUP BY 1 ORDER BY 1",
                (evaluation,),
            )
        return {StopReason(reason): n for reason, n in rows}

    def failures(self) -> Failures:
        """Failed episodes of the current attempt, evaluations included: those that infrastructure ended (expired ones
        apart). Constant time."""
        with self._db.read():
            attempt, well = ended_well(self._db)
            ended = self._db.row("SELECT COALESCE(SUM(n), 0) FROM ending_counts WHERE attempt = ?", (attempt,))
            counts = self._db.row(
                "SELECT COALESCE(SUM(episodes), 0), COUNT(*) FILTER (WHERE cause <> ?3),"
                " COUNT(*) FILTER (WHERE cause <> ?3 AND well = ?2), COUNT(*) FILTER (WHERE cause = ?3),"
                " COUNT(*) FILTER (WHERE cause = ?3 AND well = ?2) FROM outages WHERE attempt = ?1",
                (attempt, well, RAISED),
            )
            running = self._db.row("SELECT COUNT(*) FROM episodes WHERE state = 'running' AND holder IS NOT NULL")
            last = self._db.row(f"SELECT detail FROM episodes WHERE {_FAILED} ORDER BY id DESC LIMIT 1")
        assert ended is not None and counts is not None and running is not None
        failed, outages, in_a_row, raised, raised_in_a_row = counts
        return Failures(
            failed=failed,
            ended=ended[0],
            detail="" if last is None else last[0],
            outages=outages,
            in_a_row=in_a_row,
            well=well,
            raised=raised,
            raised_in_a_row=raised_in_a_row,
            running=running[0],
        )

    def failed_tasks(self, purpose: str | None = None, *, after_s: float = 0.0) -> list[FailedTask]:
        """The failures of a purpose, or of all, that ended after `after_s`, by task and reason in the order of their
        first episodes. Reads every failed episode: call it when `failures` shows more of them."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT g.task, g.purpose, e.stop_reason, e.detail, e.id, e.ended_s FROM episodes e"
                f" JOIN groups g ON g.id = e.group_id WHERE e.{_FAILED} AND e.ended_s > ?1"
                " AND g.purpose = COALESCE(?2, g.purpose) ORDER BY e.id",
                (after_s, purpose),
            )
        return _failed_together(
            FailedTask(
                task=unpack_task(task),
                purpose=of,
                reason=StopReason(reason),
                detail=detail,
                times=1,
                episode=id,
                last_s=ended_s,
            )
            for task, of, reason, detail, id, ended_s in rows
        )

    def waited(self) -> Waits:
        """How long training episodes waited. Reads every ended episode: call it at the end of a run."""
        with self._db.read():
            row = self._db.row(
                "SELECT TOTAL(ended_s - started_s), TOTAL((SELECT SUM(t.ended_s - t.started_s) FROM turns t"
                "  WHERE t.episode_id = episodes.id AND t.trial = episodes.trial))"
                " FROM episodes WHERE evaluation = 0 AND ended_s IS NOT NULL AND started_s IS NOT NULL"
            )
        assert row is not None
        return Waits(engine_s=row[1], env_s=max(0.0, row[0] - row[1]))

    def episodes_trained(self) -> int:
        """Episodes that entered the loss in the lineage that counts."""
        with self._db.read():
            row = self._db.row("SELECT COUNT(*) FROM lineage WHERE undone_attempt IS NULL")
        return 0 if row is None else row[0]

    def progress(self) -> tuple[int, ...]:
        """Counters: every turn, answer, score that counts, ended episode and learner step raises one of them. Nothing
        else does: neither metrics nor expired episodes. Constant time."""
        with self._db.read():
            row = self._db.row(
                "SELECT (SELECT MAX(id) FROM turns), (SELECT MAX(turn_id) FROM steps),"
                " (SELECT MAX(version) FROM versions),"
                " (SELECT SUM(n) FROM ending_counts WHERE stop_reason <> 'expired'), (SELECT SUM(n) FROM score_counts)"
            )
        assert row is not None
        return tuple(number or 0 for number in row)

    def members_dropped(self) -> dict[str, int]:
        """Training episodes that never enter the loss, by reason, see `LengthBias`. Reads every ended episode."""
        return {reason: lengths.episodes for reason, lengths in self.length_bias().by_reason.items()}

    def length_bias(self) -> LengthBias:
        """Lengths of trained and dropped training episodes; those that may still be trained are neither. Reads every
        ended episode: do not call it every turn."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT e.taken_step IS NOT NULL AND e.dropped IS NULL,"
                " COALESCE(e.dropped, iif(g.state IN ('expired', 'failed') AND e.late = 0, g.reason, NULL)),"
                " e.stop_reason, e.outcome IS NULL, COUNT(*), SUM(e.n_turns), SUM(e.n_tokens),"
                " TOTAL(e.ended_s - e.started_s) FROM episodes e JOIN groups g ON g.id = e.group_id"
                " WHERE g.purpose = ? AND g.state IN ('taken', 'trained', 'expired', 'failed')"
                " AND e.stop_reason IS NOT NULL GROUP BY 1, 2, 3, 4",
                (TRAIN,),
            )
        trained = _Sum()
        dropped = _Sum()
        by_reason: dict[str, _Sum] = {}
        for in_lineage, reason, stop_reason, without_outcome, *sums in rows:
            in_loss = StopReason(stop_reason).by_policy and not without_outcome
            if in_lineage:
                trained.add(*sums)
            elif reason is not None or not in_loss:  # else it waits to be taken
                dropped.add(*sums)
                by_reason.setdefault(reason or stop_reason, _Sum()).add(*sums)
        return LengthBias(
            trained=trained.mean(),
            dropped=dropped.mean(),
            by_reason={reason: total.mean() for reason, total in sorted(by_reason.items())},
        )


def _failed_together(rows: Iterable[FailedTask]) -> list[FailedTask]:
    """The failures with those of one task, purpose and reason in one row, in the order in which these come."""
    found: dict[tuple[str, ...], FailedTask] = {}
    for row in rows:
        key = pack_identity(row.task), row.purpose, row.reason, row.detail
        known = found.get(key)
        if known is not None:
            last = max(known, row, key=lambda one: (one.last_s, one.episode))
            row = replace(last, times=known.times + row.times)
        found[key] = row
    return list(found.values())


@dataclass(slots=True)
class _Sum:
    episodes: int = 0
    turns: float = 0
    tokens: float = 0
    seconds: float = 0.0

    def add(self, episodes: int, turns: float, tokens: float, seconds: float) -> None:
        self.episodes += episodes
        self.turns += turns
        self.tokens += tokens
        self.seconds += seconds

    def mean(self) -> EpisodeLengths:
        n = self.episodes or math.nan
        return EpisodeLengths(
            episodes=self.episodes, turns=self.turns / n, tokens=self.tokens / n, seconds=self.seconds / n
        )


def finite(value: Json) -> Json:
    """The value itself; None for a number that JSON cannot hold (NaN, infinity), also inside a dict or a list."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in cast("dict[str, Json]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in cast("list[Json]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
