"""Work beside the tasks of a trio program: the thread of torch, and jobs whose end somebody waits for later.

Never knows what the work is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

_T = TypeVar("_T")


class TorchThread:
    """The one thread on which a learner computes.

    `trio.to_thread` takes any free thread, and a learner must not move: the current GPU, the gradient mode and the
    streams of torch belong to a thread. The loop goes on while the thread computes. A call cannot be interrupted, so a
    caller that is cancelled waits for its end; the heartbeat of the process is the deadline of a call that hangs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "torch")

    async def run(self, call: Callable[[], _T]) -> _T:
        """Make the call on the thread, after all calls before it. Returns its result and raises its error."""
        ended_event, trio_token = trio.Event(), trio.lowlevel.current_trio_token()
        thread_future = self._thread.submit(call)
        # The thread wakes the loop, and the loop never waits for the future itself: a second thread that blocks in
        # `future.result` for every call would only hand the wake-up on.
        thread_future.add_done_callback(lambda _: trio_token.run_sync_soon(ended_event.set))
        # If the caller left at once, the next call would queue behind a step that nobody awaits any more, and a process
        # that ends would tear CUDA down under a kernel that still runs.
        with trio.CancelScope(shield=True):
            await ended_event.wait()
        return thread_future.result()


class Job:
    """Work that a task of `nursery` does beside the loop. An error of the work cancels no other task: it waits for the
    caller of `result`, so that a step under way is finished first."""

    def __init__(self, nursery: trio.Nursery, work: Callable[[], Awaitable[None]]) -> None:
        self.error: Exception | None = None
        self._ended = trio.Event()
        nursery.start_soon(self._run, work)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        # Not BaseException: a cancellation belongs to trio, and a job that kept it as its result would never end its
        # nursery.
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self, beat: Callable[[], None] = lambda: None, every_s: float = float("inf")) -> None:
        """Wait for the end, whatever it is; call `beat` every `every_s` seconds meanwhile."""
        while not self._ended.is_set():
            with trio.move_on_after(every_s) as cancel_scope:
                await self._ended.wait()
            if cancel_scope.cancelled_caught:
                beat()

    async def result(self) -> None:
        """Wait for the end. Raises the error of the work."""
        await self.wait()
        if self.error is not None:
            raise self.error
