"""Authors' code that is written with asyncio (aiohttp, most SDKs), run beside trio.

Environments and tools run under trio, where `asyncio.sleep` and everything that is built on it ends with "no running
event loop". Such functions run on one asyncio loop in a thread of its own, which all episodes of a process share. So a
client session lives as long as the process, and a module-level lock of a package belongs to no loop that is gone. The
trio side waits with its own deadline: if that passes, or the episode is cancelled, the asyncio task is cancelled too.

Which functions those are is read from their code (`uses_asyncio`), unless the author says it: `@tool(asyncio=True)`
for a tool, `async_library = "asyncio"` for an environment. Why not try trio first and asyncio after a failure? What
the function did until then would be done twice.

Knows no environment. The other direction, trio code called from blocking code, is `agentrl.env.sync_async`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dis
import functools
import inspect
import os
import threading
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar, cast

import trio

from agentrl.errors import EnvError

T = TypeVar("T")

GRACE_S: Final = 5.0
"""Seconds that a cancelled asyncio task may take to end before nobody waits for it any more: packages such as verifiers
end processes and sandboxes then."""

_MARK: Final = "__agentrl_asyncio__"
_LIBRARIES: Final = frozenset(
    ("aiohttp", "aiofiles", "aiobotocore", "aioboto3", "aiomysql", "aiopg", "aiosqlite", "asyncpg", "asyncssh", "motor")
)
_FOREIGN: Final = ("agentrl.", "trio", "asyncio", "anyio", "httpx")
_RUNTIME: Final = frozenset(
    {
        *("sleep", "gather", "wait_for", "wait", "as_completed", "shield", "timeout", "timeout_at", "TaskGroup"),
        *("create_task", "ensure_future", "current_task", "to_thread", "run_in_executor", "open_connection"),
        *("get_running_loop", "get_event_loop", "create_subprocess_exec", "create_subprocess_shell"),
        *("Queue", "Lock", "Event", "Semaphore", "Condition", "Future"),
    }
)
"""Names of asyncio that need its loop. `asyncio.TimeoutError`, say, needs none and is caught under trio as well."""


class _LoopThread:
    """The asyncio loop of this process. A child made by `fork` gets a fresh one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A forked child inherits the object and not the thread: without the look at the process id it would hand
            # work to a loop that nobody runs.
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="agentrl asyncio", daemon=True).start()
            return self._loop


_SHARED: Final = _LoopThread()


