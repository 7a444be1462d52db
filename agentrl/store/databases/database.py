"""The connection of one process to a run store, whatever the database: what every part of the store works with.

    Database          statements, transactions, calls made together, a database that goes away and comes back
    transactions.py   who may begin a transaction, how it ends, what an error in it means
    calls_together.py calls that have one transaction, and each its own result
    driver.py         the single acts that SQLite and PostgreSQL do in their own way (`sqlite.py`, `postgres/`)
    upkeep.py         what is done to a store as a whole: made, checked, copied, tidied

A database on another machine may go away, and come back. A call that raises StoreAway has left nothing in the store, so
it is made again from its start, whole, until the database answers or `waiting.away_s` has passed (`outlast`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from agentrl.errors import StoreAway, UsageError
from agentrl.store.databases.calls_together import Result, make_together
from agentrl.store.databases.driver import PAUSE_S, Cursor, Driver, Query, Row
from agentrl.store.databases.transactions import Transactions
from agentrl.store.databases.upkeep import Upkeep

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Database:
    """One process's handle of the store. Threads may share it: calls take turns. `clock` gives seconds since the epoch.

    with db.write():
        check_fence(db, episode_id, fence)
        db.execute("UPDATE episodes SET … WHERE id = ?", (episode_id,))
    """

    def __init__(self, driver: Driver, upkeep: Upkeep, clock: Callable[[], float]) -> None:
        self.path, self.waiting, self.remote, self.shares = driver.path, driver.waiting, driver.remote, driver.shares
        self.upkeep, self.clock = upkeep, clock
        self.leads: int | None = None
        """Which of the run's learners this handle is of (see `learner_fence`); None: of none."""
        self.driver, self._transactions = driver, Transactions(driver)

    def prepare(self, *, create: bool, first: Callable[[], object] = lambda: None) -> None:
        """See that there is a store of our schema; with `create` make it, running `first` in the same transaction.

        Raises UsageError if there is a store already (`create`) or none (otherwise), FormatError if it has another
        schema."""
        upkeep = self.upkeep
        if create:
            self._alone(upkeep.make_place)
            with self.write():
                if upkeep.is_made():
                    upkeep.check()
                    raise UsageError(f"{self.path} holds a run already: resume it, or choose another folder")
                upkeep.create_tables()
                first()
        else:
            with self.read():
                upkeep.check()
        self._alone(upkeep.opened)

    def close(self) -> None:
        """Close the connection. One on which a thread waits for a silent server ends with the process."""
        # A thread that hangs in a call to a silent server holds the lock. Closing waits for it briefly and then leaves
        # the connection to the end of the process, which follows: a process must end although the network does not
        # answer.
        if self._transactions.lock.acquire(self.driver.close_s):
            self.driver.close()
            self._transactions.lock.release()

    def hurry(self, busy_s: float) -> None:
        """From now on wait no longer than `busy_s` for another process's write lock, or for a database that is away,
        also if a thread waits already."""
        self.waiting.lock_s, self.waiting.away_s = busy_s, min(busy_s, self.waiting.away_s)

    def reclaim(self) -> None:
        """Give back the space of what retention forgot, outside a transaction."""
        self.upkeep.reclaim(self._transactions)

    # --- transactions

    def write(self, *, durable: bool = False, shared: bool = False) -> AbstractContextManager[None]:
        """A write transaction, see `Transactions.write`."""
        return self._transactions.write(durable=durable, shared=shared)

    def read(self) -> AbstractContextManager[None]:
        """A read transaction, see `Transactions.read`."""
        return self._transactions.read()

    def together(self, calls: Sequence[Callable[[], Any]], *, shared: bool = False) -> list[Result]:
        """Make calls one after the other, in one transaction for all their writes: it begins with the first write, and
        each `write` is a part of it. A call that raises is undone alone. If the transaction cannot begin or
        commit, or the database undoes it (a full disk), every call has that error, and nothing was written. `shared`:
        all their writes are. Calls that are `BatchedCall` go first, at once."""
        make_all = partial(make_together, self._transactions, calls, shared=shared)
        try:
            try:
                return make_all()
            except StoreAway as error:
                return self.outlast(make_all, error)
        except Exception as error:  # all that wait for a call have to hear of it
            # A copy for each: several tasks that raise one exception object would add their frames to one traceback,
            # and each would print the stacks of all others.
            return [Result(error=copy(error)) for _ in calls]

    def outlast(self, call: Callable[[], _T], error: StoreAway) -> _T:
        """The result of a call once the database answers; before, it raised `error`, and left nothing. Raises StoreAway
        after `away_s`, and at once if the call is a part of a transaction, which is made again as a whole."""
        # A part of a transaction is not made again by itself: what came before it in the same transaction is gone with
        # the connection. The call that holds the lock makes the whole again.
        away_s = self.waiting.away_s
        if self._transactions.lock.mine or error.retries_spent or not away_s:
            raise error
        began_s = time.monotonic()
        print(f"agentrl: {error}; it is waited for, {away_s:g} s at most", file=sys.stderr, flush=True)
        self.waiting.for_database += 1
        try:
            # `away_s` is read anew at each turn: a process that is asked to end lowers it (`hurry`), also for a call
            # that is already waiting.
            while time.monotonic() - began_s < self.waiting.away_s:
                time.sleep(PAUSE_S)
                try:
                    return call()
                except StoreAway as later_error:
                    error = later_error
        finally:
            self.waiting.for_database -= 1
        wait_report = f"it was waited for, {self.waiting.away_s:g} s (cluster.store_deadline_s)"
        final_error = StoreAway(f"{error}; {wait_report}; go on with agentrl train --resume {self.path.parent}")
        # A call inside another retried call raises this error through both. Without the mark the outer one would begin
        # to wait for another `away_s`, and the deadline of law 4 would double with each level.
        final_error.retries_spent = True
        raise final_error from error

    def _alone(self, act: Callable[[], object]) -> None:
        """Do something outside a transaction."""
        with self._transactions.lock, self._transactions.naming():
            act()

    # --- statements, inside a transaction: see `Driver`

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        return self.driver.execute(sql, parameters)

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self.driver.execute_many(sql, rows)

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        return self.driver.insert(sql, parameters)

    def numbers(self, table: str, n: int) -> Sequence[int]:
        return self.driver.numbers(table, n)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self.driver.rows(sql, parameters)

    def all_rows(self, *queries: Query) -> list[list[Row]]:
        return self.driver.all_rows(*queries)

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        return self.driver.row(sql, parameters)

    def any_text(self, text: str | bytes) -> str | bytes:
        return self.driver.any_text(text)


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
