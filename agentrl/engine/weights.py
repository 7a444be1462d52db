"""New weights into running engines, through vLLM's weight-transfer calls. No torch: a file's path is all it passes.

Owns the order of the calls, their deadline and the confirmation. An engine whose update failed half-way stays paused:
waiting is better than sampling from half-loaded weights, and pushing again mends it (every call may be repeated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError, WeightSyncError
from agentrl.records import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push cost: the longest pause of generation, the whole in wall time (seconds), and the file's bytes."""

    pause_s: float
    total_s: float
    bytes: int


async def push(
    engines: Sequence[str | EngineClient],
    path: Path,
    version: int,
    *,
    sha256: str | None = None,
    deadline_s: float = 30.0,
    clear_cache: bool = False,
) -> PushReport:
    """Have every engine load the safetensors file at `path` and serve it as `version`; all at once.

    Requests go on over the swap. `clear_cache` recomputes their keys and values under the new weights; otherwise they
    keep those they have. Raises WeightSyncError naming the engines that did not confirm within `deadline_s`; the
    others have the new weights, and the call may be repeated."""
    try:
        path = Path(await trio.Path(path).resolve())
        size = (await trio.Path(path).stat()).st_size
    except OSError as error:
        raise WeightSyncError(f"cannot read {str(path)!r}: {error.strerror}") from error
    started = trio.current_time()
    pauses: list[float] = []
    failures: list[str] = []

    async def one(engine: str | EngineClient) -> None:
        client = EngineClient(engine) if isinstance(engine, str) else engine
        try:
            with trio.fail_after(deadline_s):
                pauses.append(await _push_one(client, path, version, sha256, deadline_s, clear_cache))
        except trio.TooSlowError:
            failures.append(f"{client.url} did not take version {version} within {deadline_s:g} s")
        except EngineError as error:
            failures.append(f"{client.url} did not take version {version}: {error}")
        finally:
            if isinstance(engine, str):
                with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
                    await client.aclose()

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(one, engine)
    if failures:
        raise WeightSyncError("; ".join(sorted(failures)))
    total = trio.current_time() - started
    return PushReport(pause_s=max(pauses, default=0.0), total_s=total, bytes=size)


async def _push_one(
    client: EngineClient, path: Path, version: int, sha256: str | None, deadline_s: float, clear_cache: bool
) -> float:
    """One engine's update; returns the seconds it did not generate."""
    info: dict[str, Json] = {"path": str(path)}
    if sha256 is not None:
        info["sha256"] = sha256

    async def call(path: str, json: dict[str, Json] | None = None, params: dict[str, str] | None = None) -> None:
        await client.call("POST", path, deadline_s=deadline_s, json=json, params=params)

    await call("/init_weight_transfer_engine", {"init_info": {}})
    started = trio.current_time()
    await call("/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})
    await call("/start_weight_update")
    await call("/update_weights", {"update_info": info})
    await call("/finish_weight_update", {"weight_version": str(version)})
    await call("/resume")
    paused = trio.current_time() - started
    served = await client.served_version(deadline_s=deadline_s)
    if served != version:
        raise WeightSyncError(f"it serves version {served} after the update")
    client.version = version
    return paused
