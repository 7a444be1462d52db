"""Are the weights that sampled a chunk the run's own? Two runs at one engine would train on each other's tokens. Owns
the question to whoever knows the run's versions, and the name of the fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.errors import EngineBroke, EngineError
from agentrl.protocols import Chunk

Knows = Callable[[int], Awaitable[bool]]
"""Whether the run made a weight version."""


async def check(chunk: Chunk, url: str, knows: Knows) -> None:
    """Raises EngineBroke if tokens of a chunk come from weights that the run never made, EngineError if tokens before
    it do, which the turn has already."""
    for span in chunk.spans:
        if not await knows(span.version):
            kind = EngineBroke if span.start >= 0 else EngineError
            other = "does another run send it weights? Each run needs engines of its own (engine.urls)"
            raise kind(f"{url} samples from version {span.version}, which this run never made: {other}")
