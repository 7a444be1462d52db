"""A copy of the weights that a sender reads; it stays the same while the learner goes on with its next step.

Owns the copy, and gathers a sharded model whole before any engine is contacted. `take` leaves no collective of the
learner open on any rank: if a sender waited for engines in the middle of a gather, while another rank waits for it in
the next one, both would wait for ever. Never knows engines, nor which version the weights become.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from agentrl.engine.weight_sync import fingerprints as fingerprint
from agentrl.learner.parallel.collectives import named
from agentrl.learner.parallel.fsdp import whole as gather
from agentrl.learner.weight_export import checkpoint_names, held


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The facts about a tensor that a receiver needs before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSnapshot:
    """Tensors under the names of the checkpoint format, in a fixed order; each pass over them gives (name, tensor) on
    `device`, wherever they are kept. It has the form of vLLM's `WeightSource`."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self.device = dict(tensors), device

    def metadata(self) -> list[Described]:
        """The tensors of a pass, in its order."""
        return [Described(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.to(self.device)

    def fingerprints(self) -> dict[str, str]:
        """See `agentrl.engine.weight_sync.fingerprints`."""
        return fingerprint.of_tensors(self._tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def largest_bytes(self) -> int:
        """The size of its largest tensor."""
        return max((tensor.nbytes for tensor in self._tensors.values()), default=0)


@torch.no_grad()
def take(module: Any, dtype: torch.dtype) -> WeightSnapshot | None:
    """The weights of a transformers model, cast to `dtype`; later steps do not change them.

    If the model is sharded (FSDP2), every rank calls it between two steps, all leave it together, and only rank 0 gets
    the snapshot: all weights in host memory, since one GPU may be too small for them. A model that is not sharded is
    copied on its device: in bfloat16 that takes an eighth of the memory of weights, gradients and Adam."""
    state = held(module)
    sharded = any(isinstance(tensor, DTensor) for tensor in state.values())
    keeps = not sharded or distributed.get_rank() == 0
    device = next(iter(state.values())).device
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        cast = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=not sharded)
        full = gather(cast, name)
        if keeps:
            whole[name] = full.to("cpu", copy=True) if sharded else full
    _settle(device, sharded)
    return WeightSnapshot(checkpoint_names(module, whole), device) if keeps else None


def _settle(device: torch.device, sharded: bool) -> None:
    """Wait until this rank has finished copying, and every rank has finished gathering."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if sharded:
        with named("a snapshot's end"):
            distributed.barrier()
