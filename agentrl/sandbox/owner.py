"""Whose boxes these are: the folder that holds a backend's boxes, removed when its owner dies, however it dies.

A janitor (`sh`, a session of its own) holds the read end of a pipe whose only writer is the owner. When the owner ends,
also by SIGKILL, the janitor sees the end of the pipe and removes folder, mounts and control groups. Should the janitor
be killed too, the next owner on this machine reaps what is left: labels name the dead by process id and start time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox.folder import remove_tree

_JANITOR = """
read -r _
folder=$1; shift
for mount in "$folder"/*/; do umount -l "$mount" 2>/dev/null; done
rm -rf -- "$folder" 2>/dev/null || { chmod -R u+rwX -- "$folder"; rm -rf -- "$folder"; } 2>/dev/null
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  left=
  for group in "$@"; do
    [ -d "$group" ] && find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
    [ -d "$group" ] && left=yes
  done
  [ -n "$left" ] || exit 0
  sleep 0.1
done
"""
_PREFIX = "agentrl-boxes"
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


def label() -> str:
    """Names this process for a reaper: process id, start time, pid namespace, and a random part."""
    return f"{os.getpid()}.{_start_time(os.getpid())}.{_pid_namespace()}.{secrets.token_hex(4)}"


def is_dead(label: str) -> bool:
    """Whether the process of a label is surely gone. False for labels of other pid namespaces."""
    pid, started, namespace, *_ = [*label.split("."), "", "", ""]
    if not pid.isdecimal() or namespace != _pid_namespace():
        return False
    return _start_time(int(pid)) != started


class OwnedFolder:
    """A host folder of this process's own. Invariant: it is gone after `close`, or soon after the process died."""

    def __init__(self, *, prefer_memory: bool = True, groups: Sequence[Path] = (), name: str | None = None) -> None:
        """`groups` are control groups that die with the owner; `name` is a label made before, to name them alike."""
        shared = Path("/dev/shm")
        base = shared if prefer_memory and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        home = base / f"{_PREFIX}-{os.getuid()}"
        try:
            home.mkdir(mode=0o711, exist_ok=True)
            if home.stat().st_uid != os.getuid() or home.is_symlink():
                raise SandboxError(f"{str(home)!r} belongs to someone else; remove it")
            home.chmod(0o711)
            reap(home)
            self.path = home / (name or label())
            self.path.mkdir(mode=0o711)
            self.path.chmod(0o711)
        except OSError as error:
            raise SandboxError(f"cannot make a folder for boxes in {str(base)!r}: {error.strerror}") from error
        self._lock = threading.Lock()
        self._mounts: set[Path] = set()
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "agentrl-janitor", str(self.path), *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )

    def mount_tmpfs(self, target: Path, options: str) -> bool:
        """Mount a tmpfs over an empty folder inside; False where that is not allowed."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"agentrl-box", bytes(target), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.EACCES, errno.ENODEV):
                return False
            raise SandboxError(f"cannot mount a work folder: {os.strerror(code)}")
        with self._lock:
            self._mounts.add(target)
        return True

    def remove(self, target: Path) -> None:
        """Remove one folder inside, mounted or not."""
        with self._lock:
            mounted = target in self._mounts
            self._mounts.discard(target)
        if mounted:
            _unmount(target)
        remove_tree(target)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        if self._janitor.returncode is not None:
            return
        for mounted in list(self._mounts):
            self.remove(mounted)
        remove_tree(self.path)
        assert self._janitor.stdin
        self._janitor.stdin.close()
        try:
            self._janitor.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()


def reap(home: Path) -> list[Path]:
    """Remove the folders of dead owners under `home`; what was removed."""
    removed: list[Path] = []
    for left in home.iterdir():
        if is_dead(left.name):
            for mounted in left.iterdir() if left.is_dir() else ():
                _unmount(mounted)
            with contextlib.suppress(SandboxError):
                remove_tree(left)
                removed.append(left)
    return removed


def _unmount(target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "umount2"):
        libc.umount2(bytes(target), _MNT_DETACH)


def _start_time(pid: int) -> str:
    """Clock ticks since boot at which a process started; empty if there is none (or no /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "none"
