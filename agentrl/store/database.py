"""The connection to a run store's file: transactions, deadlines, and the names of what can go wrong.

Owns the SQLite connection of one process; never knows a table. Every write is a transaction that takes the write lock
at its start (BEGIN IMMEDIATE), so a process that is killed leaves either all of it or nothing, and two processes never
deadlock halfway. Every sqlite3 error leaves here as a `StoreError` of one line.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from agentrl.errors import DiskFull, StoreError, UsageError
from agentrl.store import schema

BUSY_S = 30.0
"""How long a write waits for another process's write lock before it fails, seconds. Writes take well under a
millisecond; only a stopped process holds the lock for longer."""

_FULL_BELOW_BYTES = 1 << 20

Row = tuple[Any, ...]


class Database:
    """One process's handle of the store file. Threads may share it: calls take turns.

    Invariants: outside `write` and `read` no transaction is open; a write either commits whole or leaves no trace."""

    def __init__(self, path: Path, connection: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self.path = path
        self.clock = clock
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def connect(cls, path: Path, *, clock: Callable[[], float], create: bool) -> Self:
        """Open the file, or make it if `create`. UsageError: there is none. StoreError: it is no database."""
        if not create and not path.is_file():
            raise UsageError(f"{path} holds no run: there is no such file")
        try:
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            raise named(error, path) from error
        return cls(path, connection, clock)

    def close(self) -> None:
        """Close the connection; the last one to close folds the write-ahead log into the file."""
        with self._lock:
            self._connection.close()

    def prepare(self, *, create: bool, first: Callable[[], object] = lambda: None) -> None:
        """Bring the schema up to date; with `create` also make it, running `first` in the same transaction.

        Raises UsageError if there is a store already (`create`) or none (otherwise), StoreVersionError if a newer
        agentrl wrote it."""
        path = str(self.path)
        if not create and self._version() == schema.SCHEMA_VERSION:
            return
        with self.write():
            version = schema.read_version(self._connection, path)  # again: another process may have migrated it
            if create and version:
                raise UsageError(f"{path} holds a run already: resume it, or choose another folder")
            if not create and not version:
                raise UsageError(f"{path} holds no run: it was never begun")
            if version < schema.SCHEMA_VERSION:
                schema.migrate(self._connection, version)
            if create:
                first()

    def _version(self) -> int:
        with self.read():
            return schema.read_version(self._connection, str(self.path))

    # --- transactions -------------------------------------------------------------------------------------------

    @contextmanager
    def write(self, *, durable: bool = False) -> Generator[None]:
        """A write transaction. `durable` waits for the disk, so that it also survives a loss of power; without it
        a commit survives the death of any process, not of the machine."""
        with self._lock:
            if self._connection.in_transaction:
                raise StoreError(f"{self.path}: a write transaction is open already")
            try:
                if durable:
                    self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise named(error, self.path) from error
            except UnicodeEncodeError as error:
                raise StoreError(f"{self.path}: a name or text cannot be written as UTF-8: {error}") from error
            finally:
                self._roll_back()
                if durable:
                    self._connection.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def read(self) -> Generator[None]:
        """A read transaction: all statements inside see one state of the store. May be nested."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            try:
                self._connection.execute("BEGIN")
                yield
            except sqlite3.Error as error:
                raise named(error, self.path) from error
            finally:
                self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # --- statements, inside a transaction -----------------------------------------------------------------------

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement of the open transaction."""
        return self._connection.execute(sql, parameters)

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        """Run one statement of the open transaction for each row."""
        return self._connection.executemany(sql, rows)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows that one statement answers."""
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row that one statement answers."""
        return self._connection.execute(sql, parameters).fetchone()


class Part:
    """A part of the store's methods: it owns no state but the database that all parts share."""

    def __init__(self, db: Database) -> None:
        self._db = db


def named(error: sqlite3.Error, path: Path) -> StoreError:
    """What an sqlite3 error means, in one line."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _free_bytes(path) < _FULL_BELOW_BYTES):
        return DiskFull(f"{path}: no space left for the run store: free some; what was journaled is kept")
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"{path}: another process held the write lock for over {BUSY_S:g} s")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"{path}: cannot be opened: see that the folder exists and may be written")
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(f"{path}: may not be written")
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(f"{path}: is not a run store")
    return StoreError(f"{path}: {error}")


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return _FULL_BELOW_BYTES
    return status.f_bavail * status.f_frsize
