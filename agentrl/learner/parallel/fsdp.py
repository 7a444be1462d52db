"""FSDP2: a model's parameters cut into as many shards as there are ranks, gathered layer by layer as they are needed.

Owns how a model is cut, how one of its tensors is gathered, and how one is filled from a whole one. Never knows what
the tensors are for.

Shards, gradients and the state of the optimizer are float32. If passes compute in bfloat16, linear layers are gathered
in it: a pass would round their weights to it anyway, so half of the bytes move and no bit of a result changes.
Gradients are added up in float32: the sum of rounded parts is not the rounded sum. Embedding, norms and experts, which
a pass does not round, and the output layer, which stays with the embedding, are gathered in float32 too.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportDeprecated=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.learner.parallel.collectives import Meshes, named
from agentrl.learner.parallel.layers import ParameterCut, cuts, install, linear_layers


def spread(module: nn.Module, meshes: Meshes) -> None:
    """Give a module on the meta device sharded tensors, of which each rank then reads only its shard. Raises
    ConfigError for a model that cannot be cut as `meshes` ask for."""
    cut_by_name = cuts(module, meshes)
    sharded_parameters: dict[nn.Parameter, nn.Parameter] = {}  # a tied one once
    for submodule, parameter_name, parameter in _parameters(module):
        if parameter not in sharded_parameters:
            parameter_cut = cut_by_name.get((submodule, parameter_name))
            mesh, placements = meshes.ranks, [Shard(0)]
            if parameter_cut is not None:
                mesh, placements = parameter_cut.mesh, parameter_cut.placements
            sharded_tensor = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            sharded_parameters[parameter] = nn.Parameter(sharded_tensor, parameter.requires_grad)
        submodule.register_parameter(parameter_name, sharded_parameters[parameter])


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter with the parts that have it, and its name there."""
    submodules = list(module.modules())
    return [
        (submodule, parameter_name, parameter)
        for submodule in submodules
        for parameter_name, parameter in submodule.named_parameters(recurse=False)
    ]


def shard(module: nn.Module, meshes: Meshes, dtype: torch.dtype = torch.float32) -> None:
    """Cut a model over the ranks of `meshes`, on whose devices it is then. Each decoder layer is gathered by itself,
    its linear layers in `dtype`, which a pass computes them in; the rest together, and it stays until the backward
    pass, or `reshard`: logits are made after the pass."""
    cut_by_name, is_narrow = cuts(module, meshes), dtype != torch.float32
    sharded_entries = [parameter_entry for parameter_entry in _parameters(module) if is_sharded(parameter_entry[2])]
    hollow_parameters = {
        parameter: _hollow(parameter, cut_by_name.get((submodule, own_name)))
        for submodule, own_name, parameter in sharded_entries
    }
    for submodule, own_name, parameter in sharded_entries:
        submodule.register_parameter(own_name, hollow_parameters[parameter])
    module_names = {submodule: own_name for own_name, submodule in module.named_modules()} | {
        module: "what is outside of layers"
    }
    decoder_layers = [submodule for submodule in module.modules() if isinstance(submodule, GradientCheckpointingLayer)]
    # Only layers that the model does nothing else with than call: one whose weight is read elsewhere (tied, or
    # normalised by hand) would be read rounded.
    mesh_of_part = dict.fromkeys(linear_layers(module), meshes.ranks) if is_narrow else {}
    mesh_of_part |= {submodule: parameter_cut.column for (submodule, _), parameter_cut in cut_by_name.items()}
    for decoder_layer in decoder_layers:
        parts_by_mesh: dict[tuple[DeviceMesh, torch.dtype], list[nn.Module]] = {}
        for submodule in decoder_layer.modules():
            if submodule in mesh_of_part:
                moved_dtype = dtype if isinstance(submodule, nn.Linear) else torch.float32
                parts_by_mesh.setdefault((mesh_of_part[submodule], moved_dtype), []).append(submodule)
        for (mesh, moved_dtype), same_parts in parts_by_mesh.items():
            _fully(
                same_parts,
                mesh,
                f"{module_names[same_parts[0]]} and what is cut as it",
                reshard=True,
                dtype=moved_dtype,
            )
    for submodule in (*decoder_layers, module):
        _fully([submodule], meshes.ranks, module_names[submodule], reshard=submodule is not module)
    for submodule, own_name, parameter in sharded_entries:  # FSDP takes over what it finds at the first pass
        submodule.register_parameter(own_name, parameter)
    install(module, meshes, cut_by_name)


