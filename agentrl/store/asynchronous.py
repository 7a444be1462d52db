"""The run store in a trio program: awaited writes committed together by one thread, awaited reads, waiting for work.

The thread takes all writes that are queued and commits them in one transaction, each a savepoint of its own: an error
of one undoes that one alone. If another process holds the write lock, or the disk is slow, callers wait; all other
tasks, deadlines and cancellation go on. Reads have a read-only connection and wait for no write: in the loop if the
store is a file, else in a thread of their own (`Looks`). A database that is away is waited for by the thread of the
writes alone: so it makes the reads, too, that fail meanwhile.

Writes are committed in the order in which they were asked for; if the store lets processes journal at once, those of
the journal go before others that were asked for at the same moment, and have a transaction of their own. A write whose
caller is cancelled while it waits is still made, before any later one; its error, if any, is lost, but the fence
protects: if its episode was lost, the next call of that episode raises LeaseLost too. On a full disk, the writes of
episodes and scores wait for space: a sampled turn stays in the memory of its task. `inline` makes each call a
transaction in the caller's task, without a thread: for simulations in virtual time. Never knows what a call writes.

`Aside` is for a program with few writes: each is made in a thread, by a synchronous handle that does nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import trio

from agentrl.errors import StoreAway, StoreError
from agentrl.host.disk_space import wait_for_space
from agentrl.store import Partial, RunStore
from agentrl.store.databases.change_signal import Role
from agentrl.store.databases.database import Result
from agentrl.store.interfaces import Changes, ReadStore

LOOK_S = 10.0
"""How long a read in a loop waits for a server, in seconds; its caller looks again later."""

_BESIDE_S = 0.02
_S = TypeVar("_S")
_T = TypeVar("_T")


class Aside(Generic[_S]):
    """Calls get `store`, one at a time and in order. A call whose caller is cancelled is still made, before any later
    one. `inline` makes each in the caller's task, without a thread: for virtual time."""

    def __init__(self, store: _S, *, inline: bool = False) -> None:
        self._store, self._inline = store, inline
        self._one = trio.CapacityLimiter(1)

    async def __call__(self, call: Callable[[_S], _T]) -> _T:
        if self._inline:
            return call(self._store)
        return await trio.to_thread.run_sync(call, self._store, abandon_on_cancel=True, limiter=self._one)


class Readable(Protocol):
    """A store's handle."""

    @property
    def remote(self) -> bool:
        """Whether it is on a server."""
        ...


_R = TypeVar("_R", bound=Readable, covariant=True)


class Looks(Generic[_R]):
    """Calls get `store`, those in a thread one at a time. A caller that is cancelled goes on at once; the thread goes
    on alone until the server has answered, or the store's own deadline. `inline` has no thread: for virtual time."""

    def __init__(self, store: _R, *, deadline_s: float = LOOK_S, inline: bool = False) -> None:
        self._store, self._deadline_s, self._inline = store, deadline_s, inline
        self._apart = Aside(store)

    async def __call__(self, call: Callable[[_R], _T]) -> _T:
        """What the call returns, or raises. Raises StoreAway if the server does not answer in time."""
        if self._inline or not self._store.remote:
            return call(self._store)
        with trio.move_on_after(self._deadline_s):
            return await self._apart(call)
        raise StoreAway(f"the database did not answer within {self._deadline_s:g} s: start it")


class Newest(Generic[_T]):
    """One read for all who ask meanwhile: what they get was read after they asked. If the server does not answer, they
    get what was read last, which is `first` to begin with."""

    def __init__(self, read: Callable[[], Awaitable[_T]], first: _T) -> None:
        self._read, self._last, self._turn = read, first, trio.Lock()
        self._begun = self._done = 0  # numbers of reads

    async def __call__(self) -> _T:
        asked = self._begun
        async with self._turn:
            if self._done <= asked:
                self._begun = number = self._begun + 1
                with suppress(StoreAway):
                    self._last = await self._read()
                self._done = number
        return self._last


class Signalling(Protocol):
    """A store that tells of changes."""

    def signal(self, role: Role) -> Changes: ...


class Waiting:
    """`await waiting(role, timeout_s)` returns as soon as there may be work for `role` that was not there when this
    last returned; or at the timeout. One for a loop."""

    def __init__(self, store: Signalling) -> None:
        self._store = store
        self._looks: dict[Role, _Looking] = {}

    async def __call__(self, role: Role, timeout_s: float) -> None:
        signal = self._store.signal(role)
        looking = self._looks.setdefault(role, _Looking(signal))
        with trio.move_on_after(timeout_s):
            told = looking.told
            while await looking() <= told:  # other processes write, and no event of ours tells of it
                with trio.move_on_after(signal.pause_s):
                    await _woken(signal.wakes)
            looking.told = looking.changes


