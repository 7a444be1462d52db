"""The run store's file: one SQLite database that the processes of one machine share.

Every write takes the write lock at its start (BEGIN IMMEDIATE), so a killed process leaves either the whole
transaction or nothing, and two processes never deadlock halfway. Never knows what a table is for.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from agentrl.errors import DiskFull, StoreBusy, StoreError, UsageError
from agentrl.host.disk_space import is_full, no_space_on
from agentrl.host.file_writes import FileWrites
from agentrl.store import schema
from agentrl.store.databases.driver import BUSY_S, ChangeWatch, Driver, Row, damaged
from agentrl.store.databases.upkeep import Upkeep

_WRITE_LOCK = 120
"""The byte of the file `-shm` that SQLite locks to write (WAL_WRITE_LOCK in its sources)."""

_MOMENT_MS = 250  # one try for the write lock; `Transactions` tries again
_HEADER_BYTES = 100  # of any SQLite file
_STILL_LOOKS = 20  # that see no write, until a waiter sleeps until there is one: about 0.3 s after a change


class SQLite(Driver):
    """A connection to a file of this machine."""

    errors = sqlite3.Error

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path)
        self.connection = connection
        self._waits_for_disk = False

    @classmethod
    def look(cls, path: Path) -> Self:
        """Open the file to read. It takes no lock that a writer waits for, and changes nothing.

        Raises UsageError if there is no file or no run in it, FormatError if its schema is another."""
        if not path.is_file():
            raise UsageError(f"{path} holds no run: there is no such file")
        connection = read_only(path)
        try:
            _check(connection, path)
            connection.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            connection.close()
            raise named(error, path) from error
        except BaseException:
            connection.close()
            raise
        return cls(path, connection)

    @classmethod
    def connect(cls, path: Path, *, create: bool) -> Self:
        """Open the file, or make it if `create`. Raises UsageError if it is missing, StoreError if no database."""
        if not create and not path.is_file():
            raise UsageError(f"{path} holds no run: there is no such file")
        if not create and path.stat().st_size < _HEADER_BYTES and Path(f"{path}-wal").exists():
            raise damaged(path, ValueError("the file is empty"))  # SQLite would begin it anew, and wait for its users
        try:
            # `isolation_level=None`, or the module begins transactions by itself, and those are deferred: two processes
            # that read first and write then would each wait for the other's read to end, and SQLite fails one of them
            # at once, whatever the timeout. Threads take turns by the lock of `Transactions`, so the module's check is
            # off.
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            # With a write-ahead log, NORMAL loses commits only to a loss of power, never to a killed process, and saves
            # a sync for each of a run's many commits. What must not be lost even then asks for `durable` (a take, a
            # checkpoint, a version), and `recovery` repairs the rest. `tests/store/test_power_loss.py` cuts the power
            # after each write.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA busy_timeout = {_MOMENT_MS}")
        except sqlite3.Error as error:
            raise named(error, path) from error
        return cls(path, connection)

    def close(self) -> None:
        """Close the connection; the last one to close folds the write-ahead log into the file."""
        self.connection.close()

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def begin_read(self) -> None:
        self.connection.execute("BEGIN")

    def begin_write(self, *, durable: bool, shared: bool) -> None:
        # Before BEGIN, as SQLite ignores this setting inside a transaction. Kept until it differs: most writes come in
        # rows of the same kind.
        if durable != self._waits_for_disk:
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._waits_for_disk = durable
        # IMMEDIATE takes the write lock now. A deferred transaction would take it at its first write, perhaps behind a
        # state that somebody else has changed since it read it, and SQLite then refuses it.
        self.connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def roll_back(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def named(self, error: Exception) -> StoreError:
        return named(error, self.path, self.waiting.lock_s)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, parameters)

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self.connection.executemany(sql, rows)

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        inserted_id = self.connection.execute(sql, parameters).lastrowid
        assert inserted_id is not None
        return inserted_id

    def numbers(self, table: str, n: int) -> Sequence[int]:
        # Safe without a sequence: the caller holds the only write lock of the file until these numbers are in it.
        ((highest_id,),) = self.rows(f"SELECT COALESCE(MAX(id), 0) FROM {table}")
        return range(highest_id + 1, highest_id + 1 + n)

    def any_text(self, text: str | bytes) -> str | bytes:
        if isinstance(text, bytes):  # as PostgreSQL has all text, or with lone surrogates
            with contextlib.suppress(UnicodeDecodeError):
                return text.decode()
        return text


class SQLiteUpkeep(Upkeep):
    """See `Upkeep`."""

    def __init__(self, driver: SQLite) -> None:
        super().__init__(driver)
        self._path, self._connection = driver.path, driver.connection

    def is_made(self) -> bool:
        return not schema.is_empty(self._connection)

    def check(self) -> None:
        _check(self._connection, self._path)

    def create_tables(self) -> None:
        schema.create_tables(self._connection)

    def opened(self) -> None:
        # Not before the check: it is written to the file, which may be another program's.
        self._connection.execute("PRAGMA journal_mode = WAL")

    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        # The table has no unique key, so there is no upsert; and a store without any episode yet has no row for it.
        sequence_row = self._driver.row("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
        self._driver.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        highest_id = 0 if sequence_row is None else sequence_row[0]
        self._driver.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, max(highest_id, beyond) + n))

    def faults(self) -> list[str]:
        # `integrity_check` compares every index with its table besides, and takes several times as long. Bytes that a
        # disk changed show here: in the pages' structure, in the types of a STRICT table, and in the blobs by their own
        # checksums when they are read.
        fault_messages = [
            str(fault_message) for (fault_message,) in self._driver.rows("PRAGMA quick_check") if fault_message != "ok"
        ]
        return [" ".join(fault_message.split()) for fault_message in fault_messages]

    def watch(self) -> ChangeWatch:
        return CommitCounter(self._path)

    def tables(self) -> dict[str, tuple[str, ...]]:
        tables_query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        columns_query = "SELECT name FROM pragma_table_info(?) ORDER BY cid"
        fetch_rows = self._driver.rows
        return {
            table_name: tuple(column_name for (column_name,) in fetch_rows(columns_query, (table_name,)))
            for (table_name,) in fetch_rows(tables_query)
        }

    def loosen(self) -> None:
        self._driver.execute("PRAGMA defer_foreign_keys = ON")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise UsageError unless the file holds a store, FormatError unless its schema is the one that we read."""
    if schema.is_empty(connection):
        raise UsageError(f"{path} holds no run: it was never begun")
    schema.check_version(schema.read_version(connection), path)


