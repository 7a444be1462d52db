"""The learner's end of vLLM's native weight transfer: join engines, send them a snapshot, leave.

Owns the only use of vLLM in the learner's process: `GpuSender` loads it, nothing before it does. Raises vLLM's errors
as ours. Never knows HTTP: a client makes the control calls. Never knows time: all calls but `leave` may block for as
long as an engine does, so they belong on a thread whose owner has a deadline and then calls `leave`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import distributed

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.host.ports import free_port
from agentrl.learner.weight_export import WeightSnapshot

_PACKAGE = "vllm.distributed.weight_transfer"
# Both ends hold it, on the GPU that they share: large enough to hide the calls between two fillings, small beside the
# weights.
_IPC_BUFFER = 1 << 30  # bytes shared with the engine at a time, or a tensor's own size where that is larger


class Client(Protocol):
    """The control calls that vLLM's sender makes, from threads of its own: vLLM's VLLMWeightSyncClient."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class GpuSender:
    """Opens channels from `device` to engines: `nccl` broadcasts packed tensors to any number of other GPUs, `ipc`
    shares a buffer with engines on the same GPU."""

    def __init__(self, sync: str, device: torch.device | str) -> None:
        """Raises ConfigError if vLLM cannot be loaded, or if this learner cannot send by `sync`."""
        self._sync, self._device = sync, torch.device(device)
        try:
            self._factory = importlib.import_module(f"{_PACKAGE}.factory").WeightTransferTrainerFactory
            self._backend = importlib.import_module(f"{_PACKAGE}.{sync}_engine")
        except ImportError as error:
            correction = f"it sends with vLLM's own sender, which it cannot load ({error}): install vllm beside it"
            raise ConfigError("engine.sync", sync, correction) from error
        rank_count = distributed.get_world_size() if distributed.is_initialized() else 1
        if sync == "ipc" and rank_count > 1:
            correction = f"a learner of {rank_count} ranks sends from one of them: give 'nccl'"
            raise ConfigError("engine.sync", sync, correction)

    def join(self, client: Client, snapshot: WeightSnapshot, *, world: int, address: str) -> GpuChannel:
        """Connect to engines that have `world` workers in total and reach us at `address`. Every later snapshot has the
        tensors of this one. Raises WeightSyncError."""
        with _named(f"joining {world} workers"), _on(self._device):
            if self._sync == "nccl":
                master_port = free_port(address)
                trainer_info = self._backend.NCCLTrainerInitInfo(
                    rank=0, master_address=address, master_port=master_port, world_size=1 + world, packed=True
                )
            else:
                buffer_bytes = max(snapshot.largest_bytes, min(snapshot.size_bytes, _IPC_BUFFER))
                trainer_info = self._backend.IPCTrainerInitInfo(
                    rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes
                )
            trainer_engine = self._factory.trainer_init(trainer_info, client=client, source=snapshot)
        # vLLM keeps both for its next call; the client belongs to one join only (`gpu_transport._Calls`), and the
        # snapshot is gigabytes.
        trainer_engine.client = trainer_engine.source = None
        return GpuChannel(trainer_engine, self._device)


class GpuChannel:
    """Joined engines. After an error call only `leave`: the engines may be anywhere in the protocol."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine, self._device = engine, device

    def send(self, client: Client, snapshot: WeightSnapshot) -> None:
        """One update, from its start to its finish. Raises WeightSyncError."""
        trainer_engine = self._engine
        trainer_engine.client, trainer_engine.source = client, snapshot
        try:
            with _named("sending"), _on(self._device):
                trainer_engine.send_weights()
        finally:
            # A snapshot may be gigabytes: it lives no longer than its push.
            trainer_engine.client = trainer_engine.source = None

    def leave(self) -> None:
        """Break off a call under way on any thread; takes seconds at most."""
        shutdown: Callable[[], None] = self._engine.shutdown
        with _named("leaving"), _on(self._device):
            shutdown()


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Set the current device: vLLM uses it, and a new thread has not set it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _named(doing: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError, AssertionError) as vllm_error:
        reason = next(iter(str(vllm_error).splitlines()), type(vllm_error).__name__)
        raise WeightSyncError(f"vLLM's sender failed at {doing}: {reason}") from vllm_error