async def in_asyncio(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Await a function written with asyncio, from trio code. In asyncio code it is awaited in place.

    On cancellation the task is cancelled, and waited for `GRACE_S` seconds at most. Raises the function's exception;
    EnvError if it ends itself by asyncio's cancellation or asks Python to exit."""
    if not trio.lowlevel.in_trio_task():
        return await function(*args, **kwargs)
    token, ended = trio.lowlevel.current_trio_token(), trio.Event()

    def report() -> None:
        with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
            token.run_sync_soon(ended.set)

    async def body() -> T:
        try:
            return await explained(function, function(*args, **kwargs))
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop of all episodes
            raise EnvError(f"{name_of(function)} called sys.exit, which would end the process") from error
        finally:
            report()  # here, since the future counts as done as soon as it is cancelled, before the task has cleaned up

    task = asyncio.run_coroutine_threadsafe(body(), _SHARED.loop())
    try:
        await ended.wait()
    except trio.Cancelled:
        task.cancel()
        # Shielded, as this runs because of a cancellation: a task that is left alone at once would still hold its
        # sandbox or its connection when the episode is played anew.
        with trio.move_on_after(GRACE_S, shield=True):
            await ended.wait()
        raise
    try:
        return await trio.to_thread.run_sync(task.result)  # it is there, or comes in the loop's next turn
    except concurrent.futures.CancelledError as error:
        raise EnvError(f"{name_of(function)} was cancelled by its own asyncio code") from error


_OF_ASYNCIO: Final = (
    "is written with asyncio, and runs under trio: say @tool(asyncio=True) for a tool, or async_library = 'asyncio' in "
    "the environment's class"
)
_OF_TRIO: Final = (
    "awaits code of trio, such as that of a box, and runs on asyncio's loop: say @tool(asyncio=False), and await "
    "agentrl.env.asyncio_code.in_asyncio(function, …) for its asyncio part"
)
_OTHER_LOOP: Final = {
    "no running event loop": _OF_ASYNCIO,
    "trio.run received unrecognized yield message": _OF_ASYNCIO,
    "must be called from async context": _OF_TRIO,
    "Task got bad yield": _OF_TRIO,
}
"""How the errors begin that each library raises in the other one's loop. They are of bare classes: the words alone tell
them from an author's own."""


def mark(function: Any, is_asyncio: bool) -> None:
    """Write down what the author says of a function."""
    setattr(function, _MARK, is_asyncio)


def adapted(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """An async method that runs on asyncio's loop if its code, or its object's `async_library`, asks for that."""

    @functools.wraps(function)
    async def method(self: Any, *args: Any, **kwargs: Any) -> T:
        bound = types.MethodType(function, self)
        if uses_asyncio(bound):
            return await in_asyncio(bound, *args, **kwargs)
        return await explained(bound, bound(*args, **kwargs))

    return method


async def explained(function: Any, awaitable: Awaitable[T]) -> T:
    """Await; an error for want of the other library's loop says what to do. Raises EnvError for that."""
    try:
        return await awaitable
    except (RuntimeError, TypeError) as error:
        hint = next((hint for begin, hint in _OTHER_LOOP.items() if str(error).startswith(begin)), None)
        if hint is None:
            raise
        raise EnvError(f"{name_of(function)} {hint}") from error


def uses_asyncio(function: Any) -> bool:
    """Whether an async function is written with asyncio: its author says so, or its code, or that of the async
    functions of its module and its object that it names, uses asyncio's loop or a library that is built on it."""
    owner, inner = _unwrapped(function)
    if not inspect.isfunction(inner) or inner.__module__.startswith("agentrl."):
        return False
    stated = getattr(inner, _MARK, None)
    if stated is None and (library := getattr(owner, "async_library", None)) is not None:
        stated = library == "asyncio"
    kind: type | None = None if owner is None else owner.__class__
    return bool(stated) if stated is not None else _reads_asyncio(kind, inner)


@functools.lru_cache(maxsize=4_096)
def _reads_asyncio(owner: type | None, function: Any) -> bool:
    seen, pending = set[Any](), [function]
    # Bounded: the names of a large module lead anywhere, and a wrong "no" is explained by an error that says what to
    # write, while an endless search would be a hang at the first episode.
    while pending and len(seen) < 64:
        current = pending.pop()
        code, names = current.__code__, current.__globals__
        if code in seen:
            continue
        seen.add(code)
        words = set(_words(code))
        if "asyncio" in words and words & _RUNTIME and _is_asyncio(names.get("asyncio", asyncio)):
            return True
        if any(map(_is_built_on_asyncio, _imported(code))):
            return True
        for word in words:
            value = names.get(word)
            origin = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
            if _is_built_on_asyncio(origin) or (origin.startswith("asyncio") and word in _RUNTIME):
                return True
            helper: Any = value if inspect.iscoroutinefunction(value) else getattr(owner, word, None)
            helper = inspect.unwrap(helper) if inspect.isfunction(helper) else None
            if inspect.iscoroutinefunction(helper) and not helper.__module__.startswith(_FOREIGN):
                pending.append(helper)
    return False


def _is_asyncio(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ == "asyncio"


def _is_built_on_asyncio(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES or ".asyncio" in module or module.startswith("grpc.aio")


def _words(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code reads, with those of the functions within it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _words(value)


def _imported(code: types.CodeType) -> list[str]:
    """The modules that a function imports itself."""
    return [str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]


def _unwrapped(function: Any) -> tuple[Any, Any]:
    """The object of a bound method, and the plain function behind partials, methods and callable objects."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = getattr(function, "__call__", function)  # noqa: B004  (an object whose class writes it)
    owner = getattr(function, "__self__", None)
    return owner, getattr(function, "__func__", function)


def name_of(function: Any) -> str:
    """A function's name for an error."""
    _, inner = _unwrapped(function)
    return getattr(inner, "__qualname__", repr(function))
