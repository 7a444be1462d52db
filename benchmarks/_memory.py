"""The memory of this process as Linux counts it, in MiB."""

from __future__ import annotations

from pathlib import Path


def resident_mb() -> float:
    return _read("VmRSS")


def peak_mb() -> float:
    """The most that was resident since `reset`."""
    return _read("VmHWM")


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024
