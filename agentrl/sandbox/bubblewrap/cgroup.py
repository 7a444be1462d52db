"""Control groups of boxes, version 1 or 2, if this process may make them. Knows no command that runs inside.

They bound a box as a whole (all its processes together), which rlimits cannot: memory, processes, CPU share.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from agentrl.protocols import Limits

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_V1 = ("memory", "pids", "cpu")


class ControlGroups:
    """Makes one group for each box, below groups of this owner. The owner's janitor removes them."""

    def __init__(self, name: str) -> None:
        """Raises OSError where groups cannot be made."""
        self.version = 2 if (_ROOT / "cgroup.controllers").exists() else 1
        hierarchies = [_ROOT] if self.version == 2 else [_ROOT / controller for controller in _V1]
        self._roots = [hierarchy / name for hierarchy in hierarchies]
        made_groups: list[Path] = []
        try:
            for group_root in self._roots:
                group_root.mkdir()
                made_groups.append(group_root)
            if self.version == 2:
                (self._roots[0] / "cgroup.subtree_control").write_text("+memory +pids +cpu")
            # A mount that looks writable may still refuse a limit (a container without its own hierarchy, say). Tried
            # once here, it decides for the backend; found out at the first box it would fail an episode.
            self.group("probe", Limits()).close()
        except OSError:
            for group_root in made_groups:
                with contextlib.suppress(OSError):
                    group_root.rmdir()
            raise

    def group(self, name: str, limits: Limits, *, extra_memory: int = 0) -> ControlGroup:
        """A group bounded by `limits`; `extra_memory` (bytes) is for the box's memory-backed files."""
        group_folders = [group_root / name for group_root in self._roots]
        for group_folder in group_folders:
            group_folder.mkdir()
        memory_bytes = limits.memory_bytes + extra_memory
        cpu_quota_us = max(1000, int(limits.cpus * _PERIOD_US))
        if self.version == 2:
            settings = {
                group_folders[0] / "memory.max": memory_bytes,
                # With swap a box that has used up its memory becomes slow instead of being stopped, and slows down the
                # disk that all boxes share.
                group_folders[0] / "memory.swap.max": 0,
                group_folders[0] / "pids.max": limits.pids,
                group_folders[0] / "cpu.max": f"{cpu_quota_us} {_PERIOD_US}",
            }
        else:
            settings = {
                # In this order: the kernel refuses a bound of memory and swap together that lies below the bound of
                # memory.
                group_folders[0] / "memory.limit_in_bytes": memory_bytes,
                group_folders[0] / "memory.memsw.limit_in_bytes": memory_bytes,
                group_folders[1] / "pids.max": limits.pids,
                group_folders[2] / "cpu.cfs_period_us": _PERIOD_US,
                group_folders[2] / "cpu.cfs_quota_us": cpu_quota_us,
            }
        for setting_file, setting_value in settings.items():
            # Kernels without swap accounting lack the swap bounds.
            if setting_file.exists() or "sw" not in setting_file.name:
                setting_file.write_text(str(setting_value))
        return ControlGroup(group_folders)


class ControlGroup:
    """The group of one box."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        memory_folder = folders[0]
        self._events = memory_folder / (
            "memory.events" if (memory_folder / "memory.events").exists() else "memory.oom_control"
        )

    def enter(self, pid: int) -> None:
        """Move a process into the group; processes that it starts later are inside too. Raises OSError."""
        for group_folder in self._folders:
            # One write, without a buffer: the answer of the kernel is the result of the write, and a buffered file
            # would report it when it is closed.
            descriptor = os.open(group_folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, str(pid).encode())
            finally:
                os.close(descriptor)

    def out_of_memory_kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        try:
            for event_line in self._events.read_text().splitlines():
                if event_line.startswith("oom_kill "):
                    return int(event_line.split()[1])
        except OSError:
            pass
        return 0

    def close(self) -> None:
        for group_folder in self._folders:
            _remove(group_folder)


def _remove(folder: Path) -> None:
    """Remove an empty group; the kernel may need a moment after its last process."""
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.002)
