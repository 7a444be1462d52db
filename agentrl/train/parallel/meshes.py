"""The ranks of a learner as meshes: all of them in a row, and the same ranks as a table for each way to cut a layer.

Owns their process groups, whose collectives have the ranks' deadline. Never knows models.

    ranks      all ranks. Weights that no other mesh cuts have a shard on each
    tensor     (data, tensor): the ranks of a row have the same tokens, and each a part of a layer's matrix products
    expert     (copies, expert): the ranks of a row have all experts of a layer, and each some of them

A rank's row and column are those of its number in reading order, so that ranks of a row are neighbours.
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

from agentrl.train.parallel.collectives import named


@dataclass(frozen=True, slots=True)
class Meshes:
    """A mesh is None where its rows would have one rank."""

    ranks: DeviceMesh
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None


def table(names: tuple[str, str], rank: int, size: int, width: int, timeout: timedelta, device: str) -> DeviceMesh:
    """The mesh of `size` ranks in rows of `width`: `names` are those of its dimensions. All ranks make it together."""
    numbers = torch.arange(size).view(-1, width)
    own: list[distributed.ProcessGroup] = []
    for name, lines in zip(names, (numbers.T, numbers), strict=True):
        for line in lines.tolist():
            with named(f"meeting as {name} ranks {line}"):
                group = distributed.new_group(line, timeout=timeout)
            if rank in line:
                own.append(cast(distributed.ProcessGroup, group))
    return DeviceMesh.from_group(own, device, mesh=numbers.int(), mesh_dim_names=names)
