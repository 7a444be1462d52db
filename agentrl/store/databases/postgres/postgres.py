"""The run store in PostgreSQL: a schema of a database that many hosts share.

The run's folder holds an address file in the place of SQLite's file. Owns the connection and its deadlines;
`sql` has the statements in PostgreSQL's words, `connection` sends them. Never knows what a table is for.

Every commit waits for the server's disk: the server may fall and come back under processes that live on, and they must
not have seen what it lost. A write holds an advisory lock of its run until it commits, so writers take turns as they do
with SQLite; but those of the journal share it: each writes only rows of an episode whose fence it checked, and fences
rise under the lock that nobody shares. Statements of a transaction go out without waiting for each other, its end with
them; only the lock, and statements whose rows are asked for, wait for the server.

The server ends a session that is silent within a transaction for `_SILENT_S`, and one whose host no longer answers; one
that is silent between two statements is ended by whoever waits for its lock. So a process that hangs, or is cut off,
gives the lock up and leaves nothing of its transaction.

A connection that is lost within a transaction fails it with StoreAway, and nothing of it is left. If it was lost while
the transaction ended, that is not known yet: so each transaction writes its number to a row of its connection's own in
`last_writes`, and a new connection reads there, under the run's lock, whether it was committed. The numbers of the
server's own transactions do not serve for this: a crash may give one of them away twice.

Time is the server's: a lease that one host gives is judged by another, and their clocks may differ by minutes. Each
connection learns it as it begins, and again with a write now and then; in between it counts on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psycopg
from psycopg import sql as names
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumper

from agentrl.errors import DiskFull, StoreAway, StoreBusy, StoreError, UsageError
from agentrl.host.disk_space import is_full
from agentrl.store import schema
from agentrl.store.databases.database import PAUSE_S, Asked, ChangeWatch, Cursor, Database, Row
from agentrl.store.databases.postgres.connection import DeadlineConnection, Notices, Pipeline
from agentrl.store.databases.postgres.partitions import READ, Partitions, Tables
from agentrl.store.databases.postgres.sql import many, parted, plain_insert, translated

CONNECT_S = 10.0
_SILENT_S = 30.0
_MOMENT_S = 1.0  # one try for the write lock; `Database` tries again
_STATEMENT_S = 60.0  # less than `ANSWER_S`
_CLOCK_S = 60.0  # after which a write asks for the server's time again
_LOCK = schema.APPLICATION_ID << 32  # advisory locks of run stores: this, and the schema's number


class Address(NamedTuple):
    """Where a store is: a URL for libpq without a password, and the schema of its run."""

    url: str
    schema: str

    @classmethod
    def of(cls, url: str, run: Path) -> Address:
        """The address of a new run in the database at `url`. Raises UsageError for a URL that names no database or
        holds a password, since it is written to the run's folder."""
        try:
            parts = conninfo_to_dict(url)
        except psycopg.Error:  # its message may quote a password
            raise UsageError(f"the store's URL is none of PostgreSQL: {_EXAMPLE}") from None
        if "password" in parts or "sslpassword" in parts:
            raise UsageError(f"the store's URL holds a password: leave it out, and give it in PGPASSWORD or {_PASSES}")
        if not url.startswith(("postgresql://", "postgres://")) or not parts.get("dbname"):
            raise UsageError(f"store {url!r} names no database: {_EXAMPLE}")
        word = re.sub(r"\W+", "_", run.name.lower(), flags=re.ASCII)[:30].strip("_")
        mark = hashlib.sha256(f"{run.absolute()}:{time.time_ns()}:{os.getpid()}".encode()).hexdigest()[:8]
        return cls(url, f"agentrl_{word}_{mark}")

    @classmethod
    def read(cls, path: Path) -> Address:
        """Read an address file. Raises UsageError."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            address = cls(str(found["url"]), str(found["schema"]))
            if not _SCHEMA.fullmatch(address.schema):  # it stands in statements as it is
                raise ValueError(f"{address.schema!r} is no schema of ours")
            return address
        except FileNotFoundError:
            raise UsageError(f"{path} holds no run: there is no such file") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not say where the run's store is ({error})") from None

    def write(self, path: Path) -> None:
        """Write an address file."""
        path.write_text(json.dumps(self._asdict()) + "\n", encoding="utf-8")

    def connect(self, *, reads: bool = False) -> DeadlineConnection:
        """A new connection, outside any transaction. Raises psycopg.Error."""
        settings = {
            "search_path": self.schema,
            "lock_timeout": f"{int(1000 * _MOMENT_S)}",
            "statement_timeout": f"{int(1000 * _STATEMENT_S)}",
            "idle_in_transaction_session_timeout": f"{int(1000 * _SILENT_S)}",
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": f"{int(1000 * _SILENT_S)}",
            "default_transaction_read_only": "on" if reads else "off",
        }
        connection = DeadlineConnection.connect(
            self.url,
            autocommit=True,
            prepare_threshold=None,  # what psycopg prepares it forgets at a rollback, and all that `Pipeline` prepared
            cursor_factory=psycopg.RawCursor,
            connect_timeout=int(CONNECT_S),
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=int(1000 * _SILENT_S),
            application_name="agentrl",
            options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
        )
        connection.adapters.register_dumper(str, StrDumper)
        connection.adapters.register_dumper(int, Int8Dumper)  # one type, so one prepared statement, however large
        connection.adapters.register_loader("numeric", _Number)
        return connection


_SCHEMA = re.compile("agentrl_[a-z0-9_]{1,50}")
_EXAMPLE = "give postgresql://user@host/database"
_PASSES = "~/.pgpass"


_LOST = ("08", "57P", "25P03")
"""How the states of errors begin with which a server ends a session: it stops, or somebody was silent for too long."""

_END_SILENT = b"""
SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()
    AND (l.classid::bigint << 32 | l.objid::bigint) = $1 AND l.objsubid = 1
    AND a.wait_event = 'ClientRead' AND a.state_change < clock_timestamp() - make_interval(secs => $2)
