"""The connection to a run store: transactions, deadlines and errors, whatever the database (see `sqlite`, `postgres`).

Owns the connection of one process; knows no table but those that retention empties. Every write is a transaction that
takes the store's write lock at its start, so a killed process leaves either the whole transaction or nothing, and two
processes never deadlock halfway. Every error of the driver and every unreadable row is raised as a `StoreError` of one
line. Calls that are made together have one transaction, and each its own result (`Several`, `Result`).

A database on another machine may go away, and come back. A call that raises StoreAway has left nothing in the store, so
it is made again from its start, whole, until the database answers or `away_s` has passed (`outlast`).

Statements are in the SQL that both databases read, with `?` for a parameter; `postgres` names what it translates.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import zstandard

from agentrl.errors import StoreAway, StoreBusy, StoreDamaged, StoreError
from agentrl.store import schema


class Result(NamedTuple):
    """What came of a call: a value, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class Several(ABC):
    """A call that `Database.together` makes at once with others of its kind: all that come one after the other."""

    __slots__ = ()

    first: ClassVar[bool] = False
    """Whether calls of this kind go before all others."""

    @abstractmethod
    def __call__(self) -> Any:
        """Make it alone."""

    @classmethod
    @abstractmethod
    def all(cls, calls: Sequence[Any]) -> list[Result]:
        """Make calls in their order; what came of each. An error that it raises undoes them all."""


def each(calls: Sequence[Callable[[], Any]]) -> list[Result]:
    """What came of calls. Raises the error of one that is made alone."""
    made = dict[int, Result]()
    order = sorted(range(len(calls)), key=lambda at: not (isinstance(call := calls[at], Several) and call.first))
    for kind, places in groupby(order, key=lambda at: _kind(calls[at])):
        own = list(places)
        if kind is None:
            made.update((at, Result(value=calls[at]())) for at in own)
        else:
            made.update(zip(own, kind(type(calls[own[0]]), [calls[at] for at in own]), strict=True))
    return [made[at] for at in range(len(calls))]


def _kind(call: Callable[[], Any]) -> Callable[[type, Sequence[Any]], list[Result]] | None:
    """How calls of its kind are made at once; None if they are not."""
    return call.all.__func__ if isinstance(call, Several) else None


BUSY_S = 120.0
"""How long a write waits for another process's write lock before it fails, seconds. Our own writes take well under a
millisecond; a backup, or somebody's shell, may hold the lock for longer, and the run waits for it."""

PAUSE_S = 0.2
"""Between two attempts to reach a database that is away, seconds."""

_T = TypeVar("_T")
_P = ParamSpec("_P")
_UNREADABLE = (zstandard.ZstdError, struct.error, json.JSONDecodeError, UnicodeDecodeError)

Row = tuple[Any, ...]
Asked = tuple[str, Sequence[Any]]
"""A statement and its parameters."""
_Whole = AbstractContextManager[None] | None


