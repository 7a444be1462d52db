"""Waiting for a file descriptor: a suite has more than the 1,024 that `select.select` knows."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Whether there is something to read; for a process: whether it has ended."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(within_s * 1000))
