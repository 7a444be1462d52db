"""Muon over ranks: torch's, whose matrices are sharded and become whole on one rank each for their own update.

Owns the way of a matrix to the rank that makes its update orthogonal, and of the update back. Never knows models.

As many matrices as there are ranks are updated together: every rank sends its shard of each to the rank that has it
whole then, all to all, and gets its shard of each update back, all to all again. Largest matrices come first, so that
those of a round are mostly of one shape and no rank waits long. Momentum stays sharded. Torch rounds a matrix to
bfloat16 before it makes it orthogonal: so it is sent, and no bit of an update changes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from agentrl.learner.parallel.collectives import named
from agentrl.learner.parallel.fsdp import local
from agentrl.learner.parallel.layers import sent_to

Block = tuple[slice, ...]
"""The rows and the columns of a matrix that a rank has."""


class Muon(torch.optim.Muon):
    """Of parameters that are sharded over all ranks, each of which calls `step`. A matrix is updated if any rank has a
    gradient of it; to those that have none it is 0."""

    def rounds(self, matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Those that are updated together."""
        order = sorted(matrices, key=lambda one: (one.numel() * min(one.shape), one.shape), reverse=True)
        size = distributed.get_world_size()
        return (order[at : at + size] for at in range(0, len(order), size))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for group in self.param_groups:
            for some in self.rounds(_with_gradients(group["params"])):
                self._update(group, some)

    def _update(self, group: dict[str, Any], some: Sequence[Tensor]) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        given = [self._momentum(one, group).flatten() for one in some]
        sent = [len(one) for one in given] + [0] * (size - len(some))
        places = _places(some[rank]) if rank < len(some) else ()
        taken = [_size(place) for place in places] or [0] * size
        parts = sent_to(torch.cat(given), sent, taken, None, "matrices to be made orthogonal").split(taken)
        found = _orthogonal(some[rank].shape, places, parts, group) if places else given[0].new_empty(0)
        back = sent_to(found, taken, sent, None, "matrices made orthogonal").split(sent)
        for one, update in zip(some, back, strict=False):
            own = local(one)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(update.view(own.shape), alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], one.shape))

    def _momentum(self, one: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's shard of what is to be made orthogonal."""
        state = self.state[one]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(one)
        mean = local(state["momentum_buffer"])
        grad = torch.zeros_like(mean) if one.grad is None else local(one.grad)
        mean.lerp_(grad, 1 - group["momentum"])
        return (grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean).bfloat16()


def _with_gradients(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Those of which any rank has a gradient."""
    has = torch.tensor([one.grad is not None for one in matrices], dtype=torch.int32, device=local(matrices[0]).device)
    with named("which matrices have gradients"):
        distributed.all_reduce(has, distributed.ReduceOp.MAX)
    return [one for one, any_has in zip(matrices, has.tolist(), strict=True) if any_has]


def _orthogonal(shape: torch.Size, places: Sequence[Block], parts: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """What the parts of a matrix become, one after the other."""
    matrix = parts[0].new_empty(shape)
    for place, part in zip(places, parts, strict=True):
        matrix[place] = part.view(matrix[place].shape)
    whole = _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return torch.cat([whole[place].flatten() for place in places])


def _size(place: Block) -> int:
    return math.prod(one.stop - one.start for one in place)


def _places(matrix: Tensor) -> tuple[Block, ...]:
    """What each rank has of it."""
    sharded = cast(DTensor, matrix)
    return _blocks(matrix.shape, sharded.device_mesh.shape, sharded.placements)


@cache
def _blocks(shape: torch.Size, ranks: tuple[int, ...], placements: Any) -> tuple[Block, ...]:
    """By rank: meshes have their ranks in reading order."""
    found = (
        _compute_local_shape_and_global_offset(shape, ranks, list(at), placements) for at in product(*map(range, ranks))
    )
    return tuple(
        tuple(slice(start, start + size) for size, start in zip(sizes, starts, strict=True)) for sizes, starts in found
    )