"""


_NOW = "extract(epoch FROM clock_timestamp())::float8"
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NUMBERED = b"INSERT INTO last_writes VALUES ($1, $2) ON CONFLICT (writer) DO UPDATE SET number = excluded.number"


class _Number(Loader):
    """A sum or mean of PostgreSQL: an int if it is one, else a float."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data).decode()
        return int(text) if text.lstrip("-").isdigit() else float(text)


class Postgres(Database):
    """A store in a schema of a PostgreSQL database."""

    shares: ClassVar[bool] = True
    remote: ClassVar[bool] = True
    _errors: ClassVar[type[Exception]] = psycopg.Error

    def __init__(self, path: Path, address: Address, clock: Callable[[], float], *, reads: bool = False) -> None:
        """Connect. `path` is the address file, which names the store in messages. Raises StoreError."""
        super().__init__(path, self._servers_s if clock is time.time else clock)
        self._ahead_s, self._asked_s = 0.0, 0.0  # of the server's time before `_host_s`; when it was asked for
        self._address, self._reads = address, reads
        self._lock_id = 0
        self._shares_lock = False  # whether the open write transaction does
        self._tables = Tables(self, address.schema)
        self._writer, self._written = uuid.uuid4().hex[:16], 0  # how many write transactions it has begun
        self._prepared = False  # whether the tables are known to be there
        self._parts = Partitions(self, self._once, lambda: -self._lock_id)
        if reads:
            self.away_s = CONNECT_S
        try:
            self._connection = self._dial()
        except psycopg.Error as error:
            raise self._away(error) from error

    def _dial(self) -> DeadlineConnection:
        connection = self._address.connect(reads=self._reads)
        self._pipeline = Pipeline(connection)
        found = connection.execute(
            f"SELECT to_regnamespace($1)::oid::bigint, {_NOW}", (self._address.schema,)
        ).fetchone()
        assert found is not None
        self._lock_id = 0 if found[0] is None else _LOCK + found[0]
        self._set_clock(found[1])
        return connection

    def _servers_s(self) -> float:
        """The server's time."""
        return _host_s() + self._ahead_s

    def _set_clock(self, server_s: float) -> None:
        self._asked_s = _host_s()
        self._ahead_s = server_s - self._asked_s

    def close(self) -> None:
        """Close the connection; one that a thread waits for a silent server on ends with the process."""
        if self._lock.acquire(_MOMENT_S):
            self._connection.close()
            self._lock.release()

    def prepare(self, *, create: bool, first: Callable[[], object] = lambda: None) -> None:
        if not create:
            self._check()
            return
        with self._lock, self._naming():
            name = names.Identifier(self._address.schema)
            self._connection.execute(names.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
            self._connection.close()
            self._connection = self._dial()
        with self.write():
            self._settle()  # several statements at once go through no pipeline
            if self._is_made():
                raise UsageError(f"{self.path} holds a run already: resume it, or choose another folder")
            self._run(schema.text("schema.postgres.sql"))
            self._run(f"INSERT INTO schema_version VALUES ({schema.SCHEMA_VERSION})")
            self._parts.room(0)
            first()
        self._prepared = True

    def look(self) -> None:
        """See that there is a store of our schema. Raises UsageError, FormatError."""
        self._check()

    def _check(self) -> None:
        """Raises UsageError if there is no store, FormatError if it has another schema."""
        with self.read():
            if not self._is_made():
                why = "it was never begun"
                if not self._lock_id:
                    why = f"the database has no schema {self._address.schema}: the run was removed"
                raise UsageError(f"{self.path} holds no run: {why}")
            ((version,),) = self.rows("SELECT version FROM schema_version")
        schema.check_version(version, self.path)
        self._prepared = True

    def drop(self) -> None:
        """Remove the schema with all that is in it."""
        with self._lock, self._naming():
            name = names.Identifier(self._address.schema)
            self._connection.execute(names.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(name))

    def _is_made(self) -> bool:
        """Whether the schema has our tables."""
        return self.row("SELECT to_regclass(?)", (f"{self._address.schema}.schema_version",)) != (None,)

    # --- transactions and statements ----------------------------------------------------------------------------------

    @property
    def _in_transaction(self) -> bool:
        return self._connection.info.transaction_status in (
            TransactionStatus.ACTIVE,
            TransactionStatus.INTRANS,
            TransactionStatus.INERROR,
        )

    def _begin_read(self) -> None:
        begins = (_BEGIN_READ, *READ) if self._prepared else (_BEGIN_READ,)
        if not self._said_nothing():  # it may have been closed: then a new one is
            self._start("; ".join(begins))
            self._pipeline.enter()
            return
        self._pipeline.enter()
        for statement in begins:
            self._pipeline.send(statement.encode(), ())

    def _said_nothing(self) -> bool:
        """Whether the server has sent nothing unasked, as it does when it ends a session."""
        connection = self._connection
        if connection.closed:
            return False
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return not poll.poll(0)

    def _begin_write(self, *, durable: bool, shared: bool) -> None:
        how = "_shared" if shared else ""
        asks = f"; SELECT {_NOW}" if _host_s() - self._asked_s > _CLOCK_S else ""
        told = self._start("BEGIN", lambda: f"SELECT pg_advisory_xact_lock{how}({self._lock_id}){asks}")
        while told.nextset():
            pass
        if asks and (row := told.fetchone()) is not None:
            self._set_clock(row[0])
        self._shares_lock = shared
        self._pipeline.enter()
        self._written += 1
        if self._prepared:
            self._pipeline.send(_NUMBERED, (self._writer, self._written))

    def _start(self, begin: str, lock: Callable[[], str] | None = None) -> psycopg.Cursor[Any]:
        """Begin a transaction; on a new connection if the old one was lost."""
        for first in (True, False):
            try:
                if self._connection.closed:
                    self._connection = self._dial()
                return self._connection.execute((begin if lock is None else f"{begin}; {lock()}").encode())
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if not self._lost(error):
                    self._roll_back()
                    self._end_silent()
                    raise
                self._connection.close()
                if not first:
                    raise
        raise AssertionError("unreachable")

    def _end_silent(self) -> None:
        """End sessions that hold the run's lock and have said nothing for too long. The server does that by itself, but
        for one that fell silent between statements that it sent without waiting."""
        with suppress(psycopg.Error):
            self._connection.execute(_END_SILENT, (self._lock_id, _SILENT_S))

    def _run(self, command: str) -> None:
        self._connection.execute(command.encode())

    def _once(self, command: str) -> None:
        """Run a statement of the open transaction that no later one resembles."""
        if self._pipeline.entered:
            self._pipeline.send_once(command.encode())
        else:
            self._run(command)

    def _commit(self) -> None:
        """A notification locks out all other commits of the database until this one is on the disk, so the journal goes
        without: nobody waits for it but reward sources, whose turns notify them by a trigger."""
        try:
            self._end("COMMIT" if self._shares_lock else f"NOTIFY {self._address.schema}; COMMIT")
        except psycopg.Error as error:
            if not self._lost(error) or not self._committed():
                raise

    def _end(self, command: str) -> None:
        """Run the last statements of the open transaction, which goes with all that was sent: after one that failed,
        the server runs none of them."""
        if not self._pipeline.entered:
            self._run(command)
            return
        for statement in command.split("; "):
            self._pipeline.send(statement.encode(), ())
        self._settle()
        if self._in_transaction:
            raise psycopg.errors.InFailedSqlTransaction("a statement of the transaction failed")

    def _committed(self) -> bool:
        """Whether the last transaction was committed, whose connection was lost meanwhile. Raises StoreError if the
        database does not say in time."""
        began, error = time.monotonic(), None
        self.away += 1
        self._connection.close()
        try:
            while self._prepared and (error is None or time.monotonic() - began < self.away_s):
                try:
                    self._start("BEGIN", lambda: f"SELECT pg_advisory_xact_lock({self._lock_id})")  # so it has ended
                    found = self.row("SELECT number FROM last_writes WHERE writer = ?", (self._writer,))
                    self._roll_back()
                    return found == (self._written,)
                except psycopg.Error as again:
                    if error is None:
                        told = f"agentrl: {self._away(again)}; it is waited for, {self.away_s:g} s at most"
                        print(told, file=sys.stderr, flush=True)
                    error = again
                time.sleep(PAUSE_S)
        finally:
            self.away -= 1
        why = f"{self.path}: the database does not answer, and may have kept the last write or not"
        raise StoreError(f"{why}: start it, then go on with agentrl train --resume {self.path.parent}") from error

    def all_rows(self, *asked: Asked) -> list[list[Row]]:
        """See `Database`: all of them go out before the first is waited for."""
        sent = [self.execute(sql, parameters) for sql, parameters in asked]
        return [list(one) for one in reversed(sent)][::-1]  # with the last answer come all before it

    def _settle(self) -> None:
        """Wait for all statements so far, and leave the pipeline. Raises psycopg.Error for the first that failed."""
        self._pipeline.leave()

    @contextmanager
    def _savepoint(self) -> Generator[None]:
        with suppress(psycopg.Error):
            self._settle()  # from here on a failure belongs to its statement
        with super()._savepoint():
            yield

    def _roll_back(self) -> None:
        with suppress(psycopg.Error):
            if self._pipeline.entered:
                self._pipeline.send(b"ROLLBACK", ())
        with suppress(psycopg.Error):
            self._settle()
        if self._in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except psycopg.OperationalError:  # it was lost: the server has rolled back
                self._connection.close()

    def _lost(self, error: Exception) -> bool:
        """Whether the connection of a failed statement was lost, also if there is a new one by now. Errors without a
        state are libpq's, which hears no server any more."""
        state = getattr(error, "sqlstate", None) or ""
        return self._connection.closed or state.startswith(_LOST) or type(error) is psycopg.OperationalError

    def _away(self, error: Exception) -> StoreAway:
        return StoreAway(f"{self.path}: the database does not answer ({_line(error)}): start it")

    def _named(self, error: Exception) -> StoreError:
        state = getattr(error, "sqlstate", None) or ""
        if is_full(error):
            return DiskFull(f"{self.path}: no space left for the database: free some; what was journaled is kept")
        if state in ("55P03", "57014"):
            who = f"another session has held the run's write lock for over {self._busy_s:g} s"
            hint = "find it in pg_stat_activity and end it with pg_terminate_backend"
            return StoreBusy(f"{self.path}: {who}: {hint}; then go on with agentrl train --resume {self.path.parent}")
        if self._lost(error):
            return self._away(error)
        if state in ("3F000", "42P01"):
            return StoreError(f"{self.path}: the database has no such run any more ({_line(error)})")
        return StoreError(f"{self.path}: the database says: {_line(error)}")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        if self._pipeline.entered:
            return self._pipeline.send(translated(sql), _plain(parameters))
        return self._connection.execute(translated(sql), _plain(parameters))

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Rows of one table go out in one statement, which has an array for each column."""
        rows, plain = list(rows), plain_insert(sql)
        if plain is not None and plain.table in schema.BYTES and rows:
            self._parts.room(max(row[0] for row in rows))
        if len(rows) < 2 or plain is None or not self._pipeline.entered:
            for row in rows:
                self.execute(sql, row)
            return
        types = self._tables.types(plain.table)
        columns = [types[name] for name in plain.columns] if plain.columns else list(types.values())
        for few in parted(rows):
            self._pipeline.send_arrays(many(sql, tuple(columns)), columns, list(zip(*few, strict=True)))

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        number = "version" if sql.startswith("INSERT INTO versions") else "id"
        row = self.row(f"{sql} RETURNING {number}", parameters)
        assert row is not None
        if sql.startswith("INSERT INTO turns"):
            self._parts.room(row[0])
        return row[0]

    def numbers(self, table: str, n: int) -> Sequence[int]:
        return self._tables.numbers(table, n)

    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        self._tables.skip_numbers(table, beyond, n)

    def forget(self, groups: Sequence[int]) -> None:
        self._parts.forget(groups)

    def reclaim(self) -> None:
        self._parts.reclaim()

    def watch(self) -> ChangeWatch:
        return Notices(partial(self._address.connect, reads=True), self._address.schema)

    def tables(self) -> dict[str, tuple[str, ...]]:
        return self._tables.all()

    def loosen(self) -> None:
        self.execute("SET CONSTRAINTS ALL DEFERRED")

    def renumber(self) -> None:
        self._tables.renumber()

    def faults(self) -> list[str]:
        return []  # checksums are the server's own affair

    def any_text(self, text: str | bytes) -> str | bytes:
        return text.encode() if isinstance(text, str) else text  # a text of PostgreSQL cannot hold a NUL


def _plain(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Flags are numbers, as SQLite has them."""
    return tuple(int(each) if isinstance(each, bool) else each for each in parameters)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _host_s() -> float:
    """Seconds of a clock of this host that nobody sets, and that goes on while it is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
