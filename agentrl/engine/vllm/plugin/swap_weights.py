"""`agentrl_publish`: staged weights take the place of the old ones between two passes, in one call to the engine core.

    finish the passes in flight ─► every worker swaps ─► the new version ─► go on

That is vLLM's own pause, update and resume without the five HTTP requests, each of which the engine would stand still
for. Requests and their keys and values are treated as by `/pause?mode=keep`. If a swap fails, the engine stays paused.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from typing import Any

METHOD = "agentrl_publish"


def install() -> None:
    """Have this process's engine core answer it. Safe to call again."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if method != METHOD:
            return original(self, method, timeout, args, kwargs)
        return publish(self, functools.partial(original, self), *args, **(kwargs or {}))

    EngineCore.collective_rpc = collective_rpc


def publish(core: Any, workers: Any, update_info: str, version: str, clear_cache: bool) -> Any:
    """The answer, or a future of it: `swapped`, and `paused_s`, for how long no pass was computed. `workers` calls a
    method of all workers."""
    # An operator's pause is left as it was if the swap does not happen: only what this call paused, it resumes.
    was_paused = core.is_scheduler_paused()

    def swap() -> list[dict[str, Any]]:
        started_at = time.perf_counter()
        swapped = [answer["swapped"] for answer in workers("agentrl_swap", args=(update_info,))]
        # Some layers new and some old is the one state from which nothing may be sampled. The exception leaves the
        # scheduler paused, and the next push loads all of them.
        if any(swapped) and not all(swapped):
            raise RuntimeError("some workers have the new weights and some the old ones")
        if all(swapped):
            # Between the swap and the next pass, in the core's own thread: no token can be drawn in between (law 1).
            core.set_weight_version(version)
        if all(swapped) or not was_paused:
            core.resume_scheduler()
        return [{"swapped": all(swapped), "paused_s": time.perf_counter() - started_at}]

    pause_future = core.pause_scheduler(mode="keep", clear_cache=clear_cache)
    if pause_future is None:
        return swap()
    # Passes are in flight: the core must go on to finish them, so this call returns a future, and the swap runs in
    # the callback once it is idle.
    answer_future: Future[list[dict[str, Any]]] = Future()

    def idle(future: Future[Any]) -> None:
        try:
            future.result()
            answer_future.set_result(swap())
        except Exception as error:
            answer_future.set_exception(error)

    pause_future.add_done_callback(idle)
    return answer_future