def _hollow(parameter: nn.Parameter, cut: ParameterCut | None) -> nn.Parameter:
    """A parameter that FSDP is to cut, without numbers."""
    empty_tensor: Tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    if cut is not None:
        empty_tensor = distribute_tensor(empty_tensor, cut.row, [Shard(cut.dim)], src_data_rank=None)
    return nn.Parameter(empty_tensor, parameter.requires_grad)


def _fully(
    parts: list[nn.Module], mesh: DeviceMesh, name: str, *, reshard: bool, dtype: torch.dtype = torch.float32
) -> None:
    """Have FSDP cut the parameters of parts that it gathers together, those in float32 as `dtype`. Gradients are added
    up: each rank has its part of the loss."""
    fully_shard(parts if len(parts) > 1 else parts[0], mesh=mesh, reshard_after_forward=reshard)
    first_part = parts[0]
    assert isinstance(first_part, FSDPModule)
    first_part.set_custom_all_gather(cast(Any, _AllGather(f"gathering {name}", dtype)))
    first_part.set_custom_reduce_scatter(cast(Any, _ReduceScatter(f"adding up the gradients of {name}")))
    # FSDP averages gradients over ranks by default. Here each rank has its part of one loss, whose shares were fixed
    # for the whole step (`data.shares`), so they are added up.
    first_part.set_gradient_divide_factor(1.0)
    first_part.set_force_sum_reduction_for_comms(True)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, not copied, and without gradients: the tensor that a sharded one is computed with."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor  # `to_local` may wrap it anew


def with_shard(tensor: Tensor, shard: Tensor) -> Tensor:
    """A tensor like another one, of which this rank has `shard`, wherever that is; `shard`, if the other is whole."""
    return DTensor(shard, cast(Any, tensor)._spec, requires_grad=False) if isinstance(tensor, DTensor) else shard


def whole(tensor: Tensor, name: str) -> Tensor:
    """A tensor with all of its shards: a collective, if it has shards. `name` is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    with named(f"gathering {name}"):
        placements = list(tensor.placements)
        for dimension in range(len(placements) - 1):  # one mesh dimension at a time: torch would warn that it does
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        return tensor.full_tensor()


def gathered(tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
    """Whole tensors on rank 0, in host memory if they were sharded; none on other ranks. Each is changed first."""
    whole_tensors: dict[str, Tensor] = {}
    for tensor_name, tensor in tensors.items():
        whole_tensor = whole(change(tensor), tensor_name)
        if not is_sharded(tensor):
            whole_tensors[tensor_name] = whole_tensor
        elif distributed.get_rank() == 0:
            whole_tensors[tensor_name] = whole_tensor.cpu()
    return whole_tensors if not distributed.is_initialized() or distributed.get_rank() == 0 else {}


def like(whole: Tensor, tensor: Tensor) -> Tensor:
    """`whole` on the device of `tensor`, and sharded as it is. Each rank has all of `whole` already, or its shard."""
    moved_whole = whole.to(tensor.device)
    if is_sharded(moved_whole):
        return moved_whole
    if not isinstance(tensor, DTensor):
        return moved_whole
    return distribute_tensor(moved_whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    tensor.copy_(like(whole, tensor))


def load_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a module that may be sharded. Raises RuntimeError if they do not fit."""
    own_tensors = module.state_dict()
    if not any(is_sharded(own_tensor) for own_tensor in own_tensors.values()):
        module.load_state_dict(state)
        return
    if wrong_names := [
        tensor_name
        for tensor_name in own_tensors.keys() | state.keys()
        if own_tensors.get(tensor_name, _NONE).shape != state.get(tensor_name, _NONE).shape
    ]:
        raise RuntimeError(f"{min(wrong_names)} is of another shape, or not there")
    for tensor_name, own_tensor in own_tensors.items():
        fill(own_tensor, state[tensor_name])


