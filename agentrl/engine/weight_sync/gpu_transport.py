"""New weights from the learner's memory into running engines, with no file between: vLLM's `nccl` and `ipc`.

Owns the order of the calls, their deadlines, and who is joined with the sender. The sender itself is the learner's: it
blocks, so it works on a thread and makes its control calls back through here. No torch: a snapshot is only passed on.

    served? ── all as we left them ──────────────────► pause ► [ start ► update ∥ bytes ► finish ] ► resume ► served?
       └── else: release ► [ init ∥ rendezvous ] ──────┘              the sender's thread

Engines are paused only once all are joined. A push that fails breaks the channel, so that neither the thread nor a GPU
waits on. Engines whose update has begun stay paused, until another push over a new channel succeeds.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import trio
import trio.from_thread
import trio.to_thread

from agentrl.config import EngineSettings, Train, gpu_placement
from agentrl.engine.client import EngineClient
from agentrl.engine.http_client import socket_of
from agentrl.engine.vllm_api import parse_json
from agentrl.engine.weight_sync.transport import (
    MemoryParcel,
    Place,
    PushReport,
    WeightChannel,
    WeightSender,
    WeightsInMemory,
    WeightTransport,
)
from agentrl.errors import ConfigError, EngineError, EngineUnavailable, WeightSyncError
from agentrl.records import Json

_LEAVE_S = 10.0
_T = TypeVar("_T")


class Transfer:
    """Pushes to a set of engines. Invariant: while `_channel` is there, the engines of `_urls` are joined by it, and
    each served `_version` when it was last seen; one that serves another now was started again and is not joined."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._channel: WeightChannel | None = None
        self._urls: tuple[str, ...] = ()
        self._version: int | None = None

    async def push(
        self,
        engines: Sequence[EngineClient],
        snapshot: WeightsInMemory,
        version: int,
        *,
        deadline_s: float = 30.0,
        clear_cache: bool = False,
    ) -> PushReport:
        """Have every engine take the snapshot and serve it as `version`; all at once. Joining and sending have
        `deadline_s` each. `clear_cache` as in `weights.push`.

        Raises WeightSyncError naming the engines that failed. The call may be repeated."""
        started_at = trio.current_time()
        try:
            await self._join(engines, snapshot, version, deadline_s)
            pause_s = await self._send(engines, snapshot, version, deadline_s, clear_cache)
        # Cancellation too: a sender's thread that nobody waits for would hold the communicator, and the next step's
        # copy waits for it.
        except BaseException:
            await self._leave()
            raise
        self._version = version
        total_s = trio.current_time() - started_at
        return PushReport(pause_s=pause_s, total_s=total_s, bytes=snapshot.size_bytes)

    async def _join(
        self, engines: Sequence[EngineClient], snapshot: WeightsInMemory, version: int, deadline_s: float
    ) -> None:
        engine_urls = tuple(engine.url for engine in engines)
        served_versions = await _each(engines, version, lambda engine: engine.served_version(deadline_s=deadline_s))
        # A channel is a group of ranks: an engine that died and came back is none of them any more, and a broadcast
        # would wait for it until the deadline. That it serves the last version shows that it never left.
        if self._channel is not None and engine_urls == self._urls and set(served_versions.values()) == {self._version}:
            return
        await self._leave()
        await _each(engines, version, lambda engine: _release(engine, deadline_s))
        worker_counts = await _each(engines, version, lambda engine: _workers(engine, deadline_s))
        engine_calls = _Calls(engines, version, deadline_s, worker_counts)

        def join() -> WeightChannel:
            return self._sender.join(
                engine_calls, snapshot, world=sum(worker_counts.values()), address=_address(engine_urls)
            )

        self._channel = await engine_calls.during(join)
        self._urls = engine_urls

    async def _send(
        self,
        engines: Sequence[EngineClient],
        snapshot: WeightsInMemory,
        version: int,
        deadline_s: float,
        clear_cache: bool,
    ) -> float:
        """The update itself; returns the seconds without generation."""
        channel, engine_calls = self._channel, _Calls(engines, version, deadline_s)
        assert channel is not None
        pause_params = {"mode": "keep", "clear_cache": "true" if clear_cache else "false"}
        started_at = trio.current_time()
        await engine_calls.post("/pause", params=pause_params)
        await engine_calls.during(lambda: channel.send(engine_calls, snapshot))
        await engine_calls.post("/resume")
        pause_s = trio.current_time() - started_at
        for engine in engines:
            served_version = await engine.served_version(deadline_s=deadline_s)
            if served_version != version:
                raise WeightSyncError(f"{engine.url} serves version {served_version} after the update to {version}")
            engine.version = version
        return pause_s

    async def _leave(self) -> None:
        """Break the channel. In shelter: nothing may stay joined half-way."""
        channel, self._channel, self._version = self._channel, None, None
        if channel is not None:
            with trio.CancelScope(shield=True), suppress(WeightSyncError), trio.move_on_after(_LEAVE_S):
                await trio.to_thread.run_sync(channel.leave, abandon_on_cancel=True)