# Writes of the log wake a waiter; the counter decides.
#
# The counter alone has to be read again and again, and three waiting processes of a paused run that read it fifty times
# a second each used most of the CPU that the run took. A write of the log is a hint: the kernel shows it before the
# commit can be read (the log's index changes last, after a sync in a durable commit), and most writes change nothing
# that the waiter waits for. So after a write the counter is read by the clock for a while, as without any hint, and
# the descriptor ends only the sleep of a store that nobody has written for some looks. Where the hint is missing or
# comes too early, a look once a second remains.
class CommitCounter:
    """Reads the counter that SQLite raises when another connection commits (`PRAGMA data_version`, microseconds)."""

    def __init__(self, path: Path) -> None:
        self._path, self._connection = path, read_only(path)
        self._log_writes = FileWrites(Path(f"{path}-wal"))
        self._last: int | None = None
        self._still_looks = 0

    @property
    def wakes(self) -> int | None:
        return self._log_writes.descriptor if self._still_looks >= _STILL_LOOKS else None

    def written(self) -> bool:
        is_stirred = self._log_writes.seen()  # first: a write after this line is seen by the next look
        version_row = self.row("PRAGMA data_version")
        previous_version, self._last = self._last, None if version_row is None else version_row[0]
        is_written = previous_version != self._last
        self._still_looks = 0 if is_stirred or is_written else self._still_looks + 1
        return is_written

    def row(self, sql: str) -> Row | None:
        try:
            return self._connection.execute(sql).fetchone()
        except sqlite3.Error as error:
            raise named(error, self._path) from error

    def close(self) -> None:
        self._log_writes.close()
        self._connection.close()


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that can only read: it takes no lock that a writer waits for, and changes nothing in the file. It
    reads a file in a folder that may not be written, too, if no write-ahead log is beside it: nobody writes it then."""
    file_uri = f"{path.absolute().as_uri()}?mode=ro"
    is_immutable = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    if is_immutable:  # no room for the log's index, without which SQLite reads only what never changes
        file_uri += "&immutable=1"
    try:
        return sqlite3.connect(file_uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise named(error, path) from error


def named(error: Exception, path: Path, busy_s: float | None = None) -> StoreError:
    """The StoreError for an sqlite3 error, in one line. `busy_s` is how long the call waited for the write lock."""
    error_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if is_full(error) or (error_code == sqlite3.SQLITE_IOERR and no_space_on(path.parent)):
        return DiskFull(f"{path}: no space left for the run store: free some; what was journaled is kept")
    if error_code == sqlite3.SQLITE_BUSY:
        return _busy(path, BUSY_S if busy_s is None else busy_s)
    if error_code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"{path}: cannot be opened: see that the folder exists and may be written")
    if error_code == sqlite3.SQLITE_READONLY:
        return StoreError(f"{path}: may not be written")
    if error_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or not error_code:  # 0: text that is not UTF-8
        return damaged(path, error)
    return StoreError(f"{path}: {error}")


def _busy(path: Path, busy_s: float) -> StoreBusy:
    holder_pid = _lock_holder(path)
    lock_holder, release_hint = "another process", f"find it with lsof {path} and end it"
    if holder_pid is not None:
        lock_holder = f"process {holder_pid} ({_command(holder_pid)})"
        release_hint = f"end it with kill -9 {holder_pid}"
    resume_hint = f"{release_hint}; then go on with agentrl train --resume {path.parent}"
    return StoreBusy(f"{path}: {lock_holder} has held the write lock for over {busy_s:g} s: {resume_hint}")


def _lock_holder(path: Path) -> int | None:
    """The process that holds the write lock, None if the system does not say. Never opens the file: closing it again
    would give up this process's own locks."""
    try:
        shm_inode = Path(f"{path}-shm").stat().st_ino
        lock_lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for lock_line in lock_lines:
        match lock_line.split():  # 5: POSIX ADVISORY WRITE 4711 00:2f:1234 120 120
            case [_, "POSIX", _, "WRITE", holder_pid, device, first, last] if device.split(":")[-1] == str(shm_inode):
                if int(first) <= _WRITE_LOCK and (last == "EOF" or int(last) >= _WRITE_LOCK) and int(holder_pid) > 0:
                    return int(holder_pid)
            case _:
                pass
    return None


def _command(pid: int) -> str:
    """The command line of a process, cut to 80 characters."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone by now"
    command_line = " ".join(" ".join(arguments).split())
    return "".join(character for character in command_line if character.isprintable())[:80] or "no command line"
