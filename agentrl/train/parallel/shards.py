"""FSDP2: a model's parameters cut into as many shards as there are ranks, gathered layer by layer as they are needed.

Owns how a model is cut, how one of its tensors is gathered, and how one is filled from a whole one. Never knows what
the tensors are for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportDeprecated=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.train.parallel.collectives import named


def spread(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give a module on the meta device sharded tensors, of which each rank then reads only its shard."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one once
    for part, name, parameter in _parameters(module):
        if parameter not in made:
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            made[parameter] = nn.Parameter(cut, parameter.requires_grad)
        part.register_parameter(name, made[parameter])


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter with the parts that have it, and its name there."""
    parts = list(module.modules())
    return [(part, name, parameter) for part in parts for name, parameter in part.named_parameters(recurse=False)]


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model over the ranks of `mesh`, on whose devices it is then. Each decoder layer is gathered by itself; the
    rest together, and it stays until the backward pass, or `reshard`: logits are made after the pass."""
    cut = [one for one in _parameters(module) if is_sharded(one[2])]
    whole = {
        one: nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad) for *_, one in cut
    }
    for part, name, parameter in cut:
        part.register_parameter(name, whole[parameter])
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    names = {part: name for name, part in module.named_modules()} | {module: "what is outside of layers"}
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=part is not module)
        assert isinstance(part, FSDPModule)
        part.set_custom_all_gather(cast(Any, _AllGather(f"gathering {names[part]}")))
        part.set_custom_reduce_scatter(cast(Any, _ReduceScatter(f"adding up the gradients of {names[part]}")))
    for part, name, parameter in cut:  # FSDP takes over what it finds at the first pass
        part.register_parameter(name, parameter)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, name: str) -> Tensor:
    """A tensor with all of its shards: a collective, if it has shards. `name` is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    with named(f"gathering {name}"):
        return tensor.full_tensor()


def gathered(tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
    """Whole tensors on rank 0, in host memory if they were sharded; none on other ranks. Each is changed first."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(change(tensor), name)
        if not is_sharded(tensor):
            found[name] = full
        elif distributed.get_rank() == 0:
            found[name] = full.cpu()
    return found if not distributed.is_initialized() or distributed.get_rank() == 0 else {}


def like(whole: Tensor, tensor: Tensor) -> Tensor:
    """`whole` on the device of `tensor`, and sharded as it is. Each rank has all of `whole` already, or its shard."""
    there = whole.to(tensor.device)
    if is_sharded(there):
        return there
    if not isinstance(tensor, DTensor):
        return there
    return distribute_tensor(there, tensor.device_mesh, tensor.placements, src_data_rank=None)


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    tensor.copy_(like(whole, tensor))


def load_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a module that may be sharded. Raises RuntimeError if they do not fit."""
    own = module.state_dict()
    if not any(is_sharded(tensor) for tensor in own.values()):
        module.load_state_dict(state)
        return
    if wrong := [
        name for name in own.keys() | state.keys() if own.get(name, _NONE).shape != state.get(name, _NONE).shape
    ]:
        raise RuntimeError(f"{min(wrong)} is of another shape, or not there")
    for name, tensor in own.items():
        fill(tensor, state[name])


def reshard(module: nn.Module) -> None:
    """Let go of what a pass has gathered and no backward pass has let go of."""
    if isinstance(module, FSDPModule):
        module.reshard()


@contextmanager
def settled(module: nn.Module) -> Generator[None]:
    """Around a pass and what is made of it: without gradients, no backward pass comes."""
    yield
    if not torch.is_grad_enabled():
        reshard(module)


def gathered_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as if nothing were sharded: every rank takes part, rank 0 has it."""
    state = optimizer.state_dict()
    whole = {at: gathered(own) for at, own in state["state"].items()}
    return {**state, "state": whole}


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `gathered_state` returned, on every rank. Its tensors are copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cut = {
        at: {
            name: (like(value, parameter) if value.shape == parameter.shape else value).clone()
            for name, value in own.items()
        }
        for (at, own), parameter in ((one, parameters[one[0]]) for one in state["state"].items())
    }
    optimizer.load_state_dict({**state, "state": cut})


# torch 2.13 renamed them
_ALL_GATHER: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
_NONE = torch.empty(0, 0, 0)


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Named):
    """FSDP's own, noted in the ledger."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        with named(self._name):
            return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Named):
    """FSDP's own, noted in the ledger."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        with named(self._name):
            return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
