"""Weights on their way into vLLM, without it: made ready while it generates, swapped between two passes, or dropped."""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.plugin import file_transfer, staging
from agentrl.engine.vllm.plugin import swap_weights as publish
from agentrl.engine.vllm.plugin.file_transfer import Base, Stage, Superseded, Update
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import WeightSyncError
from tests.parts.vllm_server import FakeVLLM

PATIENCE_S = 60.0  # reached only when broken


def update_of(folder: Path, value: float) -> Update:
    path = folder / f"{value}.safetensors"
    save_file({"weight": np.full(4, value, dtype=np.float32)}, path)
    return Update(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def done(stage: Stage) -> None:
    assert stage._done.wait(PATIENCE_S)


def ended(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Builds:
    """The builds of second copies that were begun; each waits until it is let go, and asks then whether it should."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, data: Any, waited_for: Callable[[], None]) -> tuple[Any, str | None]:
        self.begun.append(bytes(data))
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        waited_for()
        return ("second", len(self.begun)), None


# --- made ready on a thread


def test_an_update_is_made_ready_with_a_second_copy_that_a_swap_takes_once(tmp_path: Path) -> None:
    builds, update = Builds(), update_of(tmp_path, 1)
    stage = Stage(Base(keep=True), builds)
    stage.begin(update, second=True)
    assert not stage.state()["ready"] and not stage.has_second(update)
    builds.go.set()
    done(stage)
    assert stage.state() == {"ready": True, "error": None, "second": True, "why": None}
    assert stage.has_second(update) and not stage.has_second(update_of(tmp_path, 2))
    staged = stage.take(update)
    assert staged.second == ("second", 1) and staged.kept is not None
    assert bytes(staged.kept) == Path(update.path).read_bytes()  # the next delta's base, copied before the pause
    assert not stage.has_second(update) and stage.take(update).second is None


def test_of_two_updates_the_newer_one_is_made_ready_and_the_other_gives_up(tmp_path: Path) -> None:
    builds, older, newer = Builds(), update_of(tmp_path, 1), update_of(tmp_path, 2)
    stage = Stage(Base(), builds)
    stage.begin(older, second=True)
    assert builds.entered.wait(PATIENCE_S)
    first = stage._thread
    stage.begin(newer, second=True)
    assert len(builds.begun) == 1  # never two at once: there would be a third copy
    builds.go.set()
    done(stage)
    ended(first)
    assert builds.begun == [Path(update.path).read_bytes() for update in (older, newer)]
    assert not stage.has_second(older) and stage.take(newer).second == ("second", 2)


def test_a_copy_that_nobody_takes_is_dropped(tmp_path: Path) -> None:
    builds, update = Builds(), update_of(tmp_path, 1)
    stage = Stage(Base(), builds)
    stage.begin(update, second=True, keep_s=0.0)
    builds.go.set()
    ended(stage._thread)
    assert not stage.has_second(update) and stage._staged is None
    assert bytes(stage.take(update).data) == Path(update.path).read_bytes()  # a late pusher's file is read again


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_a_damaged_file_is_noticed_before_a_copy_is_made(tmp_path: Path, damage: str) -> None:
    builds, update = Builds(), update_of(tmp_path, 1)
    whole = bytearray(Path(update.path).read_bytes())
    whole[-1] ^= 1
    Path(update.path).write_bytes(whole[:-4] if damage == "torn" else whole)
    stage = Stage(Base(), builds)
    stage.begin(update, second=True)
    done(stage)
    assert "SHA-256" in stage.state()["error"] and not builds.begun and not stage.has_second(update)
    with pytest.raises(WeightSyncError, match="SHA-256"):
        stage.take(update)


def test_loading_gives_up_between_two_tensors(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    save_file({name: np.ones(4, dtype=np.float32) for name in "ab"}, path)
    taken: list[str] = []

    def waited_for() -> None:
        if taken:
            raise Superseded

    model = SimpleNamespace(load_weights=lambda weights: taken.extend(name for name, _ in weights), modules=list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_transfer.cpu_fixes, "ready_for_update", lambda _: None)
        seen = SimpleNamespace(load_weights=lambda weights: [taken.append(name) for name, _ in weights])
        with pytest.raises(Superseded):
            file_transfer.load(seen, np.fromfile(path, dtype=np.uint8), waited_for)
        assert taken == ["a"]
        taken.clear()
        file_transfer.load(model, np.fromfile(path, dtype=np.uint8))
    assert taken == ["a", "b"]


# --- a second copy of layers, and the swap


class Fused(torch.nn.Module):
    """A layer of two stacked shards that packs its weight, as vLLM's linear layers do on a CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * width, width), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # pyright: ignore[reportAttributeAccessIssue]
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.quant_method = SimpleNamespace(kernel=None)
        self.pack()

    def weight_loader(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        width = len(loaded)
        parameter.data[shard * width : (shard + 1) * width] = loaded

    def pack(self) -> None:
        packed = self.weight.T.contiguous()
        self.compute = lambda x: x @ packed
        self.quant_method.kernel = object()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Fused(2), Fused(2)
        self.tied = self.first  # the same layer by another name
        self.out = torch.nn.Linear(2, 4, bias=False)
        self.out.weight = self.first.weight  # a layer of its own, tied to the first
        self.slot = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first.compute(x), self.second.compute(x), self.out(x)], dim=-1)


@pytest.fixture
def sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `_rebound` needs of vLLM."""
    name = "vllm.model_executor.model_loader.reload.sanitize"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(layer_ref_sentinel=object()))  # pyright: ignore[reportArgumentType]


def loaded(second: staging.Second) -> None:
    """Put shards in their places in both layers of the copy, and pack it."""
    for number, layer in enumerate((second.model.first, second.model.second), start=1):
        for shard in (0, 1):
            layer.weight.weight_loader(layer.weight, torch.full((2, 2), float(10 * number + shard)), shard)
        layer.pack()


X = torch.tensor([[1.0, 2.0]])
NEW = torch.tensor([[30.0, 30, 33, 33, 60, 60, 63, 63, 30, 30, 33, 33]])  # 3 times the shards' values


@pytest.mark.parametrize("by_pointer", [True, False], ids=["pointers", "copies"])
def test_a_swap_moves_shards_packed_weights_and_kernels_of_all_layers(sentinel: None, by_pointer: bool) -> None:
    model = Model()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    kernel = model.first.quant_method.kernel
    second = staging.Second(model)
    assert second.model.tied is second.model.first is not model.first
    assert second.model.out.weight is second.model.first.weight is not model.first.weight
    assert second.model.first.table is model.first.table and second.model.first.scale is not model.first.scale
    loaded(second)
    assert model(X).abs().sum() == 0  # it computes with the old weights until the swap
    model.slot = 7  # changed by a request meanwhile
    held = second.swap(by_pointer=by_pointer)
    assert torch.equal(model(X), NEW)
    assert model.slot == 7 and model.tied is model.first and model.out.weight is model.first.weight
    assert model.first.quant_method.kernel is second.model.first.quant_method.kernel is not kernel
    assert (addresses == [parameter.data_ptr() for parameter in model.parameters()]) is not by_pointer
    assert any(old is kernel for old in held)  # freed by whoever asked, after the pause
    assert model.first.weight.weight_loader.__self__ is model.first  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def known(sentinel: None, monkeypatch: pytest.MonkeyPatch) -> weakref.WeakKeyDictionary[Any, Any]:
    """What vLLM knows of layers that are loaded again, by layer."""
    found: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of_layer(layer: torch.nn.Module) -> SimpleNamespace:
        return SimpleNamespace(restore_metadata=(dict(layer.named_parameters(recurse=False)), {}), restore_device="cpu")

    def like(tensor: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_like(tensor, device="meta")
        meta.__dict__ = dict(tensor.__dict__)
        return meta

    layerwise = SimpleNamespace(LAYERWISE_INFO=found, get_layerwise_info=of_layer)
    name = "vllm.model_executor.model_loader.reload"
    modules: dict[str, Any] = {
        name: SimpleNamespace(layerwise=layerwise),
        f"{name}.meta": SimpleNamespace(to_meta_tensor=like),
        f"{name}.types": SimpleNamespace(LayerReloadingInfo=SimpleNamespace),
    }
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module, content)
    return found


def test_a_copy_that_was_swapped_in_leaves_nothing_in_memory(known: weakref.WeakKeyDictionary[Any, Any]) -> None:
    model = Model()
    second = staging.Second(model)
    second.ready_for_load()
    assert len(known) > 0
    loaded(second)
    second.loaded()
    held, twin = second.swap(by_pointer=True), weakref.ref(second.model.first)
    del second
    held.clear()
    gc.collect()
    assert twin() is None and len(known) == 0
    assert torch.equal(model(X), NEW)


def test_a_copy_that_is_dropped_leaves_the_model_as_it_was(sentinel: None) -> None:
    model = Model()
    loaded(staging.Second(model))
    assert model(X).abs().sum() == 0


# --- one call to the engine core


class Core:
    """An engine core that writes down what is done to it; `busy` has a pass in flight when it is paused."""

    def __init__(self, *, busy: bool = False, paused: bool = False, swapped: tuple[bool, ...] = (True,)) -> None:
        self.did: list[str] = []
        self.pause: Future[None] | None = Future() if busy else None
        self.paused, self._swapped = paused, swapped

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.paused = True
        self.did.append(f"pause {mode} {clear_cache}")
        return self.pause

    def resume_scheduler(self) -> None:
        self.paused = False
        self.did.append("resume")

    def set_weight_version(self, version: str) -> None:
        self.did.append(f"version {version}")

    def workers(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.did.append(f"{method} {args[0]}")
        return [{"swapped": swapped} for swapped in self._swapped]

    def publish(self) -> Any:
        return publish.publish(self, self.workers, "info", "7", True)


WHOLE = ["pause keep True", "agentrl_swap info", "version 7", "resume"]


def test_a_swap_waits_for_the_pass_in_flight_whose_tokens_keep_their_version() -> None:
    core = Core(busy=True)
    answer = core.publish()
    assert core.did == ["pause keep True"] and not answer.done()
    assert core.pause is not None
    core.pause.set_result(None)
    assert core.did == WHOLE
    ((said),) = answer.result()
    assert said["swapped"] and 0 <= said["paused_s"] < PATIENCE_S


def test_an_idle_engine_swaps_at_once_and_one_that_was_paused_half_way_goes_on() -> None:
    for core in (Core(), Core(paused=True)):
        assert core.publish()[0]["swapped"]
        assert core.did == WHOLE and not core.paused


@pytest.mark.parametrize("paused", [False, True])
def test_without_a_second_copy_nothing_changes(paused: bool) -> None:
    core = Core(paused=paused, swapped=(False, False))
    assert not core.publish()[0]["swapped"]
    assert "version 7" not in core.did and core.paused is paused


def test_workers_that_disagree_leave_the_engine_paused() -> None:
    core = Core(busy=True, swapped=(True, False))
    answer = core.publish()
    assert core.pause is not None
    core.pause.set_result(None)
    with pytest.raises(RuntimeError, match="some workers"):
        answer.result()
    assert core.paused and "version 7" not in core.did


# --- the pusher


def client_of(fake: FakeVLLM) -> EngineClient:
    return EngineClient(fake.url, transport=fake)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"")
    return path


PAUSED = ["POST /pause", "POST /start_weight_update", "POST /update_weights", "POST /finish_weight_update"]


@pytest.mark.parametrize("room", [True, False])
async def test_a_push_is_a_swap_where_there_is_room_and_a_pause_elsewhere(room: bool, file: Path) -> None:
    fake = FakeVLLM(room=room)
    report = await push([client_of(fake)], file, 3, sha256="0", stage=True)
    assert (fake.version, fake.weights, fake.paused) == ("3", str(file), False)
    assert [call for call in fake.calls if call in PAUSED] == ([] if room else PAUSED)
    assert (report.pause_s == 0.0) is room  # a swap's pause is the engine's own figure


async def test_a_run_may_leave_out_the_second_copy(file: Path) -> None:
    fake = FakeVLLM()
    await push([client_of(fake)], file, 3, sha256="0", stage=True, second=False)
    assert fake.version == "3" and "POST /pause" in fake.calls


async def test_a_copy_that_another_push_took_away_is_no_loss(file: Path) -> None:
    """Between the question and the swap; the file is loaded in a pause then."""
    fake = FakeVLLM()
    answer = functools.partial(fake._worker)

    def stolen(method: str, args: list[Any]) -> Any:
        if method == "agentrl_publish":
            fake._staged = None
        return answer(method, args)

    fake._worker = stolen  # pyright: ignore[reportAttributeAccessIssue]
    await push([client_of(fake)], file, 3, sha256="0", stage=True)
    assert (fake.version, fake.weights) == ("3", str(file)) and "POST /pause" in fake.calls


async def test_an_engine_that_dies_between_staging_and_swap_did_not_take_it(file: Path) -> None:
    fake = FakeVLLM()
    answer = fake._worker

    def dying(method: str, args: list[Any]) -> Any:
        if method == "agentrl_staged":
            fake.core = "dead"
        return answer(method, args)

    fake._worker = dying  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(WeightSyncError, match="did not take version 3"):
        await push([client_of(fake)], file, 3, sha256="0", stage=True)
    fake._worker = answer  # pyright: ignore[reportAttributeAccessIssue]
    fake.restart()
    await push([client_of(fake)], file, 3, sha256="0", stage=True)
    assert (fake.version, fake.weights) == ("3", str(file))


async def test_an_engine_that_reads_ahead_is_paused_only_once_it_has_read(file: Path) -> None:
    """The embedded engine, which says so; vLLM must not be given weights before the pause."""
    fake = FakeVLLM()
    fake.answers |= {"/init_weight_transfer_engine": (200, b'{"reads_ahead": true}'), "/update_weights": (200, b"{}")}
    await push([client_of(fake)], file, 3, sha256="0")
    admin = [call for call in fake.calls if call in PAUSED]
    assert admin == [*PAUSED[1:3], PAUSED[0], PAUSED[3]] and fake.version == "3"
