"""A Mac, as far as code of agentrl asks; put this folder on PYTHONPATH, and every Python below is on it. Each writes
its command into the file that ON_A_MAC names.

No Mac runs these tests, so its answers are simulated: `sys.platform` is "darwin"; names of the standard library that
only Linux has are missing; /proc and /dev/shm are not there; no signal goes to a group of zombies. Other people's
packages still see the Linux that they were built for: torch would look for a library of a Mac's.

The names are those that typeshed leaves out where `sys.platform == "darwin"`.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LINUX_ONLY: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "pidfd_open", "P_PIDFD", "waitid", "memfd_create", "eventfd"),
        *("setns", "unshare", "splice", "copy_file_range", "posix_fallocate", "posix_fadvise", "pipe2", "getrandom"),
        *("O_PATH", "O_TMPFILE", "O_DIRECT", "O_LARGEFILE", "O_NOATIME", "fdatasync", "getxattr", "setxattr"),
        *("listxattr", "removexattr", "setresuid", "setresgid", "getresuid", "getresgid"),
    ),
    socket: (
        *("AF_VSOCK", "AF_ALG", "AF_PACKET", "AF_NETLINK", "SO_PEERCRED", "SO_BINDTODEVICE", "SOCK_CLOEXEC"),
        *("SOCK_NONBLOCK", "TCP_USER_TIMEOUT", "SO_PASSCRED", "SCM_CREDENTIALS"),
    ),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL"),
    select: ("epoll",),
    fcntl: ("F_GETPIPE_SZ", "F_SETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_OFD_SETLK", "F_NOTIFY"),
    resource: ("prlimit", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RUSAGE_THREAD"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI"),
}
NOT_THERE = ("/proc", "/dev/shm")
_STDLIB = sys.stdlib_module_names | {"sitecustomize"}


def _ours(frame: FrameType | None) -> bool:
    """Whether code of agentrl asks: the nearest frame outside of the standard library is its own."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "__main__" and (spec := frame.f_globals.get("__spec__")) is not None:
            name = spec.name
        package = name.partition(".")[0]
        if package not in _STDLIB and package != "importlib":
            return package.startswith("agentrl") or package == "on_a_mac"
        frame = frame.f_back
    return False


class _Hidden:
    """An attribute of a module that code of agentrl does not find, or finds with another value."""

    def __init__(self, name: str, *instead: object) -> None:
        self._name, self._instead = name, instead

    def __get__(self, module: Any, _: type | None = None) -> Any:
        if not _asks_itself(sys._getframe(1)):
            return vars(module)[self._name]
        if self._instead:
            return self._instead[0]
        raise AttributeError(f"module {module.__name__!r} has no attribute {self._name!r} on a Mac")

    def __set__(self, module: Any, value: object) -> None:
        vars(module)[self._name] = value


def _asks_itself(frame: FrameType) -> bool:
    """Whether the frame itself is agentrl's: what the standard library uses inside is its own business."""
    name = str(frame.f_globals.get("__name__"))
    if name == "__main__" and (spec := frame.f_globals.get("__spec__")) is not None:
        name = spec.name
    return name.startswith("agentrl") or name == "on_a_mac"


def _hide(module: ModuleType, attributes: dict[str, _Hidden]) -> None:
    module.__class__ = type("MacModule", (ModuleType,), attributes)


def _absent(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.fsdecode(path)
    return any(text == place or text.startswith(f"{place}/") for place in NOT_THERE)


def _without_folders(module: Any, name: str) -> None:
    """Wrap a function of files, so that what is not there on a Mac is not found."""
    real = getattr(module, name)

    def function(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if _absent(path) and _ours(sys._getframe(1)):
            if name == "access":
                return False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *args, **kwargs)

    setattr(module, name, function)


def _killpg(group: int, number: int, *, real: Any = os.killpg, listdir: Any = os.listdir, read: Any = io.open) -> None:
    states = set[str]()
    for name in filter(str.isdigit, listdir("/proc")):
        try:
            with read(f"/proc/{name}/stat", errors="replace") as file:
                state, _, of_group, *_ = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(of_group) == group:
            states.add(state)
    if states == {"Z"}:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    real(group, number)


for _module, _names in LINUX_ONLY.items():
    _hide(_module, {name: _Hidden(name) for name in _names if hasattr(_module, name)})
_hide(sys, {"platform": _Hidden("platform", "darwin")})
for _name in ("stat", "lstat", "access", "readlink", "listdir", "scandir", "open"):
    _without_folders(os, _name)
_without_folders(builtins, "open")
_without_folders(io, "open")
os.killpg = _killpg
with Path(os.environ["ON_A_MAC"]).open("a") as processes:
    processes.write(" ".join(sys.orig_argv).replace("\n", " ") + "\n")
