"""Transactions of one process's connection: who may begin one, how it ends, and what an error in it means.

Every write is a transaction that takes the store's write lock at its start, so a killed process leaves either the whole
transaction or nothing, and two processes never deadlock halfway. Every error of the driver and every unreadable row is
raised as a `StoreError` of one line.

Most writes of a run come together, many at once (`calls_together`): then a `Batch` is open, and each `write` is a part
of its one transaction.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import zstandard

from agentrl.errors import StoreBusy, StoreError
from agentrl.store.databases.driver import Driver, damaged

_UNREADABLE = (zstandard.ZstdError, struct.error, json.JSONDecodeError, UnicodeDecodeError)
_Part = AbstractContextManager[None] | None
"""A write that was begun: its transaction or savepoint; None if the writes of its batch share one."""


@dataclass(slots=True)
class Batch:
    """One transaction whose parts are writes of several calls."""

    shared: bool
    """Whether all of them are shared writes: those of other processes may go on beside it."""
    savepoints: bool
    """Whether a part that fails is undone alone. If not, one that fails undoes them all."""
    begun: bool = False
    """Whether a write has begun the transaction."""
    half_done: bool = False
    """Whether a part failed and had no savepoint: the transaction may not be committed."""


class Transactions:
    """Read and write transactions of a connection. Threads may share it: calls take turns.

    Invariants: outside `write` and `read` no transaction is open; a write either commits whole or leaves no trace."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.lock = driver, Turn()
        self.batch: Batch | None = None

    def write(self, *, durable: bool = False, shared: bool = False) -> AbstractContextManager[None]:
        """A write transaction. `durable` waits for the disk, so that it also survives a loss of power; without it
        a commit survives the death of any process, not of the machine. `shared` promises that it writes only rows that
        nobody else may write meanwhile, as those of an episode whose fence it checks: a database may let other shared
        writes go on beside it. In a batch it is a part of one transaction."""
        return _Write(partial(self._enter, durable, shared), self._leave)

    @contextmanager
    def read(self) -> Generator[None]:
        """A read transaction: all statements inside see one state of the store. May be nested."""
        with self.lock:
            if self.driver.in_transaction:
                with self.naming():
                    yield
                return
            try:
                with self.naming():
                    self.driver.begin_read()
                    yield
            finally:
                self.driver.roll_back()

    def commit_batch(self) -> None:
        """Commit what the parts of the open batch wrote; nothing if none wrote."""
        if self.driver.in_transaction:
            with self.naming():
                self.driver.commit()

    def _enter(self, durable: bool, shared: bool) -> _Part:
        self.lock.acquire()
        try:
            begun_part = self._begin_part(durable, shared)
            if begun_part is not None:
                begun_part.__enter__()
            return begun_part
        except BaseException as error:
            self.lock.release()
            self._raise_named(error)
            raise

    def _begin_part(self, durable: bool, shared: bool) -> _Part:
        open_batch = self.batch
        if open_batch is None:
            return self._alone(durable=durable, shared=shared)
        # Refused rather than obeyed: the others of the batch would wait for the disk too, or this one would return
        # before its promise holds. No caller needs both, so a mixture is a mistake.
        if durable:
            raise StoreError(f"{self.driver.path}: a write that waits for the disk has a transaction of its own")
        if open_batch.shared and not shared:
            raise StoreError(f"{self.driver.path}: a write that needs the store for itself came among others")
        if not self.driver.in_transaction:
            # The transaction begins with the first write and not with the batch: a batch may hold only calls that look
            # and find nothing to do, such as the claim of an idle worker.
            open_batch.begun = True
            self._begin(durable=False, shared=open_batch.shared)
        return self._savepoint() if open_batch.savepoints else None

    def _leave(self, part: _Part, error: BaseException | None) -> None:
        try:
            if part is not None:
                with self.naming():
                    part.__exit__(type(error) if error is not None else None, error, None)
            elif error is not None and self.batch is not None:
                self.batch.half_done = True
            self._raise_named(error)
        finally:
            self.lock.release()

    @contextmanager
    def _alone(self, *, durable: bool, shared: bool) -> Generator[None]:
        """A write transaction for this block alone, outside of any batch; rolled back unless the block ends well. See
        `write` for `durable` and `shared`."""
        if self.driver.in_transaction:
            raise StoreError(f"{self.driver.path}: a write transaction is open already")
        try:
            self._begin(durable=durable, shared=shared)
            yield
            self.driver.commit()
        finally:
            self.driver.roll_back()

    @contextmanager
    def _savepoint(self) -> Generator[None]:
        """A savepoint: if the block fails, its writes alone are undone."""
        driver = self.driver
        # On a server, statements that were sent before are still unanswered. Waiting here puts their errors on the call
        # that sent them; otherwise one would surface inside this savepoint and undo the wrong call.
        driver.before_savepoint()
        try:
            driver.execute("SAVEPOINT one")
            yield
            driver.execute("RELEASE one")
        except Exception:
            if driver.in_transaction:
                driver.execute("ROLLBACK TO one")
                driver.execute("RELEASE one")
            raise

    def _begin(self, *, durable: bool, shared: bool) -> None:
        began_s, waiting = time.monotonic(), self.driver.waiting
        waiting.for_lock = True
        try:
            while True:
                try:
                    self.driver.begin_write(durable=durable, shared=shared)
                    return
                except self.driver.errors as error:
                    named_error = self.driver.named(error)
                    # Many short tries instead of the database's own long timeout: the bound may shrink while it waits
                    # (`hurry`), a signal is handled between two tries, and the flag that says "waits for a lock" is
                    # true for exactly as long as it does.
                    if not isinstance(named_error, StoreBusy) or time.monotonic() - began_s >= waiting.lock_s:
                        raise named_error from error
        finally:
            waiting.for_lock = False

    @contextmanager
    def naming(self) -> Generator[None]:
        """Raise each error of the driver, and of a row that cannot be read or written, as a StoreError."""
        try:
            yield
        except Exception as error:
            self._raise_named(error)
            raise

    def _raise_named(self, error: BaseException | None) -> None:
        """Raise the StoreError for an error of the driver or of a row; nothing for any other."""
        store_path = self.driver.path
        if isinstance(error, self.driver.errors):
            raise self.driver.named(error) from error
        if isinstance(error, _UNREADABLE):
            raise damaged(store_path, error) from error
        if isinstance(error, UnicodeEncodeError):
            raise StoreError(f"{store_path}: a name or text cannot be written as UTF-8: {error}") from error


class _Write(AbstractContextManager[None]):
    """`Transactions.write`: no generator, since each turn has several. `enter` begins it, `leave` ends it."""

    __slots__ = ("_enter", "_leave", "_part")

    def __init__(self, enter: Callable[[], _Part], leave: Callable[[_Part, BaseException | None], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._part = self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._part, error)


class Turn:
    """A lock that its thread may take again, and that knows whether the asking thread has it."""

    def __init__(self) -> None:
        # Python's RLock does not say who owns it. The thread's number is read by other threads without the lock, which
        # is sound: a thread can only ever find its own number there if it wrote it itself.
        self._lock, self._depth, self._thread = threading.RLock(), 0, 0

    def acquire(self, timeout_s: float = -1) -> bool:
        if is_acquired := self._lock.acquire(timeout=timeout_s):
            self._depth, self._thread = self._depth + 1, threading.get_ident()
        return is_acquired

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
