"""Measured values by kind and step, and numbers computed from the rows: drops, endings, durations, bias of dropping.

Never knows what a kind means. Values of steps that a rollback undid are kept and flagged: a curve shows the lineage
that counts, and the others can still be looked at.

`LengthBias` and `TrainingBias` show whether what was trained is like what was played: lengths, and the gradient as far
as rewards show it (law 5). They compare all episodes that left the buffer with those of them that entered the loss, and
never know which rule made the difference: orders of groups, close policies and deadlines all show here. Groups without
signal that were skipped are in neither set: their gradient is 0. Episodes that may still be trained are in neither. One
that was cut off while it ran counts with the length it had.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Final, NamedTuple, cast

from agentrl.algos.judging import Returns, advantages, is_silent
from agentrl.records import Json, MemberRecord, StopReason, Task
from agentrl.store.codec import pack_identity, to_json, unpack_record, unpack_task
from agentrl.store.databases.database import StorePart, retried
from agentrl.store.databases.driver import Row
from agentrl.store.episodes.endings import RAISED, ended_well
from agentrl.store.episodes.groups import TRAIN, record_of, scored
from agentrl.store.learner_fence import check_lead
from agentrl.store.run_values import ATTEMPT_SQL

_AT_ONCE: Final = 500  # rows of one statement


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
    """Counts of failed episodes. Of `ended` episodes, `failed` failed through no doing of the policy: `raised` of them
    by an exception of somebody's code in the first play of their task, each by itself, the others in so many `outages`
    (see `outages`) or in later plays. Of both, `raised_in_a_row` and `in_a_row` came after the last episode that ended
    well; `well` episodes did, `running` ones may. `detail` is the cause of the latest failed one."""

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

    @retried
    def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        """Record values under the current attempt. Numbers that are not finite become null."""
        packed_values = to_json(
            {metric_name: finite(metric_value) for metric_name, metric_value in values.items()}, f"metrics {kind!r}"
        )
        with self._db.write(shared=True):
            check_lead(self._db)
            self._db.execute(
                f"INSERT INTO metrics (kind, step, attempt, time_s, data) VALUES (?, ?, {ATTEMPT_SQL}, ?, ?)",
                (kind, step, self._db.clock(), packed_values),
            )

    @retried
    def values(self, kind: str, *, undone: bool = False, after: int = -1) -> list[Metric]:
        """Values of a kind by step, then by time, of steps above `after`; with `undone` also undone ones. For all steps
        of a long run they take gigabytes: see `sample`."""
        with self._db.read():
            metric_rows = self._db.rows(
                "SELECT kind, step, attempt, time_s, data, undone_attempt FROM metrics"
                " WHERE kind = ? AND step > ? AND (undone_attempt IS NULL OR ? = 1) ORDER BY step, id",
                (kind, after, undone),
            )
        return [
            Metric(
                kind=kind,
                step=step,
                attempt=attempt,
                time_s=time_s,
                values=json.loads(packed_values),
                undone=undone_attempt is not None,
            )
            for kind, step, attempt, time_s, packed_values, undone_attempt in metric_rows
        ]

    @retried
    def sample(self, kind: str, most: int, *, near: Collection[int] = (), reach: int = 0) -> list[Metric]:
        """About `most` values of a kind at most, so that a look at a long run costs no more than one at a short one:
        the newest half, the first quarter, and others evenly spread between these. Also those of steps that are `reach`
        or less away from a step in `near`."""
        with self._db.read():
            # The ids first, which an index has, then the values of the chosen ones: the JSON of a hundred thousand
            # steps takes gigabytes, and a look at a long run must not cost more than one at a short one.
            step_rows = self._db.rows(
                "SELECT id, step FROM metrics WHERE kind = ? AND undone_attempt IS NULL ORDER BY step, id", (kind,)
            )
            if len(step_rows) > most:
                head_end, tail_start = most // 4, len(step_rows) - most // 2
                spread_positions = range(head_end, tail_start, max(1, (tail_start - head_end) // max(1, most // 4)))
                chosen_positions = {*range(head_end), *spread_positions, *range(tail_start, len(step_rows))}
                near_steps = {step + distance for step in near for distance in range(-reach, reach + 1)}
                step_rows = [
                    step_row
                    for position, step_row in enumerate(step_rows)
                    if position in chosen_positions or step_row[1] in near_steps
                ]
            metric_rows: list[Row] = []
            for position in range(0, len(step_rows), _AT_ONCE):
                metric_ids = [metric_id for metric_id, _ in step_rows[position : position + _AT_ONCE]]
                placeholders = ", ".join("?" * len(metric_ids))
                metric_rows += self._db.rows(
                    f"SELECT step, attempt, time_s, data FROM metrics WHERE id IN ({placeholders}) ORDER BY step, id",
                    metric_ids,
                )
        return [
            Metric(kind=kind, step=step, attempt=attempt, time_s=time_s, values=json.loads(packed_values), undone=False)
            for step, attempt, time_s, packed_values in metric_rows
        ]

    @retried
    def drops(self) -> dict[str, int]:
        """Training groups that never enter the loss, by reason, such as "stale" or "engine_failed"."""
        with self._db.read():
            reason_rows = self._db.rows(
                "SELECT reason, COUNT(*) FROM groups WHERE purpose = ? AND state IN ('expired', 'failed')"
                " GROUP BY reason ORDER BY 1",
                (TRAIN,),
            )
        return dict(reason_rows)

    @retried
    def endings(self, *, evaluation: bool = False) -> dict[StopReason, int]:
        """How the ended training episodes ended, or those of all evaluations. Constant time."""
        with self._db.read():
            ending_rows = self._db.rows(
                "SELECT stop_reason, SUM(n) FROM ending_counts WHERE evaluation = ? AND n > 0 GROUP BY 1 ORDER BY 1",
                (evaluation,),
            )
        return {StopReason(stop_reason): ending_count for stop_reason, ending_count in ending_rows}

    @retried
    def failures(self) -> Failures:
        """Failed episodes of the current attempt, evaluations included: those that infrastructure ended (expired ones
        apart). Constant time."""
        with self._db.read():
            attempt, ended_count = ended_well(self._db)
            ended_row = self._db.row("SELECT COALESCE(SUM(n), 0) FROM ending_counts WHERE attempt = ?", (attempt,))
            outage_counts = self._db.row(
                "SELECT COALESCE(SUM(episodes), 0), COUNT(*) FILTER (WHERE cause <> ?3),"
                " COUNT(*) FILTER (WHERE cause <> ?3 AND well = ?2), COUNT(*) FILTER (WHERE cause = ?3),"
                " COUNT(*) FILTER (WHERE cause = ?3 AND well = ?2) FROM outages WHERE attempt = ?1",
                (attempt, ended_count, RAISED),
            )
            running_row = self._db.row("SELECT COUNT(*) FROM episodes WHERE state = 'running' AND holder IS NOT NULL")
            last_failure = self._db.row(f"SELECT detail FROM episodes WHERE {_FAILED} ORDER BY id DESC LIMIT 1")
        assert ended_row is not None and outage_counts is not None and running_row is not None
        failed_count, outages, in_a_row, raised_count, raised_in_a_row = outage_counts
        return Failures(
            failed=failed_count,
            ended=max(ended_row[0], failed_count),  # one that is played again has failed, and has not ended
            detail="" if last_failure is None else last_failure[0],
            outages=outages,
            in_a_row=in_a_row,
            well=ended_count,
            raised=raised_count,
            raised_in_a_row=raised_in_a_row,
            running=running_row[0],
        )

    @retried
    def failed_tasks(self, purpose: str | None = None, *, after_s: float = 0.0) -> list[FailedTask]:
        """The failures of a purpose, or of all, that ended after `after_s`, by task and reason in the order of their
        first episodes. Reads every failed episode: call it when `failures` shows more of them."""
        with self._db.read():
            failure_rows = self._db.rows(
                "SELECT g.task, g.purpose, e.stop_reason, e.detail, e.id, e.ended_s FROM episodes e"
                f" JOIN groups g ON g.id = e.group_id WHERE e.{_FAILED} AND e.ended_s > ?1"
                " AND g.purpose = COALESCE(?2, g.purpose) ORDER BY e.id",
                (after_s, purpose),
            )
        return _failed_together(
            FailedTask(
                task=unpack_task(packed_task),
                purpose=task_purpose,
                reason=StopReason(stop_reason),
                detail=detail,
                times=1,
                episode=episode_id,
                last_s=ended_s,
            )
            for packed_task, task_purpose, stop_reason, detail, episode_id, ended_s in failure_rows
        )

    @retried
    def waited(self) -> Waits:
        """How long training episodes waited. Reads every ended episode: call it at the end of a run.

        What began before the host's clock was set back, and ended after, counts as 0 s. Its true duration is not in
        the store, whose times outlive processes and so cannot come from a monotonic clock."""
        spent = "CASE WHEN {0}.ended_s > {0}.started_s THEN {0}.ended_s - {0}.started_s ELSE 0 END"
        with self._db.read():
            time_row = self._db.row(
                f"SELECT TOTAL({spent.format('episodes')}), TOTAL((SELECT SUM({spent.format('t')}) FROM turns t"
                "  WHERE t.episode_id = episodes.id AND t.trial = episodes.trial))"
                " FROM episodes WHERE evaluation = 0 AND ended_s IS NOT NULL AND started_s IS NOT NULL"
            )
        assert time_row is not None
        # What is left of an episode after its turns: times that were measured apart would need a row more for each
        # step, for a number that is read once at the end.
        return Waits(engine_s=time_row[1], env_s=max(0.0, time_row[0] - time_row[1]))

    @retried
    def episodes_trained(self) -> int:
        """Episodes that entered the loss in the lineage that counts."""
        with self._db.read():
            count_row = self._db.row("SELECT COUNT(*) FROM lineage WHERE undone_attempt IS NULL")
        return 0 if count_row is None else count_row[0]

    @retried
    def progress(self) -> tuple[int, ...]:
        """Counters: every turn, answer, score that counts, ended episode and learner step raises one of them. Nothing
        else does: neither metrics nor expired episodes. Constant time."""
        with self._db.read():
            counter_row = self._db.row(
                # Highest numbers and sums of counters, never counts of rows: this is asked every second for as long as
                # the run lives. Expired episodes are left out on purpose. They end by a deadline, so a run in which
                # nothing works any more would seem to move by giving up (law 4).
                "SELECT (SELECT MAX(id) FROM turns), (SELECT MAX(turn_id) FROM steps),"
                " (SELECT MAX(version) FROM versions),"
                " (SELECT SUM(n) FROM ending_counts WHERE stop_reason <> 'expired'), (SELECT SUM(n) FROM score_counts)"
            )
        assert counter_row is not None
        return tuple(counter_value or 0 for counter_value in counter_row)

    @retried
    def members_dropped(self) -> dict[str, int]:
        """Training episodes that never enter the loss, by reason, see `LengthBias`. Reads every ended episode."""
        return {drop_reason: lengths.episodes for drop_reason, lengths in self.length_bias().by_reason.items()}

    @retried
    def length_bias(self) -> LengthBias:
        """Lengths of trained and dropped training episodes; those that may still be trained are neither. Reads every
        ended episode: do not call it every turn."""
        with self._db.read():
            length_rows = self._db.rows(
                "SELECT e.taken_step IS NOT NULL AND e.dropped IS NULL,"
                " COALESCE(e.dropped, iif(g.state IN ('expired', 'failed') AND e.late = 0, g.reason, NULL)),"
                " e.stop_reason, e.outcome IS NULL, COUNT(*), SUM(e.n_turns), SUM(e.n_tokens),"
                " TOTAL(e.ended_s - e.started_s) FROM episodes e JOIN groups g ON g.id = e.group_id"
                " WHERE g.purpose = ? AND g.state IN ('taken', 'trained', 'expired', 'failed')"
                " AND e.stop_reason IS NOT NULL GROUP BY 1, 2, 3, 4",
                (TRAIN,),
            )
        trained_sum = _Sum()
        dropped_sum = _Sum()
        sums_by_reason: dict[str, _Sum] = {}
        for in_lineage, drop_reason, stop_reason, without_outcome, *length_sums in length_rows:
            in_loss = StopReason(stop_reason).by_policy and not without_outcome
            if in_lineage:
                trained_sum.add(*length_sums)
            elif drop_reason is not None or not in_loss:  # else it waits to be taken
                dropped_sum.add(*length_sums)
                sums_by_reason.setdefault(drop_reason or stop_reason, _Sum()).add(*length_sums)
        return LengthBias(
            trained=trained_sum.mean(),
            dropped=dropped_sum.mean(),
            by_reason={drop_reason: reason_sum.mean() for drop_reason, reason_sum in sorted(sums_by_reason.items())},
        )

    @retried
    def activity(self, turns: int) -> Activity:
        """The spans of time in which somebody worked, of the newest `turns` turns. Constant time."""
        newest_turns = "SELECT episode_id, started_s, ended_s, n_tokens FROM turns ORDER BY id DESC LIMIT ?"
        with self._db.read():
            turn_rows = self._db.rows(newest_turns, (turns,))
            episodes = self._db.rows(
                f"SELECT id, started_s, ended_s FROM episodes WHERE id IN (SELECT episode_id FROM ({newest_turns}) t)"
                " AND started_s IS NOT NULL UNION SELECT id, started_s, ended_s FROM episodes"
                " WHERE state = 'running' AND holder IS NOT NULL AND started_s IS NOT NULL",
                (turns,),
            )
        return Activity(
            turns=[(turn_start_s, turn_end_s, token_count) for _, turn_start_s, turn_end_s, token_count in turn_rows],
            episodes=[(episode_start_s, episode_end_s) for _, episode_start_s, episode_end_s in episodes],
        )

    @retried
    def episode_times(self, limit: int) -> list[EpisodeTimes]:
        """The ended episodes of the newest `limit` training groups, by id. An episode that started anew, after its
        worker died for example, counts from its first claim, with the turns of its last trial."""
        with self._db.read():
            turn_rows = self._db.rows(
                "SELECT e.id, e.group_id, e.started_s, e.ended_s, e.stop_reason, e.outcome, t.started_s, t.ended_s,"
                " t.n_tokens FROM (SELECT id FROM groups WHERE purpose = ? ORDER BY id DESC LIMIT ?) g"
                " JOIN episodes e ON e.group_id = g.id"
                " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial AND t.learns = 1 AND t.n_tokens > 0"
                " WHERE e.ended_s IS NOT NULL AND e.started_s IS NOT NULL ORDER BY e.id, t.idx",
                (TRAIN, limit),
            )
        episode_times: list[EpisodeTimes] = []
        for (_, group_id, began_s, ended_s, stop_reason, outcome), episode_turns in groupby(
            turn_rows, key=lambda row: row[:6]
        ):
            played_turns = tuple(
                (turn_start_s, turn_end_s, token_count)
                for *_, turn_start_s, turn_end_s, token_count in episode_turns
                if token_count is not None
            )
            is_scored = scored(StopReason(stop_reason), outcome)
            episode_times.append(
                EpisodeTimes(
                    group_id=group_id, started_s=began_s, ended_s=ended_s, scored=is_scored, turns=played_turns
                )
            )
        return episode_times

    @retried
    def silent_groups(self, limit: int, returns: Returns) -> frozenset[int]:
        """Ids of those of the newest `limit` training groups that give no signal, whether or not they were skipped."""
        with self._db.read():
            group_rows = self._db.rows(
                "SELECT id, record, task FROM groups WHERE purpose = ? ORDER BY id DESC LIMIT ?", (TRAIN, limit)
            )
        closed_groups = (
            (group_id, unpack_record(record), unpack_task(task))
            for group_id, record, task in group_rows
            if record is not None
        )
        return frozenset(
            group_id for group_id, record, task in closed_groups if is_silent(record, returns.for_env(task.env))
        )

    @retried
    def push_times(self) -> list[float]:
        """Seconds from the minting of each weight version until the engines served it, oldest first."""
        with self._db.read():
            version_rows = self._db.rows(
                "SELECT confirmed_s - minted_s FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
                " ORDER BY version"
            )
        return [push_seconds for (push_seconds,) in version_rows]

    @retried
    def training_bias(self, returns: Returns) -> TrainingBias:
        """The comparison; `returns` says what an advantage is made of. Reads every ended episode: call it at the end
        of a run."""
        with self._db.read():
            episode_rows = self._db.rows(
                "SELECT e.id, e.group_id, e.member, e.n_turns, e.n_tokens, e.ended_s - e.started_s,"
                " e.taken_step IS NOT NULL AND e.dropped IS NULL, e.late, e.stop_reason, e.outcome, e.outcomes,"
                " e.late = 1 AND e.dropped IS NULL AND e.taken_step IS NULL"
                " FROM episodes e JOIN groups g ON g.id = e.group_id WHERE g.purpose = ? AND e.stop_reason IS NOT NULL"
                " AND g.state IN ('taken', 'trained', 'expired', 'failed') AND (g.skipped_step IS NULL OR e.late = 1)"
                " ORDER BY e.group_id, e.member",
                (TRAIN,),
            )
            episodes: list[_Episode] = []
            late_records: defaultdict[int, dict[int, MemberRecord]] = defaultdict(dict)
            for *columns, seconds, trained, is_late, stop_reason, outcome, outcomes, is_open in episode_rows:
                is_judged = scored(stop_reason, outcome)
                if is_open and is_judged:
                    continue  # it may still be trained
                episodes.append(_Episode(*columns, seconds=seconds or 0.0, trained=bool(trained)))
                if is_late and is_judged:
                    late_records[columns[1]][columns[2]] = record_of(self._db, columns[0], outcome, outcomes)
            advantage = self._advantages({episode.group_id for episode in episodes}, late_records, returns)
        # The quartiles are those of all episodes, also for the side that was trained. With borders of its own, a side
        # from which every long episode was dropped would show four even quarters and no bias.
        token_quantiles = _quantiles([float(episode.tokens) for episode in episodes])
        quartile_borders = [token_quantiles["p25"], token_quantiles["p50"], token_quantiles["p75"]]
        return TrainingBias(
            admitted=_side(episodes, advantage, quartile_borders),
            trained=_side([episode for episode in episodes if episode.trained], advantage, quartile_borders),
        )

    def _advantages(
        self, groups: set[int], late: Mapping[int, Mapping[int, MemberRecord]], returns: Returns
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """The mean advantage and mean |advantage| of each judged member, by group and member."""
        member_means: dict[tuple[int, int], tuple[float, float]] = {}
        for group_id, packed_record, task in self._db.execute(
            "SELECT id, record, task FROM groups WHERE record IS NOT NULL"
        ):
            if group_id in groups:
                env_returns = returns.for_env(unpack_task(task).env)
                for member_index, turn_advantages in advantages(
                    unpack_record(packed_record), env_returns, late.get(group_id)
                ).items():
                    if turn_advantages:
                        member_means[group_id, member_index] = fmean(turn_advantages), fmean(map(abs, turn_advantages))
        return member_means


def _failed_together(rows: Iterable[FailedTask]) -> list[FailedTask]:
    """The failures with those of one task, purpose and reason in one row, in the order in which these come."""
    failures_by_key: dict[tuple[str, ...], FailedTask] = {}
    for failed_task in rows:
        failure_key = pack_identity(failed_task.task), failed_task.purpose, failed_task.reason, failed_task.detail
        previous = failures_by_key.get(failure_key)
        if previous is not None:
            latest_failure = max(previous, failed_task, key=lambda one: (one.last_s, one.episode))
            failed_task = replace(latest_failure, times=previous.times + failed_task.times)
        failures_by_key[failure_key] = failed_task
    return list(failures_by_key.values())


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
        episode_count = self.episodes or math.nan
        return EpisodeLengths(
            episodes=self.episodes,
            turns=self.turns / episode_count,
            tokens=self.tokens / episode_count,
            seconds=self.seconds / episode_count,
        )


def finite(value: Json) -> Json:
    """The value itself; None for a number that JSON cannot hold (NaN, infinity), also inside a dict or a list."""
    if isinstance(value, dict):
        return {entry_key: finite(entry_value) for entry_key, entry_value in cast("dict[str, Json]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(entry_value) for entry_value in cast("list[Json]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTimes:
    """One ended training episode, by the store's clock. `turns` are (start, end, sampled tokens) of those that the
    policy which learns played; `scored`: it could enter the loss."""

    group_id: int
    started_s: float
    ended_s: float
    scored: bool
    turns: tuple[tuple[float, float, int], ...]


class Activity(NamedTuple):
    """The newest turns as (start, end, sampled tokens), the last written first, and the episodes that played them or
    that go on as (start, end; None while it goes on), by the store's clock."""

    turns: list[tuple[float, float, int]]
    episodes: list[tuple[float, float | None]]


_QUANTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two sets. `turns`, `tokens` (sampled) and `seconds` (first claim to end) describe its episodes'
    lengths: `mean`, `p25`, `p50`, `p75`, `p95`.

    An episode's advantage is the mean over its turns, before any scale; an episode that was not judged has none.
    `weighted_tokens` is the mean length weighted by |advantage|: tokens as the gradient counts them.
    `advantage_by_quartile` is the mean advantage of the shortest quarter of all episodes (in tokens), and so on to the
    longest. Equal numbers on both sides say that dropping did not turn the gradient towards a length. Everywhere nan
    for want of episodes."""

    episodes: int
    turns: Mapping[str, float]
    tokens: Mapping[str, float]
    seconds: Mapping[str, float]
    weighted_tokens: float
    advantage_by_quartile: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBias:
    """All training episodes that left the buffer, and those of them that were trained."""

    admitted: Side
    trained: Side


class _Episode(NamedTuple):
    id: int
    group_id: int
    member: int
    turns: int
    tokens: int
    seconds: float
    trained: bool


def _side(
    episodes: Sequence[_Episode], advantage: Mapping[tuple[int, int], tuple[float, float]], borders: Sequence[float]
) -> Side:
    judged_members = [
        (episode.tokens, *advantage[member_key])
        for episode in episodes
        if (member_key := (episode.group_id, episode.member)) in advantage
    ]
    magnitude_total = math.fsum(mean_magnitude for _, _, mean_magnitude in judged_members)
    quarters: list[list[float]] = [[], [], [], []]
    for token_count, mean_advantage, _ in judged_members:
        quarters[sum(token_count > border for border in borders)].append(mean_advantage)
    first, second, third, fourth = (fmean(of_quarter) if of_quarter else math.nan for of_quarter in quarters)
    return Side(
        episodes=len(episodes),
        turns=_quantiles([float(episode.turns) for episode in episodes]),
        tokens=_quantiles([float(episode.tokens) for episode in episodes]),
        seconds=_quantiles([episode.seconds for episode in episodes]),
        weighted_tokens=math.fsum(token_count * mean_magnitude for token_count, _, mean_magnitude in judged_members)
        / magnitude_total
        if magnitude_total
        else math.nan,
        advantage_by_quartile=(first, second, third, fourth),
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """The mean, and the smallest values that so many of all do not exceed."""
    if not values:
        return dict.fromkeys(("mean", *_QUANTILES), math.nan)
    ranked_values = sorted(values)
    return {"mean": fmean(ranked_values)} | {
        quantile_name: ranked_values[max(0, math.ceil(episode_share * len(ranked_values)) - 1)]
        for quantile_name, episode_share in _QUANTILES.items()
    }