class _Calls:
    """The control calls of one join or one send, which vLLM's sender makes from its threads: each goes to all engines,
    and returns when all have answered. The first refusal ends the waiting for the sender, which may be blocked with
    nobody left to talk to; a sender that nobody waits for any more cannot call."""

    def __init__(
        self, engines: Sequence[EngineClient], version: int, deadline_s: float, workers: Mapping[str, int] | None = None
    ) -> None:
        self._engines, self._version, self._deadline_s = engines, version, deadline_s
        self._workers = workers or {}
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        self._refusal: EngineError | None = None
        self._over = False

    async def during(self, work: Callable[[], _T]) -> _T:
        """Do the sender's work on a thread. Raises WeightSyncError at a refusal, or at the deadline."""
        self._scope.deadline = trio.current_time() + self._deadline_s
        try:
            with self._scope:
                # NCCL cannot be cancelled: the thread is left behind, and `_leave` aborts the communicator under it,
                # which ends its call.
                return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except WeightSyncError as error:
            raise self._refusal or error from None
        finally:
            self._over = True
        engine_urls = ", ".join(engine.url for engine in self._engines)
        raise self._refusal or WeightSyncError(
            f"{engine_urls} did not take version {self._version} within {self._deadline_s:g} s (half of "
            "engine.liveness_deadline_s)"
        )

    async def post(
        self,
        path: str,
        body: Callable[[str], dict[str, Json]] | None = None,
        params: dict[str, str] | None = None,
        *,
        first_ends: bool = False,
    ) -> None:
        """One call to every engine, with the `body` for its URL."""

        async def receive(engine: EngineClient) -> None:
            json_body = None if body is None else body(engine.url)
            await engine.call("POST", path, deadline_s=self._deadline_s, json=json_body, params=params)

        await _each(self._engines, self._version, receive, first_ends=first_ends)

    def _from_sender(self, path: str, body: Callable[[str], dict[str, Json]] | None = None) -> None:
        async def call() -> None:
            try:
                await self.post(path, body, first_ends=True)
            except EngineError as error:
                self._refusal = self._refusal or error
                # The sender is blocked in a broadcast and waits for the one that just refused. Nothing would ever
                # wake it.
                self._scope.cancel()
                raise

        if self._over:
            raise WeightSyncError("this update was abandoned")
        # The token is kept from the start, since the sender calls from threads of its own making, which trio does not
        # know.
        trio.from_thread.run(call, trio_token=self._token)

    # --- vLLM's VLLMWeightSyncClient

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every engine's workers follow those of the engines before it."""
        rank_offsets: dict[str, int] = {}
        next_rank = init_info.get("rank_offset", 0)
        # Ranks in one NCCL group are one after the other: the learner has 0, each engine begins where the one before
        # it ends.
        for engine_url, worker_count in self._workers.items():
            rank_offsets[engine_url] = next_rank
            next_rank += worker_count

        def body(url: str) -> dict[str, Json]:
            rank_offset = {"rank_offset": rank_offsets[url]} if "rank_offset" in init_info else {}
            return {"init_info": {**init_info, **rank_offset}}

        self._from_sender("/init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        self._from_sender("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        json_info = _json_safe(update_info)
        self._from_sender("/update_weights", lambda _: {"update_info": json_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._from_sender("/finish_weight_update", lambda _: {"weight_version": str(self._version)})


async def _each(
    engines: Sequence[EngineClient],
    version: int,
    ask: Callable[[EngineClient], Awaitable[_T]],
    *,
    first_ends: bool = False,
) -> dict[str, _T]:
    """The answers of all engines by URL, requested at once. Raises WeightSyncError naming those that failed: the first
    one only, and without waiting for the others, where `first_ends`."""
    answers: dict[str, _T] = {}
    failures: list[str] = []

    async def answer(engine: EngineClient) -> None:
        try:
            answers[engine.url] = await ask(engine)
        except EngineError as error:
            failures.append(f"{engine.url} did not take version {version}: {error}")
            if first_ends:
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(answer, engine)
    if failures:
        raise WeightSyncError("; ".join(sorted(failures)))
    return {engine.url: answers[engine.url] for engine in engines}


async def _release(engine: EngineClient, deadline_s: float) -> None:
    """Have an engine forget a sender before this one, and the update that it left open."""
    # Of a learner that died in the midst: the engine still waits for the rest of its broadcast, and refuses a second
    # sender.
    for api_path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
        with suppress(EngineUnavailable):  # there is none
            await engine.call("POST", api_path, json={}, deadline_s=deadline_s)


async def _workers(engine: EngineClient, deadline_s: float) -> int:
    world_size = parse_json(await engine.call("GET", "/get_world_size", deadline_s=deadline_s)).get("world_size")
    if type(world_size) is not int or world_size < 1:
        raise EngineError(f"the engine says that its world_size is {world_size!r:.80}")
    return world_size


def _json_safe(update_info: dict[str, Any]) -> dict[str, Json]:
    """CUDA IPC handles hold what JSON does not: vLLM takes them pickled, where it was started to."""
    json_info = dict(update_info)
    ipc_handles = json_info.pop("ipc_handles", None)
    json_info.pop("ipc_handles_pickled", None)
    if ipc_handles is not None:
        # Pickled only towards the engine. The danger lies in its unpickling, and it has to be started with a flag
        # that says so.
        json_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(ipc_handles)).decode()
    return json_info


def _address(urls: Sequence[str]) -> str:
    """An address of this machine that all engines can reach: one that leads outwards where one of them is elsewhere.
    Raises WeightSyncError for an engine to which no way leads."""
    addresses: list[str] = []
    for url in urls:
        if socket_of(url) is not None:
            continue  # it is on this machine
        url_parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:  # connecting one sends nothing
            try:
                probe_socket.connect((url_parts.hostname or "127.0.0.1", url_parts.port or 80))
            except OSError as error:
                raise WeightSyncError(f"no way leads from here to {url}: {error.strerror}") from error
            addresses.append(probe_socket.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")


class _MemoryTransport(WeightTransport):
    """From the learner's GPU memory into that of the engines, all of them together."""

    form = "memory"

    def __init__(self, place: Place) -> None:
        self._settings = place.engine
        self._transfer = None if place.sender is None else Transfer(place.sender)

    @classmethod
    def check(cls, engine: EngineSettings, train: Train, *, on_ray: bool) -> None:
        if engine.weights_url is not None:
            hint = f"engine.sync = {cls.backend!r} needs none: leave it out"
            raise ConfigError("engine.weights_url", engine.weights_url, hint)
        if engine.kind == "embedded":
            raise ConfigError("engine.sync", cls.backend, "the embedded engine takes whole files: give 'auto'")
        if engine.kind == "sglang":
            hint = "SGLang takes whole weights or adapters here: give 'auto'"
            raise ConfigError("engine.sync", cls.backend, hint)
        gpu_placement.check_memory_sync(engine, train, sync=cls.backend, on_ray=on_ray)

    async def deliver(
        self, engines: Sequence[EngineClient], parcel: MemoryParcel, base: MemoryParcel | None
    ) -> PushReport:
        assert self._transfer is not None, "only a learner sends from its memory"
        return await self._transfer.push(
            engines,
            parcel.snapshot,
            parcel.version,
            deadline_s=self._settings.admin_deadline_s,
            clear_cache=self._settings.at_update == "recompute",
        )


class NcclTransport(_MemoryTransport):
    """`nccl`: a broadcast to any number of other GPUs."""

    backend = "nccl"


class IpcTransport(_MemoryTransport):
    """`ipc`: a buffer shared with engines on the same GPU."""

    backend = "ipc"
