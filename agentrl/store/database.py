"""The connection to a run store's file: transactions, deadlines and errors.

Owns the SQLite connection of one process; never knows a table. Every write is a transaction that takes the write lock
at its start (BEGIN IMMEDIATE), so a killed process leaves either the whole transaction or nothing, and two processes
never deadlock halfway. Every sqlite3 error and every unreadable row is raised as a `StoreError` of one line.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Self

import zstandard

from agentrl.errors import DiskFull, StoreBusy, StoreDamaged, StoreError, UsageError
from agentrl.store import schema

BUSY_S = 120.0
"""How long a write waits for another process's write lock before it fails, seconds. Our own writes take well under a
millisecond; a backup, or somebody's shell, may hold the lock for longer, and the run waits for it."""

_WRITE_LOCK = 120
"""The byte of the file `-shm` that SQLite locks to write (WAL_WRITE_LOCK in its sources)."""

_FULL_BELOW_BYTES = 1 << 20
_HEADER_BYTES = 100  # of any SQLite file

_UNREADABLE = (zstandard.ZstdError, struct.error, json.JSONDecodeError, UnicodeDecodeError)

Row = tuple[Any, ...]


class Result(NamedTuple):
    """What came of a call: a value, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class Database:
    """One process's handle of the store file. Threads may share it: calls take turns.

    Invariants: outside `write` and `read` no transaction is open; a write either commits whole or leaves no trace."""

    def __init__(self, path: Path, connection: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self.path = path
        self.clock = clock
        self._connection = connection
        self._lock = threading.RLock()
        self._busy_s = BUSY_S
        self._together = False  # whether writes are savepoints of one transaction
        self._begun = False  # whether that transaction was begun
        self.waits = False  # True while a thread waits for another process's write lock

    @classmethod
    def look(cls, path: Path, *, clock: Callable[[], float]) -> Self:
        """Open the file to read. It takes no lock that a writer waits for, and changes nothing; if an older agentrl
        wrote it, a private copy is brought up to date and read.

        Raises UsageError if there is no file, StoreVersionError if a newer agentrl wrote it."""
        if not path.is_file():
            raise UsageError(f"{path} holds no run: there is no such file")
        connection = read_only(path)
        try:
            version = schema.read_version(connection, str(path))
            if not version:
                raise UsageError(f"{path} holds no run: it was never begun")
            if version < schema.SCHEMA_VERSION:
                copied = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # a file that has no name
                connection.backup(copied)
                connection.close()
                connection = copied
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.execute("BEGIN")
                schema.migrate(connection, version)
                connection.execute("COMMIT")
            connection.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            connection.close()
            raise named(error, path) from error
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, clock)

    @classmethod
    def connect(cls, path: Path, *, clock: Callable[[], float], create: bool) -> Self:
        """Open the file, or make it if `create`. Raises UsageError if it is missing, StoreError if no database."""
        if not create and not path.is_file():
            raise UsageError(f"{path} holds no run: there is no such file")
        if not create and path.stat().st_size < _HEADER_BYTES and Path(f"{path}-wal").exists():
            raise _damaged(path, ValueError("the file is empty"))  # SQLite would begin it anew, and wait for its users
        try:
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            raise named(error, path) from error
        return cls(path, connection, clock)

    def hurry(self, busy_s: float) -> None:
        """From now on wait no longer than `busy_s` for another process's write lock."""
        self._busy_s = busy_s
        with self._lock:
            self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * busy_s)}")

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
        a commit survives the death of any process, not of the machine. Inside `together` it is a savepoint."""
        with self._lock:
            if self._together:
                with self._savepoint(durable):
                    yield
                return
            if self._connection.in_transaction:
                raise StoreError(f"{self.path}: a write transaction is open already")
            try:
                with self._named():
                    if durable:
                        self._connection.execute("PRAGMA synchronous = FULL")
                    self._begin()
                    yield
                    self._connection.execute("COMMIT")
            finally:
                self._roll_back()
                if durable:
                    self._connection.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def read(self) -> Generator[None]:
        """A read transaction: all statements inside see one state of the store. May be nested."""
        with self._lock:
            if self._connection.in_transaction:
                with self._named():
                    yield
                return
            try:
                with self._named():
                    self._connection.execute("BEGIN")
                    yield
            finally:
                self._roll_back()

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Result]:
        """Make calls one after the other, in one transaction for all their writes: it begins with the first write, and
        each `write` is a savepoint of it. A call that raises is undone alone. If the transaction cannot begin or
        commit, or SQLite undoes it (a full disk), every call has that error, and nothing was written."""
        with self._lock:
            self._together, self._begun = True, False
            try:
                done = [self._one(call) for call in calls]
                if self._connection.in_transaction:
                    with self._named():
                        self._connection.execute("COMMIT")
            except Exception as error:  # all that wait for a call have to hear of it
                done = [Result(error=copy(error)) for _ in calls]
            finally:
                self._together = False
                self._roll_back()
        return done

    def _one(self, call: Callable[[], Any]) -> Result:
        try:
            return Result(value=call())
        except Exception as error:  # it belongs to whoever asked for this call
            if self._begun and not self._connection.in_transaction:  # what earlier calls wrote is gone as well
                raise
            return Result(error=error)

    @contextmanager
    def _savepoint(self, durable: bool) -> Generator[None]:
        if durable:
            raise StoreError(f"{self.path}: a write that waits for the disk has a transaction of its own")
        try:
            with self._named():
                if not self._connection.in_transaction:
                    self._begun = True
                    self._begin()
                self._connection.execute("SAVEPOINT one")
                yield
                self._connection.execute("RELEASE one")
        except Exception:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK TO one")
                self._connection.execute("RELEASE one")
            raise

    def _begin(self) -> None:
        self.waits = True
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        finally:
            self.waits = False

    @contextmanager
    def _named(self) -> Generator[None]:
        """Raise each error of SQLite, and of a row that cannot be read or written, as a StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            raise named(error, self.path, self._busy_s) from error
        except _UNREADABLE as error:
            raise _damaged(self.path, error) from error
        except UnicodeEncodeError as error:
            raise StoreError(f"{self.path}: a name or text cannot be written as UTF-8: {error}") from error

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
        """All rows that one statement returns."""
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row that one statement returns; None if it returns none."""
        return self._connection.execute(sql, parameters).fetchone()


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that can only read: it takes no lock that a writer waits for, and changes nothing in the file."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise named(error, path) from error


class Part:
    """A part of the store's methods. All parts share one database, which holds the state."""

    def __init__(self, db: Database) -> None:
        self._db = db


