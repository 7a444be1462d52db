"""The memory of a process as Linux counts it, in MiB; of this one if no id is given."""

from __future__ import annotations

from pathlib import Path


def resident_mb(pid: int | str = "self") -> float:
    return _read("VmRSS", pid)


def peak_mb(pid: int | str = "self") -> float:
    """The most that was resident since `reset`."""
    return _read("VmHWM", pid)


def reset(pid: int | str = "self") -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _read(name: str, pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024
