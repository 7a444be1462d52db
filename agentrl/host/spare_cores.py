"""How many threads a computation may take just now: what it used of the machine and what nobody did, together.

So an engine takes the core of a learner that waits, and gives it back when the learner computes. Owns the reading of
this machine's counters; never starts or binds a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentrl.host.cores import cores
from agentrl.host.platform_checks import own_cores

_WINDOW_S: Final = 0.25
"""Counters of idle time have steps of 0.01 s."""

_ENOUGH: Final = 0.75
"""The part of a core that has to be free for one more thread: one that idled less would make the others wait."""

_STAT: Final = Path("/proc/stat")


class SpareCores:
    """The number of threads that a computation may take: from 1 to all cores of this process, or 1 where the machine
    does not report idle time. Call `threads` before each piece of work: it measures four times a second at most."""

    def __init__(
        self,
        *,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        used_s: Callable[[], float] = time.process_time,
        idle_s: Callable[[], float | None] | None = None,
    ) -> None:
        """`used_s` returns the CPU time of this process, `idle_s` the time in which its cores were idle, None if
        unknown."""
        self._most = most or cores()
        self._clock, self._used_s, self._idle_s = clock, used_s, idle_s or idle_time_s
        self._threads = 1
        self._since = self._look()

    def threads(self) -> int:
        """Return how many threads the next piece of work may take, from 1 to the cores of this process."""
        looked_s = self._clock()
        if self._most == 1 or looked_s - self._since[0] < _WINDOW_S:
            return self._threads
        began_s, used_before, idle_before = self._since
        _, used_now_s, idle_now_s = self._since = self._look()
        if idle_now_s is not None and idle_before is not None:
            free_cores = (used_now_s - used_before + idle_now_s - idle_before) / (looked_s - began_s)
            # What this process used counts as free for it: by idle time alone, an engine that has taken three cores
            # would see none left, give them back at the next look, and take them again. A rest of at least `_ENOUGH`
            # cores is one more thread.
            self._threads = min(self._most, max(1, int(free_cores + 1 - _ENOUGH)))
        return self._threads

    def _look(self) -> tuple[float, float, float | None]:
        return self._clock(), self._used_s(), self._idle_s()


def idle_time_s(stat: Path = _STAT) -> float | None:
    """Seconds in which the cores that this process is bound to had nothing to do, since the machine started; None if
    `stat`, in the format of proc(5), does not say it."""
    try:
        bound_cores = {f"cpu{core_number}" for core_number in own_cores()}
        stat_rows = [stat_line.split() for stat_line in stat.read_text().splitlines()]
        # Ticks without work, and ticks of waiting for a disk.
        idle_ticks = [
            int(stat_row[4]) + int(stat_row[5]) for stat_row in stat_rows if stat_row and stat_row[0] in bound_cores
        ]
        return sum(idle_ticks) / os.sysconf("SC_CLK_TCK") if idle_ticks else None
    except (OSError, ValueError, IndexError):
        return None
