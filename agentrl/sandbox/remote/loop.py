"""An asyncio loop in a thread, for libraries that know no trio. Knows nothing of boxes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import trio

T = TypeVar("T")


class AsyncioLoop:
    """Runs coroutines of asyncio from trio tasks. The thread is a daemon and starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def call(self, make: Callable[[], Coroutine[Any, Any, T]], *, deadline_s: float) -> T:
        """The result of a coroutine that is made in the loop's thread. Raises what it raises, TimeoutError after
        `deadline_s`. A cancelled or late one is cancelled there, and not waited for."""
        loop = self._started()
        token, done = trio.lowlevel.current_trio_token(), trio.Event()

        async def run() -> T:
            return await asyncio.wait_for(make(), deadline_s)

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        future.add_done_callback(lambda _: _tell(token, done))
        try:
            with trio.move_on_after(deadline_s + 5.0):  # a library may swallow its cancellation
                await done.wait()
        finally:
            future.cancel()
        if not done.is_set():
            raise TimeoutError(f"no answer within {deadline_s:.0f} s")
        return future.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-asyncio", daemon=True)
            self._thread.start()
        return self._loop

    async def aclose(self) -> None:
        """End the thread; a call that hangs is left to it. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def _tell(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(done.set)
