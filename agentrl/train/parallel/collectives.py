"""Where each rank stands: how many collectives it has entered, and which one it is in.

Owns a few bytes a rank in memory that all ranks of a machine share, so that whoever waits in vain can say for whom.
Never knows what a collective carries.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

_SLOT = struct.Struct("qq112s")


@dataclass(frozen=True, slots=True)
class Standing:
    """A rank has entered `count` collectives, and `name` last; `inside`: it has not left that one."""

    count: int
    inside: bool
    name: str


class Ledger:
    """The standings of all ranks. A rank writes its own."""

    def __init__(self, handle: int, rank: int, size: int) -> None:
        """`handle` is that of a file that all ranks opened; rank 0 makes it long enough."""
        if rank == 0:
            os.ftruncate(handle, size * _SLOT.size)
        self._memory = mmap.mmap(handle, size * _SLOT.size)
        self._rank, self._size, self._count = rank, size, 0

    def enter(self, name: str) -> None:
        self._count += 1
        self._write(1, name)

    def leave(self, name: str) -> None:
        self._write(0, name)

    def _write(self, inside: int, name: str) -> None:
        _SLOT.pack_into(self._memory, self._rank * _SLOT.size, self._count, inside, name.encode()[:112])

    def standings(self) -> list[Standing]:
        """That of each rank."""
        found = (_SLOT.unpack_from(self._memory, rank * _SLOT.size) for rank in range(self._size))
        return [
            Standing(count, bool(inside), name.rstrip(b"\0").decode(errors="replace")) for count, inside, name in found
        ]


_ledger: Ledger | None = None
heard: list[str] | None = None
"""If it is a list, the name of each collective that this rank enters is added to it."""


def keep(ledger: Ledger | None) -> None:
    """From now on, the collectives of this process are noted there."""
    global _ledger
    _ledger = ledger


@contextmanager
def named(name: str) -> Generator[None]:
    """Inside, this rank is in the collective `name`: a few words on what it is for."""
    if heard is not None:
        heard.append(name)
    if _ledger is None:
        yield
        return
    _ledger.enter(name)
    yield  # an error leaves it open: the rank never got through
    _ledger.leave(name)
