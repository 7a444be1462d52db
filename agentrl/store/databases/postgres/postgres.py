"""The run store in PostgreSQL: a schema of a database that many hosts share.

    address.py     where the store is, and how it is connected to
    session.py     the connection, the server's clock, a connection that was lost
    connection.py  statements that go out together, waits with a deadline, notifications of writes
    sql.py         the statements in PostgreSQL's words
    catalogue.py   the columns of the tables, and the numbers of new rows
    partitions.py  the tables of large arrays, in parts that retention drops

Every commit waits for the server's disk: the server may fall and come back under processes that live on, and they must
not have seen what it lost. A write holds an advisory lock of its run until it commits, so writers take turns as they do
with SQLite; but those of the journal share it: each writes only rows of an episode whose fence it checked, and fences
rise under the lock that nobody shares. Statements of a transaction go out without waiting for each other, its end with
them; only the lock, and statements that return rows, wait for the server.

A session that is silent between two statements is ended by whoever waits for its lock. So a process that hangs, or is
cut off, gives the lock up and leaves nothing of its transaction.

A connection that is lost within a transaction fails it with StoreAway, and nothing of it is left. If it was lost while
the transaction ended, that is not known yet: so each transaction writes its number to a row of its connection's own in
`last_writes`, and a new connection reads there, under the run's lock, whether it was committed. The numbers of the
server's own transactions do not serve for this: a crash may give one of them away twice.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql as names

from agentrl.errors import DiskFull, StoreAway, StoreBusy, StoreError, UsageError
from agentrl.host.disk_space import is_full
from agentrl.store import schema
from agentrl.store.databases.database import Database
from agentrl.store.databases.driver import PAUSE_S, ChangeWatch, Cursor, Driver, Query, Row
from agentrl.store.databases.postgres.address import CONNECT_S, MOMENT_S, Address
from agentrl.store.databases.postgres.catalogue import Catalogue
from agentrl.store.databases.postgres.connection import Notices
from agentrl.store.databases.postgres.partitions import READ, Partitions
from agentrl.store.databases.postgres.session import Session, one_line
from agentrl.store.databases.postgres.sql import many, parted, plain_insert, translated
from agentrl.store.databases.transactions import Transactions
from agentrl.store.databases.upkeep import Upkeep

_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NUMBERED = b"INSERT INTO last_writes VALUES ($1, $2) ON CONFLICT (writer) DO UPDATE SET number = excluded.number"


def open_database(path: Path, address: Address, clock: Callable[[], float], *, reads: bool = False) -> Database:
    """Connect; a handle of the machine's clock takes the server's. Raises StoreError."""
    postgres_driver = Postgres(path, address, reads=reads)
    return Database(
        postgres_driver,
        PostgresUpkeep(postgres_driver),
        postgres_driver.session.servers_s if clock is time.time else clock,
    )


def drop_schema(path: Path, address: Address) -> None:
    """Remove the schema of a store with all that is in it. Raises StoreError."""
    postgres_driver = Postgres(path, address)
    try:
        postgres_driver.session.connection.execute(
            names.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(names.Identifier(address.schema))
        )
    except psycopg.Error as error:
        raise postgres_driver.named(error) from error
    finally:
        postgres_driver.close()


class Postgres(Driver):
    """A session in the schema of a PostgreSQL database. `path` is the address file, which names the store in messages.
    Raises StoreAway if the server does not answer."""

    shares: ClassVar[bool] = True
    remote: ClassVar[bool] = True
    close_s: ClassVar[float] = MOMENT_S
    errors: ClassVar[type[Exception]] = psycopg.Error

    def __init__(self, path: Path, address: Address, *, reads: bool = False) -> None:
        super().__init__(path)
        if reads:
            self.waiting.away_s = CONNECT_S
        self.prepared = False
        """Whether the tables are known to be there."""
        self._shares_lock = False  # whether the open write transaction does
        self._writer, self._written = uuid.uuid4().hex[:16], 0  # how many write transactions it has begun
        try:
            self.session = Session(path, address, reads=reads)
        except psycopg.Error as error:
            raise StoreAway(f"{path}: the database does not answer ({one_line(error)}): start it") from error
        self.catalogue = Catalogue(self, address.schema)
        self.partitions = Partitions(self, self.session.run_once, lambda: -self.session.lock_id)

    def close(self) -> None:
        self.session.connection.close()

    # --- transactions

    @property
    def in_transaction(self) -> bool:
        return self.session.in_transaction

    def begin_read(self) -> None:
        session, begin_statements = self.session, (_BEGIN_READ, *READ) if self.prepared else (_BEGIN_READ,)
        # The statements below are sent without waiting, so a connection that the server has closed would show only at
        # the first answer, in the middle of the caller's work. One poll of the socket, without a message, tells
        # beforehand.
        if not session.is_silent():  # it may have been closed: then a new one is opened
            session.begin("; ".join(begin_statements))
            session.pipeline.enter()
            return
        session.pipeline.enter()
        for statement in begin_statements:
            session.pipeline.send(statement.encode(), ())

    def begin_write(self, *, durable: bool, shared: bool) -> None:
        self.session.lock(shared=shared)
        self._shares_lock = shared
        self.session.pipeline.enter()
        self._written += 1
        if self.prepared:
            # If the connection is lost during COMMIT, nobody on this side knows whether it happened. To make the write
            # again could write it twice; to give up could lose it (law 2). So the transaction carries its own number
            # with it, and a new connection reads whether the number is there: it is, exactly if everything else is.
            # `tests/store/test_away.py` cuts the connection at that moment.
            self.session.pipeline.send(_NUMBERED, (self._writer, self._written))

    def before_savepoint(self) -> None:
        with suppress(psycopg.Error):
            self.session.settle()  # from here on a failure belongs to its statement

    def commit(self) -> None:
        """A notification locks out all other commits of the database until this one is on the disk, so the journal goes
        without: nobody waits for it but reward sources, whose turns notify them by a trigger."""
        try:
            self._end("COMMIT" if self._shares_lock else f"NOTIFY {self.session.schema}; COMMIT")
        except psycopg.Error as error:
            if not self.session.lost(error) or not self._was_committed():
                raise

    def _end(self, command: str) -> None:
        """Run the last statements of the open transaction, which goes with all that was sent: after one that failed,
        the server runs none of them."""
        session = self.session
        if not session.pipeline.entered:
            session.run(command)
            return
        for statement in command.split("; "):
            session.pipeline.send(statement.encode(), ())
        session.settle()
        if session.in_transaction:
            raise psycopg.errors.InFailedSqlTransaction("a statement of the transaction failed")

    def _was_committed(self) -> bool:
        """Whether the last transaction was committed, whose connection was lost meanwhile. Raises StoreError if the
        database does not say in time."""
        session, began_s, first_error = self.session, time.monotonic(), None
        self.waiting.for_database += 1
        session.connection.close()
        try:
            while self.prepared and (first_error is None or time.monotonic() - began_s < self.waiting.away_s):
                try:
                    # Under the run's lock: the old session may still be committing on the server. It held the same
                    # lock, so once this one has it the row says the final word.
                    session.lock()  # so the transaction has ended
                    last_write = self.row("SELECT number FROM last_writes WHERE writer = ?", (self._writer,))
                    session.roll_back()
                    return last_write == (self._written,)
                except psycopg.Error as error:
                    if first_error is None:
                        waiting_notice = (
                            f"agentrl: {session.away(error)}; it is waited for, {self.waiting.away_s:g} s at most"
                        )
                        print(waiting_notice, file=sys.stderr, flush=True)
                    first_error = error
                time.sleep(PAUSE_S)
        finally:
            self.waiting.for_database -= 1
        problem = f"{self.path}: the database does not answer, and may have kept the last write or not"
        raise StoreError(
            f"{problem}: start it, then go on with agentrl train --resume {self.path.parent}"
        ) from first_error

    def roll_back(self) -> None:
        self.session.roll_back()

    def named(self, error: Exception) -> StoreError:
        sql_state = getattr(error, "sqlstate", None) or ""
        if is_full(error):
            return DiskFull(f"{self.path}: no space left for the database: free some; what was journaled is kept")
        if sql_state in ("55P03", "57014"):
            lock_holder = f"another session has held the run's write lock for over {self.waiting.lock_s:g} s"
            release_hint = "find it in pg_stat_activity and end it with pg_terminate_backend"
            return StoreBusy(
                f"{self.path}: {lock_holder}: {release_hint}; then go on with agentrl train --resume {self.path.parent}"
            )
        if self.session.lost(error):
            return self.session.away(error)
        if sql_state in ("3F000", "42P01"):
            return StoreError(f"{self.path}: the database has no such run any more ({one_line(error)})")
        return StoreError(f"{self.path}: the database says: {one_line(error)}")

    # --- statements

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        if self.session.pipeline.entered:
            return self.session.pipeline.send(translated(sql), _plain(parameters))
        return self.session.connection.execute(translated(sql), _plain(parameters))

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Rows of one table go out in one statement, which has an array for each column."""
        rows, insertion = list(rows), plain_insert(sql)
        if insertion is not None and insertion.table in schema.BYTES and rows:
            self.partitions.room(max(row_values[0] for row_values in rows))
        # A single row as a plain statement: it is prepared already, and an array of one element is longer to pack and
        # to plan.
        if len(rows) < 2 or insertion is None or not self.session.pipeline.entered:
            for row_values in rows:
                self.execute(sql, row_values)
            return
        types_by_column = self.catalogue.types(insertion.table)
        column_types = (
            [types_by_column[column_name] for column_name in insertion.columns]
            if insertion.columns
            else list(types_by_column.values())
        )
        # Divided by bytes: a parameter has a limit of 1 GB, and the server holds a whole statement in memory, beside
        # those of all other sessions.
        for row_batch in parted(rows):
            column_arrays = list(zip(*row_batch, strict=True))
            self.session.pipeline.send_arrays(many(sql, tuple(column_types)), column_types, column_arrays)

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        number_column = "version" if sql.startswith("INSERT INTO versions") else "id"
        returned_row = self.row(f"{sql} RETURNING {number_column}", parameters)
        assert returned_row is not None
        if sql.startswith("INSERT INTO turns"):
            self.partitions.room(returned_row[0])
        return returned_row[0]

    def numbers(self, table: str, n: int) -> Sequence[int]:
        return self.catalogue.numbers(table, n)

    def all_rows(self, *queries: Query) -> list[list[Row]]:
        """See `Driver`: all of them go out before the first is waited for."""
        cursors = [self.execute(statement, parameters) for statement, parameters in queries]
        return [list(cursor) for cursor in reversed(cursors)][::-1]  # with the last answer come all before it

    def any_text(self, text: str | bytes) -> str | bytes:
        return text.encode() if isinstance(text, str) else text  # a text of PostgreSQL cannot hold a NUL


