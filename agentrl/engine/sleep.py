"""An engine's sleep: it gives its memory back, so that a learner can have the GPU, and keeps its requests.

    awake ──sleep──► asleep ──wake weights──► takes an update ──wake kv_cache──► awake

Owns vLLM's calls for it (the embedded engine has the same) and the proof that they were heard. Requests stay with the
engine, and new ones queue there: their keys and values are computed anew afterwards, no token is sampled again.
"""

from __future__ import annotations

from typing import Literal

from agentrl.engine.dialect import EngineCalls
from agentrl.engine.vllm_api import metric, parse_json
from agentrl.errors import EngineError

_STATE = "vllm:engine_sleep_state{"
Level = Literal[1, 2]
"""Of a sleep: 1 keeps the weights in host memory, 2 drops them, for an engine that is about to get new ones."""


async def sleep(engine: EngineCalls, *, level: Level, deadline_s: float) -> None:
    """Have an engine sleep; safe to repeat. Raises EngineError if it does not."""
    sleep_params = {"level": str(level), "mode": "keep"}
    await engine.call("POST", "/sleep", params=sleep_params, deadline_s=deadline_s)
    # A status of 200 is not believed: the learner takes the GPU next, and an engine that kept its memory would end
    # the step with an out-of-memory error far from its cause.
    sleep_state = parse_json(await engine.call("GET", "/is_sleeping", deadline_s=deadline_s))
    if not sleep_state.get("is_sleeping"):
        raise EngineError(f"{engine.url} was sent to sleep and is still awake", url=engine.url)


async def sleeps(engine: EngineCalls, *, deadline_s: float) -> bool:
    """Whether the engine has freed its memory, and is not only paused. False if it does not report it. Raises
    EngineError."""
    sleep_state = parse_json(await engine.call("GET", "/is_sleeping", deadline_s=deadline_s))
    if not sleep_state.get("is_sleeping"):
        return False
    # The embedded engine has a field for it. To vLLM a pause is a sleep too, and only its metrics tell them apart.
    if "asleep" in sleep_state:
        return bool(sleep_state["asleep"])
    metrics_lines = (await engine.call("GET", "/metrics", deadline_s=deadline_s)).decode(errors="replace").splitlines()
    awake_values = (
        metric(line)[1] for line in metrics_lines if line.startswith(_STATE) and 'sleep_state="awake"' in line
    )
    return any(awake_value == 0 for awake_value in awake_values)


async def wake(engine: EngineCalls, tag: Literal["weights", "kv_cache"] | None = None, *, deadline_s: float) -> None:
    """Have an engine take this part of its memory again, or all of it; safe to repeat. With all of it, it goes on.
    Raises EngineError if it cannot."""
    wake_params = None if tag is None else {"tags": tag}
    await engine.call("POST", "/wake_up", params=wake_params, deadline_s=deadline_s)
