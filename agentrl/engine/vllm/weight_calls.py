"""New weights from files through vLLM's weight-transfer calls, which the embedded engine has too.

stage ──► second copy ready ─► swap, between two passes ───────────────────────────────────► served?
      └─► else: pause ► start ► update ► finish ► resume ────────────────────────────────────┘

sleep ► wake weights ► start ► update ► finish ► wake kv_cache ──────────────────► served?     (colocated)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import trio

from agentrl.engine import sleep
from agentrl.engine.dialect import EngineCalls, WeightUpdate
from agentrl.engine.vllm_api import parse_json, results
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, WeightSyncError
from agentrl.records import Json

_STAGE_POLL_S = 0.01


async def take_weights(engine: EngineCalls, update: WeightUpdate, *, deadline_s: float) -> float:
    """Have an engine load new weights; see `EngineDialect.take_weights`."""
    file_infos, clear_cache = update.files, update.clear_cache
    init: dict[str, Json] = {} if update.keep_base is None else {"keep_base": update.keep_base}
    # With every push, also where it was done before: an engine that was restarted has forgotten it, and asking would
    # cost the same call.
    answer = await engine.call("POST", "/init_weight_transfer_engine", json={"init_info": init}, deadline_s=deadline_s)
    reads_ahead = bool(parse_json(answer).get("reads_ahead"))
    # A sleeping engine has no memory for a second copy, and no generation that a pause could disturb.
    if update.stage and not update.asleep:
        wants_second = update.second and len(file_infos) == 1
        if await _stage(engine, file_infos[0], wants_second, deadline_s):
            paused_s = await _swap(engine, file_infos[0], update.version, deadline_s, clear_cache)
            if paused_s is not None:
                return paused_s
    return await _load(engine, file_infos, update.version, deadline_s, clear_cache, reads_ahead, update.asleep)


async def _stage(engine: EngineCalls, info: Mapping[str, Json], second: bool, deadline_s: float) -> bool:
    """Wait until the engine's workers have the file ready. Returns whether they hold it as a second copy of their
    weights, to be swapped; an engine without our plugin reads it in the pause."""
    try:
        await _workers(engine, "agentrl_stage", json.dumps(dict(info)), second, deadline_s, deadline_s=deadline_s)
    except (EngineTimeout, EngineUnavailable):
        raise
    # Without our plugin there is no such method. The long way loads the same file.
    except EngineError:
        return False
    while True:
        worker_states = results(await _workers(engine, "agentrl_staged", deadline_s=deadline_s), ready=bool)
        if errors := [str(worker_state["error"]) for worker_state in worker_states if worker_state.get("error")]:
            raise WeightSyncError(errors[0])
        if all(worker_state["ready"] for worker_state in worker_states):
            return all(worker_state.get("second", False) for worker_state in worker_states)
        await trio.sleep(_STAGE_POLL_S)


async def _swap(
    engine: EngineCalls, info: Mapping[str, Json], version: int, deadline_s: float, clear_cache: bool
) -> float | None:
    """Have staged weights take the place of the old ones. Returns the seconds in which the engine computed nothing, by
    its own clock; None if it has no second copy any more, and nothing was changed."""
    arguments = (json.dumps(dict(info)), str(version), clear_cache)
    answer = await _workers(engine, "agentrl_publish", *arguments, deadline_s=deadline_s)
    if not all(worker_result["swapped"] for worker_result in results(answer, swapped=bool)):
        return None
    return max(worker_result["paused_s"] for worker_result in results(answer, paused_s=int | float))


async def _workers(engine: EngineCalls, method: str, *args: Json, deadline_s: float) -> bytes:
    """The answer of the engine's workers to a method of our plugin."""
    body: dict[str, Json] = {"method": method, "args": list(args)}
    return await engine.call("POST", "/collective_rpc", json=body, deadline_s=deadline_s)


async def _load(
    engine: EngineCalls,
    infos: Sequence[Mapping[str, Json]],
    version: int,
    deadline_s: float,
    clear_cache: bool,
    ahead: bool,
    asleep: bool,
) -> float:
    """Pause the engine and have it load the files, which it reads before where it can (`ahead`: the embedded engine),
    or have it load them in its sleep. Returns the seconds from the pause's call to the last answer."""

    async def call(path: str, json: dict[str, Json] | None = None, params: dict[str, str] | None = None) -> None:
        await engine.call("POST", path, deadline_s=deadline_s, json=json, params=params)

    async def update() -> None:
        try:
            await call("/start_weight_update")
        except EngineError:  # vLLM refuses while the update of a trainer that died half-way is open: close it first
            # Without a version: what lies half-loaded in the layers gets no name, and the update that follows
            # replaces all of it. `test_an_update_whose_trainer_died_half_way_is_mended_by_the_next` kills a trainer
            # here.
            await call("/finish_weight_update", {})
            await call("/start_weight_update")
        for file_info in infos:
            await call("/update_weights", {"update_info": dict(file_info)})

    finish_body: dict[str, Json] = {"weight_version": str(version)}
    if asleep:
        started_at = trio.current_time()
        await sleep.sleep(engine, level=2, deadline_s=deadline_s)  # whatever it does
        await sleep.wake(engine, "weights", deadline_s=deadline_s)
        await update()
        await call("/finish_weight_update", finish_body)
        # Last: with room for keys and values the engine goes on by itself, and it must have the new weights and their
        # version by then.
        await sleep.wake(engine, "kv_cache", deadline_s=deadline_s)
        return trio.current_time() - started_at
    if ahead:
        await update()
    started_at = trio.current_time()
    await call("/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})
    if not ahead:
        await update()
    await call("/finish_weight_update", finish_body)
    await call("/resume")
    return trio.current_time() - started_at
