"""New weights as files into running engines, through vLLM's weight-transfer calls. No torch: it passes a file's path.

    stage ──► second copy ready ─► swap, between two passes ───────────────────────────────────► served?
          └─► else: pause ► start ► update ► finish ► resume ────────────────────────────────────┘

    sleep ► wake weights ► start ► update ► finish ► wake kv_cache ──────────────────► served?     (colocated)

Owns the order of the calls, their deadline and the confirmation. An engine whose update failed half-way stays paused:
waiting is better than sampling from half-loaded weights, and pushing again repairs it (every call may be repeated).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from agentrl.engine import sleep
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import parse_json, results
from agentrl.engine.weight_sync import object_store, weight_file
from agentrl.engine.weight_sync.object_store import Outbox, StoredVersion
from agentrl.engine.weight_sync.transport import Parcel, Place, PushReport, WeightTransport
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, WeightSyncError
from agentrl.records import Json

_STAGE_POLL_S = 0.01


async def push(
    engines: Sequence[str | EngineClient],
    path: Path | str | Sequence[Path | str],
    version: int,
    *,
    sha256: str | None = None,
    base_sha256: str | None = None,
    keep_base: bool | None = None,
    stage: bool = False,
    second: bool = True,
    deadline_s: float = 30.0,
    clear_cache: bool = False,
    asleep: bool = False,
) -> PushReport:
    """Have every engine load the safetensors file at `path`, or several that hold the weights together, and serve it
    as `version`; all at once. In the place of a path, the URL of an entry in an object store (`objects`) will do for
    engines that do not see our files.

    Requests go on over the swap. `clear_cache` recomputes their keys and values under the new weights; otherwise they
    keep those they have. `sha256` is that of the one file, computed here if not given. `stage` has an engine that can
    (vLLM with our plugin) read and check it while it generates, and with `second` also make a second copy of its
    weights of it where there is room, so that the pause is a swap. With `base_sha256` the file is a delta (see
    `weightfile`) against the weights of that digest, which the engines must have kept: `keep_base` tells them to, from
    the push of the base on. With `asleep` engines take the weights in their sleep, which they are put to if they are
    awake, and wake with them: weights first, then room for keys and values.

    Raises WeightSyncError naming the engines that did not confirm within `deadline_s`; the others have the new
    weights, and the call may be repeated."""
    infos: list[dict[str, Json]] = []
    size = 0
    for part in [path] if isinstance(path, Path | str) else path:
        whole, bytes_, digest = await trio.to_thread.run_sync(_found, part, sha256, deadline_s)
        size += bytes_
        infos.append(update_info(whole, digest, base_sha256, version=version, deadline_s=deadline_s))
    started = trio.current_time()
    pauses: list[float] = []
    failures: list[str] = []

    async def update(client: EngineClient) -> float:
        init: dict[str, Json] = {} if keep_base is None else {"keep_base": keep_base}
        answer = await client.call(
            "POST", "/init_weight_transfer_engine", json={"init_info": init}, deadline_s=deadline_s
        )
        ahead = bool(parse_json(answer).get("reads_ahead"))
        paused = None
        if stage and not asleep and await _stage(client, infos[0], second and len(infos) == 1, deadline_s):
            paused = await _swap(client, infos[0], version, deadline_s, clear_cache)
        if paused is None:
            paused = await _load(client, infos, version, deadline_s, clear_cache, ahead, asleep)
        served = await client.served_version(deadline_s=deadline_s)
        if served != version:
            raise WeightSyncError(f"it serves version {served} after the update")
        client.version = version
        return paused

    async def push_to(engine: str | EngineClient) -> None:
        client = EngineClient(engine) if isinstance(engine, str) else engine
        try:
            with trio.fail_after(deadline_s):
                pauses.append(await update(client))
        except trio.TooSlowError:
            failures.append(f"{client.url} did not take version {version} within {deadline_s:g} s")
        except EngineError as error:
            failures.append(f"{client.url} did not take version {version}: {error}{_mend(error, infos)}")
        finally:
            if isinstance(engine, str):
                with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
                    await client.aclose()

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(push_to, engine)
    if failures:
        raise WeightSyncError("; ".join(sorted(failures)))
    total = trio.current_time() - started
    return PushReport(pause_s=max(pauses, default=0.0), total_s=total, bytes=size)


def _found(path: Path | str, sha256: str | None, deadline_s: float) -> tuple[Path | str, int, str]:
    """A file's place, as any process can name it, the bytes that an engine reads, and the digest of the weights. Raises
    WeightSyncError."""
    if isinstance(path, str):
        folder, _, name = path.rpartition("/")
        entry = object_store.ObjectFolder(folder, deadline_s=deadline_s).entry(name)
        return path, entry.object_bytes, sha256 or entry.sha256
    try:
        place, size = path.resolve(), path.stat().st_size
    except OSError as error:
        raise WeightSyncError(f"cannot read {str(path)!r}: {error.strerror}") from error
    return place, size, sha256 or weight_file.digest(weight_file.open_bytes(place))


def _mend(error: EngineError, infos: Sequence[dict[str, Json]]) -> str:
    """What to do about an engine that cannot read a file which is there."""
    unseen = [
        info["path"] for info in infos if not object_store.is_url(info["path"]) and str(info["path"]) in str(error)
    ]
    if not unseen or "cannot read" not in str(error):
        return ""
    return (
        "; the file is there, so this engine was not started with its folder (--weights-from FOLDER), or it shares no "
        "disk with the learner: set engine.weights_url to a folder that both reach "
        '(engine.weights_url = "s3://bucket/weights"), or scratch_dir to a folder that both mount'
    )


def update_info(
    path: Path | str,
    sha256: str | None = None,
    base_sha256: str | None = None,
    *,
    version: int | None = None,
    deadline_s: float | None = None,
) -> dict[str, Json]:
    """How a weight file is named to an engine, with the version that it belongs to; `deadline_s` is that of each object
    of a store."""
    info: dict[str, Json] = {"path": str(path)}
    if object_store.is_url(path) and deadline_s is not None:
        info["deadline_s"] = deadline_s
    more = (("sha256", sha256), ("base_sha256", base_sha256), ("version", version))
    return info | {key: value for key, value in more if value is not None}


async def _stage(client: EngineClient, info: dict[str, Json], second: bool, deadline_s: float) -> bool:
    """Wait until the engine's workers have the file ready. Returns whether they hold it as a second copy of their
    weights, to be swapped; an engine without our plugin reads it in the pause."""
    try:
        await _workers(client, "agentrl_stage", json.dumps(info), second, deadline_s, deadline_s=deadline_s)
    except (EngineTimeout, EngineUnavailable):
        raise
    except EngineError:
        return False
    while True:
        states = results(await _workers(client, "agentrl_staged", deadline_s=deadline_s), ready=bool)
        if errors := [str(state["error"]) for state in states if state.get("error")]:
            raise WeightSyncError(errors[0])
        if all(state["ready"] for state in states):
            return all(state.get("second", False) for state in states)
        await trio.sleep(_STAGE_POLL_S)


async def _swap(
    client: EngineClient, info: dict[str, Json], version: int, deadline_s: float, clear_cache: bool
) -> float | None:
    """Have staged weights take the place of the old ones. Returns the seconds in which the engine computed nothing, by
    its own clock; None if it has no second copy any more, and nothing was changed."""
    asked = (json.dumps(info), str(version), clear_cache)
    answer = await _workers(client, "agentrl_publish", *asked, deadline_s=deadline_s)
    if not all(worker["swapped"] for worker in results(answer, swapped=bool)):
        return None
    return max(worker["paused_s"] for worker in results(answer, paused_s=int | float))


async def _workers(client: EngineClient, method: str, *args: Json, deadline_s: float) -> bytes:
    """The answer of the engine's workers to a method of our plugin."""
    asked: dict[str, Json] = {"method": method, "args": list(args)}
    return await client.call("POST", "/collective_rpc", json=asked, deadline_s=deadline_s)


