"""Calls that are made together have one transaction, and each its own result: how most writes of a run are made.

Calls of one kind that come one after the other may be made at once (`BatchedCall`), in fewer statements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from agentrl.errors import StoreAway
from agentrl.store.databases.transactions import Batch, Transactions


class Result(NamedTuple):
    """Result of a call: a value, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class BatchedCall(ABC):
    """A call that is made at once with others of its kind: all that come one after the other."""

    __slots__ = ()

    first: ClassVar[bool] = False
    """Whether calls of this kind go before all others."""

    @abstractmethod
    def __call__(self) -> Any:
        """Make it alone."""

    @classmethod
    @abstractmethod
    def all(cls, calls: Sequence[Any]) -> list[Result]:
        """Make calls in their order and return their results. An error that it raises undoes them all."""


def make_each(calls: Sequence[Callable[[], Any]]) -> list[Result]:
    """Make the calls and return their results in order. Raises the error of a call that is made alone."""
    results_by_position = dict[int, Result]()
    # The sort is stable, so writes of one episode keep their order: the entries of its journal are all `first`, and it
    # awaits every other kind of call. Brought together they become one run of one kind, and few statements.
    call_order = sorted(
        range(len(calls)), key=lambda at: not (isinstance(call := calls[at], BatchedCall) and call.first)
    )
    for call_kind, grouped_positions in groupby(call_order, key=lambda at: _kind(calls[at])):
        positions = list(grouped_positions)
        if call_kind is None:
            results_by_position.update((position, Result(value=calls[position]())) for position in positions)
        else:
            kind_results = call_kind(type(calls[positions[0]]), [calls[position] for position in positions])
            results_by_position.update(zip(positions, kind_results, strict=True))
    return [results_by_position[position] for position in range(len(calls))]


def _kind(call: Callable[[], Any]) -> Callable[[type, Sequence[Any]], list[Result]] | None:
    """How calls of its kind are made at once; None if they are not."""
    return call.all.__func__ if isinstance(call, BatchedCall) else None


def make_together(transactions: Transactions, calls: Sequence[Callable[[], Any]], *, shared: bool) -> list[Result]:
    """The results of calls, made in one transaction that is committed. Raises what undid them all."""
    # Almost no call of a run fails. So all are first made without savepoints: two statements less for each. If one
    # raises, or a block was left half done, all are undone and made again one by one, each in a savepoint, and the one
    # that fails is undone alone. That is sound because a call depends on the store's rows alone: made again, it does
    # the same. A call that waits for the disk, or that needs the store for itself, is refused: its promise would have
    # to be that of all the others. `tests/store/test_atomic.py` stops a process at every statement of every write.
    with transactions.lock:
        try:
            call_results = _without_savepoints(transactions, calls, shared)
            if call_results is None:
                savepoint_batch = transactions.batch = Batch(shared=shared, savepoints=True)
                call_results = [_alone(transactions, savepoint_batch, call) for call in calls]
                transactions.commit_batch()
            return call_results
        finally:
            # Also after a commit, when there is nothing to roll back: an error between two calls must never leave a
            # transaction open, as its write lock would stop every process of the run.
            transactions.batch = None
            transactions.driver.roll_back()


def _without_savepoints(
    transactions: Transactions, calls: Sequence[Callable[[], Any]], shared: bool
) -> list[Result] | None:
    """The results of calls, if none failed and their transaction is committed. None if one of several failed: nothing
    is written, and the caller makes them one by one."""
    batch = transactions.batch = Batch(shared=shared, savepoints=False)
    try:
        call_results = make_each(calls)
        if not batch.half_done:
            transactions.commit_batch()
            return call_results
    except StoreAway:
        raise
    except Exception as error:
        _raise_if_undone(transactions, batch, error)
        if len(calls) == 1:
            return [Result(error=error)]
    transactions.driver.roll_back()
    return None


def _alone(transactions: Transactions, batch: Batch, call: Callable[[], Any]) -> Result:
    try:
        return Result(value=call())
    except StoreAway:
        raise
    except Exception as error:  # it belongs to the caller of this call
        _raise_if_undone(transactions, batch, error)
        return Result(error=error)


def _raise_if_undone(transactions: Transactions, batch: Batch, error: Exception) -> None:
    """Raise an error with which the database undid the whole transaction: what earlier calls wrote is gone as well."""
    # SQLite may end a transaction by itself, for a full disk or an error of the device among others (see "Response To
    # Errors Within A Transaction" in its documentation). Then writes of earlier calls are gone although those calls
    # returned: nobody may be told that theirs was kept (law 2).
    if batch.begun and not transactions.driver.in_transaction:
        raise error
