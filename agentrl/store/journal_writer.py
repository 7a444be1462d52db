"""The journal of a trio program: awaited writes that one thread commits together, and the reads that go with them.

A turn is journaled before its environment sees it (law 1), so hundreds of episodes wait for the disk at once. One
transaction for each would give every episode its own wait for the write lock and its own sync; here all that wait share
one. A `JournalWriter` answers `RolloutStore` and `RewardStore` of `agentrl.store.interfaces`.

    task of an episode   await journal_turn(…) ──► queue ──► thread: one transaction for all that is queued
                         goes on  ◄── result, in passes of the loop ◄──┘

Invariants: writes take effect in the order of their calls, but for those of the journal, which go before others of the
same moment where the database lets processes journal at once; each caller gets the result or the error of its own write
alone; a write, once called, is made, also if its caller was cancelled meanwhile.

Other programs have few writes, and make them through `agentrl.store.async_calls`. Never knows what a call writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import trio

from agentrl.errors import StoreAway, StoreError
from agentrl.host.disk_space import wait_for_space
from agentrl.store import Partial, RunStore
from agentrl.store.async_calls import Looks, Waiting
from agentrl.store.databases.calls_together import Result
from agentrl.store.databases.change_signal import Role

# Why the commit is shared, and what was decided with it:
#
# - All in one transaction, and most often no savepoint. A savepoint for each write would keep an error of one from the
#   others, and costs two statements a write. Almost no write fails, so the thread first makes all of them without, and
#   only if one raises is everything undone and made again one by one, each with its savepoint (`Database.together`).
#   `tests/store/test_awaitable.py` holds that a write that fails leaves no trace and takes none of the others with it.
# - A caller that is cancelled leaves at once, and its write stays in the queue. To take it out would need the thread's
#   word on whether it has begun already. So the write may take effect after its caller is gone. Its error is lost then,
#   and nothing else is: if the episode was lost to another worker, the fence makes the next call of it raise LeaseLost.
# - Results come back in passes of the loop with a bounded number of tasks each. To let all go on in one pass would
#   hold every deadline of the loop up for as long as hundreds of tasks run.
# - A full disk is waited for by the tasks of the writes, not by the thread: reads and cancellation go on, and a sampled
#   turn stays in the memory of its task until there is space. `claim`, `renew` and `record` do not wait: there will be
#   a later one.
# - Reads have a connection of their own that waits for no writer. If the database is away they go through the thread,
#   which waits for it; so there is one place that waits, and one message that says so.

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LAST_WORD_S = 4.0  # less than a supervisor leaves a child to end
_TOGETHER = 256  # writes of one transaction at most: other processes wait for its end
_AT_ONCE = 32  # tasks that go on in one pass of the loop: its other tasks wait for their end


class Write:
    """A requested write. `result` is None until it is committed or has failed."""

    __slots__ = ("call", "result", "shared", "task", "then")

    def __init__(self, call: Callable[[], Any], shared: bool) -> None:
        self.call, self.shared = call, shared
        self.result: Result | None = None
        self.task: trio.lowlevel.Task | None = None  # waits for it
        self.then: Callable[[], None] | None = None  # called once it is committed


def _written(
    call_of: Callable[[RunStore], Callable[_P, _T]], *, shared: bool = False, waits_for_space: bool = True
) -> Callable[Concatenate[JournalWriter, _P], CoroutineType[Any, Any, _T]]:
    """A write of the store, awaited. `shared`: it writes rows of one episode alone, so that other processes may write
    such rows meanwhile."""

    async def call(self: JournalWriter, *arguments: _P.args, **named: _P.kwargs) -> _T:
        store_call = partial(call_of(self.store), *arguments, **named)
        return await (self.write if waits_for_space else self.write_once)(store_call, shared=shared)

    return call


def _entered(
    entry_of: Callable[[RunStore], Callable[_P, Callable[[], _T]]], *, shared: bool = True
) -> Callable[Concatenate[JournalWriter, _P], CoroutineType[Any, Any, _T]]:
    """A write of the journal, awaited. The store gives it as an entry, which is packed here, in the caller's task, and
    written in few statements with others of its kind. `shared` as above."""

    async def call(self: JournalWriter, *arguments: _P.args, **named: _P.kwargs) -> _T:
        return await self.write(entry_of(self.store)(*arguments, **named), shared=shared)

    return call


def _read(
    call_of: Callable[[RunStore], Callable[_P, _T]],
) -> Callable[Concatenate[JournalWriter, _P], CoroutineType[Any, Any, _T]]:
    """A read of the store, awaited."""

    async def call(self: JournalWriter, *arguments: _P.args, **named: _P.kwargs) -> _T:
        return await self.read(lambda store: call_of(store)(*arguments, **named))

    return call


class JournalWriter:
    """The store of a worker and of a reward source. Make it inside `trio.run`, unless `inline`; `aclose` makes the
    writes that are still queued. It closes neither `store` nor `reader`. `inline` makes each write a transaction in the
    caller's task, without a thread: for simulations in virtual time."""

    def __init__(
        self, store: RunStore, reader: RunStore | None = None, *, inline: bool = False, disk_wait_s: float = 0.0
    ) -> None:
        """`store` writes, `reader` (default: `store`) reads; a `reader` of its own never waits for a writer. Writes
        wait `disk_wait_s` for space before they raise DiskFull, but for `claim`, `renew` and `record`."""
        self.store, self._disk_wait_s = store, disk_wait_s
        self.on_part: Callable[[int, Partial], None] | None = None
        """Called in the loop with an episode's number and each part of its turns, once the part is committed."""
        self._looks, self._waiting = Looks(reader or store, inline=inline), Waiting(store)
        self._queue: SimpleQueue[Write | None] = SimpleQueue()
        self._made: deque[tuple[list[Write], list[Result]]] = deque()  # by the thread; the loop has yet to look
        self._ready: deque[Write] = deque()  # they have their results, and their callers wait
        self._thread: threading.Thread | None = None
        if not inline:
            self._token = trio.lowlevel.current_trio_token()
            # A thread of our own, not trio's pool: commits must come one after the other, and a pool's thread that is
            # chosen anew for each would cost a hand-over for every batch. A daemon, because a call that hangs in the
            # database must not keep the process from ending (law 4); `aclose` is how it ends otherwise.
            self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
            self._thread.start()

    # --- what a worker does

    claim = _written(lambda store: store.leases.claim, waits_for_space=False)
    # Not a read: it is to see the writes of its episode that are still queued.
    reload = _written(lambda store: store.leases.reload)
    renew = _written(lambda store: store.leases.renew, waits_for_space=False)
    hand_back = _written(lambda store: store.leases.hand_back)
    begin = _written(lambda store: store.journal.begin, shared=True)
    journal_turn = _entered(lambda store: store.journal.turn_entry)
    journal_step = _entered(lambda store: store.journal.step_entry)
    restart_episode = _written(lambda store: store.journal.restart_episode)
    discard_turn = _written(lambda store: store.journal.discard_turn)
    restart_group = _written(lambda store: store.journal.restart_group)
    # It may close the group, and so writes rows of other episodes: it has the store for itself.
    finish = _entered(lambda store: store.journal.end_entry, shared=False)
    keep_snapshot = _written(lambda store: store.journal.keep_snapshot, shared=True)
    snapshot = _written(lambda store: store.journal.snapshot)
    note_unsaved = _written(lambda store: store.journal.note_unsaved, shared=True)
    unsaved = _written(lambda store: store.journal.unsaved)
    keep_artifacts = _written(lambda store: store.journal.keep_artifacts, shared=True)
    record = _written(lambda store: store.metrics.record, waits_for_space=False)
    meta = _read(lambda store: store.meta)
    current_version = _read(lambda store: store.versions.current_version)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Write:
        """Write a part of a turn; nobody waits for it."""
        posted_write = self._post(self.store.journal.part_entry(episode_id, fence, part), shared=True)
        if self.on_part is not None:
            posted_write.then = partial(self.on_part, episode_id, part)
        return posted_write

    async def wait_for_work(self, role: Role, timeout_s: float) -> None:
        """Wait until there may be work for `role`, or until the timeout."""
        await self._waiting(role, timeout_s)

    # --- what a reward source does

    awaiting = _read(lambda store: store.scores.awaiting)
    trajectory = _read(lambda store: store.reads.trajectory)
    artifacts = _read(lambda store: store.journal.artifacts)
    score = _written(lambda store: store.scores.score)

    # --- reads

    async def read(self, call: Callable[[RunStore], _T]) -> _T:
        """Make a read."""
        try:
            return await self._looks(call)
        except StoreAway:
            return await self.write_once(partial(call, self.store))

    # --- writes

    async def write(self, call: Callable[[], Any], *, shared: bool = False) -> Any:
        """Make a write once there is space for it. Raises DiskFull after `disk_wait_s`."""
        return await wait_for_space(partial(self.write_once, call, shared=shared), deadline_s=self._disk_wait_s)

    async def write_once(self, call: Callable[[], Any], *, shared: bool = False) -> Any:
        """Make a write. Raises DiskFull at once where there is no space for it."""
        posted_write = self._post(call, trio.lowlevel.current_task(), shared=shared)
        if posted_write.result is None:
            # The task is parked by hand instead of on a `trio.Event` for each write: hundreds of tasks wait at once,
            # and an event is an object, a set and a wake-up of its own for each. Cancellation succeeds at once and only
            # forgets the task.
            def leave(_: object) -> trio.lowlevel.Abort:
                posted_write.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(leave)
        else:
            # Also without a thread each write is a checkpoint, so that a simulation in virtual time has the same
            # schedule points as a run.
            await trio.lowlevel.checkpoint()
        assert posted_write.result is not None
        if posted_write.result.error is not None:
            raise posted_write.result.error
        return posted_write.result.value

    def _post(self, call: Callable[[], Any], task: trio.lowlevel.Task | None = None, *, shared: bool = False) -> Write:
        posted_write = Write(call, shared and self.store.shares)
        if self._thread is None:
            (posted_write.result,) = self.store.together([call], shared=posted_write.shared)
        else:
            posted_write.task = task
            self._queue.put(posted_write)
        return posted_write

    def _serve(self) -> None:
        """The thread: make writes until None comes."""
        goes_on = True
        while goes_on:
            queue_items = [self._queue.get()]
            with suppress(Empty):
                # Whatever is queued now, without waiting for more: a batch is as large as the last commit was slow. A
                # timer that collects writes would add its delay to every turn of a run with few episodes.
                while len(queue_items) < _TOGETHER:
                    queue_items.append(self._queue.get_nowait())
            writes = [queued_write for queued_write in queue_items if queued_write is not None]
            goes_on = len(writes) == len(queue_items)
            # Two transactions where a database lets journals of several processes go on at once: one write that needs
            # the store for itself would make all the journal entries beside it wait for the other processes. The
            # journal goes first, since episodes wait for it.
            for is_shared in (True, False):
                if batch_writes := [queued_write for queued_write in writes if queued_write.shared is is_shared]:
                    self._make(batch_writes, is_shared)

    def _make(self, writes: list[Write], shared: bool) -> None:
        """Commit writes in one transaction, and tell their callers."""
        try:
            write_results = self.store.together([write.call for write in writes], shared=shared)
        except BaseException as error:  # whatever it was, the callers wait, and so will others
            write_results = [Result(error=StoreError(f"the store's thread failed: {error!r}")) for _ in writes]
        self._made.append((writes, write_results))
        self._wake_soon()

    def _wake(self) -> None:
        """Note what came of writes, and let their callers go on: in one pass of the loop only so many that no other
        task of it waits long."""
        while self._made:
            for made_write, write_result in zip(*self._made.popleft(), strict=True):
                made_write.result = write_result
                if made_write.then is not None and write_result.error is None:
                    made_write.then()
                if made_write.task is not None:
                    self._ready.append(made_write)
        for _ in range(min(_AT_ONCE, len(self._ready))):
            made_write = self._ready.popleft()
            if made_write.task is not None:  # else its caller was cancelled
                trio.lowlevel.reschedule(made_write.task)
                made_write.task = None
        if self._ready:
            self._wake_soon()

    def _wake_soon(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    async def aclose(self) -> None:
        """Make the writes that are queued, and end the thread. They wait for the lock for a few seconds only, as the
        supervisor does for this process."""
        if self._thread is not None:
            self.store.hurry(_LAST_WORD_S)
            self._queue.put(None)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
