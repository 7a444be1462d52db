"""Optimizers by the name of `train.optimizer`, and where their numbers are between two updates.

Owns which optimizer updates which parameter, float32 masters of bfloat16 weights, and numbers that wait in host memory.
Never knows models, losses or schedules. Every optimizer here has the state and the groups of one of torch's, so that a
checkpoint keeps it as such.

    adamw       Loshchilov and Hutter 2019: two moments, 8 bytes a parameter
    adamw8bit   the same with moments of 8 bits, blockwise (Dettmers et al. 2022), through torchao: 2 bytes
    muon        Jordan et al. 2024: orthogonal updates of matrices, 4 bytes, scaled to the size of AdamW's (Liu et al.
                2025) so that one learning rate suits both; embeddings, output layer, vectors and fused experts by AdamW
    sgd         nothing to remember: who has memory for a moment takes muon or adamw

Over ranks Muon updates as many matrices together as there are ranks: every rank sends its shard of each to the rank
that has it whole then, all to all, and gets its shard of each update back, all to all again. Largest matrices come
first, so that those of a round are mostly of one shape and no rank waits long. Momentum stays sharded. Torch rounds a
matrix to bfloat16 before it makes it orthogonal: so it is sent, and no bit of an update changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, product
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from agentrl.config.train import Train
from agentrl.errors import ConfigError
from agentrl.host import compile_cache
from agentrl.host.installation import install_command
from agentrl.learner.optimizers.master_weights import master
from agentrl.learner.parallel.collectives import named
from agentrl.learner.parallel.fsdp import is_sharded, local, with_shard
from agentrl.learner.parallel.layers import sent_to

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

_MUON_MOMENTUM = 0.95
"""Momentum of Jordan et al., which nobody has found a reason to change: its updates are made orthogonal anyway."""


def make(
    train: Train,
    parameters: Sequence[nn.Parameter],
    lr: float,
    *,
    outer: Collection[int] = (),
    vectors: Collection[int] = (),
) -> Optimizer:
    """The optimizer of `parameters`. `outer` are the ids of embeddings and output layers, `vectors` those of parameters
    that are no matrices, whatever their dimensions: see `agentrl.learner.optimizers.parameter_roles`. Raises
    ConfigError if the optimizer is not installed."""
    # Ids of masters, since these are what the optimizer sees: sets of ids of the parameters would match none of them.
    master_parameters = [cast(nn.Parameter, master(parameter)) for parameter in parameters]
    outer, vectors = (
        {
            id(master_parameter)
            for parameter, master_parameter in zip(parameters, master_parameters, strict=True)
            if id(parameter) in parameter_ids
        }
        for parameter_ids in (outer, vectors)
    )
    matrix_ids = {
        id(master_parameter)
        for master_parameter in master_parameters
        if master_parameter.dim() > 1 and id(master_parameter) not in vectors
    }
    base_optimizer = _of(train, master_parameters, lr, outer, matrix_ids)
    if not train.offload_optimizer and all(parameter.dtype == torch.float32 for parameter in parameters):
        return base_optimizer
    return ParameterwiseOptimizer(parameters, base_optimizer, offload=train.offload_optimizer)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for parameter_group in optimizer.param_groups:
        if isinstance(parameter_group["lr"], Tensor):  # torchao's, so that it compiles once
            parameter_group["lr"].fill_(lr)
        else:
            parameter_group["lr"] = lr


def lr_of(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _decayed(parameters: Sequence[nn.Parameter], decay: float, matrices: Collection[int]) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay is of matrices, not of norms and biases. Parameters stay in their order, by
    which a checkpoint knows them."""
    # Runs of neighbours, and not two groups: a checkpoint numbers parameters by their order over all groups, and two
    # groups would renumber them whenever decay is switched on.
    decay_runs = groupby(parameters, key=lambda one: decay if id(one) in matrices else 0.0)
    return [{"params": list(neighbours), "weight_decay": weight_decay} for weight_decay, neighbours in decay_runs]