class _Looking:
    """Looks at a signal: at one of a server in a thread, one look at a time. Counts the `changes` that were found, and
    of these those that some caller was `told` of: all who wait are told of one, and the next caller of one that was
    found for a cancelled caller."""

    def __init__(self, signal: Changes) -> None:
        self._look = Aside(signal.changed, inline=not signal.remote)
        self.changes = self.told = 0

    async def __call__(self) -> int:
        await self._look(self._note)
        return self.changes

    def _note(self, changed: Callable[[], bool]) -> None:
        self.changes += changed()


async def _woken(wakes: int | None) -> None:
    if wakes is None:
        await trio.sleep_forever()
    else:
        try:
            await trio.lowlevel.wait_readable(wakes)
        except (trio.BusyResourceError, OSError):  # another task of this role waits there, or a look has closed it
            await trio.sleep(_BESIDE_S)


_P = ParamSpec("_P")
_LAST_WORD_S = 4.0  # less than a supervisor leaves a child to end
_TOGETHER = 256  # writes of one transaction at most: other processes wait for its end
_AT_ONCE = 32  # tasks that go on in one pass of the loop: its other tasks wait for their end


class Write:
    """A write that was asked for. `result` is None until it is committed or has failed."""

    __slots__ = ("call", "result", "shared", "task")

    def __init__(self, call: Callable[[], Any], shared: bool) -> None:
        self.call, self.shared = call, shared
        self.result: Result | None = None
        self.task: trio.lowlevel.Task | None = None  # waits for it


def _written(
    method: Callable[Concatenate[RunStore, _P], _T],
    *,
    entry: Callable[Concatenate[RunStore, _P], Callable[[], Any]] | None = None,
    shared: bool = False,
    waits_for_space: bool = True,
) -> Callable[Concatenate[AsyncStore, _P], Coroutine[Any, Any, _T]]:
    """A write of the store, awaited. `entry` makes it a call that is committed at once with others of its kind.
    `shared`: it writes rows of one episode, so other processes may do so meanwhile."""

    @wraps(method)
    async def call(self: Any, *given: _P.args, **named: _P.kwargs) -> _T:
        if entry is None:
            made = partial(getattr(self._store, method.__name__), *given, **named)
        else:
            made = getattr(self._store, entry.__name__)(*given, **named)
        return await (self._write if waits_for_space else self._once)(made, shared=shared)

    return call


def _read(
    method: Callable[Concatenate[RunStore, _P], _T],
) -> Callable[Concatenate[AsyncStore, _P], Coroutine[Any, Any, _T]]:
    """A read of the store, awaited."""

    @wraps(method)
    async def call(self: Any, *given: _P.args, **named: _P.kwargs) -> _T:

        def read(store: ReadStore) -> Any:
            return getattr(store, method.__name__)(*given, **named)

        return await self._read(read)

    return call


