"""One session of PostgreSQL: its connection, which is made anew when it was lost, its clock, and what its errors say.

Time is the server's: a lease that one host gives is judged by another, and their clocks may differ by minutes. Each
connection learns it as it begins, and again with a write now and then; in between it counts on.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from agentrl.errors import StoreAway
from agentrl.store import schema
from agentrl.store.databases.postgres.address import SILENT_S, Address
from agentrl.store.databases.postgres.connection import DeadlineConnection, Pipeline

_CLOCK_S = 60.0  # after which a write asks for the server's time again
_LOCK = schema.APPLICATION_ID << 32  # advisory locks of run stores: this, and the schema's number
_NOW = "extract(epoch FROM clock_timestamp())::float8"

_LOST = ("08", "57P", "25P03")
"""How the states of errors begin with which a server ends a session: it stops, or somebody was silent for too long."""

_END_SILENT = b"""
SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()
    AND (l.classid::bigint << 32 | l.objid::bigint) = $1 AND l.objsubid = 1
    AND a.wait_event = 'ClientRead' AND a.state_change < clock_timestamp() - make_interval(secs => $2)
"""


class Session:
    """A session in the schema of a run. Raises psycopg.Error from every call that speaks to the server."""

    def __init__(self, path: Path, address: Address, *, reads: bool) -> None:
        self._path, self._address, self._reads = path, address, reads
        self._ahead_s, self._clock_set_s = 0.0, 0.0  # of the server's time before `_host_s`; when it was read
        self.lock_id = 0
        """The number of the run's advisory lock; 0 if the database has no schema of the run."""
        self.connect()

    def connect(self) -> None:
        """Open the connection, a new one if there was one."""
        self.connection = self._address.connect(reads=self._reads)
        self.pipeline = Pipeline(self.connection)
        schema_query = f"SELECT to_regnamespace($1)::oid::bigint, {_NOW}"
        answer_row = self.connection.execute(schema_query, (self._address.schema,)).fetchone()
        assert answer_row is not None
        self.lock_id = 0 if answer_row[0] is None else _LOCK + answer_row[0]
        self._set_clock(answer_row[1])

    def watch(self) -> DeadlineConnection:
        """Another connection to the same schema, which only reads."""
        return self._address.connect(reads=True)

    @property
    def schema(self) -> str:
        return self._address.schema

    # --- the server's clock

    def servers_s(self) -> float:
        """The server's time, in seconds since the epoch."""
        return _host_s() + self._ahead_s

    def _set_clock(self, server_s: float) -> None:
        self._clock_set_s = _host_s()
        self._ahead_s = server_s - self._clock_set_s

    # --- transactions

    @property
    def in_transaction(self) -> bool:
        return self.connection.info.transaction_status in (
            TransactionStatus.ACTIVE,
            TransactionStatus.INTRANS,
            TransactionStatus.INERROR,
        )

    def lock(self, *, shared: bool = False) -> None:
        """Begin a transaction that holds the run's lock; set the clock if that was long ago."""
        lock_suffix = "_shared" if shared else ""
        clock_query = f"; SELECT {_NOW}" if _host_s() - self._clock_set_s > _CLOCK_S else ""
        # The number is read after a lost connection was replaced: the new one may have another schema.
        # The lock belongs to the transaction, not to the session: a process that dies, or an error that nobody
        # expected, frees it with the transaction. A lock of the session would stay until somebody gives it up by name.
        lock_answer = self.begin(
            "BEGIN", lambda: f"SELECT pg_advisory_xact_lock{lock_suffix}({self.lock_id}){clock_query}"
        )
        while lock_answer.nextset():
            pass
        if clock_query and (clock_row := lock_answer.fetchone()) is not None:
            self._set_clock(clock_row[0])

    def begin(self, begin: str, lock: Callable[[], str] | None = None) -> psycopg.Cursor[Any]:
        """Begin a transaction; on a new connection if the old one was lost."""
        # A lost connection is replaced once, without the caller's knowledge: nothing of a transaction exists yet. A
        # second failure is not a lost connection but a server that is away, and waiting for that is the business of
        # `outlast`.
        for is_first_try in (True, False):
            try:
                if self.connection.closed:
                    self.connect()
                return self.connection.execute((begin if lock is None else f"{begin}; {lock()}").encode())
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if not self.lost(error):
                    self.roll_back()
                    self._end_silent()
                    raise
                self.connection.close()
                if not is_first_try:
                    raise
        raise AssertionError("unreachable")

    def _end_silent(self) -> None:
        """End sessions that hold the run's lock and have sent nothing for too long. The server does that by itself, but
        for one that fell silent between statements that it sent without waiting."""
        with suppress(psycopg.Error):
            self.connection.execute(_END_SILENT, (self.lock_id, SILENT_S))

    def run(self, command: str) -> None:
        """Run a command outside the pipeline."""
        self.connection.execute(command.encode())

    def run_once(self, command: str) -> None:
        """Run a statement of the open transaction that no later one resembles."""
        if self.pipeline.entered:
            self.pipeline.send_once(command.encode())
        else:
            self.run(command)

    def settle(self) -> None:
        """Wait for all statements so far, and leave the pipeline. Raises psycopg.Error for the first that failed."""
        self.pipeline.leave()

    def roll_back(self) -> None:
        """End an open transaction without a trace. Raises nothing."""
        with suppress(psycopg.Error):
            if self.pipeline.entered:
                self.pipeline.send(b"ROLLBACK", ())
        with suppress(psycopg.Error):
            self.settle()
        if self.in_transaction:
            try:
                self.connection.execute("ROLLBACK")
            except psycopg.OperationalError:  # it was lost: the server has rolled back
                self.connection.close()

    # --- a connection that was lost

    def is_silent(self) -> bool:
        """Whether the server has sent nothing unasked, as it does when it ends a session."""
        if self.connection.closed:
            return False
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLIN)
        return not poller.poll(0)

    def lost(self, error: Exception) -> bool:
        """Whether the connection of a failed statement was lost, also if there is a new one by now. Errors without a
        state are libpq's, which hears no server any more."""
        sql_state = getattr(error, "sqlstate", None) or ""
        # The exact class: its subclasses have a state and are answers of a server that is there, such as a full disk or
        # a lock that was not to be had.
        return self.connection.closed or sql_state.startswith(_LOST) or type(error) is psycopg.OperationalError

    def away(self, error: Exception) -> StoreAway:
        """The error for a server that does not answer."""
        return StoreAway(f"{self._path}: the database does not answer ({one_line(error)}): start it")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _host_s() -> float:
    """Seconds of a clock of this host that nobody sets, and that goes on while it is suspended."""
    # Not `time.time`, which NTP and people set, and not `time.monotonic`, which stands still while a laptop sleeps:
    # after the sleep all leases of other hosts would look young.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