def regrouped(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state of the same parameters, with the groups that the optimizer has now: it may have had another weight
    decay, or be of an agentrl whose decay reached vectors."""
    current_groups, saved_groups = optimizer.state_dict()["param_groups"], saved["param_groups"]
    group_of_parameter = {
        parameter_index: parameter_group
        for parameter_group in saved_groups
        for parameter_index in parameter_group["params"]
    }
    if [len(parameter_group["params"]) for parameter_group in current_groups] == [
        len(parameter_group["params"]) for parameter_group in saved_groups
    ]:
        return saved
    if group_of_parameter.keys() != {
        parameter_index for parameter_group in current_groups for parameter_index in parameter_group["params"]
    }:
        return saved
    kept_settings = ("params", "weight_decay")
    return {
        **saved,
        "param_groups": [
            group_of_parameter[parameter_group["params"][0]]
            | {setting_name: parameter_group[setting_name] for setting_name in kept_settings}
            for parameter_group in current_groups
        ],
    }


def _of(
    train: Train, parameters: Sequence[nn.Parameter], lr: float, outer: Collection[int], matrices: Collection[int]
) -> Optimizer:
    """The optimizer of float32 `parameters`, of which `matrices` decay and, but for the `outer` ones, have updates by
    Muon."""
    weight_decay = train.weight_decay
    if train.optimizer == "sgd":
        return torch.optim.SGD(_decayed(parameters, weight_decay, matrices), lr=lr)
    if train.optimizer == "adamw8bit":
        return _eight_bit()(_decayed(parameters, weight_decay, matrices), lr=lr, betas=train.betas)
    if train.optimizer == "muon":
        muon_matrices = [
            parameter
            for parameter in parameters
            # Fused experts have three dimensions: Newton-Schulz would make the stack orthogonal, and not each expert.
            if parameter.dim() == 2 and id(parameter) in matrices and id(parameter) not in outer
        ]
        other_parameters = [
            parameter for parameter in parameters if all(parameter is not muon_matrix for muon_matrix in muon_matrices)
        ]
        part_optimizers: list[Optimizer] = []
        if muon_matrices:
            # Scaled to AdamW's update size (Liu et al. 2025), so that `train.lr` means the same for both, and for the
            # embeddings that AdamW updates beside it.
            muon_settings = {
                "weight_decay": weight_decay,
                "momentum": _MUON_MOMENTUM,
                "adjust_lr_fn": "match_rms_adamw",
            }
            part_optimizers.append(_muon(over=is_sharded(muon_matrices[0]))(muon_matrices, lr=lr, **muon_settings))
        if other_parameters:
            part_optimizers.append(
                torch.optim.AdamW(_decayed(other_parameters, weight_decay, matrices), lr=lr, betas=train.betas)
            )
        return part_optimizers[0] if len(part_optimizers) == 1 else CombinedOptimizer(part_optimizers)
    return torch.optim.AdamW(_decayed(parameters, weight_decay, matrices), lr=lr, betas=train.betas)


def _muon(*, over: bool) -> Any:
    muon_class = getattr(torch.optim, "Muon", None)
    if muon_class is None:
        correction = f"torch {torch.__version__} has none: pip install 'torch>=2.9', or give adamw"
        raise ConfigError("train.optimizer", "muon", correction)
    if over:
        return Muon
    return muon_class


def _eight_bit() -> Any:
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore
    except ImportError as import_error:
        correction = f"it needs torchao: {install_command('adamw8bit')}, or give adamw"
        raise ConfigError("train.optimizer", "adamw8bit", correction) from import_error
    compile_cache.choose()
    return AdamW8bit


class CombinedOptimizer(Optimizer):
    """Optimizers of different parameters as one; they share its state and groups."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__(
            [parameter_group for part_optimizer in parts for parameter_group in part_optimizer.param_groups], {}
        )
        self._share()

    def _share(self) -> None:
        shared_groups = iter(self.param_groups)
        for part_optimizer in self.parts:
            # One dictionary for all parts: a checkpoint then is that of a single optimizer, whatever it consists of.
            part_optimizer.state = self.state
            part_optimizer.param_groups = [next(shared_groups) for _ in part_optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for part_optimizer in self.parts:
            part_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()


class ParameterwiseOptimizer(CombinedOptimizer):
    """Updates one parameter after the other, in float32: in place, or in its master, which it is rounded from; a
    bfloat16 parameter without a master is rounded at random, up or down so that the mean is exact. If they are
    offloaded, moments and masters wait in host memory, and are beside the parameter only for its own update; of a
    sharded one each rank has its shards. Its state and groups are those of the optimizer that it stands for."""

    def __init__(self, parameters: Sequence[nn.Parameter], base: Optimizer, *, offload: bool) -> None:
        """`base` is the optimizer of the parameters' float32 numbers."""
        super().__init__(base.parts if isinstance(base, CombinedOptimizer) else [base])
        self.parameters, self.offload = list(parameters), offload
        self._at = {id(master(parameter)): parameter_index for parameter_index, parameter in enumerate(self.parameters)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        # In a group, since groups are saved: the random rounding after a restart goes on with the numbers that would
        # have come.
        self.param_groups[0]["updates"] = self.param_groups[0].get("updates", 0) + 1
        for part_optimizer in self.parts:
            part_groups = part_optimizer.param_groups
            for parameter_group in part_groups:
                group_masters, part_optimizer.param_groups = parameter_group["params"], [parameter_group]
                try:
                    for round_masters in self._rounds(part_optimizer, group_masters):
                        self._update(part_optimizer, parameter_group, round_masters)
                finally:
                    parameter_group["params"], part_optimizer.state, part_optimizer.param_groups = (
                        group_masters,
                        self.state,
                        part_groups,
                    )

    def _rounds(self, part: Optimizer, wholes: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
        """Divide `wholes` into lots that are updated together: one parameter each, or Muon's rounds over ranks."""
        together = getattr(part, "rounds", None)
        if together is not None:
            return together(wholes)
        return [[own_master] for own_master in wholes if self.parameters[self._at[id(own_master)]].grad is not None]

    def _update(self, part: Optimizer, group: dict[str, Any], wholes: Sequence[Tensor]) -> None:
        parameters = [self.parameters[self._at[id(own_master)]] for own_master in wholes]
        device_numbers = [
            self._brought(own_master, parameter) for own_master, parameter in zip(wholes, parameters, strict=True)
        ]
        device_states = [
            self._near(own_master, parameter.device) for own_master, parameter in zip(wholes, parameters, strict=True)
        ]
        # The optimizer is shown one parameter at a time, with its state under that tensor. Its own code then runs
        # unchanged, and no more than one parameter's moments are on the device.
        group["params"], part.state = device_numbers, defaultdict(dict, zip(device_numbers, device_states, strict=True))
        part.step()
        for own_master, parameter, updated, device_state in zip(
            wholes, parameters, device_numbers, device_states, strict=True
        ):
            if own_master is not parameter and self.offload:
                own_master.copy_(updated)
            if parameter.dtype != torch.float32:
                rounding_seed = self.param_groups[0]["updates"], self._at[id(own_master)]
                parameter.copy_(
                    updated if own_master is not parameter else rounded(updated, parameter.dtype, seed=rounding_seed)
                )
            if device_state:
                self._keep(own_master, device_state, parameter.device)

    def _brought(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """The float32 numbers of a parameter, beside it and with its gradient."""
        is_copied = whole is not parameter and self.offload
        device_numbers = whole.to(parameter.device, torch.float32, copy=is_copied).detach()
        device_numbers.grad = parameter.grad
        return device_numbers

    def _near(self, whole: Tensor, device: torch.device) -> dict[str, Any]:
        """A parameter's optimizer state, with its offloaded tensors copied to `device`."""
        host_state = self.state.get(whole, {})
        host_tensors = {
            state_name: state_value
            for state_name, state_value in host_state.items()
            if self.offload and _is_moved(state_value)
        }
        return host_state | {
            state_name: with_shard(host_tensor, local(host_tensor).to(device, copy=True))
            for state_name, host_tensor in host_tensors.items()
        }

    def _keep(self, whole: Tensor, state: dict[str, Any], device: torch.device) -> None:
        """Remember this of a parameter on `device`: in host memory where it was before, if it was there."""
        if self.offload:
            previous_state, pins_memory = self.state.get(whole, {}), device.type == "cuda"
            state = {
                state_name: _home(state_value, previous_state.get(state_name), pinned=pins_memory)
                for state_name, state_value in state.items()
            }
        self.state[whole] = state

    def load_state_dict(self, state_dict: Any) -> None:
        # Without the state: torch would bring all of it to the parameters' device at once, which offloading is there
        # to avoid.
        super().load_state_dict({**state_dict, "state": {}})
        master_parameters = [
            parameter for parameter_group in self.param_groups for parameter in parameter_group["params"]
        ]
        for parameter_index, saved_state in state_dict["state"].items():
            device = self.parameters[self._at[id(master_parameters[parameter_index])]].device
            is_on_device = not self.offload
            placed_state = {
                state_name: state_value.to(device) if is_on_device and _is_moved(state_value) else state_value
                for state_name, state_value in saved_state.items()
            }
            self._keep(master_parameters[parameter_index], placed_state, device)

    def away(self) -> list[Tensor]:
        """The tensors in host memory; of sharded ones this rank's shards."""
        if not self.offload:
            return []
        moments = [
            local(state_value)
            for parameter_state in self.state.values()
            for state_value in parameter_state.values()
            if _is_moved(state_value)
        ]
        return [*(master(parameter) for parameter in self.parameters if master(parameter) is not parameter), *moments]


def _is_moved(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _home(value: Any, before: Tensor | None, *, pinned: bool) -> Any:
    """A tensor in host memory: where it was before, if it was there."""
    if not _is_moved(value):
        return value
    if before is None:
        before = with_shard(value, torch.empty_like(local(value), device="cpu", pin_memory=pinned))
    local(before).copy_(local(value))
    return before


def rounded(values: Tensor, dtype: torch.dtype, *, seed: tuple[int, int]) -> Tensor:
    """bfloat16 below or above each float32, at random so that the mean is the value: the bits that it loses are a
    number that is carried with its probability."""
    # By update and parameter, and not from the global state: the same numbers however many parameters were updated
    # before, and after a restart. (Tuples of ints hash alike in every process.)
    generator = torch.Generator(values.device).manual_seed(hash(seed) & 0x7FFFFFFF)
    value_bits = values.contiguous().view(torch.int32)
    noise_bits = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return ((value_bits + noise_bits) & -65536).view(torch.float32).to(dtype)


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaves parts of its signatures untyped)


Block = tuple[slice, ...]
"""The rows and the columns of a matrix that a rank has."""


class Muon(torch.optim.Muon):
    """Muon for parameters that are sharded over all ranks, each of which calls `step`. A matrix is updated if any rank
    has a gradient of it; for the ranks that have none it is 0."""

    def rounds(self, matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Divide `matrices` into rounds, largest first: as many as there are ranks are updated together."""
        # By the cost of Newton-Schulz, which is that of products with the smaller side.
        ordered_matrices = sorted(matrices, key=lambda one: (one.numel() * min(one.shape), one.shape), reverse=True)
        rank_count = distributed.get_world_size()
        return (
            ordered_matrices[first_index : first_index + rank_count]
            for first_index in range(0, len(ordered_matrices), rank_count)
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for parameter_group in self.param_groups:
            for round_matrices in self.rounds(_with_gradients(parameter_group["params"])):
                self._update(parameter_group, round_matrices)

    def _update(self, group: dict[str, Any], some: Sequence[Tensor]) -> None:
        own_rank, rank_count = distributed.get_rank(), distributed.get_world_size()
        flat_momenta = [self._momentum(matrix, group).flatten() for matrix in some]
        sent_sizes = [len(momentum) for momentum in flat_momenta] + [0] * (rank_count - len(some))
        matrix_blocks = _places(some[own_rank]) if own_rank < len(some) else ()
        taken_sizes = [_size(matrix_block) for matrix_block in matrix_blocks] or [0] * rank_count
        matrix_parts = sent_to(
            torch.cat(flat_momenta), sent_sizes, taken_sizes, None, "matrices to be made orthogonal"
        ).split(taken_sizes)
        orthogonal_parts = (
            _orthogonal(some[own_rank].shape, matrix_blocks, matrix_parts, group)
            if matrix_blocks
            else flat_momenta[0].new_empty(0)
        )
        returned_updates = sent_to(orthogonal_parts, taken_sizes, sent_sizes, None, "matrices made orthogonal").split(
            sent_sizes
        )
        for matrix, shard_update in zip(some, returned_updates, strict=False):
            own_shard = local(matrix)
            own_shard.mul_(1 - group["lr"] * group["weight_decay"])
            own_shard.add_(
                shard_update.view(own_shard.shape), alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
            )

    def _momentum(self, one: Tensor, group: dict[str, Any]) -> Tensor:
        """Update this rank's shard of the momentum. Returns its shard of the matrix to be made orthogonal."""
        momentum_state = self.state[one]
        if "momentum_buffer" not in momentum_state:
            momentum_state["momentum_buffer"] = torch.zeros_like(one)
        mean_gradient = local(momentum_state["momentum_buffer"])
        gradient = torch.zeros_like(mean_gradient) if one.grad is None else local(one.grad)
        mean_gradient.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(mean_gradient, group["momentum"]) if group["nesterov"] else mean_gradient).bfloat16()


def _with_gradients(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Select the matrices of which any rank has a gradient."""
    has_gradients = torch.tensor(
        [matrix.grad is not None for matrix in matrices], dtype=torch.int32, device=local(matrices[0]).device
    )
    with named("which matrices have gradients"):
        # All ranks must enter the same rounds: a role's matrix without rows on one rank would leave the others
        # waiting for it.
        distributed.all_reduce(has_gradients, distributed.ReduceOp.MAX)
    return [matrix for matrix, has_gradient in zip(matrices, has_gradients.tolist(), strict=True) if has_gradient]


def _orthogonal(shape: torch.Size, places: Sequence[Block], parts: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Make a matrix orthogonal that lies in `parts` at `places`. Returns its parts, flat, one after the other."""
    whole_matrix = parts[0].new_empty(shape)
    for matrix_block, block_part in zip(places, parts, strict=True):
        whole_matrix[matrix_block] = block_part.view(whole_matrix[matrix_block].shape)
    orthogonal = _zeropower_via_newtonschulz(whole_matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return torch.cat([orthogonal[matrix_block].flatten() for matrix_block in places])


def _size(place: Block) -> int:
    return math.prod(index_range.stop - index_range.start for index_range in place)


def _places(matrix: Tensor) -> tuple[Block, ...]:
    """The block of a matrix that each rank has."""
    sharded_matrix = cast(DTensor, matrix)
    return _blocks(matrix.shape, sharded_matrix.device_mesh.shape, sharded_matrix.placements)


@cache
def _blocks(shape: torch.Size, ranks: tuple[int, ...], placements: Any) -> tuple[Block, ...]:
    """Blocks by rank: meshes have their ranks in reading order."""
    block_layouts = (
        _compute_local_shape_and_global_offset(shape, ranks, list(coordinates), placements)
        for coordinates in product(*map(range, ranks))
    )
    return tuple(
        tuple(
            slice(block_start, block_start + block_size)
            for block_size, block_start in zip(block_sizes, block_starts, strict=True)
        )
        for block_sizes, block_starts in block_layouts
    )
