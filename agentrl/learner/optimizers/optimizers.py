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
    wholes = [cast(nn.Parameter, master(parameter)) for parameter in parameters]
    outer, vectors = (
        {id(whole) for parameter, whole in zip(parameters, wholes, strict=True) if id(parameter) in ids}
        for ids in (outer, vectors)
    )
    matrices = {id(whole) for whole in wholes if whole.dim() > 1 and id(whole) not in vectors}
    base = _of(train, wholes, lr, outer, matrices)
    if not train.offload_optimizer and all(parameter.dtype == torch.float32 for parameter in parameters):
        return base
    return ParameterwiseOptimizer(parameters, base, offload=train.offload_optimizer)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, so that it compiles once
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def lr_of(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _decayed(parameters: Sequence[nn.Parameter], decay: float, matrices: Collection[int]) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay is of matrices, not of norms and biases. Parameters stay in their order, by
    which a checkpoint knows them."""
    # Runs of neighbours, and not two groups: a checkpoint numbers parameters by their order over all groups, and two
    # groups would renumber them whenever decay is switched on.
    runs = groupby(parameters, key=lambda one: decay if id(one) in matrices else 0.0)
    return [{"params": list(run), "weight_decay": weight_decay} for weight_decay, run in runs]


def regrouped(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state of the same parameters, with the groups that the optimizer has now: it may have had another weight
    decay, or be of an agentrl whose decay reached vectors."""
    groups, saved_groups = optimizer.state_dict()["param_groups"], saved["param_groups"]
    of = {number: group for group in saved_groups for number in group["params"]}
    if [len(group["params"]) for group in groups] == [len(group["params"]) for group in saved_groups]:
        return saved
    if of.keys() != {number for group in groups for number in group["params"]}:
        return saved
    keys = ("params", "weight_decay")
    return {**saved, "param_groups": [of[group["params"][0]] | {key: group[key] for key in keys} for group in groups]}


def _of(
    train: Train, parameters: Sequence[nn.Parameter], lr: float, outer: Collection[int], matrices: Collection[int]
) -> Optimizer:
    """The optimizer of float32 `parameters`, of which `matrices` decay and, but for the `outer` ones, have updates by
    Muon."""
    decay = train.weight_decay
    if train.optimizer == "sgd":
        return torch.optim.SGD(_decayed(parameters, decay, matrices), lr=lr)
    if train.optimizer == "adamw8bit":
        return _eight_bit()(_decayed(parameters, decay, matrices), lr=lr, betas=train.betas)
    if train.optimizer == "muon":
        inner = [
            parameter
            for parameter in parameters
            # Fused experts have three dimensions: Newton-Schulz would make the stack orthogonal, and not each expert.
            if parameter.dim() == 2 and id(parameter) in matrices and id(parameter) not in outer
        ]
        others = [parameter for parameter in parameters if all(parameter is not matrix for matrix in inner)]
        parts: list[Optimizer] = []
        if inner:
            # Scaled to AdamW's update size (Liu et al. 2025), so that `train.lr` means the same for both, and for the
            # embeddings that AdamW updates beside it.
            rule = {"weight_decay": decay, "momentum": _MUON_MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
            parts.append(_muon(over=is_sharded(inner[0]))(inner, lr=lr, **rule))
        if others:
            parts.append(torch.optim.AdamW(_decayed(others, decay, matrices), lr=lr, betas=train.betas))
        return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)
    return torch.optim.AdamW(_decayed(parameters, decay, matrices), lr=lr, betas=train.betas)


def _muon(*, over: bool) -> Any:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        hint = f"torch {torch.__version__} has none: pip install 'torch>=2.9', or give adamw"
        raise ConfigError("train.optimizer", "muon", hint)
    if over:
        return Muon
    return muon


def _eight_bit() -> Any:
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore
    except ImportError as error:
        hint = f"it needs torchao: {install_command('adamw8bit')}, or give adamw"
        raise ConfigError("train.optimizer", "adamw8bit", hint) from error
    compile_cache.choose()
    return AdamW8bit


class CombinedOptimizer(Optimizer):
    """Optimizers of different parameters as one; they share its state and groups."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            # One dictionary for all parts: a checkpoint then is that of a single optimizer, whatever it consists of.
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for part in self.parts:
            part.step()

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
        self._at = {id(master(parameter)): number for number, parameter in enumerate(self.parameters)}

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
        for part in self.parts:
            groups = part.param_groups
            for group in groups:
                wholes, part.param_groups = group["params"], [group]
                try:
                    for some in self._rounds(part, wholes):
                        self._update(part, group, some)
                finally:
                    group["params"], part.state, part.param_groups = wholes, self.state, groups

    def _rounds(self, part: Optimizer, wholes: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
        """Divide `wholes` into lots that are updated together: one parameter each, or Muon's rounds over ranks."""
        together = getattr(part, "rounds", None)
        if together is not None:
            return together(wholes)
        return [[whole] for whole in wholes if self.parameters[self._at[id(whole)]].grad is not None]

    def _update(self, part: Optimizer, group: dict[str, Any], wholes: Sequence[Tensor]) -> None:
        parameters = [self.parameters[self._at[id(whole)]] for whole in wholes]
        here = [self._brought(whole, parameter) for whole, parameter in zip(wholes, parameters, strict=True)]
        states = [self._near(whole, parameter.device) for whole, parameter in zip(wholes, parameters, strict=True)]
        # The optimizer is shown one parameter at a time, with its state under that tensor. Its own code then runs
        # unchanged, and no more than one parameter's moments are on the device.
        group["params"], part.state = here, defaultdict(dict, zip(here, states, strict=True))
        part.step()
        for whole, parameter, updated, state in zip(wholes, parameters, here, states, strict=True):
            if whole is not parameter and self.offload:
                whole.copy_(updated)
            if parameter.dtype != torch.float32:
                seed = self.param_groups[0]["updates"], self._at[id(whole)]
                parameter.copy_(updated if whole is not parameter else rounded(updated, parameter.dtype, seed=seed))
            if state:
                self._keep(whole, state, parameter.device)

    def _brought(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """The float32 numbers of a parameter, beside it and with its gradient."""
        moves = whole is not parameter and self.offload
        here = whole.to(parameter.device, torch.float32, copy=moves).detach()
        here.grad = parameter.grad
        return here

    def _near(self, whole: Tensor, device: torch.device) -> dict[str, Any]:
        """A parameter's optimizer state, with its offloaded tensors copied to `device`."""
        before = self.state.get(whole, {})
        away = {name: value for name, value in before.items() if self.offload and _is_moved(value)}
        return before | {name: with_shard(tensor, local(tensor).to(device, copy=True)) for name, tensor in away.items()}

    def _keep(self, whole: Tensor, state: dict[str, Any], device: torch.device) -> None:
        """Remember this of a parameter on `device`: in host memory where it was before, if it was there."""
        if self.offload:
            before, pinned = self.state.get(whole, {}), device.type == "cuda"
            state = {name: _home(value, before.get(name), pinned=pinned) for name, value in state.items()}
        self.state[whole] = state

    def load_state_dict(self, state_dict: Any) -> None:
        # Without the state: torch would bring all of it to the parameters' device at once, which offloading is there
        # to avoid.
        super().load_state_dict({**state_dict, "state": {}})
        wholes = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, saved in state_dict["state"].items():
            device = self.parameters[self._at[id(wholes[number])]].device
            near = not self.offload
            state = {name: value.to(device) if near and _is_moved(value) else value for name, value in saved.items()}
            self._keep(wholes[number], state, device)

    def away(self) -> list[Tensor]:
        """The tensors in host memory; of sharded ones this rank's shards."""
        if not self.offload:
            return []
        moments = [local(value) for state in self.state.values() for value in state.values() if _is_moved(value)]
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
    random = torch.Generator(values.device).manual_seed(hash(seed) & 0x7FFFFFFF)
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=random)
    return ((bits + noise) & -65536).view(torch.float32).to(dtype)


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
        order = sorted(matrices, key=lambda one: (one.numel() * min(one.shape), one.shape), reverse=True)
        size = distributed.get_world_size()
        return (order[start : start + size] for start in range(0, len(order), size))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for group in self.param_groups:
            for some in self.rounds(_with_gradients(group["params"])):
                self._update(group, some)

    def _update(self, group: dict[str, Any], some: Sequence[Tensor]) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        momenta = [self._momentum(matrix, group).flatten() for matrix in some]
        sent = [len(momentum) for momentum in momenta] + [0] * (size - len(some))
        places = _places(some[rank]) if rank < len(some) else ()
        taken = [_size(place) for place in places] or [0] * size
        parts = sent_to(torch.cat(momenta), sent, taken, None, "matrices to be made orthogonal").split(taken)
        orthogonal = _orthogonal(some[rank].shape, places, parts, group) if places else momenta[0].new_empty(0)
        back = sent_to(orthogonal, taken, sent, None, "matrices made orthogonal").split(sent)
        for matrix, update in zip(some, back, strict=False):
            shard = local(matrix)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.view(shard.shape), alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape))

    def _momentum(self, one: Tensor, group: dict[str, Any]) -> Tensor:
        """Update this rank's shard of the momentum. Returns its shard of the matrix to be made orthogonal."""
        state = self.state[one]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(one)
        mean = local(state["momentum_buffer"])
        grad = torch.zeros_like(mean) if one.grad is None else local(one.grad)
        mean.lerp_(grad, 1 - group["momentum"])
        return (grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean).bfloat16()