def named(error: sqlite3.Error, path: Path, busy_s: float | None = None) -> StoreError:
    """The StoreError for an sqlite3 error, in one line. `busy_s` is how long the call waited for the write lock."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _free_bytes(path) < _FULL_BELOW_BYTES):
        return DiskFull(f"{path}: no space left for the run store: free some; what was journaled is kept")
    if code == sqlite3.SQLITE_BUSY:
        return _busy(path, BUSY_S if busy_s is None else busy_s)
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"{path}: cannot be opened: see that the folder exists and may be written")
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(f"{path}: may not be written")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or not code:  # 0: text that is not UTF-8
        return _damaged(path, error)
    return StoreError(f"{path}: {error}")


def _damaged(path: Path, error: Exception) -> StoreDamaged:
    what = "is not a run store, or is damaged" if "not a database" in str(error) else f"is damaged ({error})"
    hint = f"put a copy of it in its place and go on with agentrl train --resume {path.parent}; without one, begin a"
    return StoreDamaged(f"{path}: {what}: {hint} new run with the newest folder of {path.parent}/checkpoints as model")


def _busy(path: Path, busy_s: float) -> StoreBusy:
    pid = _lock_holder(path)
    who, hint = "another process", f"find it with lsof {path} and end it"
    if pid is not None:
        who, hint = f"process {pid} ({_command(pid)})", f"end it with kill -9 {pid}"
    go_on = f"{hint}; then go on with agentrl train --resume {path.parent}"
    return StoreBusy(f"{path}: {who} has held the write lock for over {busy_s:g} s: {go_on}")


def _lock_holder(path: Path) -> int | None:
    """The process that holds the write lock, None if the system does not say. Never opens the file: closing it again
    would give up this process's own locks."""
    try:
        inode = Path(f"{path}-shm").stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in locks:
        match line.split():  # 5: POSIX ADVISORY WRITE 4711 00:2f:1234 120 120
            case [_, "POSIX", _, "WRITE", pid, device, first, last] if device.split(":")[-1] == str(inode):
                if int(first) <= _WRITE_LOCK and (last == "EOF" or int(last) >= _WRITE_LOCK) and int(pid) > 0:
                    return int(pid)
            case _:
                pass
    return None


def _command(pid: int) -> str:
    """The command line of a process, cut to 80 characters."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone by now"
    line = " ".join(" ".join(words).split())
    return "".join(c for c in line if c.isprintable())[:80] or "no command line"


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return _FULL_BELOW_BYTES
    return status.f_bavail * status.f_frsize
