"""How many cores this process may compute on: those it is bound to, and no more than its control group pays for."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # version 2; a container sees its own here


def cores(limit: Path = _CGROUP) -> int:
    """Cores for this process, at least 1. `limit` holds the quota of its control group, as "200000 100000"."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return max(1, min(bound, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or "max": no quota
        return bound