class Cursor(Protocol):
    """The rows that a statement returns, and how many it wrote."""

    @property
    def rowcount(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...


class ChangeWatch(Protocol):
    """Tells whether the store was written."""

    @property
    def wakes(self) -> int | None:
        """A file descriptor that becomes readable when the store was written; None if there is none now."""
        ...

    def written(self) -> bool:
        """Whether anybody has committed since this was last asked; True at first."""
        ...

    def row(self, sql: str) -> Row | None:
        """The row that a statement returns."""
        ...

    def close(self) -> None: ...


class Database(ABC):
    """One process's handle of the store. Threads may share it: calls take turns.

    Invariants: outside `write` and `read` no transaction is open; a write either commits whole or leaves no trace."""

    shares: ClassVar[bool] = False
    """Whether shared writes of several processes go on at once."""
    remote: ClassVar[bool] = False  # on a server, which may answer late or never: a loop of tasks asks it in a thread
    _errors: ClassVar[type[Exception]]  # the driver's

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self.clock = clock
        self._lock = _Turn()
        self._busy_s = self.away_s = BUSY_S  # `away_s`: how long a call waits for a database that is away
        self._together = False  # whether writes are parts of one transaction
        self._shared = False  # whether that transaction is of writes that others may go on beside
        self._begun = False  # whether that transaction was begun
        self._swift = False  # whether its parts are not told apart: if one fails, all are undone and made again
        self._torn = False  # whether one of those failed
        self.leads: int | None = (
            None  # which of the run's learners this handle is of (see `learner_fence`); None: of none
        )
        self.waits = False  # True while a thread waits for another process's write lock
        self.away = 0  # how many threads wait for a database that is away

    # --- what a database does its own way -------------------------------------------------------------------------

    @property
    @abstractmethod
    def _in_transaction(self) -> bool: ...

    @abstractmethod
    def _begin_read(self) -> None:
        """Begin a transaction that sees one state of the store."""

    @abstractmethod
    def _begin_write(self, *, durable: bool, shared: bool) -> None:
        """Begin a transaction with the write lock, which nobody holds beside it, or only others that share it. If
        somebody holds it for longer than a moment, raise what `_named` calls StoreBusy. If it raises, none is open."""

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _roll_back(self) -> None:
        """End an open transaction without a trace; nothing if there is none."""

    @abstractmethod
    def _named(self, error: Exception) -> StoreError:
        """The StoreError for an error of the driver."""

    @abstractmethod
    def prepare(self, *, create: bool, first: Callable[[], object] = lambda: None) -> None:
        """See that there is a store of our schema; with `create` make it, running `first` in the same transaction.

        Raises UsageError if there is a store already (`create`) or none (otherwise), FormatError if it has another
        schema."""

    def hurry(self, busy_s: float) -> None:
        """From now on wait no longer than `busy_s` for another process's write lock, or for a database that is away,
        also if a thread waits already."""
        self._busy_s, self.away_s = busy_s, min(busy_s, self.away_s)

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Run one statement of the open transaction."""

    @abstractmethod
    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement of the open transaction for each row."""

    @abstractmethod
    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        """Insert one row into a table that numbers its rows; the number."""

    @abstractmethod
    def numbers(self, table: str, n: int) -> Sequence[int]:
        """Numbers of `n` new rows of a table, higher than any row's, inside a write transaction; only it may use them,
        and those that it leaves are used by none or by a later one."""

    @abstractmethod
    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        """Leave out the next `n` numbers of a table's rows, and all up to `beyond` and `n` more, inside a write
        transaction."""

    def forget(self, groups: Sequence[int]) -> None:
        """Drop the large arrays of groups, inside a write transaction; `reclaim` may do so later."""
        for table in schema.BYTES:
            own = "SELECT t.id FROM turns t JOIN episodes e ON e.id = t.episode_id WHERE e.group_id = ?"
            self.execute_many(f"DELETE FROM {table} WHERE turn_id IN ({own})", [(id,) for id in groups])

    def reclaim(self) -> None:  # noqa: B027
        """Give back the space of what was forgotten, outside a transaction, if the database does not by itself."""

    @abstractmethod
    def watch(self) -> ChangeWatch:
        """Watch the store for writes of all processes, on a connection of its own."""

    @abstractmethod
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The columns of each of the store's tables, inside a transaction."""

    @abstractmethod
    def loosen(self) -> None:
        """Let the open transaction write rows before those that they refer to."""

    @abstractmethod
    def renumber(self) -> None:
        """Let numbers of new rows go on after the highest there is, inside a transaction."""

    @abstractmethod
    def faults(self) -> list[str]:
        """The faults that the database's own check finds in the store, inside a transaction. The whole file is read:
        600 MB take a second."""

    @abstractmethod
    def any_text(self, text: str | bytes) -> str | bytes:
        """Model output, which may hold any character, in the form that a column of type ANY takes."""

    # --- transactions -------------------------------------------------------------------------------------------

    def write(self, *, durable: bool = False, shared: bool = False) -> AbstractContextManager[None]:
        """A write transaction. `durable` waits for the disk, so that it also survives a loss of power; without it
        a commit survives the death of any process, not of the machine. `shared` promises that it writes only rows that
        nobody else may write meanwhile, as those of an episode whose fence it checks: a database may let other shared
        writes go on beside it. Inside `together` it is a part of one transaction."""
        return _Write(partial(self._enter, durable, shared), self._leave)

    def _enter(self, durable: bool, shared: bool) -> _Whole:
        """Begin a write, with the lock held; None if it is one of many that are not told apart."""
        self._lock.acquire()
        try:
            whole = self._transaction(durable, shared)
            if whole is not None:
                whole.__enter__()
            return whole
        except BaseException as error:
            self._lock.release()
            self._raise_named(error)
            raise

    def _transaction(self, durable: bool, shared: bool) -> _Whole:
        if not self._together:
            return self._alone(durable=durable, shared=shared)
        if durable:
            raise StoreError(f"{self.path}: a write that waits for the disk has a transaction of its own")
        if self._shared and not shared:
            raise StoreError(f"{self.path}: a write that needs the store for itself came among others")
        if not self._in_transaction:
            self._begun = True
            self._begin(durable=False, shared=self._shared)
        return None if self._swift else self._savepoint()

    def _leave(self, whole: _Whole, error: BaseException | None) -> None:
        try:
            if whole is None:
                self._torn = self._torn or error is not None
            else:
                with self._naming():
                    whole.__exit__(type(error) if error is not None else None, error, None)
            self._raise_named(error)
        finally:
            self._lock.release()

    @contextmanager
    def _alone(self, *, durable: bool, shared: bool) -> Generator[None]:
        if self._in_transaction:
            raise StoreError(f"{self.path}: a write transaction is open already")
        try:
            self._begin(durable=durable, shared=shared)
            yield
            self._commit()
        finally:
            self._roll_back()

    @contextmanager
    def read(self) -> Generator[None]:
        """A read transaction: all statements inside see one state of the store. May be nested."""
        with self._lock:
            if self._in_transaction:
                with self._naming():
                    yield
                return
            try:
                with self._naming():
                    self._begin_read()
                    yield
            finally:
                self._roll_back()

    def together(self, calls: Sequence[Callable[[], Any]], *, shared: bool = False) -> list[Result]:
        """Make calls one after the other, in one transaction for all their writes: it begins with the first write, and
        each `write` is a part of it. A call that raises is undone alone. If the transaction cannot begin or
        commit, or the database undoes it (a full disk), every call has that error, and nothing was written. `shared`:
        all their writes are. Calls that are `Several` go first, at once."""
        # Most writes of a run come here, many at once, and almost none fails. So they are first made without savepoints
        # (`_at_once`): two statements less for each. If one raises, or a block was left half done (`_torn`), all are
        # undone and made again one by one, each in a savepoint, and the one that fails is undone alone. That is sound
        # because a call depends on the store's rows alone: made again, it does the same. A call that waits for the
        # disk, or that needs the store for itself, is refused: its promise would have to be that of all the others.
        # `tests/store/test_atomic.py` stops a process at every statement of every write.
        whole = partial(self._all, calls, shared)
        try:
            try:
                return whole()
            except StoreAway as error:
                return self.outlast(whole, error)
        except Exception as error:  # all that wait for a call have to hear of it
            return [Result(error=copy(error)) for _ in calls]

    def _all(self, calls: Sequence[Callable[[], Any]], shared: bool) -> list[Result]:
        with self._lock:
            self._together, self._shared, self._begun = True, shared, False
            try:
                done = self._at_once(calls) or [self._one(call) for call in calls]
                self._end_together()
                return done
            finally:
                self._together = False
                self._roll_back()

    def outlast(self, call: Callable[[], _T], error: StoreAway) -> _T:
        """The result of a call once the database answers; before, it raised `error`, and left nothing. Raises StoreAway
        after `away_s`, and at once if the call is a part of a transaction, which is made again as a whole."""
        # A part of a transaction is not made again by itself: what came before it in the same transaction is gone with
        # the connection. The call that holds the lock makes the whole again.
        if self._lock.mine or error.given_up or not self.away_s:
            raise error
        began = time.monotonic()
        print(f"agentrl: {error}; it is waited for, {self.away_s:g} s at most", file=sys.stderr, flush=True)
        self.away += 1
        try:
            while time.monotonic() - began < self.away_s:
                time.sleep(PAUSE_S)
                try:
                    return call()
                except StoreAway as again:
                    error = again
        finally:
            self.away -= 1
        waited = f"it was waited for, {self.away_s:g} s (cluster.store_deadline_s)"
        given_up = StoreAway(f"{error}; {waited}; go on with agentrl train --resume {self.path.parent}")
        given_up.given_up = True
        raise given_up from error

    def _at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Result] | None:
        """The results of calls, if none failed and their transaction is committed. None if a call failed: nothing is
        written, and the caller makes them one by one. Most often none fails, and so none needs a savepoint."""
        self._swift, self._torn = True, False
        try:
            done = each(calls)
            if not self._torn:
                self._end_together()
                return done
        except StoreAway:
            raise
        except Exception as error:  # one of them failed: which, and what of it, is found one by one
            if self._begun and not self._in_transaction:
                raise
            if len(calls) == 1:
                self._roll_back()
                return [Result(error=error)]
        finally:
            self._swift = False
        self._roll_back()
        self._begun = False
        return None

    def _end_together(self) -> None:
        if self._in_transaction:
            with self._naming():
                self._commit()

    def _one(self, call: Callable[[], Any]) -> Result:
        try:
            return Result(value=call())
        except StoreAway:
            raise
        except Exception as error:  # it belongs to whoever asked for this call
            if self._begun and not self._in_transaction:  # what earlier calls wrote is gone as well
                raise
            return Result(error=error)

    @contextmanager
    def _savepoint(self) -> Generator[None]:
        """A savepoint: if the block fails, its writes alone are undone."""
        try:
            self.execute("SAVEPOINT one")
            yield
            self.execute("RELEASE one")
        except Exception:
            if self._in_transaction:
                self.execute("ROLLBACK TO one")
                self.execute("RELEASE one")
            raise

    def _begin(self, *, durable: bool, shared: bool) -> None:
        began, self.waits = time.monotonic(), True
        try:
            while True:
                try:
                    self._begin_write(durable=durable, shared=shared)
                    return
                except self._errors as error:
                    why = self._named(error)
                    if not isinstance(why, StoreBusy) or time.monotonic() - began >= self._busy_s:
                        raise why from error
        finally:
            self.waits = False

    @contextmanager
    def _naming(self) -> Generator[None]:
        """Raise each error of the driver, and of a row that cannot be read or written, as a StoreError."""
        try:
            yield
        except Exception as error:
            self._raise_named(error)
            raise

    def _raise_named(self, error: BaseException | None) -> None:
        """Raise the StoreError for an error of the driver or of a row; nothing for any other."""
        if isinstance(error, self._errors):
            raise self._named(error) from error
        if isinstance(error, _UNREADABLE):
            raise damaged(self.path, error) from error
        if isinstance(error, UnicodeEncodeError):
            raise StoreError(f"{self.path}: a name or text cannot be written as UTF-8: {error}") from error

    # --- statements, inside a transaction -----------------------------------------------------------------------

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows that one statement returns."""
        return list(self.execute(sql, parameters))

    def all_rows(self, *asked: Asked) -> list[list[Row]]:
        """All rows that each of several statements returns: asked at once, of a server."""
        return [self.rows(sql, parameters) for sql, parameters in asked]

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row that one statement returns; None if it returns none."""
        return next(iter(self.execute(sql, parameters)), None)


