"""The SQLite file of a training server: its tables, transactions and reads. Knows nothing of what its rows mean."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import DiskFull, StoreError
from agentrl.host.disk_space import is_full
from agentrl.host.with_block import Closing

_VERSION = 1
_SCHEMA = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, asked TEXT UNIQUE, ended INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE models (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL, rank INTEGER,
  attention INTEGER, mlp INTEGER, answered INTEGER NOT NULL DEFAULT -1, state INTEGER) STRICT;
CREATE TABLE samplers (id TEXT PRIMARY KEY, session TEXT NOT NULL, path TEXT) STRICT;
CREATE TABLE weights (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, model TEXT NOT NULL, kind TEXT NOT NULL,
  rank INTEGER NOT NULL, attention INTEGER NOT NULL, mlp INTEGER NOT NULL, named INTEGER NOT NULL) STRICT;
CREATE TABLE calls (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL, owner TEXT NOT NULL,
  place INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB, digest TEXT NOT NULL, form TEXT, answer BLOB,
  UNIQUE (owner, place)) STRICT;
CREATE INDEX unanswered ON calls (owner) WHERE form IS NULL;
"""


class LogFile(Closing):
    """One connection, which all threads share."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises StoreError if it is no log of ours, or of another version."""
        self._lock = threading.RLock()  # a transaction holds it over its statements, which take it again
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            self._database.execute("PRAGMA journal_mode = WAL")
            # FULL, unlike a run's journal: a client is told that its call was accepted and will not send it again, so
            # an accepted call must outlive a loss of power.
            self._database.execute("PRAGMA synchronous = FULL")
            (log_version,) = self._database.execute("PRAGMA user_version").fetchone()
            if log_version not in (0, _VERSION):
                correction = "give another folder with --state"
                raise StoreError(
                    f"{str(path)!r} was written by another version of agentrl ({log_version}): {correction}"
                )
            if not log_version:
                self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            raise StoreError(f"cannot use {str(path)!r}: {error}") from error

    def close(self) -> None:
        """Close the file; no call may follow."""
        with self._lock:
            self._database.close()

    @contextmanager
    def writing(self) -> Generator[None]:
        """A transaction. Raises StoreError if it cannot be written, and nothing is; DiskFull for want of space."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                error_class = DiskFull if is_full(error) else StoreError
                raise error_class(f"the log of calls cannot be written: {error}") from error

    def do(self, statement: str, *values: Any) -> None:
        """Run a statement of a transaction."""
        self._database.execute(statement, values)

    def find(self, statement: str, *values: Any) -> Sequence[Any] | None:
        """Read the first row, if there is one."""
        with self._lock:
            return self._database.execute(statement, values).fetchone()

    def all(self, statement: str, *values: Any) -> list[Sequence[Any]]:
        """Read every row."""
        with self._lock:
            return self._database.execute(statement, values).fetchall()
