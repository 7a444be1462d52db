"""The run store: one SQLite file that is journal, partial-rollout checkpoint, buffer, lineage and metrics of a run.

Every process of a run opens a `RunStore`, and gives its functions the parts that they need. Calls are synchronous and
short, but another process's write lock may hold a write up: programs with a loop await theirs (`journal_writer`,
`async_calls`). Standard library and zstandard only; trio in those two, psycopg in `databases/postgres`.

    store.groups     groups and their members: admission, forks, counts           episodes/groups.py
    store.played     groups that no worker of the run journaled                   played_groups.py
    store.leases     which worker plays which episode                             episodes/leases.py
    store.deaths     dead workers: what they held, which task killed them         episodes/worker_deaths.py
    store.journal    an episode turn by turn, its snapshots and files, its end    episodes/journal.py
    store.replays    what infrastructure failed and is played again               episodes/replays.py
    store.scores     rewards of turns by their sources                            episodes/scores.py
    store.buffer     what a step takes, closing and expiry of groups              buffer/buffer.py
    store.trained    the groups of steps that are over, taken again               buffer/trained_steps.py
    store.versions   weight versions, minted once                                 versions.py
    store.lineage    checkpoints, rollback, retention, which learner leads        lineage.py
    store.recovery   repair of the lineage after a loss of power                  recovery.py
    store.reads      rows back into records                                       reads.py
    store.search     episodes by filter, order and text                           episode_search.py
    store.metrics    measured values, counts, durations, the bias of training     metrics.py

A value that the processes of a run agree on is under a key of `run_values`, read and set by `store.meta`.

    databases        SQLite in a file, PostgreSQL on a server: transactions, deadlines, errors, who hears of writes
    schema           tables and indexes: `schema.sql`
    interfaces       what an episode, a worker and a reward source ask of their store
    audit            the laws, checked from the raw rows
    codec            packing
    copy_database    a whole store into another database
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

from agentrl.algos.judging import Returns
from agentrl.errors import DiskFull, LeaseLost, StoreError
from agentrl.host.with_block import Closing
from agentrl.store.buffer.admission import AdmissionBounds, Load, Room, admissible_groups
from agentrl.store.buffer.buffer import Expired, GroupBuffer
from agentrl.store.buffer.closing import FULL, ClosePolicy, Full, Patience, Quorum, close_policy
from agentrl.store.buffer.group_order import Freshest, Oldest, Pick, Prioritised, Ready, TakeOrder, Windowed
from agentrl.store.buffer.trained_steps import TrainedSteps
from agentrl.store.databases.calls_together import Result
from agentrl.store.databases.change_signal import Role, Signal
from agentrl.store.databases.database import Database, retried
from agentrl.store.databases.driver import damaged
from agentrl.store.databases.open_store import connect, look
from agentrl.store.episode_search import EpisodeFilter, EpisodeSearch, Searched
from agentrl.store.episodes.endings import Ending
from agentrl.store.episodes.groups import TEXT, TRAIN, Groups
from agentrl.store.episodes.journal import EnvSnapshot, Journal
from agentrl.store.episodes.leases import Claim, Leases
from agentrl.store.episodes.partial_turns import Partial
from agentrl.store.episodes.replays import ReplayedFailures, Replays, Requeued
from agentrl.store.episodes.scores import Scored, Scores, Source
from agentrl.store.episodes.worker_deaths import Deaths, Quarantined, Released
from agentrl.store.learner_fence import check_lead
from agentrl.store.lineage import Checkpoint, Lineage
from agentrl.store.metrics import (
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
from agentrl.store.played_groups import PlayedGroups, PlayedMember
from agentrl.store.reads import EpisodeRow, GroupResult, Readers, Restart
from agentrl.store.recovery import Recovery, Saved
from agentrl.store.schema import FIRST_META, SET_META
from agentrl.store.versions import Versions

__all__ = [
    "FULL",
    "TEXT",
    "TRAIN",
    "AdmissionBounds",
    "Checkpoint",
    "Claim",
    "ClosePolicy",
    "DiskFull",
    "Ending",
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
    "Oldest",
    "Partial",
    "Patience",
    "Pick",
    "PlayedMember",
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
    "TakeOrder",
    "TrainingBias",
    "Windowed",
    "admissible_groups",
    "close_policy",
]


class RunStore(Closing):
    """A run's store, opened by this process. Threads may share it; forked children may not: they open their own.

    Its parts are attributes, each with the calls on one kind of rows. A caller that needs one part takes that part.
    `clock` gives seconds since the epoch, the same for every process of the run: by default that of the machine for a
    file, and that of its server for PostgreSQL. A simulation passes its own."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._signals: dict[Role, Signal] = {}
        self.versions: Final = Versions(db)
        self.groups: Final = Groups(db)
        self.played: Final = PlayedGroups(db, self.versions)
        self.leases: Final = Leases(db)
        self.deaths: Final = Deaths(db)
        self.journal: Final = Journal(db, self.versions)
        self.replays: Final = ReplayedFailures(db)
        self.scores: Final = Scores(db)
        self.buffer: Final = GroupBuffer(db)
        self.trained: Final = TrainedSteps(db)
        self.lineage: Final = Lineage(db)
        self.recovery: Final = Recovery(db)
        self.reads: Final = Readers(db)
        self.search: Final = EpisodeSearch(db)
        self.metrics: Final = Metrics(db)

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
        database = connect(Path(path), clock=clock, create=True, url=url)
        try:
            # In one transaction with the tables: a process killed between the two would leave a store that nobody can
            # resume, since it has no configuration, and nobody can begin, since it has tables.
            database.prepare(create=True, first=lambda: database.execute(FIRST_META, (config_json,)))
        except BaseException:
            database.close()
            raise
        return cls(database)

    @classmethod
    def open(cls, path: str | Path, *, clock: Callable[[], float] = time.time, away_s: float | None = None) -> RunStore:
        """The store at `path`. `away_s`: how long a call waits for a database that is away, in seconds; opening it
        never does. Raises UsageError if there is none, FormatError if it has another schema, StoreAway if the database
        does not answer, StoreError if the file is something else."""
        database = connect(Path(path), clock=clock)
        try:
            # Not retried as later calls are: whoever opens a store has just typed its address, and should read at once
            # that nobody answers there.
            database.prepare(create=False)
        except BaseException:
            database.close()
            raise
        database.waiting.away_s = database.waiting.away_s if away_s is None else away_s
        return cls(database)

    def hurry(self, busy_s: float) -> None:
        """From now on wait no longer than `busy_s` seconds for another process's write lock, or for a database that is
        away; a wait under way ends soon, too."""
        self._db.hurry(busy_s)

    @retried
    def refuse_damage(self) -> None:
        """Have the database check all of the store: a page that changed would be noticed by whoever reads it, or by
        nobody. Raises StoreDamaged."""
        with self._db.read():
            fault_messages = self._db.upkeep.faults()
        if fault_messages:
            raise damaged(self.path, ValueError(fault_messages[0]))

    @property
    def waits(self) -> bool:
        """Whether a thread of this process waits for another process's write lock now (for two minutes at most), or for
        a database that is away (for `away_s` at most)."""
        return self._db.waiting.for_lock or self._db.waiting.for_database > 0

    @classmethod
    def read(cls, path: str | Path, *, clock: Callable[[], float] = time.time, away_s: float | None = None) -> RunStore:
        """The store at `path`, to look at: nothing of it is written, and no writer waits. `away_s` as for `open`; 0 for
        reads of a program with a loop (see `async_calls`).

        Raises UsageError if there is none, FormatError if it has another schema, StoreAway."""
        database = look(Path(path), clock=clock)
        database.waiting.away_s = database.waiting.away_s if away_s is None else away_s
        return cls(database)

    @retried
    def now(self) -> float:
        """The time by which leases and deadlines of this store are judged, in seconds since the epoch."""
        return self._db.clock()

    @retried
    def together(self, calls: Sequence[Callable[[], Any]], *, shared: bool = False) -> list[Result]:
        """Make calls of this handle, in one transaction for all their writes; each has its own result. A call that
        waits for the disk (`mint_version`, `checkpoint`, `take`, …) is not among them. `shared`: each journals one
        episode, so other processes may do the same meanwhile."""
        return self._db.together(calls, shared=shared)

    @property
    def remote(self) -> bool:
        """Whether it is on a server, which a loop of tasks asks in a thread (see `async_calls`)."""
        return self._db.remote

    @property
    def shares(self) -> bool:
        """Whether calls that journal may go on in several processes at once."""
        return self._db.shares

    @retried
    def signal(self, role: Role) -> Signal:
        """The signal by which `role` learns when to look at the store again, see `change_signal`. One for each role of
        this handle."""
        if role not in self._signals:
            self._signals[role] = Signal(self._db.upkeep.watch(), role, remote=self.remote)
        return self._signals[role]

    @retried
    def wait_for_work(self, role: Role, timeout_s: float) -> None:
        """Block until there may be work for `role` that was not there when this last returned, or until the timeout.
        A trio program uses `agentrl.store.async_calls`."""
        work_signal, deadline_s = self.signal(role), time.monotonic() + timeout_s
        while not work_signal.changed() and (left_s := deadline_s - time.monotonic()) > 0:
            descriptors = [] if work_signal.wakes is None else [work_signal.wakes]
            # Not `select`, which fails for descriptors above 1023: a process with a few hundred sandboxes has
            # thousands. SQLite gives no descriptor at all, and then this line only sleeps.
            connection.wait(descriptors, min(work_signal.pause_s, left_s))

    def close(self) -> None:
        """Close this process's handle; no call may follow."""
        for open_signal in self._signals.values():
            open_signal.close()
        self._db.close()

    @property
    def path(self) -> Path:
        """The store's file."""
        return self._db.path

    @retried
    def meta(self, key: str) -> str | None:
        """A value that the run's processes agree on; None if nobody set it. "config" is the run's configuration."""
        with self._db.read():
            meta_row = self._db.row("SELECT value FROM meta WHERE key = ?", (key,))
        return None if meta_row is None else meta_row[0]

    @retried
    def set_meta(self, key: str, value: str) -> None:
        """Set a value for every process of the run."""
        with self._db.write():
            check_lead(self._db)
            self._db.execute(SET_META, (key, value))

    @retried
    def swap_meta(self, key: str, before: str, value: str) -> bool:
        """Set a value that is `before` now ("": nobody set it, or set it to nothing); returns whether it was."""
        with self._db.write():
            check_lead(self._db)
            meta_row = self._db.row("SELECT value FROM meta WHERE key = ?", (key,))
            # Compared and set under one write lock. With a read before a `set_meta`, two commands of a user that come
            # together would both believe that theirs was the change.
            if ("" if meta_row is None else meta_row[0]) != before:
                return False
            self._db.execute(SET_META, (key, value))
        return True
