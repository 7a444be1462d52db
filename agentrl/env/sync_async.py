"""Between the two worlds: blocking code called from trio, and trio code called from blocking code.

Owns threads and nothing else; knows no environment.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import trio
from trio.lowlevel import RunVar

from agentrl.env.asyncio_code import explained, in_asyncio, uses_asyncio
from agentrl.errors import EnvError, UsageError
from agentrl.host.clocks import HostClock, host_time

T = TypeVar("T")

MAX_THREADS: Final = 64
"""Blocking calls of one trio loop that may run at once; the others wait their turn."""


class _Threads:
    """The threads of one trio loop. `abandoned` are the calls that run although their callers have left them."""

    def __init__(self) -> None:
        self.limiter = cast(trio.CapacityLimiter, _Limiter())
        self.abandoned: set[trio.Event] = set()


class _Limiter:
    """A limiter for `trio.to_thread`. To wait for a thread is to wait for the host."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(MAX_THREADS)

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        # A step that waits behind 64 others is late through this machine and not through its environment, so the wait
        # is taken out of the step's deadline. trio's own limiter has no place for that, hence this wrapper.
        with host_time("a thread for blocking code"):
            await self._limiter.acquire_on_behalf_of(borrower)

    def release_on_behalf_of(self, borrower: object) -> None:
        self._limiter.release_on_behalf_of(borrower)


_threads: RunVar[_Threads] = RunVar("agentrl_env_threads")


def _of_loop() -> _Threads:
    try:
        return _threads.get()
    except LookupError:
        _threads.set(new_threads := _Threads())
        return new_threads


def worn_out() -> bool:
    """Whether half of this loop's threads are lost to calls that were abandoned and still run: no loop gets them back,
    but its process may be started anew before the others are lost too."""
    return len(_of_loop().abandoned) >= MAX_THREADS // 2


async def in_thread(function: Callable[[], T], *, left: Callable[[trio.Event], None] | None = None) -> T:
    """Run blocking code in a thread. On cancellation the thread is abandoned: it runs to its own end, nobody reads its
    result; `left` gets an event that is set at that end.

    Raises EnvError where calls that were abandoned, and never end, have taken every thread: to wait for one would use
    up the deadline of a caller who has not to answer for it."""
    loop_threads = _of_loop()
    # Python cannot end a thread, so a call that ran past its deadline keeps its place in the limiter. Once all places
    # are gone, the next caller would wait for one that may never come free, until its own deadline.
    if len(loop_threads.abandoned) >= MAX_THREADS:
        raise EnvError(f"{MAX_THREADS} blocking calls ran past their deadlines and still run: give them deadlines")
    call_ended, trio_token = trio.Event(), trio.lowlevel.current_trio_token()
    # Written by two threads without a lock: each is set once, from False to True, and the reader only needs a value
    # that was true at some instant. A call seen as not begun that begins a moment later finds `gone` set.
    has_begun = is_abandoned = False

    def end() -> None:
        loop_threads.abandoned.discard(call_ended)
        call_ended.set()

    def body() -> T | None:
        nonlocal has_begun
        has_begun = True
        try:
            return None if is_abandoned else function()  # its caller may have left while the thread began
        finally:
            # An abandoned call may end long after its loop.
            with contextlib.suppress(trio.RunFinishedError):
                trio_token.run_sync_soon(end)

    try:
        return cast(T, await trio.to_thread.run_sync(body, abandon_on_cancel=True, limiter=loop_threads.limiter))
    except trio.Cancelled:
        is_abandoned = True
        # Only a call that runs is counted as lost: one that was cancelled while it waited for a place holds none.
        if has_begun and not call_ended.is_set():
            loop_threads.abandoned.add(call_ended)
            if left is not None:
                left(call_ended)
        raise


async def call(function: Callable[..., T | Awaitable[T]], *args: Any, blocking: bool = True, **kwargs: Any) -> T:
    """Call `function`, be it `def` or `async def`, without holding up the trio loop.

    An async function is awaited here, or on asyncio's loop if it is written with asyncio (`agentrl.env.asyncio_code`).
    A plain one goes to a thread if `blocking` (see `in_thread`), else it is called in place."""

    def body() -> tuple[T | Awaitable[T]]:
        return (function(*args, **kwargs),)  # boxed: trio takes a bare coroutine from a thread for a mistake

    try:
        if inspect.iscoroutinefunction(function):
            if uses_asyncio(function):
                return await in_asyncio(function, *args, **kwargs)
            return await explained(function, function(*args, **kwargs))
        if blocking:
            (result,) = await in_thread(body)
        else:
            # Without it an environment that never awaits is never cancelled, and its neighbours in the loop get no
            # turn.
            await trio.lowlevel.checkpoint()
            (result,) = body()
        return await explained(function, result) if inspect.isawaitable(result) else result
    except SystemExit as exit_request:
        raise refused_exit(function, exit_request) from exit_request


def refused_exit(function: Callable[..., Any], error: SystemExit) -> EnvError:
    """`sys.exit` in an author's function (a parser of arguments calls it) fails its episode and not the process."""
    function_name = getattr(function, "__qualname__", repr(function))
    return EnvError(f"{function_name} called sys.exit({error.code!r}), which would end the process")


class LoopThread:
    """A trio loop in a thread of its own, so that blocking code can drive async code that lives across calls.

    It starts with the first `run` and lasts until `stop`, which is idempotent. A child made by `fork` gets a fresh
    loop, as threads do not survive a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop: trio.Event | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `await function(*args)` on the loop and return its result or raise its exception.

        Raises UsageError when called from trio code, which it would block."""
        if trio.lowlevel.in_trio_run():
            raise UsageError("reset, step and close block: from trio code await areset, astep and aclose")
        with self._lock:
            # gymnasium's AsyncVectorEnv forks: the child inherits the token of a loop whose thread exists in the parent
            # alone, and would wait for it for ever.
            if self._token is None or self._pid != os.getpid():
                self._start()
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def stop(self) -> None:
        """End the loop and wait for its thread."""
        with self._lock:
            trio_token, stop_event, loop_thread = self._token, self._stop, self._thread
            self._token = self._stop = self._thread = None
        # In a forked child there is no such thread, and `join` on the parent's would not return.
        if trio_token is None or stop_event is None or loop_thread is None or self._pid != os.getpid():
            return
        trio_token.run_sync_soon(stop_event.set)
        loop_thread.join()

    def _start(self) -> None:
        is_ready = threading.Event()

        async def main() -> None:
            self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
            stop_event = self._stop
            is_ready.set()
            await stop_event.wait()

        run_loop = functools.partial(trio.run, main, clock=HostClock())
        self._thread = threading.Thread(target=run_loop, name="agentrl env loop", daemon=True)
        self._pid = os.getpid()
        self._thread.start()
        # The token exists only once the loop runs, and `run` reads it right after this.
        is_ready.wait()
