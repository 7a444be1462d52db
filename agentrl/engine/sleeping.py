"""An engine's sleep: it gives its memory back, so that a learner can have the GPU, and keeps its requests.

    awake ──sleep──► asleep ──wake weights──► takes an update ──wake kv_cache──► awake

Owns vLLM's calls for it (the embedded engine has the same) and the proof that they were heard. Requests stay with the
engine, and new ones queue there: their keys and values are computed anew afterwards, no token is sampled again.
"""

from __future__ import annotations

from typing import Literal

from agentrl.engine.client import EngineClient
from agentrl.engine.wire import parse_json
from agentrl.errors import EngineError

Level = Literal[1, 2]
"""Of a sleep: 1 keeps the weights in host memory, 2 drops them, for an engine that is about to get new ones."""


async def sleep(client: EngineClient, *, level: Level, deadline_s: float) -> None:
    """Have an engine sleep; safe to repeat. Raises EngineError if it does not."""
    params = {"level": str(level), "mode": "keep"}
    await client.call("POST", "/sleep", params=params, deadline_s=deadline_s)
    said = parse_json(await client.call("GET", "/is_sleeping", deadline_s=deadline_s))
    if not said.get("is_sleeping"):
        raise EngineError(f"{client.url} was told to sleep and does not")


async def wake(client: EngineClient, tag: Literal["weights", "kv_cache"] | None = None, *, deadline_s: float) -> None:
    """Have an engine take this part of its memory again, or all of it; safe to repeat. With all of it, it goes on.
    Raises EngineError if it cannot."""
    params = None if tag is None else {"tags": tag}
    await client.call("POST", "/wake_up", params=params, deadline_s=deadline_s)
