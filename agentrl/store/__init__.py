"""The run store: one SQLite file that is journal, partial-rollout checkpoint, buffer, lineage and metrics of a run.

Every process of a run opens it. Calls are synchronous and short, but another process's write lock may hold a write up:
programs with a loop await theirs (see `asynchronous`). Standard library and zstandard only; trio in `asynchronous`,
psycopg in `databases/postgres`.

    databases      SQLite in a file, PostgreSQL on a server: transactions, deadlines, errors, who hears of writes
    episodes       groups and episodes: leases, journal, partial turns, endings, scores, replays, forks,
                   failures that are played again because somebody asks
    buffer         between rollout and learner: admission, closing of groups, what a step takes and when
    audit          the laws, checked from the raw rows
    asynchronous   for a trio program: awaited writes committed together, awaited reads, waiting for work
    interfaces     what each process of a run may ask of the store
    schema         tables and migrations
    run_values     every key of `meta`, with its type
    versions       weight versions, minted once
    lineage        checkpoint, rollback, retention, repair after a loss of power
    learner_fence  which process is the learner
    reads          rows back into records
    episode_search  find episodes: filters, orders, texts
    codec          packing
    metrics        values, durations, drops, what was trained beside what was played
    transfer       groups out of one store into another
    copy_database  a whole store into another database
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from agentrl.errors import DiskFull, LeaseLost, StoreError, StoreVersionError
from agentrl.host.with_block import Closing
from agentrl.store.buffer.admission import AdmissionBounds, Load, Room, admissible_groups
from agentrl.store.buffer.buffer import Expired, GroupBuffer, Retaking
from agentrl.store.buffer.closing import FULL, ClosePolicy, Full, Patience, Quorum, close_policy
from agentrl.store.buffer.group_order import Freshest, Oldest, Pick, Prioritised, Ready, TakeOrder, Windowed
from agentrl.store.buffer.no_signal import Returns
from agentrl.store.databases.change_signal import Role, Signal
from agentrl.store.databases.database import Database, Result
from agentrl.store.databases.open_store import connect, look, refuse_several
from agentrl.store.episode_search import EpisodeFilter, EpisodeSearch, Searched
from agentrl.store.episodes.groups import TRAIN, Forks, Groups, ReplayCounts, Replays
from agentrl.store.episodes.journal import Artifacts, EnvSnapshot, EnvSnapshots, Journal, Restarts
from agentrl.store.episodes.leases import Claim, Leases
from agentrl.store.episodes.partial_turns import Partial
from agentrl.store.episodes.requeue import Requeue, Requeued
from agentrl.store.episodes.scores import Rewards, Scored, Source
from agentrl.store.episodes.worker_deaths import Deaths, Quarantined, Released
from agentrl.store.learner_fence import Leading, check_lead
from agentrl.store.lineage import Checkpoint, Lineage, Recovery, Saved
from agentrl.store.metrics import (
    Bias,
    Durations,
    EpisodeLengths,
    EpisodeTimes,
    FailedTask,
    Failures,
    LengthBias,
    Metric,
    Metrics,
    Side,
    TrainingBias,
)
from agentrl.store.reads import EpisodeRow, GroupResult, Readers, Restart
from agentrl.store.schema import FIRST_META, SET_META
from agentrl.store.transfer import MovedGroup, MovedMember, Moving

__all__ = [
    "FULL",
    "TRAIN",
    "AdmissionBounds",
    "Checkpoint",
    "Claim",
    "ClosePolicy",
    "DiskFull",
    "EnvSnapshot",
    "EpisodeFilter",
    "EpisodeLengths",
    "EpisodeRow",
    "EpisodeTimes",
    "Expired",
    "FailedTask",
    "Failures",
    "Freshest",
    "Full",
    "GroupResult",
    "LeaseLost",
    "LengthBias",
    "Load",
    "Metric",
    "MovedGroup",
    "MovedMember",
    "Oldest",
    "Partial",
    "Patience",
    "Pick",
    "Prioritised",
    "Quarantined",
    "Quorum",
    "Ready",
    "Released",
    "Replays",
    "Requeued",
    "Restart",
    "Returns",
    "Room",
    "RunStore",
    "Saved",
    "Scored",
    "Searched",
    "Side",
    "Source",
    "StoreError",
    "StoreVersionError",
    "TakeOrder",
    "TrainingBias",
    "Windowed",
    "admissible_groups",
    "close_policy",
]


class RunStore(
    Groups,
    Forks,
    Moving,
    Leases,
    Deaths,
    Journal,
    Restarts,
    EnvSnapshots,
    GroupBuffer,
    Retaking,
    Leading,
    Lineage,
    Recovery,
    Rewards,
    Artifacts,
    Metrics,
    Bias,
    Readers,
    EpisodeSearch,
    ReplayCounts,
    Requeue,
    Durations,
    Closing,
):
    """A run's store, opened by this process. Threads may share it; forked children may not: they open their own.

    `clock` gives seconds since the epoch, the same for every process of the run: by default that of the machine for a
    file, and that of its server for PostgreSQL. A simulation passes its own."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._signals: dict[Role, Signal] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        config_json: str,
        *,
        url: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> RunStore:
        """A new store holding the run's configuration: at `path`, or in the PostgreSQL database at `url`, and then
        `path` is the address file that says so. Raises UsageError if there is a run at `path` already."""
        db = connect(Path(path), clock=clock, create=True, url=url)
        try:
            db.prepare(create=True, first=lambda: db.execute(FIRST_META, (config_json,)))
        except BaseException:
            db.close()
            raise
        return cls(db)

    @classmethod
    def open(cls, path: str | Path, *, clock: Callable[[], float] = time.time, away_s: float | None = None) -> RunStore:
        """The store at `path`, its schema brought up to date. `away_s`: how long a call waits for a database that is
        away, in seconds; opening it never does. Raises UsageError if there is none, StoreVersionError if a newer
        agentrl wrote it, StoreAway if the database does not answer, StoreError if the file is something else."""
        refuse_several(Path(path))
        db = connect(Path(path), clock=clock)
        try:
            db.prepare(create=False)
        except BaseException:
            db.close()
            raise
        db.away_s = db.away_s if away_s is None else away_s
        return cls(db)

    def hurry(self, busy_s: float) -> None:
        """From now on wait no longer than `busy_s` seconds for another process's write lock, or for a database that is
        away; a wait under way ends soon, too."""
        self._db.hurry(busy_s)

    @property
    def waits(self) -> bool:
        """Whether a thread of this process waits for another process's write lock now (for two minutes at most), or for
        a database that is away (for `away_s` at most)."""
        return self._db.waits or self._db.away > 0

    @classmethod
    def read(cls, path: str | Path, *, clock: Callable[[], float] = time.time, away_s: float | None = None) -> RunStore:
        """The store at `path`, to look at: nothing of it is written or migrated, and no writer waits. A store of an
        older agentrl is read from a private copy, which does not change any more. `away_s` as for `open`; 0 for reads
        of a program with a loop (see `asynchronous`).

        Raises UsageError if there is none, StoreVersionError if a newer agentrl wrote it, StoreAway."""
        refuse_several(Path(path))
        db = look(Path(path), clock=clock)
        db.away_s = db.away_s if away_s is None else away_s
        return cls(db)

    def now(self) -> float:
        """The time by which leases and deadlines of this store are judged, in seconds since the epoch."""
        return self._db.clock()

    def together(self, calls: Sequence[Callable[[], Any]], *, shared: bool = False) -> list[Result]:
        """Make calls of this handle, in one transaction for all their writes; each has its own result. A call that
        waits for the disk (`mint_version`, `checkpoint`, `take`, …) is not among them. `shared`: each journals one
        episode, so other processes may do the same meanwhile."""
        return self._db.together(calls, shared=shared)

    @property
    def remote(self) -> bool:
        """Whether it is on a server, which a loop of tasks asks in a thread (see `asynchronous`)."""
        return self._db.remote

    @property
    def shares(self) -> bool:
        """Whether calls that journal may go on in several processes at once."""
        return self._db.shares

    def signal(self, role: Role) -> Signal:
        """Tells `role` when to look at the store again, see `change_signal`. One for each role of this handle."""
        if role not in self._signals:
            self._signals[role] = Signal(self._db.watch(), role, remote=self.remote)
        return self._signals[role]

    def wait_for_work(self, role: Role, timeout_s: float) -> None:
        """Block until there may be work for `role` that was not there when this last returned, or until the timeout.
        A trio program uses `agentrl.store.asynchronous`."""
        signal, until = self.signal(role), time.monotonic() + timeout_s
        while not signal.changed() and (left_s := until - time.monotonic()) > 0:
            wakes = [] if signal.wakes is None else [signal.wakes]
            connection.wait(wakes, min(signal.pause_s, left_s))

    def close(self) -> None:
        """Close this process's handle; no call may follow."""
        for signal in self._signals.values():
            signal.close()
        self._db.close()

    @property
    def path(self) -> Path:
        """The store's file."""
        return self._db.path

    def meta(self, key: str) -> str | None:
        """A value that the run's processes agree on; None if nobody set it. "config" is the run's configuration."""
        with self._db.read():
            row = self._db.row("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        """Set a value for every process of the run."""
        with self._db.write():
            check_lead(self._db)
            self._db.execute(SET_META, (key, value))

    def swap_meta(self, key: str, before: str, value: str) -> bool:
        """Set a value that is `before` now ("": nobody set it, or set it to nothing); returns whether it was."""
        with self._db.write():
            check_lead(self._db)
            row = self._db.row("SELECT value FROM meta WHERE key = ?", (key,))
            if ("" if row is None else row[0]) != before:
                return False
            self._db.execute(SET_META, (key, value))
        return True
