"""The ranks of a learner as meshes: all of them in a row, and the same ranks as a table for each way to cut a layer.

Owns their process groups, whose collectives have the ranks' deadline. Never knows models.

    ranks      all ranks. Weights that no other mesh cuts have a shard on each
    tensor     (data, tensor): the ranks of a row have the same tokens, and each a part of a layer's matrix products
    expert     (copies, expert): the ranks of a row have all experts of a layer, and each some of them

A rank's row and column are those of its number in reading order, so that ranks of a row are neighbours.

Ranks that compute a pass together are a team: neighbours too, in as many rows of `tensor` as its nodes are divided
among. Ranks of a team that have the same column each have some of the nodes: they are the `context` of each other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from agentrl.learner.parallel.collectives import named

Teams = tuple[distributed.ProcessGroup, distributed.ProcessGroup]
"""A rank's context and its team."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """A mesh or a group is None where its rows, or it, would have one rank."""

    ranks: DeviceMesh
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    context: distributed.ProcessGroup | None = None
    team: distributed.ProcessGroup | None = None


def table(names: tuple[str, str], rank: int, size: int, width: int, timeout: timedelta, device: str) -> DeviceMesh:
    """The mesh of `size` ranks in rows of `width`: `names` are those of its dimensions. All ranks make it together."""
    numbers = torch.arange(size).view(-1, width)
    own = [met(name, of, rank, timeout) for name, of in zip(names, (numbers.T, numbers), strict=True)]
    return DeviceMesh.from_group(own, device, mesh=numbers.int(), mesh_dim_names=names)


def teams(rank: int, size: int, context: int, tensor: int, timeout: timedelta) -> Teams:
    """This rank's context and its team. All ranks make them together."""
    numbers = torch.arange(size).view(-1, context, tensor)
    own = met("context", numbers.transpose(1, 2).reshape(-1, context), rank, timeout)
    return own, own if tensor == 1 else met("team", numbers.view(-1, context * tensor), rank, timeout)


def met(name: str, lines: torch.Tensor, rank: int, timeout: timedelta) -> distributed.ProcessGroup:
    """The group of the line of ranks that this one is in. All ranks make those of all lines together."""
    own: object = None
    for line in lines.tolist():
        with named(f"meeting as {name} ranks {line}"):
            group = distributed.new_group(line, timeout=timeout)
        own = group if rank in line else own
    return cast(distributed.ProcessGroup, own)
