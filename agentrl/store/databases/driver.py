"""The seam between the store and a database: the single acts that SQLite and PostgreSQL each do in their own way.

`Transactions` owns their order, the lock between threads and the retries; a driver knows one connection. Statements are
in the SQL that both databases read, with `?` for a parameter; `postgres/sql.py` names what it translates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from agentrl.errors import StoreDamaged, StoreError

BUSY_S = 120.0
"""How long a write waits for another process's write lock before it fails, seconds. Our own writes take well under a
millisecond; a backup, or somebody's shell, may hold the lock for longer, and the run waits for it."""

PAUSE_S = 0.2
"""Between two attempts to reach a database that is away, seconds."""

Row = tuple[Any, ...]
Query = tuple[str, Sequence[Any]]
"""A statement and its parameters."""


class Cursor(Protocol):
    """The rows that a statement returns, and how many it wrote."""

    @property
    def rowcount(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...


class ChangeWatch(Protocol):
    """Detects that the store was written."""

    @property
    def wakes(self) -> int | None:
        """A file descriptor that becomes readable when the store was written; None if there is none now."""
        ...

    def written(self) -> bool:
        """Whether anybody has committed since the last call; True at first."""
        ...

    def row(self, sql: str) -> Row | None:
        """The row that a statement returns."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Waiting:
    """How long the calls of a handle wait, in seconds, and how many threads wait now."""

    lock_s: float
    """For another process's write lock."""
    away_s: float
    """For a database that is away."""
    for_lock: bool = False
    for_database: int = 0


class Driver(ABC):
    """One connection. Its calls are made by the thread that has the lock of `Transactions`."""

    shares: ClassVar[bool] = False
    """Whether shared writes of several processes go on at once."""
    remote: ClassVar[bool] = False
    """Whether it is a server, which may answer late or never: a loop of tasks asks it in a thread."""
    close_s: ClassVar[float] = -1
    """How long `close` waits for another thread's call, in seconds; -1: until it ends."""
    errors: ClassVar[type[Exception]]
    """The base class of the errors that its library raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = Waiting(lock_s=BUSY_S, away_s=BUSY_S)

    # --- transactions

    @property
    @abstractmethod
    def in_transaction(self) -> bool: ...

    @abstractmethod
    def begin_read(self) -> None:
        """Begin a transaction that sees one state of the store."""

    @abstractmethod
    def begin_write(self, *, durable: bool, shared: bool) -> None:
        """Begin a transaction with the write lock, which nobody holds beside it, or only others that share it. If
        somebody holds it for longer than a moment, raise what `named` calls StoreBusy. If it raises, none is open."""

    def before_savepoint(self) -> None:  # noqa: B027
        """Wait for the statements before a savepoint, where they are sent without waiting."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def roll_back(self) -> None:
        """End an open transaction without a trace; nothing if there is none."""

    @abstractmethod
    def named(self, error: Exception) -> StoreError:
        """The StoreError for an error of the library."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    # --- statements of the open transaction

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Run one statement."""

    @abstractmethod
    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row."""

    @abstractmethod
    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        """Insert one row into a table that numbers its rows; the number."""

    @abstractmethod
    def numbers(self, table: str, n: int) -> Sequence[int]:
        """Numbers of `n` new rows of a table, higher than any row's, inside a write transaction; only it may use them,
        and those that it leaves are used by none or by a later one."""

    @abstractmethod
    def any_text(self, text: str | bytes) -> str | bytes:
        """Model output, which may hold any character, in the form that a column of type ANY takes."""

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows that one statement returns."""
        return list(self.execute(sql, parameters))

    def all_rows(self, *queries: Query) -> list[list[Row]]:
        """All rows that each of several statements returns: a server gets them at once."""
        return [self.rows(statement, parameters) for statement, parameters in queries]

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row that one statement returns; None if it returns none."""
        return next(iter(self.execute(sql, parameters)), None)


def damaged(path: Path, error: Exception) -> StoreDamaged:
    """The error of a store that cannot be read."""
    problem = "is not a run store, or is damaged" if "not a database" in str(error) else f"is damaged ({error})"
    restore_hint = (
        f"put a copy of it in its place and go on with agentrl train --resume {path.parent}; without one, begin a"
    )
    return StoreDamaged(
        f"{path}: {problem}: {restore_hint} new run with the newest folder of {path.parent}/checkpoints as model"
    )
