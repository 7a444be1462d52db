"""A sandbox backend that the episodes of a trio loop share. Knows nothing of what they do in its boxes."""

from __future__ import annotations

import trio

from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox, SandboxBackend, SandboxSpec
from agentrl.sandbox import backend


class SharedBackend:
    """Opened for the first box that anyone asks for, closed when the last user has left; then it may be used again.
    Satisfies `SandboxBackend`."""

    def __init__(self, name: str) -> None:
        """`name` is the registry id of the backend."""
        self.name = name
        self._users = 0
        self._backend: SandboxBackend | None = None
        self._closing = trio.Lock()

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
        if self._backend is None:
            self._backend = backend(self.name)
        return await self._backend.create(spec)

    async def aclose(self) -> None:
        """Close the backend, whoever still uses it. Idempotent."""
        opened, self._backend = self._backend, None
        if opened is not None:
            await opened.aclose()
