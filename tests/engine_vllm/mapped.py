"""A mapped file in the place of a GPU's memory, so that vLLM's own `ipc` weight transfer runs on CPUs: both ends of it,
packing, pickled handles and all. Only the memory, its handles and the CUDA streams are stand-ins; see `gloo`."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any


def allocate(size: int, *, dtype: Any, device: object) -> Any:
    """`torch.empty`; on a GPU, where only the buffer to be shared is made, a file that its handles name."""
    import torch

    if device != "cuda":
        return torch.empty(size, dtype=dtype, device=device)
    descriptor, path = tempfile.mkstemp(prefix="agentrl-mapped-", dir="/dev/shm")
    os.truncate(descriptor, size)
    os.close(descriptor)
    tensor = torch.from_file(path, shared=True, size=size, dtype=dtype)
    tensor.path = path
    return tensor


def handle(tensor: Any) -> tuple[None, tuple[object, ...]]:
    """`reduce_tensor`: what another process opens it with; as there, the seventh is the receiver's device."""
    return None, (tensor.path, tensor.numel(), 0, 0, 0, 0, 0)


def opened(path: str, size: int, *_: object) -> Any:
    """`rebuild_cuda_tensor`."""
    import torch

    tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    os.unlink(path) if os.path.exists(path) else None  # noqa: PTH108, PTH110
    return tensor


class Stream:
    """Waited for once before a piece is handed over."""

    pieces = 0

    def synchronize(self) -> None:
        Stream.pieces += 1


class Torch:
    """torch, whose `empty` is `allocate`."""

    empty = staticmethod(allocate)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def register() -> None:
    """Put it in CUDA's place, in this process."""
    import torch
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    if isinstance(packed_tensor.torch, Torch):
        return  # vLLM loads its plugins again and again

    finish = IPCWeightTransferEngine.finish_weight_update

    def finish_and_mend(engine: Any) -> None:
        from agentrl.engine.vllm.plugin import cpu_fixes

        finish(engine)
        cpu_fixes.after_update(engine.model)

    IPCWeightTransferEngine.finish_weight_update = finish_and_mend
    packed_tensor.torch, packed_tensor.reduce_tensor = Torch(), handle
    reductions.rebuild_cuda_tensor = opened
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="GPU-of-files")
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.ipc_collect = lambda: None
