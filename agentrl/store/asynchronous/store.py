"""The run store in a trio program: writes that are awaited, and committed together by one thread of the process.

The thread takes all writes that are queued and commits them in one transaction, each a savepoint of its own: an error
of one undoes that one alone. If another process holds the write lock, or the disk is slow, callers wait; all other
tasks, deadlines and cancellation go on. Reads have a read-only connection and wait for no write: in the loop if the
store is a file, else in a thread of their own (`looks`). A database that is away is waited for by the thread of the
writes alone: so it makes the reads, too, that fail meanwhile.

Writes are committed in the order in which they were asked for; if the store lets processes journal at once, those of
the journal go before others that were asked for at the same moment, and have a transaction of their own. A write whose
caller is cancelled while it waits is still made, before any later one; its error, if any, is lost, but the fence
protects: if its episode was lost, the next call of that episode raises LeaseLost too. On a full disk, the writes of
episodes and scores wait for space: a sampled turn stays in the memory of its task. `inline` makes each call a
transaction in the caller's task, without a thread: for simulations in virtual time. Never knows what a call writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

import trio

from agentrl.errors import DiskFull, StoreAway, StoreError
from agentrl.records import Json, Messages, Step, StopReason, Trajectory, Turn, WeightVersion
from agentrl.store import Claim, Partial, RunStore, Snapshot
from agentrl.store.asynchronous.reads import Looks
from agentrl.store.asynchronous.wait_for_work import Waiting
from agentrl.store.databases.batched_calls import Result
from agentrl.store.databases.change_signal import Role
from agentrl.store.episodes.endings import Ending
from agentrl.store.interfaces import ReadStore
from agentrl.tokens.columns import NONE, Columns

_T = TypeVar("_T")
_LAST_WORD_S = 4.0  # less than a supervisor leaves a child to end
_DISK_S = 1.0  # between two tries to write on a full disk
_TOGETHER = 256  # writes of one transaction at most: other processes wait for its end
_AT_ONCE = 32  # tasks that go on in one pass of the loop: its other tasks wait for their end


class Write:
    """A write that was asked for. `result` is None until it is committed or has failed."""

    __slots__ = ("call", "result", "shared", "task")

    def __init__(self, call: Callable[[], Any], shared: bool) -> None:
        self.call, self.shared = call, shared
        self.result: Result | None = None
        self.task: trio.lowlevel.Task | None = None  # waits for it


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

    async def claim(
        self, worker: str, limit: int, *, lease_s: float, now: float | None = None, ahead: int | None = None
    ) -> list[Claim]:
        return await self._once(partial(self._store.claim, worker, limit, lease_s=lease_s, now=now, ahead=ahead))

    async def reload(self, claim: Claim) -> Claim:
        return await self._write(partial(self._store.reload, claim))  # after the episode's writes, so among them

    async def renew(self, worker: str, *, lease_s: float, now: float | None = None) -> frozenset[int]:
        return await self._once(partial(self._store.renew, worker, lease_s=lease_s, now=now))

    async def hand_back(self, worker: str) -> int:
        return await self._write(partial(self._store.hand_back, worker))

    async def begin(self, episode_id: int, fence: int, start: Messages) -> None:
        await self._write(partial(self._store.begin, episode_id, fence, start), shared=True)

    async def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None:
        await self._write(self._store.turn_entry(episode_id, fence, turn), shared=True)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Write:
        return self._post(self._store.part_entry(episode_id, fence, part), shared=True)

    async def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        await self._write(self._store.step_entry(episode_id, fence, turn_index, step), shared=True)

    async def restart_episode(self, episode_id: int, fence: int, reason: str) -> None:
        await self._write(partial(self._store.restart_episode, episode_id, fence, reason))

    async def discard_turn(self, episode_id: int, fence: int) -> None:
        await self._write(partial(self._store.discard_turn, episode_id, fence))

    async def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        return await self._write(partial(self._store.restart_group, episode_id, fence, max_replays))

    async def finish(
        self,
        episode_id: int,
        fence: int,
        *,
        stop_reason: StopReason,
        outcome: float | None,
        success: bool | None,
        outcomes: Mapping[str, float] | None = None,
        detail: str = "",
    ) -> None:
        said: dict[str, Any] = {"outcome": outcome, "success": success, "outcomes": outcomes or {}, "detail": detail}
        await self._write(self._store.end_entry(episode_id, fence, Ending(stop_reason=stop_reason, **said)))

    async def keep_snapshot(self, episode_id: int, fence: int, snapshot: Snapshot) -> None:
        await self._write(partial(self._store.keep_snapshot, episode_id, fence, snapshot), shared=True)

    async def snapshot(self, episode_id: int) -> Snapshot | None:
        return await self._write(partial(self._store.snapshot, episode_id))

    async def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None:
        await self._write(partial(self._store.note_unsaved, episode_id, fence, turn, reason), shared=True)

    async def unsaved(self, episode_id: int) -> str:
        return await self._write(partial(self._store.unsaved, episode_id))

    async def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None:
        await self._write(partial(self._store.keep_artifacts, episode_id, fence, turn, files), shared=True)

    async def meta(self, key: str) -> str | None:
        return await self._read(lambda store: store.meta(key))

    async def current_version(self) -> WeightVersion:
        return await self._read(lambda store: store.current_version())

    async def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        await self._once(partial(self._store.record, kind, step, values))

    async def wait_for_work(self, role: Role, timeout_s: float) -> None:
        await self._waiting(role, timeout_s)

    # --- what a reward source does

    async def awaiting(self, source: str, limit: int, *, skip: Iterable[str] = (), settled: bool = False) -> list[str]:
        skip = list(skip)
        return await self._read(lambda store: store.awaiting(source, limit, skip=skip, settled=settled))

    async def trajectory(self, episode_id: int) -> Trajectory:
        return await self._read(lambda store: store.trajectory(episode_id))

    async def artifacts(self, turn: str) -> dict[str, bytes] | None:
        return await self._read(lambda store: store.artifacts(turn))

    async def score(
        self,
        turn: str,
        source: str,
        value: float,
        *,
        version: int | None = None,
        took_s: float,
        cost: float,
        columns: Columns = NONE,
    ) -> bool:
        said = {"version": version, "took_s": took_s, "cost": cost, "columns": columns}
        call = partial(self._store.score, turn, source, value, **said)
        return await self._write(call)

    async def _read(self, call: Callable[[ReadStore], _T]) -> _T:
        try:
            return await self._looks(call)
        except StoreAway:
            return await self._once(partial(call, self._store))

    # --- writes

    async def _write(self, call: Callable[[], Any], *, shared: bool = False) -> Any:
        """Make a write once there is space for it. Raises DiskFull after `disk_wait_s`."""
        until: float | None = None  # a look at the clock only when there is no space
        while True:
            try:
                return await self._once(call, shared=shared)
            except DiskFull:
                until = trio.current_time() + self._disk_wait_s if until is None else until
                if trio.current_time() >= until:
                    raise
            await trio.sleep(_DISK_S)

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
