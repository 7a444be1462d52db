"""What a store of several databases answers: calls of the database that has a group, and answers put together.

Knows how calls are spread, and no call that writes to several databases (see `sharded`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from heapq import merge
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar, cast

from agentrl.errors import UsageError
from agentrl.records import Group, GroupState, StopReason, Trajectory
from agentrl.store import RunStore
from agentrl.store.audit.selection_bias import TrainingBias, compared
from agentrl.store.buffer.no_signal import Returns
from agentrl.store.buffer.taken_groups import Gone, Span
from agentrl.store.databases.database import Database, Watch
from agentrl.store.durations import EpisodeTimes
from agentrl.store.episodes.leases import Claim
from agentrl.store.episodes.outages import OUTAGE_S, RAISED
from agentrl.store.episodes.replays import Replays, quarantined
from agentrl.store.episodes.scores import Scored, read_turn_id
from agentrl.store.episodes.worker_deaths import Quarantined
from agentrl.store.metrics import FailedTask, Failures, LengthBias, Lengths, Waits, failed_together, mean_of
from agentrl.store.reads import EpisodeRow, GroupResult
from agentrl.store.sharded.placement import Watches, home

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def routed(method: _F) -> _F:
    """The call of the database that has the group, the episode or the turn which is named first."""

    @wraps(method)
    def call(self: ShardedReads, which: int | str | Claim, *arguments: Any, **named: Any) -> Any:
        return getattr(self.shard_of(which), method.__name__)(which, *arguments, **named)

    return cast("_F", call)


def summed(method: _F) -> _F:
    """The sum of what all databases answer; the control store is asked last."""

    @wraps(method)
    def call(self: ShardedReads, *arguments: Any, **named: Any) -> Any:
        return sum(getattr(shard, method.__name__)(*arguments, **named) for shard in reversed(self.shards))

    return cast("_F", call)


def each(method: _F) -> _F:
    """A call of each database; the control store is last."""

    @wraps(method)
    def call(self: ShardedReads, *arguments: Any, **named: Any) -> None:
        for shard in reversed(self.shards):
            getattr(shard, method.__name__)(*arguments, **named)

    return cast("_F", call)


def refused(method: _F) -> _F:
    """A call that only a store in one database answers."""

    @wraps(method)
    def call(self: ShardedReads, *_: Any, **__: Any) -> Any:
        hint = f"first gather it: agentrl store copy {self.path.parent} --to sqlite"
        raise UsageError(f"{self.path}: the run's store is in {len(self.shards)} databases, this needs one: {hint}")

    return cast("_F", call)


ATTEMPT = "SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'attempt'"


class ShardedReads(RunStore):
    """A run's store in several databases, as far as it reads. What is not overridden is a matter of the control store
    alone."""

    def __init__(self, dbs: Sequence[Database]) -> None:
        super().__init__(dbs[0])
        self._shards = tuple(RunStore(db) for db in dbs)

    @property
    def shards(self) -> Sequence[RunStore]:
        return self._shards

    def shard_of(self, which: int | str | Claim) -> RunStore:
        """The database of a group or an episode, by its number, of a turn, by its id, or of a claim."""
        if isinstance(which, str):
            which = read_turn_id(which)[0]
        return self._shards[home(which if isinstance(which, int) else which.episode_id, len(self._shards))]

    def _ask(self, look: Callable[[Database], _T]) -> list[_T]:
        return [self._ask_one(shard, look) for shard in self._shards]

    def _ask_one(self, shard: RunStore, look: Callable[[Database], _T]) -> _T:
        with shard._db.read():
            return look(shard._db)

    def _watch(self) -> Watch:
        return Watches([shard._db.watch() for shard in self._shards])

    def _waiting(self, away_s: float | None) -> RunStore:
        for shard in self._shards:
            shard._waiting(away_s)
        return self

    hurry = each(RunStore.hurry)

    @property
    def waits(self) -> bool:
        return any(shard.waits for shard in self._shards)

    def close(self) -> None:
        super().close()
        for shard in self._shards:
            shard.close()

    # --- what belongs to one group

    begin = routed(RunStore.begin)
    journal_turn = routed(RunStore.journal_turn)
    turn_entry = routed(RunStore.turn_entry)
    step_entry = routed(RunStore.step_entry)
    part_entry = routed(RunStore.part_entry)
    journal_partial = routed(RunStore.journal_partial)
    journal_step = routed(RunStore.journal_step)
    restart_episode = routed(RunStore.restart_episode)
    discard_turn = routed(RunStore.discard_turn)
    finish = routed(RunStore.finish)
    end_entry = routed(RunStore.end_entry)
    reload = routed(RunStore.reload)
    keep_snapshot = routed(RunStore.keep_snapshot)
    snapshot = routed(RunStore.snapshot)
    note_unsaved = routed(RunStore.note_unsaved)
    unsaved = routed(RunStore.unsaved)
    keep_artifacts = routed(RunStore.keep_artifacts)
    artifacts = routed(RunStore.artifacts)
    score = routed(RunStore.score)
    trajectory = routed(RunStore.trajectory)
    group = routed(RunStore.group)
    restarts = routed(RunStore.restarts)
    move_out = routed(RunStore.move_out)

    def awaiting(self, source: str, limit: int, *, skip: Iterable[str] = (), settled: bool = False) -> list[str]:
        skip = list(skip)
        found = (shard.awaiting(source, limit, skip=skip, settled=settled) for shard in self._shards)
        return list(islice((id for ids in zip_longest(*found) for id in ids if id is not None), limit))

    def scores(self, source: str | None = None) -> list[Scored]:
        found = (shard.scores(source) for shard in self._shards)
        return list(merge(*found, key=lambda one: (*read_turn_id(one.turn_id), one.source, one.version)))

    # --- reads

    def trajectories(self, purpose: str) -> Iterator[Trajectory]:
        return merge(*(shard.trajectories(purpose) for shard in self._shards), key=lambda one: one.group_id)

    def results(self, after: int = 0) -> list[GroupResult]:
        end = min((one for shard in self._shards if (one := shard.first_open()) is not None), default=math.inf)
        found = merge(*(shard.results(after) for shard in self._shards), key=lambda one: one.id)
        return [one for one in found if one.id < end]

    def first_open(self) -> int | None:
        return min((one for shard in self._shards if (one := shard.first_open()) is not None), default=None)

    def episodes(
        self, purpose: str | None = None, *, group_id: int | None = None, after: int = 0, limit: int = 1000
    ) -> list[EpisodeRow]:
        found = (shard.episodes(purpose, group_id=group_id, after=after, limit=limit) for shard in self._shards)
        return list(islice(merge(*found, key=lambda one: one.id), limit))

    def purposes(self) -> list[str]:
        return sorted(set(chain(*(shard.purposes() for shard in self._shards))))

    def counts(self, purpose: str = "train") -> dict[GroupState, int]:
        return _total(shard.counts(purpose) for shard in self._shards)

    def movable(self) -> list[int]:
        return sorted(chain(*(shard.movable() for shard in self._shards)))

    left_behind = summed(RunStore.left_behind)
    late_open = summed(RunStore.late_open)
    episodes_trained = summed(RunStore.episodes_trained)

    def replays(self, max_replays: int, *, besides: Iterable[str] = ()) -> Replays:
        known = set(besides).union(*self._ask(quarantined))
        found = [shard.replays(max_replays, besides=known) for shard in self._shards]
        return Replays(
            played=sum(one.played for one in found),
            waiting=sum(one.waiting for one in found),
            given_up=sum(one.given_up for one in found),
        )

    def quarantined(self) -> list[Quarantined]:
        return list(merge(*(shard.quarantined() for shard in self._shards), key=lambda one: one.time_s))

    def drops(self) -> dict[str, int]:
        return _total(shard.drops() for shard in self._shards)

    def endings(self, *, evaluation: bool = False) -> dict[StopReason, int]:
        return _total(shard.endings(evaluation=evaluation) for shard in self._shards)

    def failures(self) -> Failures:
        """As of one store. Outages of one cause that began at one time in several databases are one; those in a row
        are counted by the database that saw the fewest of them, if it saw any."""
        found = [shard.failures() for shard in self._shards]
        sql = f"SELECT cause, began_s FROM outages WHERE attempt = ({ATTEMPT}) AND cause <> '{RAISED}' ORDER BY began_s"
        outages, began = 0, dict[str, float]()
        for cause, began_s in merge(*self._ask(lambda db: db.rows(sql)), key=lambda row: row[1]):
            if began_s >= began.get(cause, -math.inf) + OUTAGE_S:
                outages, began[cause] = outages + 1, began_s
        return Failures(
            failed=sum(one.failed for one in found),
            ended=sum(one.ended for one in found),
            detail=next((one.detail for one in found if one.detail), ""),
            outages=outages,
            in_a_row=min(outages, min((one.in_a_row for one in found if one.outages), default=0)),
            well=sum(one.well for one in found),
            raised=sum(one.raised for one in found),
            raised_in_a_row=min((one.raised_in_a_row for one in found if one.raised), default=0),
            running=sum(one.running for one in found),
        )

    def failed_tasks(self, purpose: str | None = None, *, after_s: float = 0.0) -> list[FailedTask]:
        rows = chain(*(shard.failed_tasks(purpose, after_s=after_s) for shard in self._shards))
        return failed_together(sorted(rows, key=lambda one: one.episode))

    def waited(self) -> Waits:
        found = [shard.waited() for shard in self._shards]
        return Waits(sum(one.engine_s for one in found), sum(one.env_s for one in found))

    def length_bias(self) -> LengthBias:
        found = [shard.length_bias() for shard in self._shards]
        reasons: dict[str, list[Lengths]] = defaultdict(list)
        for reason, lengths in chain(*(one.by_reason.items() for one in found)):
            reasons[reason].append(lengths)
        return LengthBias(
            trained=mean_of([one.trained for one in found]),
            dropped=mean_of([one.dropped for one in found]),
            by_reason={reason: mean_of(lengths) for reason, lengths in sorted(reasons.items())},
        )

    def training_bias(self, returns: Returns) -> TrainingBias:
        return compared([shard.played(returns) for shard in self._shards])

    def progress(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(shard.progress() for shard in self._shards), strict=True)))

    def lineage(self, step: int) -> list[int]:
        return sorted(chain(*(shard.lineage(step) for shard in self._shards)))

    def episode_times(self, limit: int) -> list[EpisodeTimes]:
        found = list(merge(*(shard.episode_times(limit) for shard in self._shards), key=lambda one: one.group_id))
        newest = set(sorted({one.group_id for one in found})[-limit:])
        return [one for one in found if one.group_id in newest]

    def steps_trained(self) -> dict[int, Gone]:
        found = sorted(chain(*(shard.steps_trained().items() for shard in self._shards)), key=_worst)
        return dict(sorted(dict(found).items()))

    def took(self, step: int) -> Span:
        spans = [shard.took(step) for shard in self._shards]
        return Span(max(one.since_s for one in spans), max(one.until_s for one in spans))

    def retaken(self, step: int, took: Span) -> list[Group]:
        found = list(chain(*(shard.retaken(step, took) for shard in self._shards)))
        skipped = sorted((one for one in found if one.skipped), key=lambda one: one.id)
        return [one for one in found if not one.skipped] + skipped

    def forked(self) -> frozenset[int]:
        return frozenset(chain(*(shard.forked() for shard in self._shards)))

    def fork_states(self, limit: int) -> list[GroupState]:
        found = zip_longest(*(shard.fork_states(limit) for shard in self._shards))
        return [state for states in found for state in states if state is not None][:limit]

    # --- what needs all rows in one database

    together = refused(RunStore.together)


def _worst(step: tuple[int, Gone]) -> int:
    return ("", "tokens", "episodes").index(step[1])


def _total(parts: Iterable[dict[Any, int]]) -> dict[Any, int]:
    total = Counter[Any]()
    for part in parts:
        total.update(part)
    return dict(total)
