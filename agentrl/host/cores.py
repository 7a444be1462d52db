"""The cores of this machine: how many this process may compute on (those it is bound to, and no more than its control
group pays for), and what they compute fast."""

from __future__ import annotations

from pathlib import Path

from agentrl.host.platform_checks import own_cores

_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # version 2; a container sees its own here
_CPU = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})


def cores(limit: Path = _CGROUP) -> int:
    """Cores for this process, at least 1. `limit` holds the quota of its control group, as "200000 100000"."""
    core_count = len(own_cores())
    try:
        quota_text, period_text = limit.read_text().split()
        # Rounded down: a thread more than the quota pays for does not compute more, it makes the kernel stop all of
        # them for the rest of each period.
        return max(1, min(core_count, int(quota_text) // int(period_text)))
    except (OSError, ValueError):  # no control groups, or "max": no quota
        return core_count


def multiplies_bfloat16(cpu: Path = _CPU) -> bool:
    """Whether the cores have instructions for products of bfloat16 numbers, so that these are faster than those of
    float32. `cpu` is the file that lists their flags, see proc(5); without it the answer is False."""
    try:
        flags_line = next(
            (info_line for info_line in cpu.read_text().splitlines() if info_line.startswith("flags")), ""
        )
    except OSError:
        return False
    return not _BFLOAT16.isdisjoint(flags_line.split())
