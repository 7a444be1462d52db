"""The learner's end of vLLM's weight transfer: what vLLM is asked for, and what becomes of what it raises.

vLLM's own sender is a stand-in here (`tests/engine_vllm/test_direct.py` runs the real one, without a GPU); the tests
marked `gpu` give the real one a GPU's tensors and a receiver that only writes down what it gets.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.learner.gpu_sender import GpuSender
from agentrl.learner.weight_export import WeightSnapshot, take

PACKAGE = "vllm.distributed.weight_transfer"


@dataclasses.dataclass(kw_only=True)
class Info:
    """What a trainer init info of vLLM 0.32 may be given."""

    rank: int
    packed: bool
    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    packed_buffer_size_bytes: int | None = None


class Engine:
    """vLLM's sender, as far as it is used. `fails` is what its next call raises."""

    fails: Exception | None = None

    def __init__(self, info: Info, client: object, source: object) -> None:
        self.info, self.client, self.source = info, client, source
        self.sent: list[tuple[object, object]] = []
        self.running = True

    @classmethod
    def trainer_init(cls, info: Info, *, client: object, source: object) -> Engine:
        if cls.fails is not None:
            raise cls.fails
        return cls(info, client, source)

    def send_weights(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.sent.append((self.client, self.source))

    def shutdown(self) -> None:
        self.running = False


class Calls:
    """A client: writes down what it is called with, and does `on_update` meanwhile."""

    def __init__(self) -> None:
        self.init: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.order: list[str] = []
        self.on_update: Any = lambda info: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init = init_info

    def start_weight_update(self) -> None:
        self.order.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.order.append("update")
        self.updates.append(update_info)
        self.on_update(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.order.append("finish")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Engine]]:
    class Fresh(Engine):
        pass

    parts = {
        "factory": {"WeightTransferTrainerFactory": Fresh},
        "nccl_engine": {"NCCLTrainerInitInfo": Info},
        "ipc_engine": {"IPCTrainerInitInfo": Info},
    }
    for name, content in parts.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield Fresh


def snapshot(*sizes: int) -> WeightSnapshot:
    tensors = {f"w{at}": torch.full((size,), float(at)) for at, size in enumerate(sizes)}
    return WeightSnapshot(tensors, torch.device("cpu"))


