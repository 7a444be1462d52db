"""The ranks of a learner: which collective each of them is in, and the meshes that they form.

All ranks enter the same collectives in the same order, by name. A rank that enters another one would wait for ever, or
get the numbers of another tensor without a word: so each compares its own with those of the others before it waits.

Owns a few kilobytes a rank in memory that all ranks of a machine share, so that whoever waits in vain can say for
whom; and the process groups of the meshes, whose collectives have the ranks' deadline. Never knows models, nor what a
collective carries.

The meshes are all ranks in a row, and the same ranks as a table for each way to cut a layer.

    ranks      all ranks. Weights that no other mesh cuts have a shard on each
    tensor     (data, tensor): the ranks of a row have the same tokens, and each a part of a layer's matrix products
    expert     (copies, expert): the ranks of a row have all experts of a layer, and each some of them

A rank's row and column are those of its number in reading order, so that ranks of a row are neighbours.

Ranks that compute a pass together are a team: neighbours too, in as many rows of `tensor` as its nodes are divided
among. Ranks of a team that have the same column each have some of the nodes: they are the `context` of each other.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

_HEAD = struct.Struct("qq")
# Of one width, so that a name is written and read in place, without a lock between processes.
_NAME = struct.Struct("112s")
_PLACES = 256
_KEPT = _PLACES - 1  # the latest names of a rank; it writes the next one before it counts it
_SIZE = _HEAD.size + _PLACES * _NAME.size


class OutOfStep(RuntimeError):
    """Two ranks entered different collectives where they should meet."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank has entered `count` collectives, and `name` last; `inside`: it has not left that one."""

    count: int
    inside: bool
    name: str


class Ledger:
    """The standings of all ranks. A rank writes its own."""

    def __init__(self, handle: int, rank: int, size: int) -> None:
        """`handle` is that of a file that all ranks opened; rank 0 makes it long enough."""
        if rank == 0:
            os.ftruncate(handle, size * _SIZE)
        self._memory = mmap.mmap(handle, size * _SIZE)
        self._rank, self._size, self._count = rank, size, 0

    def enter(self, name: str) -> None:
        """Raises OutOfStep if another rank's collective of the same number has another name."""
        self._count += 1
        _NAME.pack_into(self._memory, self._place(self._rank, self._count), name.encode()[: _NAME.size])
        # First the name, then the count: a reader that sees the new count finds the name that goes with it.
        self._write(0)
        self._compare()
        self._write(1)

    def leave(self) -> None:
        self._write(0)

    def _compare(self) -> None:
        own_name = self._name(self._rank, self._count)
        for rank in range(self._size):
            if self._counted(rank) < self._count:
                continue  # it will compare
            other_name = self._name(rank, self._count)
            # A rank that is a whole ring ahead has overwritten this name: there is nothing left to compare.
            if other_name != own_name and self._counted(rank) < self._count + _KEPT:
                raise OutOfStep(
                    f"collective {self._count} of rank {self._rank} is {own_name!r}, that of rank {rank} "
                    f"{other_name!r}: every rank must enter the same ones in the same order"
                )

    def _write(self, inside: int) -> None:
        _HEAD.pack_into(self._memory, self._rank * _SIZE, self._count, inside)

    def _counted(self, rank: int) -> int:
        return _HEAD.unpack_from(self._memory, rank * _SIZE)[0]

    @staticmethod
    def _place(rank: int, count: int) -> int:
        return rank * _SIZE + _HEAD.size + count % _PLACES * _NAME.size

    def _name(self, rank: int, count: int) -> str:
        (name_bytes,) = _NAME.unpack_from(self._memory, self._place(rank, count))
        return name_bytes.rstrip(b"\0").decode(errors="replace")

    def standings(self) -> list[RankProgress]:
        """The progress of each rank."""
        rank_heads = (_HEAD.unpack_from(self._memory, rank * _SIZE) for rank in range(self._size))
        return [
            RankProgress(entered_count, bool(is_inside), self._name(rank, entered_count))
            for rank, (entered_count, is_inside) in enumerate(rank_heads)
        ]

    def names(self, rank: int) -> list[str]:
        """The collectives that a rank has entered, as far as they are kept."""
        entered_count = self._counted(rank)
        return [
            self._name(rank, collective_number)
            for collective_number in range(max(1, entered_count - _KEPT + 1), entered_count + 1)
        ]


_ledger: Ledger | None = None


def keep(ledger: Ledger | None) -> None:
    """From now on, the collectives of this process are noted there."""
    global _ledger
    _ledger = ledger


@contextmanager
def named(name: str) -> Generator[None]:
    """Inside, this rank is in the collective `name`: a few words on what it is for. Raises OutOfStep."""
    if _ledger is None:
        yield
        return
    _ledger.enter(name)
    yield  # an error leaves it open: the rank never got through
    _ledger.leave()


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)


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
    rank_numbers = torch.arange(size).view(-1, width)
    process_groups = [
        met(dimension_name, rank_lines, rank, timeout)
        for dimension_name, rank_lines in zip(names, (rank_numbers.T, rank_numbers), strict=True)
    ]
    return DeviceMesh.from_group(process_groups, device, mesh=rank_numbers.int(), mesh_dim_names=names)


def teams(rank: int, size: int, context: int, tensor: int, timeout: timedelta) -> Teams:
    """This rank's context and its team. All ranks make them together."""
    rank_numbers = torch.arange(size).view(-1, context, tensor)
    context_group = met("context", rank_numbers.transpose(1, 2).reshape(-1, context), rank, timeout)
    team_group = context_group if tensor == 1 else met("team", rank_numbers.view(-1, context * tensor), rank, timeout)
    return context_group, team_group


def met(name: str, lines: torch.Tensor, rank: int, timeout: timedelta) -> distributed.ProcessGroup:
    """The group of the line of ranks that this one is in. All ranks make those of all lines together."""
    own_group: object = None
    for rank_line in lines.tolist():
        with named(f"meeting as {name} ranks {rank_line}"):
            line_group = distributed.new_group(rank_line, timeout=timeout)
        own_group = line_group if rank in rank_line else own_group
    return cast(distributed.ProcessGroup, own_group)