class _Write(AbstractContextManager[None]):
    """`Database.write`: no generator, since each turn has several. `enter` begins it, `leave` ends it."""

    __slots__ = ("_enter", "_leave", "_whole")

    def __init__(self, enter: Callable[[], _Whole], leave: Callable[[_Whole, BaseException | None], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._whole = self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._whole, error)


class _Turn:
    """A lock that its thread may take again, and that knows whether the asking thread has it."""

    def __init__(self) -> None:
        self._lock, self._depth, self._thread = threading.RLock(), 0, 0

    def acquire(self, timeout_s: float = -1) -> bool:
        if got := self._lock.acquire(timeout=timeout_s):
            self._depth, self._thread = self._depth + 1, threading.get_ident()
        return got

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = 0
        self._lock.release()

    @property
    def mine(self) -> bool:
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class StorePart:
    """A part of the store: calls on one kind of rows. All parts of a handle share its database, which has the state."""

    def __init__(self, db: Database) -> None:
        self._db = db


def retried(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Have a call of a part made again, whole, if the database goes away under it, for `away_s` at most.

    Such a call has one transaction that writes, and nothing after it: what was committed would be written twice. A call
    with several marks the step that has each. The decorator stands at every call that needs it; an earlier version
    added it to all public methods of a subclass, and nobody who read a call knew that it may run twice."""

    @wraps(method)
    def call(self: Any, *arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(self, *arguments, **named)
        except StoreAway as error:
            database: Database = self._db
            return database.outlast(partial(method, self, *arguments, **named), error)

    return call


def damaged(path: Path, error: Exception) -> StoreDamaged:
    """The error of a store that cannot be read."""
    what = "is not a run store, or is damaged" if "not a database" in str(error) else f"is damaged ({error})"
    hint = f"put a copy of it in its place and go on with agentrl train --resume {path.parent}; without one, begin a"
    return StoreDamaged(f"{path}: {what}: {hint} new run with the newest folder of {path.parent}/checkpoints as model")