def _with_gradients(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Select the matrices of which any rank has a gradient."""
    has = torch.tensor(
        [matrix.grad is not None for matrix in matrices], dtype=torch.int32, device=local(matrices[0]).device
    )
    with named("which matrices have gradients"):
        # All ranks must enter the same rounds: a role's matrix without rows on one rank would leave the others
        # waiting for it.
        distributed.all_reduce(has, distributed.ReduceOp.MAX)
    return [matrix for matrix, any_has in zip(matrices, has.tolist(), strict=True) if any_has]


def _orthogonal(shape: torch.Size, places: Sequence[Block], parts: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Make a matrix orthogonal that lies in `parts` at `places`. Returns its parts, flat, one after the other."""
    matrix = parts[0].new_empty(shape)
    for place, part in zip(places, parts, strict=True):
        matrix[place] = part.view(matrix[place].shape)
    orthogonal = _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return torch.cat([orthogonal[place].flatten() for place in places])


def _size(place: Block) -> int:
    return math.prod(span.stop - span.start for span in place)


def _places(matrix: Tensor) -> tuple[Block, ...]:
    """The block of a matrix that each rank has."""
    sharded = cast(DTensor, matrix)
    return _blocks(matrix.shape, sharded.device_mesh.shape, sharded.placements)


@cache
def _blocks(shape: torch.Size, ranks: tuple[int, ...], placements: Any) -> tuple[Block, ...]:
    """Blocks by rank: meshes have their ranks in reading order."""
    layouts = (
        _compute_local_shape_and_global_offset(shape, ranks, list(coordinates), placements)
        for coordinates in product(*map(range, ranks))
    )
    return tuple(
        tuple(slice(start, start + size) for size, start in zip(sizes, starts, strict=True))
        for sizes, starts in layouts
    )