class PostgresUpkeep(Upkeep):
    """See `Upkeep`."""

    def __init__(self, driver: Postgres) -> None:
        super().__init__(driver)
        self._postgres, self._session = driver, driver.session

    def make_place(self) -> None:
        # A new connection afterwards: the number of the run's lock is that of the schema, which is read when a
        # connection begins.
        create_schema = names.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(names.Identifier(self._session.schema))
        self._session.connection.execute(create_schema)
        self._session.connection.close()
        self._session.connect()

    def is_made(self) -> bool:
        return self._driver.row("SELECT to_regclass(?)", (f"{self._session.schema}.schema_version",)) != (None,)

    def check(self) -> None:
        if not self.is_made():
            problem = "it was never begun"
            if not self._session.lock_id:
                problem = f"the database has no schema {self._session.schema}: the run was removed"
            raise UsageError(f"{self._driver.path} holds no run: {problem}")
        ((schema_version,),) = self._driver.rows("SELECT version FROM schema_version")
        schema.check_version(schema_version, self._driver.path)

    def create_tables(self) -> None:
        self._session.settle()  # several statements at once go through no pipeline
        self._session.run(schema.text("schema.postgres.sql"))
        self._session.run(f"INSERT INTO schema_version VALUES ({schema.SCHEMA_VERSION})")
        self._postgres.partitions.room(0)

    def opened(self) -> None:
        self._postgres.prepared = True

    def forget(self, groups: Sequence[int]) -> None:
        self._postgres.partitions.forget(groups)

    def reclaim(self, transactions: Transactions) -> None:
        self._postgres.partitions.reclaim(transactions)

    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        self._postgres.catalogue.skip_numbers(table, beyond, n)

    def faults(self) -> list[str]:
        return []  # checksums are the server's own affair

    def watch(self) -> ChangeWatch:
        return Notices(self._session.watch, self._session.schema)

    def tables(self) -> dict[str, tuple[str, ...]]:
        return self._postgres.catalogue.tables()

    def loosen(self) -> None:
        self._driver.execute("SET CONSTRAINTS ALL DEFERRED")

    def renumber(self) -> None:
        self._postgres.catalogue.renumber()


def _plain(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Flags are numbers, as SQLite has them."""
    return tuple(int(parameter) if isinstance(parameter, bool) else parameter for parameter in parameters)
