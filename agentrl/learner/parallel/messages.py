"""An order of rank 0 to another rank, and its reply, as they go over their socket: pickled."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class RankReply:
    """What a rank returned, or how it failed: `in_collective` if perhaps since another one did."""

    value: object = None
    error: str | None = None
    in_collective: bool = False


def send(line: Connection[Any, Any], what: object) -> None:
    """By value: torch would have tensors shared between the processes, by files."""
    line.send_bytes(pickle.dumps(what))


def receive(line: Connection[Any, Any]) -> Any:
    return pickle.loads(line.recv_bytes())