class AsyncStore:
    """A worker's and a reward source's store. Make it inside `trio.run`, unless `inline`; `aclose` makes the writes
    that are still queued. It closes neither `store` nor `reader`."""

    def __init__(
        self, store: RunStore, reader: ReadStore | None = None, *, inline: bool = False, disk_wait_s: float = 0.0
    ) -> None:
        """`store` writes, `reader` (default: `store`) reads; a `reader` of its own never waits for a writer. Writes
        wait `disk_wait_s` for space before they raise DiskFull, but for `claim`, `renew` and `record`."""
        self._store, self._disk_wait_s = store, disk_wait_s
        self._looks, self._waiting = Looks(reader or store, inline=inline), Waiting(store)
        self._queue: SimpleQueue[Write | None] = SimpleQueue()
        self._made: deque[tuple[list[Write], list[Result]]] = deque()  # by the thread; the loop has yet to look
        self._ready: deque[Write] = deque()  # they have their results, and their callers wait
        self._thread: threading.Thread | None = None
        if not inline:
            self._token = trio.lowlevel.current_trio_token()
            self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
            self._thread.start()

    # --- what a worker does

    claim = _written(RunStore.claim, waits_for_space=False)
    reload = _written(RunStore.reload)  # after the episode's writes, so among them
    renew = _written(RunStore.renew, waits_for_space=False)
    hand_back = _written(RunStore.hand_back)
    begin = _written(RunStore.begin, shared=True)
    journal_turn = _written(RunStore.journal_turn, entry=RunStore.turn_entry, shared=True)
    journal_step = _written(RunStore.journal_step, entry=RunStore.step_entry, shared=True)
    restart_episode = _written(RunStore.restart_episode)
    discard_turn = _written(RunStore.discard_turn)
    restart_group = _written(RunStore.restart_group)
    finish = _written(RunStore.finish, entry=RunStore.finish_entry)
    keep_snapshot = _written(RunStore.keep_snapshot, shared=True)
    snapshot = _written(RunStore.snapshot)
    note_unsaved = _written(RunStore.note_unsaved, shared=True)
    unsaved = _written(RunStore.unsaved)
    keep_artifacts = _written(RunStore.keep_artifacts, shared=True)
    record = _written(RunStore.record, waits_for_space=False)
    meta = _read(RunStore.meta)
    current_version = _read(RunStore.current_version)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Write:
        """Write a part of a turn; nobody waits for it."""
        return self._post(self._store.part_entry(episode_id, fence, part), shared=True)

    async def wait_for_work(self, role: Role, timeout_s: float) -> None:
        """Wait until there may be work for `role`, or until the timeout."""
        await self._waiting(role, timeout_s)

    # --- what a reward source does

    awaiting = _read(RunStore.awaiting)
    trajectory = _read(RunStore.trajectory)
    artifacts = _read(RunStore.artifacts)
    score = _written(RunStore.score)

    # --- reads

    async def _read(self, call: Callable[[ReadStore], _T]) -> _T:
        try:
            return await self._looks(call)
        except StoreAway:
            return await self._once(partial(call, self._store))

    # --- writes

    async def _write(self, call: Callable[[], Any], *, shared: bool = False) -> Any:
        """Make a write once there is space for it. Raises DiskFull after `disk_wait_s`."""
        return await wait_for_space(partial(self._once, call, shared=shared), deadline_s=self._disk_wait_s)

    async def _once(self, call: Callable[[], Any], *, shared: bool = False) -> Any:
        write = self._post(call, trio.lowlevel.current_task(), shared=shared)
        if write.result is None:

            def leave(_: object) -> trio.lowlevel.Abort:
                write.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(leave)
        else:
            await trio.lowlevel.checkpoint()
        assert write.result is not None
        if write.result.error is not None:
            raise write.result.error
        return write.result.value

    def _post(self, call: Callable[[], Any], task: trio.lowlevel.Task | None = None, *, shared: bool = False) -> Write:
        write = Write(call, shared and self._store.shares)
        if self._thread is None:
            (write.result,) = self._store.together([call], shared=write.shared)
        else:
            write.task = task
            self._queue.put(write)
        return write

    def _serve(self) -> None:
        """The thread: make writes until None comes."""
        goes_on = True
        while goes_on:
            queued = [self._queue.get()]
            with suppress(Empty):
                while len(queued) < _TOGETHER:
                    queued.append(self._queue.get_nowait())
            writes = [write for write in queued if write is not None]
            goes_on = len(writes) == len(queued)
            for shared in (True, False):
                if alike := [write for write in writes if write.shared is shared]:
                    self._make(alike, shared)

    def _make(self, writes: list[Write], shared: bool) -> None:
        """Commit writes in one transaction, and tell their callers."""
        try:
            results = self._store.together([write.call for write in writes], shared=shared)
        except BaseException as error:  # whatever it was, the callers wait, and so will others
            results = [Result(error=StoreError(f"the store's thread failed: {error!r}")) for _ in writes]
        self._made.append((writes, results))
        self._wake_soon()

    def _wake(self) -> None:
        """Note what came of writes, and let their callers go on: in one pass of the loop only so many that no other
        task of it waits long."""
        while self._made:
            for write, result in zip(*self._made.popleft(), strict=True):
                write.result = result
                if write.task is not None:
                    self._ready.append(write)
        for _ in range(min(_AT_ONCE, len(self._ready))):
            write = self._ready.popleft()
            if write.task is not None:  # else its caller was cancelled
                trio.lowlevel.reschedule(write.task)
                write.task = None
        if self._ready:
            self._wake_soon()

    def _wake_soon(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    async def aclose(self) -> None:
        """Make the writes that are queued, and end the thread. They wait for the lock for a few seconds only, as the
        supervisor does for this process."""
        if self._thread is not None:
            self._store.hurry(_LAST_WORD_S)
            self._queue.put(None)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