async def _load(
    client: EngineClient,
    infos: Sequence[dict[str, Json]],
    version: int,
    deadline_s: float,
    clear_cache: bool,
    ahead: bool,
    asleep: bool,
) -> float:
    """Pause the engine and have it load the files, which it reads before where it can (`ahead`: the embedded engine),
    or have it load them in its sleep. Returns the seconds from the pause's call to the last answer."""

    async def call(path: str, json: dict[str, Json] | None = None, params: dict[str, str] | None = None) -> None:
        await client.call("POST", path, deadline_s=deadline_s, json=json, params=params)

    async def update() -> None:
        try:
            await call("/start_weight_update")
        except EngineError:  # vLLM refuses while the update of a trainer that died half-way is open: close it first
            await call("/finish_weight_update", {})
            await call("/start_weight_update")
        for info in infos:
            await call("/update_weights", {"update_info": info})

    finish: dict[str, Json] = {"weight_version": str(version)}
    if asleep:
        started = trio.current_time()
        await sleep.sleep(client, level=2, deadline_s=deadline_s)  # whatever it does
        await sleep.wake(client, "weights", deadline_s=deadline_s)
        await update()
        await call("/finish_weight_update", finish)
        await sleep.wake(client, "kv_cache", deadline_s=deadline_s)
        return trio.current_time() - started
    if ahead:
        await update()
    started = trio.current_time()
    await call("/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})
    if not ahead:
        await update()
    await call("/finish_weight_update", finish)
    await call("/resume")
    return trio.current_time() - started


class FileTransport(WeightTransport):
    """`full`: a file of all weights, or an object of a store if `engine.weights_url` names one."""

    serves_role_models = True
    deltas = False  # whether the store gets what changed

    def __init__(self, place: Place) -> None:
        self._settings = place.engine
        self._outbox = None if place.store is None else Outbox(place.store, deltas=self.deltas)
        self._stored: tuple[int, StoredVersion] | None = None  # the version that was put into the store last

    @asynccontextmanager
    async def offer(self, parcel: Parcel, base: Parcel | None) -> AsyncGenerator[None]:
        if self._outbox is not None and (self._stored is None or self._stored[0] != parcel.version):
            sent = await trio.to_thread.run_sync(self._outbox.put, parcel.version, parcel.path, parcel.sha256)
            self._stored = (parcel.version, sent)
        yield

    async def deliver(self, engines: Sequence[EngineClient], parcel: Parcel, base: Parcel | None) -> PushReport:
        return await self._push(engines, parcel)

    async def _push(
        self, engines: Sequence[EngineClient], parcel: Parcel, delta: Path | None = None, base: Parcel | None = None
    ) -> PushReport:
        """Push the object in the store, else `delta` against `base`, else the file."""
        settings = self._settings
        use = delta if self._stored is None else None
        return await push(
            engines,
            self._stored[1].url if self._stored is not None else use or parcel.path,
            parcel.version,
            sha256=parcel.sha256,
            base_sha256=base.sha256 if use is not None and base is not None else None,
            keep_base=True if self.deltas else None,
            stage=settings.kind == "vllm",
            second=settings.stage == "auto",
            deadline_s=settings.admin_deadline_s,
            clear_cache=settings.recompute_kv,
            asleep=settings.colocated,
        )

    def missed(self, *, by_all: bool) -> None:
        if self._outbox is not None:
            self._outbox.whole_next()
            self._stored = None if by_all else self._stored

    async def retire(self, engines: Sequence[EngineClient], keep: Sequence[Parcel]) -> frozenset[int]:
        if self._outbox is not None:
            with suppress(WeightSyncError):  # a store that is away now is tidied with the next version
                await trio.to_thread.run_sync(self._outbox.tidy, [parcel.version for parcel in keep])
        return frozenset()

    def diagnosis(self, parcel: Parcel) -> dict[str, Json] | None:
        return update_info(self._stored[1].url if self._stored is not None else parcel.path, parcel.sha256)
