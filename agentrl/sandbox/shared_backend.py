"""A backend that the episodes of a trio loop share, with boxes made ahead on request. Knows nothing of their use.

boxes = shared("docker", ready=4)       # the same for all who ask for the same in this loop
await boxes.enter()
box = await boxes.create(spec)
...
await box.close()
await boxes.leave()                     # the last to leave closes the backend
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import trio
from trio.lowlevel import RunVar

from agentrl.errors import ConfigError, SandboxError
from agentrl.host.clocks import host_time
from agentrl.protocols import Sandbox, SandboxBackend, SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.backend_pool import Pool

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


_arguments: RunVar[Mapping[str, Mapping[str, Any]]] = RunVar("agentrl.sandbox.arguments", default={})


def configure(arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """From now on, what the backends of this trio loop are opened with, by registry id."""
    _arguments.set(arguments)


_wrap: ContextVar[Callable[[Sandbox], Sandbox] | None] = ContextVar("agentrl.sandbox.wrap", default=None)


@contextmanager
def wrapped_boxes(wrap: Callable[[Sandbox], Sandbox]) -> Generator[None]:
    """Pass each box that is created in the block, by whatever name, through `wrap` before its user gets it: for checks
    that watch or disturb what an environment does with its boxes."""
    token = _wrap.set(wrap)
    try:
        yield
    finally:
        _wrap.reset(token)


class SharedBackend:
    """Opened for the first box that anyone asks for, closed when the last user has left; then it may be used again.
    Satisfies `SandboxBackend`."""

    def __init__(self, name: str, *, ready: int = 0) -> None:
        """`name` is the registry id of the backend; `ready` boxes of each kind are kept made ahead."""
        if not isinstance(ready, int) or ready < 0:  # pyright: ignore[reportUnnecessaryIsInstance] - from a run file
            raise ConfigError("ready", ready, "give how many boxes are made ahead, 0 for none")
        self.name = name
        self._ready = ready
        self._users = 0
        self._backend: SandboxBackend | None = None
        self._closing = trio.Lock()
        self._done, self._gone = trio.Event(), trio.Event()

    async def enter(self) -> None:
        """One more user, who will `leave`."""
        async with self._closing:
            self._users += 1

    async def leave(self) -> None:
        """One user less; the last one closes the backend."""
        # A cancelled user has left too. Not counted, it would keep the backend open for the rest of the loop.
        with trio.CancelScope(shield=True):
            async with self._closing:
                self._users -= 1
                if not self._users:
                    await self.aclose()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new box. Raises SandboxError, also where nobody has entered, and HostBusy."""
        if not self._users:
            raise SandboxError(f"the shared backend {self.name} has no user: enter it first")
        with host_time(f"a box of {self.name}"):
            async with self._closing:
                opened = self._backend = self._backend or await self._opened()
            box = await opened.create(spec)
        wrap = _wrap.get()
        return box if wrap is None else wrap(box)

    async def aclose(self) -> None:
        """Close the backend, even if somebody still uses it. Idempotent."""
        open_backend, self._backend = self._backend, None
        if isinstance(open_backend, Pool):
            self._done.set()
            await self._gone.wait()
        elif open_backend is not None:
            await open_backend.aclose()

    async def _opened(self) -> SandboxBackend:
        plain_backend = backend(self.name, **_arguments.get().get(self.name, {}))
        if not self._ready:
            return plain_backend
        warm_pool = Pool(plain_backend, ready=self._ready)
        self._done, self._gone = trio.Event(), trio.Event()
        pool_opened = trio.Event()
        # The pool's nursery has to be entered and left by one task. The first user opens it and the last one closes it,
        # and these are rarely the same.
        trio.lowlevel.spawn_system_task(self._hold, warm_pool, pool_opened, self._done, self._gone)
        await pool_opened.wait()
        return warm_pool

    async def _hold(self, pool: Pool, opened: trio.Event, done: trio.Event, gone: trio.Event) -> None:
        """Body of a system task, so it never raises: the pool outlives the episode that opened it and ends in none that
        uses it."""
        try:
            async with pool:
                opened.set()
                await done.wait()
        except Exception:
            log.exception("the pool of the backend %r failed", self.name)
        finally:
            gone.set()


def once_a_loop(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache`, anew in every trio loop: a result belongs to the loop that computed it."""
    cached_by_loop: RunVar[Callable[P, T]] = RunVar(f"{function.__module__}.{function.__qualname__}")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            cached_function = cached_by_loop.get()
        except LookupError:
            cached_function = cast("Callable[P, T]", functools.cache(function))
            cached_by_loop.set(cached_function)
        return cached_function(*args, **kwargs)

    return call


def shared(name: str, *, ready: int = 0) -> SharedBackend:
    """The shared backend of this trio loop under a registry id."""
    return _shared(name, ready)


@once_a_loop
def _shared(name: str, ready: int) -> SharedBackend:
    return SharedBackend(name, ready=ready)
