"""A backend that the episodes of a trio loop share, with boxes made ahead if asked. Knows nothing of their use.

boxes = shared("docker", ready=4)       # the same for all who ask for the same in this loop
await boxes.enter()
box = await boxes.create(spec)
...
await box.close()
await boxes.leave()                     # the last to leave closes the backend
"""

from __future__ import annotations

import trio
from trio.lowlevel import RunVar

from agentrl.errors import ConfigError, SandboxError
from agentrl.protocols import Sandbox, SandboxBackend, SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.pool import Pool


class SharedBackend:
    """Opened for the first box that anyone asks for, closed when the last user has left; then it may be used again.
    Satisfies `SandboxBackend`."""

    def __init__(self, name: str, *, ready: int = 0) -> None:
        """`name` is the registry id of the backend; `ready` boxes of each kind are kept made ahead."""
        if ready < 0:
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
        with trio.CancelScope(shield=True):
            async with self._closing:
                self._users -= 1
                if not self._users:
                    await self.aclose()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new box. Raises SandboxError, also where nobody has entered."""
        if not self._users:
            raise SandboxError(f"the shared backend {self.name} has no user: enter it first")
        async with self._closing:
            opened = self._backend = self._backend or await self._opened()
        return await opened.create(spec)

    async def aclose(self) -> None:
        """Close the backend, whoever still uses it. Idempotent."""
        opened, self._backend = self._backend, None
        if isinstance(opened, Pool):
            self._done.set()
            await self._gone.wait()
        elif opened is not None:
            await opened.aclose()

    async def _opened(self) -> SandboxBackend:
        plain = backend(self.name)
        if not self._ready:
            return plain
        pool = Pool(plain, ready=self._ready)
        self._done, self._gone = trio.Event(), trio.Event()
        opened = trio.Event()
        trio.lowlevel.spawn_system_task(self._hold, pool, opened, self._done, self._gone)
        await opened.wait()
        return pool

    async def _hold(self, pool: Pool, opened: trio.Event, done: trio.Event, gone: trio.Event) -> None:
        """Body of a system task: the pool outlives the episode that opened it and ends in none that uses it."""
        try:
            async with pool:
                opened.set()
                await done.wait()
        finally:
            gone.set()


_backends: RunVar[dict[tuple[str, int], SharedBackend]] = RunVar("agentrl_shared_backends")


def shared(name: str, *, ready: int = 0) -> SharedBackend:
    """The shared backend of this trio loop under a registry id."""
    try:
        known = _backends.get()
    except LookupError:
        known = dict[tuple[str, int], SharedBackend]()
        _backends.set(known)
    if (name, ready) not in known:
        known[name, ready] = SharedBackend(name, ready=ready)
    return known[name, ready]