def test_nccl_joins_all_workers_as_rank_0_on_a_free_port(vllm: type[Engine]) -> None:
    calls, first, second = Calls(), snapshot(2), snapshot(2)
    channel = GpuSender("nccl", "cpu").join(calls, first, world=3, address="127.0.0.1")
    engine = channel._engine
    assert (engine.info.rank, engine.info.packed, engine.info.world_size) == (0, True, 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", engine.info.master_port))
    later = Calls()
    channel.send(later, second)
    assert engine.sent == [(later, second)]
    assert engine.source is None  # the memory of a snapshot is free again before the next one is taken
    channel.leave()
    assert not engine.running


@pytest.mark.parametrize(
    ("sizes", "room"),
    [((2, 3), 20), ((300 << 20,), 1200 << 20), ((200 << 20, 200 << 20), 1 << 30)],
    ids=["all of a small model", "the largest tensor", "a piece of a large model"],
)
def test_the_buffer_shared_by_ipc_holds_any_tensor_and_no_more_than_needed(
    vllm: type[Engine], sizes: tuple[int, ...], room: int
) -> None:
    tensors = {f"w{at}": torch.empty(size, device="meta") for at, size in enumerate(sizes)}
    channel = GpuSender("ipc", "cpu").join(
        Calls(), WeightSnapshot(tensors, torch.device("cpu")), world=1, address="127.0.0.1"
    )
    assert (channel._engine.info.packed, channel._engine.info.packed_buffer_size_bytes) == (True, room)


def test_what_vllm_raises_is_named(vllm: type[Engine]) -> None:
    channel = GpuSender("nccl", "cpu").join(Calls(), snapshot(1), world=1, address="127.0.0.1")
    vllm.fails = RuntimeError("NCCL error: unhandled system error\nmore lines")
    with pytest.raises(WeightSyncError, match=r"vLLM's sender failed at sending: NCCL error: unhandled system error$"):
        channel.send(Calls(), snapshot(1))
    with pytest.raises(WeightSyncError, match="failed at joining 2 workers: NCCL error"):
        GpuSender("nccl", "cpu").join(Calls(), snapshot(1), world=2, address="127.0.0.1")
    vllm.fails = WeightSyncError("http://e did not take version 3")  # a refusal, which came through vLLM's thread
    with pytest.raises(WeightSyncError, match=r"^http://e did not take version 3$"):
        channel.send(Calls(), snapshot(1))


@pytest.mark.parametrize("sync", ["nccl", "ipc"])
def test_without_vllm_it_says_what_to_install(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.factory", None)
    with pytest.raises(ConfigError, match=f"engine.sync = '{sync}'.* install vllm beside it"):
        GpuSender(sync, "cpu")


def test_ipc_is_for_one_rank(vllm: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    GpuSender("nccl", "cpu")
    with pytest.raises(ConfigError, match="a learner of 2 ranks sends from one of them: give 'nccl'"):
        GpuSender("ipc", "cpu")


# --- on a GPU: vLLM's own sender, a stub receiver


class Recorder:
    """In the place of the NCCL communicator: keeps every broadcast, and gives them again to a receiver."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        self.chunks.append(tensor.clone())

    def destroy(self) -> None:
        self.chunks.clear()


class Replay(Recorder):
    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        tensor.copy_(self.chunks.pop(0))


@pytest.mark.gpu
def test_a_gpus_weights_are_packed_as_vllms_receiver_unpacks_them(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = pytest.importorskip(f"{PACKAGE}.nccl_engine")
    packing = pytest.importorskip(f"{PACKAGE}.packed_tensor")
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32).to("cuda")
    taken = take(model, torch.bfloat16)
    assert taken is not None and taken.device.type == "cuda"
    recorder, calls = Recorder(), Calls()
    monkeypatch.setattr(nccl, "open_trainer_endpoint", lambda info: recorder)
    channel = GpuSender("nccl", "cuda").join(calls, taken, world=1, address="127.0.0.1")
    with torch.no_grad():  # the next step, while the send is under way
        expected = {name: tensor.clone() for name, tensor in taken}
        for parameter in model.parameters():
            parameter.add_(1.0)
    channel.send(calls, taken)
    assert calls.order == ["start", "update", "finish"] and calls.init["rank_offset"] == 1
    (told,) = calls.updates
    shapes = ((shape, getattr(torch, dtype)) for shape, dtype in zip(told["shapes"], told["dtype_names"], strict=True))
    received: dict[str, torch.Tensor] = {}
    replay = Replay()
    replay.chunks = list(recorder.chunks)
    packing.packed_nccl_broadcast_consumer(
        iterator=zip(told["names"], shapes, strict=True),
        group=replay,
        src=0,
        post_unpack_func=lambda pairs: received.update({name: tensor.clone() for name, tensor in pairs}),
        buffer_size_bytes=calls.init["packed_buffer_size_bytes"],
        num_buffers=calls.init["packed_num_buffers"],
    )
    assert received.keys() == expected.keys() and not replay.chunks
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    channel.leave()


@pytest.mark.gpu
def test_a_gpus_weights_are_shared_with_another_process(qwen3_dir: Path) -> None:
    packing = pytest.importorskip(f"{PACKAGE}.packed_tensor")
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32).to("cuda")
    taken = take(model, torch.bfloat16)
    assert taken is not None
    calls, received = Calls(), {}
    context = torch.multiprocessing.get_context("spawn")

    def open_elsewhere(info: dict[str, Any]) -> None:
        """As an engine does it: in another process, which alone may open a handle."""
        mine, other = context.Pipe()
        process = context.Process(target=_open, args=(other, packing.__name__, info))
        process.start()
        try:
            assert mine.poll(120), "the receiver said nothing"
            received.update(mine.recv())
        finally:
            process.join(30)
            process.kill()

    calls.on_update = open_elsewhere
    channel = GpuSender("ipc", "cuda").join(calls, taken, world=1, address="127.0.0.1")
    channel.send(calls, taken)
    assert calls.init == {"packed": True} and calls.order == ["start", "update", "finish"]
    assert received.keys() == dict(taken).keys()
    assert all(received[name] == tensor.float().cpu().tolist() for name, tensor in taken)


def _open(pipe: Any, module: str, info: dict[str, Any]) -> None:
    import importlib

    names = SimpleNamespace(**info)
    pairs = importlib.import_module(module).packed_ipc_consumer(
        ipc_handle=names.ipc_handles,
        names=names.names,
        shapes=names.shapes,
        dtype_names=names.dtype_names,
        tensor_sizes=names.tensor_sizes,
        device_index=0,
    )
    pipe.send({name: tensor.float().cpu().tolist() for name, tensor in pairs})