@torch.no_grad()
def clipped(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scale the gradients of parameters down to a norm of `most` altogether. Returns the norm before that. Of sharded
    ones each rank has a part that no other has, however they are cut."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradient_shards = [local(gradient) for gradient in gradients]
    gradient_norm = nn.utils.get_total_norm(gradient_shards)
    if any(is_sharded(gradient) for gradient in gradients):
        # In float64, since squares of large norms overflow float32 long before the norm itself does.
        squared_norm = gradient_norm.double().square()
        with named("a norm"):
            distributed.all_reduce(squared_norm)
        gradient_norm = squared_norm.sqrt().to(gradient_norm.dtype)
    # A tensor throughout: nothing is read on the host, so the clip does not wait for the device.
    kept_share = (most / (gradient_norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grads_with_norm_
    torch._foreach_mul_(gradient_shards, kept_share)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return gradient_norm


def reshard(module: nn.Module) -> None:
    """Let go of what a pass has gathered and no backward pass has let go of."""
    if isinstance(module, FSDPModule):
        module.reshard()


@contextmanager
def settled(module: nn.Module) -> Generator[None]:
    """Around a pass and what is made of it: without gradients, no backward pass comes."""
    yield
    # Without gradients nothing triggers FSDP's own reshard of the outermost part, and the gathered output layer would
    # stay in memory beside the next pass.
    if not torch.is_grad_enabled():
        reshard(module)


def waits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what it remembers waits in host memory."""
    return getattr(optimizer, "offload", False)


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], shards: Mapping[int, Mapping[str, Tensor]]
) -> None:
    """Load the state of an optimizer, on every rank. `state` has whole tensors, of which each rank copies its own part.
    `shards` has, by the number of the parameter, tensors that are this rank's part already. If the state is to wait in
    host memory, no more than one tensor is on the device at a time."""
    parameters = [parameter for parameter_group in optimizer.param_groups for parameter in parameter_group["params"]]
    waits_on_host = waits(optimizer)

    def placed(value: Tensor, parameter: Tensor) -> Tensor:
        moved_value = like(value, parameter) if value.shape == parameter.shape else value
        return moved_value.to("cpu" if waits_on_host else moved_value.device, copy=True)

    cut_states = {
        parameter_index: {
            state_name: placed(state_value, parameter) for state_name, state_value in parameter_state.items()
        }
        for (parameter_index, parameter_state), parameter in (
            (state_entry, parameters[state_entry[0]]) for state_entry in state["state"].items()
        )
    }
    for parameter_index, parameter_state in shards.items():
        cut_states[parameter_index] = {**cut_states.get(parameter_index, {}), **parameter_state}
    optimizer.load_state_dict({**state, "state": cut_states})


# torch 2.13 renamed them
ALL_GATHER: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
_NONE = torch.empty(0, 0, 0)


_EXACT = ContextVar("exact", default=False)


@contextmanager
def exactly() -> Generator[None]:
    """Around a pass without gradients that computes in float32: weights are gathered as they are."""
    context_token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(context_token)


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Named):
    """FSDP's own, noted in the ledger. Of float32 it moves `dtype`, and gives the rounded numbers in float32."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self._dtype = dtype

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        rounds = output_tensor.dtype == torch.float32 != self._dtype and not _EXACT.get()
        with named(self._name):
            if not rounds:
                return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
            narrow_output = torch.empty_like(output_tensor, dtype=self._dtype)
            ALL_GATHER(narrow_output, input_tensor.to(self._dtype), group=group)
        output_tensor.copy_(narrow_output)
        return None


class _ReduceScatter(_Named):
    """FSDP's own, noted in the ledger."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        with named(self._name):
            return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
