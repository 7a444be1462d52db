"""Weights from memory to memory: who is joined, in what order engines are called, and that nobody waits for ever.

The engines are stubs behind an HTTP client, with the rules of vLLM's worker; the sender is one that works as vLLM's
does: it makes its calls from threads of its own and blocks until every receiver has come.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync.gpu_transport import Transfer
from agentrl.errors import WeightSyncError

UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
ADMIN = [*UPDATE, "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"]


class Wire:
    """Where a sender and its receivers meet: each `meet` returns when all of them are there, or breaks."""

    def __init__(self) -> None:
        self.group: threading.Barrier | None = None
        self.payload: object = None


class StubEngine:
    """An engine of so many `workers`. `refuses` names a path that it answers with 500, `hangs` one it never answers."""

    def __init__(self, wire: Wire, name: str, workers: int = 1) -> None:
        self.wire, self.workers = wire, workers
        self.refuses = self.hangs = ""
        self.hanging = trio.Event()
        self.calls: list[str] = []
        self.offset: int | None = None
        self.paused = self.updating = False
        self.weights: object = "from its folder"
        self.version = "default"
        self.seen_while_updating: list[bool] = []
        self.client = EngineClient(f"http://{name}", transport=httpx.MockTransport(self._answer))

    def restart(self) -> None:
        """What a new process would be, at the same URL."""
        self.offset, self.paused, self.updating = None, False, False
        self.weights, self.version = "from its folder", "1"

    @property
    def admin(self) -> list[str]:
        """The calls that change something, since this was last asked."""
        found, self.calls = [call for call in self.calls if call in ADMIN], []
        return found

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if path == self.hangs:
            self.hanging.set()
            await trio.sleep_forever()
        body = json.loads(request.content) if request.content else {}
        try:
            if path == self.refuses:
                raise RuntimeError("out of memory")
            return httpx.Response(200, json=await self._do(path, body))
        except RuntimeError as error:
            return httpx.Response(500, json={"error": {"message": str(error)}})

    async def _do(self, path: str, body: dict[str, Any]) -> object:
        match path:
            case "/version":
                return {"version": "0.32.0"}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/get_world_size":
                return {"world_size": self.workers}
            case "/pause":
                self.paused = True
            case "/resume":
                assert not self.updating
                self.paused = False
            case "/init_weight_transfer_engine":
                self.offset = body["init_info"].get("rank_offset", 0)
                await self._meet()
            case "/shutdown_weight_transfer_engine":
                if self.updating:
                    raise RuntimeError("Cannot release a trainer connection during a weight update")
                self.offset = None
            case "/start_weight_update":
                if self.updating:
                    raise RuntimeError("start_weight_update called while a weight update is already active")
                self.updating = True
            case "/update_weights":
                self.seen_while_updating.append(self.paused)
                if self.offset is None or not self.updating:
                    self.updating = False
                    raise RuntimeError("NCCL weight transfer not initialized")
                await self._meet()
                self.weights = body["update_info"].get("ipc_handles_pickled", self.wire.payload)
            case "/finish_weight_update":
                if not self.updating:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update")
                self.updating = False
                self.version = body.get("weight_version", self.version)
        return {}

    async def _meet(self) -> None:
        assert self.wire.group is not None
        await trio.to_thread.run_sync(self.wire.group.wait, abandon_on_cancel=True)


class Bytes:
    """A snapshot: one number that stands for the weights."""

    size_bytes = 8

    def __init__(self, weights: object) -> None:
        self.weights = weights


class StubSender:
    """Works as vLLM's NCCL sender does: calls on a thread beside its own, and blocks until every receiver has come."""

    def __init__(self, wire: Wire, engines: int) -> None:
        self.wire, self.engines = wire, engines
        self.joined: list[tuple[int, str]] = []
        self.left = 0
        self.after_the_end: list[BaseException] = []
        self.ended = threading.Event()

    def join(self, client: Any, snapshot: Bytes, *, world: int, address: str) -> StubSender:
        self.joined.append((world, address))
        self.wire.group = threading.Barrier(1 + self.engines)
        self._beside(lambda: client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + world}))
        return self

    def send(self, client: Any, snapshot: Bytes) -> None:
        client.start_weight_update()
        self.wire.payload = snapshot.weights
        try:
            self._beside(lambda: client.update_weights({"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}))
        except threading.BrokenBarrierError:
            try:  # as vLLM's would where the broadcast is broken off but seems to have ended
                client.finish_weight_update()
            except BaseException as error:
                self.after_the_end.append(error)
            self.ended.set()
            raise
        client.finish_weight_update()

    def leave(self) -> None:
        self.left += 1
        if self.wire.group is not None:
            self.wire.group.abort()

    def _beside(self, call: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            assert self.wire.group is not None
            self.wire.group.wait()
            answer.result()


class Scene:
    """Two engines, of two workers and of one, and a transfer to them."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.engines = [StubEngine(self.wire, "127.0.0.1:1", 2), StubEngine(self.wire, "127.0.0.1:2", 1)]
        self.sender = StubSender(self.wire, len(self.engines))
        self.transfer = Transfer(self.sender)

    async def push(self, version: int, *, weights: object = None, deadline_s: float = 20.0) -> float:
        clients = [engine.client for engine in self.engines]
        snapshot = Bytes(version if weights is None else weights)
        report = await self.transfer.push(clients, snapshot, version, deadline_s=deadline_s)
        assert report.bytes == 8 and 0 < report.pause_s <= report.total_s
        return report.pause_s

    @property
    def admin(self) -> list[list[str]]:
        return [engine.admin for engine in self.engines]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.sender.leave()  # no thread may outlive its test


async def test_all_are_joined_before_any_is_paused_and_take_the_version_together(scene: Scene) -> None:
    await scene.push(3)
    first, second = scene.engines
    assert scene.sender.joined == [(3, "127.0.0.1")]  # three workers besides the sender
    assert (first.offset, second.offset) == (1, 3)
    for engine in scene.engines:
        release = ["/finish_weight_update", "/shutdown_weight_transfer_engine"]
        assert engine.admin == [*release, "/init_weight_transfer_engine", *UPDATE]
        assert (engine.weights, engine.version, engine.client.version) == (3, "3", 3)
        assert engine.seen_while_updating == [True] and not engine.paused


async def test_the_next_version_goes_over_the_same_channel(scene: Scene) -> None:
    await scene.push(3)
    assert scene.admin
    await scene.push(4)
    assert scene.admin == [UPDATE, UPDATE]
    assert len(scene.sender.joined) == 1 and [engine.weights for engine in scene.engines] == [4, 4]


async def test_an_engine_that_was_started_again_is_seen_before_anybody_waits_for_it(scene: Scene) -> None:
    await scene.push(3)
    scene.engines[1].restart()
    assert scene.admin
    await scene.push(4)
    assert len(scene.sender.joined) == 2 and scene.sender.left == 1
    assert [(engine.weights, engine.version) for engine in scene.engines] == [(4, "4"), (4, "4")]
    assert all("/init_weight_transfer_engine" in calls for calls in scene.admin)


async def test_a_refused_update_breaks_the_wait_for_those_who_never_come(scene: Scene) -> None:
    """The deadline is a day: only the refusal can have ended it."""
    await scene.push(3)
    scene.engines[1].refuses = "/update_weights"
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:2 did not take version 4: .* out of memory"):
        await scene.push(4, deadline_s=86_400)
    assert scene.sender.left == 1
    assert all(engine.paused and engine.version == "3" for engine in scene.engines)
    await trio.to_thread.run_sync(scene.sender.ended.wait)
    scene.engines[1].refuses = ""
    await scene.push(4)
    assert [(engine.weights, engine.version, engine.paused) for engine in scene.engines] == [(4, "4", False)] * 2


async def test_a_refused_join_breaks_the_rendezvous_and_pauses_nobody(scene: Scene) -> None:
    scene.engines[0].refuses = "/init_weight_transfer_engine"
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:1 did not take version 3: .* out of memory"):
        await scene.push(3, deadline_s=86_400)
    assert not any("/pause" in calls for calls in scene.admin)
    scene.sender.leave()


async def test_a_receiver_that_never_comes_ends_at_the_deadline(
    scene: Scene, mock_clock: trio.testing.MockClock
) -> None:
    scene.engines[1].hangs = "/update_weights"
    caught: list[WeightSyncError] = []

    async def push() -> None:
        with pytest.raises(
            WeightSyncError, match=r"did not (take version 3|finish /update_weights) within 3600 s"
        ) as e:
            await scene.push(3, deadline_s=3600)
        caught.append(e.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(push)
        await scene.engines[1].hanging.wait()
        mock_clock.jump(3599.9)
        await trio.testing.wait_all_tasks_blocked()
        assert not caught and scene.sender.left == 0
        mock_clock.jump(0.2)
    assert caught and scene.sender.left == 1


async def test_a_sender_that_was_given_up_can_stamp_nothing(scene: Scene) -> None:
    """It goes on when its channel breaks; a finish from it would make half-loaded weights a version."""
    await scene.push(3)
    scene.engines[1].refuses = "/update_weights"
    with pytest.raises(WeightSyncError):
        await scene.push(4)
    await trio.to_thread.run_sync(scene.sender.ended.wait)
    assert [str(error) for error in scene.sender.after_the_end] == ["this update was abandoned"]
    assert [engine.version for engine in scene.engines] == ["3", "3"]


async def test_an_update_that_a_dead_trainer_left_open_is_closed_first(scene: Scene) -> None:
    scene.engines[0].paused = scene.engines[0].updating = True
    await scene.push(3)
    assert [(engine.weights, engine.version, engine.paused) for engine in scene.engines] == [(3, "3", False)] * 2


async def test_an_engine_that_cannot_be_reached_back_is_named(scene: Scene) -> None:
    scene.engines[1].client.url = "http://[::1]:2"  # which answers over HTTP, but the sender listens on IPv4
    with pytest.raises(WeightSyncError, match=r"no way leads from here to http://\[::1\]:2"):
        await scene.push(3)


async def test_an_engine_that_is_not_there_costs_the_others_no_pause(scene: Scene) -> None:
    await scene.push(3)
    scene.engines[0].refuses = "/weight_info"
    assert scene.admin
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:1 did not take version 4"):
        await scene.push(4)
    assert scene.engines[1].admin == []


async def test_handles_of_shared_memory_are_pickled_for_http() -> None:
    wire = Wire()
    engine, sender = StubEngine(wire, "127.0.0.1:1"), StubSender(wire, 1)
    handles = {"GPU-1": (bytes, (1, 2), b"handle")}

    class Sharing(StubSender):
        def send(self, client: Any, snapshot: Bytes) -> None:
            client.start_weight_update()
            self._beside(lambda: client.update_weights({"names": [], "ipc_handles": handles}))
            client.finish_weight_update()

    sender = Sharing(wire, 1)
    await Transfer(sender).push([engine.client], Bytes(1), 3)
    assert isinstance(engine.weights, str) and pickle.loads(base64.b64decode(engine.weights)) == handles
