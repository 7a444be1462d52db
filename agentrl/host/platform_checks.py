"""Questions to the operating system: which one it is, what it has, and how one asks.

Linux has all of it. macOS has no /proc, no /dev/shm, no namespaces and no bound cores; each function below has an
answer for it, so that callers need no branch of their own. Rooms that only Linux can have (`sandbox/bubblewrap`,
programs inside of boxes, vLLM's plugin) ask the kernel themselves. Never imports another room.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_TRIAL_S: Final = 20.0
_CGROUP: Final = Path("/sys/fs/cgroup")


def is_linux() -> bool:
    return sys.platform == "linux"


def has_proc() -> bool:
    """Whether the kernel describes processes in /proc."""
    return Path("/proc/self").exists()


def has_user_namespaces() -> bool:
    """Whether bubblewrap can make its boxes here; False without it."""
    # Tried and not looked up: whether namespaces are allowed depends on the kernel, a security module and the container
    # around us, and each has a switch of its own.
    bubblewrap = shutil.which("bwrap") if is_linux() else None
    if bubblewrap is None:
        return False
    trial_command = [bubblewrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(trial_command, capture_output=True, timeout=_TRIAL_S, check=False).returncode == 0
    return False


def default_sandbox() -> str:
    """The sandbox of environments and tools that name none. Never one without walls: a policy's commands would run on
    somebody's machine because its system has no bubblewrap."""
    return "bubblewrap" if is_linux() else "docker"


def own_cores() -> frozenset[int]:
    """The cores that this process may run on; all of the machine where processes cannot be bound to some."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def free_memory_bytes() -> float:
    """Host memory that is free, of this machine and of this process's container; infinity where nobody says."""
    free_bytes = math.inf
    with suppress(OSError):
        info_lines = Path("/proc/meminfo").read_text().splitlines()
        # MemAvailable and not MemFree: pages that cache files are given up for an allocation.
        free_bytes = next(
            (int(info_line.split()[1]) << 10 for info_line in info_lines if info_line.startswith("MemAvailable:")),
            math.inf,
        )
    with suppress(OSError, ValueError):  # no limit, or none that can be read
        # /proc/meminfo is that of the machine, also inside a container whose limit is a tenth of it; there the kernel
        # would kill the process.
        limit_bytes, used_bytes = (
            int((_CGROUP / f"memory.{limit_name}").read_text()) for limit_name in ("max", "current")
        )
        free_bytes = min(free_bytes, limit_bytes - used_bytes)
    return free_bytes


def peak_memory_bytes() -> int:
    """The most memory that this process has had so far."""
    unit_bytes = 1024 if is_linux() else 1  # of getrusage: kilobytes in Linux, bytes in macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def memory_folder() -> Path:
    """A folder for files that live as long as the processes that share them: in shared memory, else the temporary
    folder."""
    shared_memory = Path("/dev/shm")
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


def open_files_folder() -> Path:
    """The folder of this process's descriptors; with /proc each is a link to what is open."""
    return Path("/proc/self/fd" if has_proc() else "/dev/fd")


def loopback() -> str:
    """The name of the network interface of this machine to itself."""
    return "lo" if is_linux() else "lo0"


# --- processes


def process_stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the program's name, which may hold anything: state first. Empty for a process
    that is gone, and without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def process_start(pid: int) -> str:
    """The start of a process in ticks since the machine's; "unknown" without /proc, "" for one that is gone."""
    if stat_fields := process_stat(pid):
        return stat_fields[19]
    return "" if has_proc() or not _exists(pid) else "unknown"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger; False without /proc."""
    return process_stat(pid)[:1] in (["T"], ["t"])


def kill_group(leader: int) -> None:
    """SIGKILL to a process group, if it is still there."""
    # macOS refuses a signal to a group of which only zombies are left, where Linux takes it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
