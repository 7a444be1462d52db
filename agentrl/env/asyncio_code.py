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
    trio_token, task_ended = trio.lowlevel.current_trio_token(), trio.Event()

    def report() -> None:
        with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
            trio_token.run_sync_soon(task_ended.set)

    async def body() -> T:
        try:
            return await explained(function, function(*args, **kwargs))
        except (SystemExit, KeyboardInterrupt) as exit_error:  # either would end the loop of all episodes
            raise EnvError(f"{name_of(function)} called sys.exit, which would end the process") from exit_error
        finally:
            report()  # here, since the future counts as done as soon as it is cancelled, before the task has cleaned up

    asyncio_task = asyncio.run_coroutine_threadsafe(body(), _SHARED.loop())
    try:
        await task_ended.wait()
    except trio.Cancelled:
        asyncio_task.cancel()
        # Shielded, as this runs because of a cancellation: a task that is left alone at once would still hold its
        # sandbox or its connection when the episode is played anew.
        with trio.move_on_after(GRACE_S, shield=True):
            await task_ended.wait()
        raise
    try:
        return await trio.to_thread.run_sync(asyncio_task.result)  # it is there, or comes in the loop's next turn
    except concurrent.futures.CancelledError as cancel_error:
        raise EnvError(f"{name_of(function)} was cancelled by its own asyncio code") from cancel_error


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
        bound_method = types.MethodType(function, self)
        if uses_asyncio(bound_method):
            return await in_asyncio(bound_method, *args, **kwargs)
        return await explained(bound_method, bound_method(*args, **kwargs))

    return method


async def explained(function: Any, awaitable: Awaitable[T]) -> T:
    """Await; an error for want of the other library's loop says what to do. Raises EnvError for that."""
    try:
        return await awaitable
    except (RuntimeError, TypeError) as loop_error:
        explanation = next(
            (
                explanation
                for error_start, explanation in _OTHER_LOOP.items()
                if str(loop_error).startswith(error_start)
            ),
            None,
        )
        if explanation is None:
            raise
        raise EnvError(f"{name_of(function)} {explanation}") from loop_error


def uses_asyncio(function: Any) -> bool:
    """Whether an async function is written with asyncio: its author says so, or its code, or that of the async
    functions of its module and its object that it names, uses asyncio's loop or a library that is built on it."""
    method_owner, plain_function = _unwrapped(function)
    if not inspect.isfunction(plain_function) or plain_function.__module__.startswith("agentrl."):
        return False
    stated_answer = getattr(plain_function, _MARK, None)
    if stated_answer is None and (library := getattr(method_owner, "async_library", None)) is not None:
        stated_answer = library == "asyncio"
    owner_class: type | None = None if method_owner is None else method_owner.__class__
    return bool(stated_answer) if stated_answer is not None else _reads_asyncio(owner_class, plain_function)


@functools.lru_cache(maxsize=4_096)
def _reads_asyncio(owner: type | None, function: Any) -> bool:
    read_codes, unread_functions = set[Any](), [function]
    # Bounded: the names of a large module lead anywhere, and a wrong "no" is explained by an error that says what to
    # write, while an endless search would be a hang at the first episode.
    while unread_functions and len(read_codes) < 64:
        next_function = unread_functions.pop()
        function_code, global_names = next_function.__code__, next_function.__globals__
        if function_code in read_codes:
            continue
        read_codes.add(function_code)
        code_names = set(_words(function_code))
        if "asyncio" in code_names and code_names & _RUNTIME and _is_asyncio(global_names.get("asyncio", asyncio)):
            return True
        if any(map(_is_built_on_asyncio, _imported(function_code))):
            return True
        for code_name in code_names:
            global_value = global_names.get(code_name)
            module_name = (
                global_value.__name__
                if isinstance(global_value, types.ModuleType)
                else getattr(global_value, "__module__", None) or ""
            )
            if _is_built_on_asyncio(module_name) or (module_name.startswith("asyncio") and code_name in _RUNTIME):
                return True
            helper_function: Any = (
                global_value if inspect.iscoroutinefunction(global_value) else getattr(owner, code_name, None)
            )
            helper_function = inspect.unwrap(helper_function) if inspect.isfunction(helper_function) else None
            if inspect.iscoroutinefunction(helper_function) and not helper_function.__module__.startswith(_FOREIGN):
                unread_functions.append(helper_function)
    return False


def _is_asyncio(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ == "asyncio"


def _is_built_on_asyncio(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES or ".asyncio" in module or module.startswith("grpc.aio")


def _words(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code reads, with those of the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words(constant)


def _imported(code: types.CodeType) -> list[str]:
    """The modules that a function imports itself."""
    return [
        str(instruction.argval) for instruction in dis.get_instructions(code) if instruction.opname == "IMPORT_NAME"
    ]


def _unwrapped(function: Any) -> tuple[Any, Any]:
    """The object of a bound method, and the plain function behind partials, methods and callable objects."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = getattr(function, "__call__", function)  # noqa: B004  (an object whose class writes it)
    method_owner = getattr(function, "__self__", None)
    return method_owner, getattr(function, "__func__", function)


def name_of(function: Any) -> str:
    """A function's name for an error."""
    _, plain_function = _unwrapped(function)
    return getattr(plain_function, "__qualname__", repr(function))
