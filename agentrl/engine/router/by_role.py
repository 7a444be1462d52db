"""Several policies as one engine: a request goes to the engines of its role.

Owns that choice alone: each policy's engines are an engine of their own, which never hear of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from agentrl.protocols import Chunk, Engine, GenerateRequest
from agentrl.records import Generation


class Policies:
    """`protocols.Engine` over the engines of roles with a model of their own, by role, and those of all others. It
    raises what these do."""

    def __init__(self, shared: Engine, own: Mapping[str, Engine]) -> None:
        self._shared, self._own = shared, own

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._of(request).stream(request)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._of(request).generate(request)

    async def aclose(self) -> None:
        for engine in (self._shared, *self._own.values()):
            await engine.aclose()

    def _of(self, request: GenerateRequest) -> Engine:
        return self._shared if request.policy is None else self._own.get(request.policy, self._shared)
