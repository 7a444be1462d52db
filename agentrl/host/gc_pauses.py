"""Python's garbage collector in a process with thousands of running episodes.

By default it looks through every live object again and again: with 4,000 episodes that stops the loop for half a
second, and takes a fifth of the CPU time. An episode leaves next to no cycles, so most garbage goes without it. Here
young objects are still looked through, in small steps; all objects are only after the process has grown.

Owns the collector's settings of this process; never knows an episode.
"""

from __future__ import annotations

import gc

import trio

from agentrl.host.platform_checks import peak_memory_bytes

GROWTH_BYTES = 512 << 20
"""Memory that garbage in old objects may take, at most, before all objects are looked through."""

_YOUNG, _MIDDLE, _NEVER = 500, 5, 1 << 30  # a look at the young ones then takes some ms
_LOOK_S = 10.0


def spare_old_objects() -> None:
    """From now on leave old objects alone; call it once all modules are imported."""
    gc.collect()
    # Modules and their functions are most of what is alive, and none of it ever becomes garbage. Frozen, it is not
    # walked through at all.
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


async def collect_after_growth() -> None:
    """Look through all objects whenever the process has grown by `GROWTH_BYTES` since the last time."""
    last_peak_bytes = peak_memory_bytes()
    while True:
        await trio.sleep(_LOOK_S)
        # The peak and not what is in use now: it only grows, so a process that frees and takes again the same memory is
        # not looked through each time.
        if peak_memory_bytes() - last_peak_bytes >= GROWTH_BYTES:
            gc.collect()
            last_peak_bytes = peak_memory_bytes()
