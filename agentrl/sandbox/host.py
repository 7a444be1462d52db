"""What the boxes of one bubblewrap backend share on this host: folder, user ids, /etc, filter, control groups, view."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import Limits, SandboxSpec
from agentrl.sandbox import seccomp
from agentrl.sandbox.cgroup import ControlGroup, ControlGroups
from agentrl.sandbox.folder import WORKSPACE, remove_tree, usage
from agentrl.sandbox.namespace import Subreaper
from agentrl.sandbox.owner import OwnedFolder, label
from agentrl.sandbox.snapshots import Snapshots

_LIMITER = "usr/bin/prlimit"
_BOX_UID = 1000  # inside the box
_FIRST_UID, _UIDS = 1_880_000_000, 200_000_000  # outside, as root: a range that no distribution hands out
_SHM_BYTES = 64 << 20
_NOT_SHOWN = frozenset({"dev", "proc", "sys", "tmp", "workspace", "run"})  # of an image
_SHOWN_OF_HOST = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"})
_ACCOUNTS = """root:x:0:0::/nonexistent:/bin/false
agent:x:1000:1000::/tmp:/bin/sh
nobody:x:65534:65534::/nonexistent:/bin/false
"""
_GROUPS = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"


@dataclass(slots=True)
class Place:
    """Where one box lives on the host."""

    root: Path
    work: Path
    tmp: Path
    owner: tuple[int, int]
    bounded: bool  # a file system of its own size
    group: ControlGroup | None
    folder: OwnedFolder

    def oom_kills(self) -> int:
        return self.group.out_of_memory_kills() if self.group else 0

    def usage(self) -> int:
        """Bytes on disk."""
        return usage(self.work, self.tmp)

    def clear_tmp(self) -> None:
        for entry in self.tmp.iterdir():
            remove_tree(entry)

    def close(self) -> None:
        self.folder.remove(self.root)
        if self.group:
            self.group.close()


class Host:
    """One backend's share of this machine. Invariant: all of it is gone after `close`, or after this process died."""

    def __init__(self, readonly: Mapping[str, str], want_groups: bool | None) -> None:
        """Raises SandboxUnavailable with what to install, SandboxError if the host fails."""
        found = shutil.which("bwrap")
        if sys.platform != "linux" or found is None:
            raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman, apk)")
        self._bwrap = found
        self._setpriv = shutil.which("setpriv")
        self._readonly = dict(readonly)
        self.drops_user = os.geteuid() == 0 and _all_ids_mapped() and self._setpriv is not None
        self._count = itertools.count()
        self._first_uid = secrets.randbelow(_UIDS)
        name = label()
        self._groups = _control_groups(f"agentrl-boxes.{name}", want_groups)
        try:
            self.folder = OwnedFolder(groups=self._groups.roots if self._groups else (), name=name)
        except BaseException:
            if self._groups:
                self._groups.close()
            raise
        try:
            self.snapshots = Snapshots(self.folder.path / "snapshots")
            self._etc = self.folder.path / "etc"
            _make_etc(self._etc)
            self._filter = self.folder.path / "filter.bpf"
            self._filter.write_bytes(seccomp.program())
        except BaseException:
            self.folder.close()
            if self._groups:
                self._groups.close()
            raise
        Subreaper.hold()

    def place(self, limits: Limits) -> Place:
        """Make the folders and the control group of a new box."""
        name = f"box{next(self._count)}"
        uid = gid = _FIRST_UID + (self._first_uid + next(self._count)) % _UIDS
        if not self.drops_user:
            uid, gid = os.geteuid(), os.getegid()
        root = self.folder.mount_tmpfs(name, size=limits.disk_bytes, uid=uid, gid=gid) if os.geteuid() == 0 else None
        bounded = root is not None
        if root is None:
            root = self.folder.path / name
            root.mkdir(mode=0o711)
        try:
            work, tmp = root / "work", root / "tmp"
            for folder in (work, tmp):
                folder.mkdir(mode=0o755)
                os.chown(folder, uid, gid)
            extra = limits.disk_bytes if bounded else 0
            group = self._groups.group(name, limits, extra_memory=extra) if self._groups else None
        except OSError as error:
            self.folder.remove(root)
            raise SandboxUnavailable(f"cannot make a box on this host: {error}") from error
        except BaseException:
            self.folder.remove(root)
            raise
        return Place(root, work, tmp, (uid, gid), bounded, group, self.folder)

    def bwrap(self, spec: SandboxSpec, place: Place) -> list[bytes]:
        """The bwrap command of a box, up to what differs from one of its commands to the next."""
        argv: list[str] = []
        if self.drops_user:
            uid, gid = place.owner
            argv += [str(self._setpriv), f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
        argv += [self._bwrap, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        argv += ["--unshare-cgroup-try", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
        argv += ["--clearenv", "--hostname", "box", "--uid", str(_BOX_UID), "--gid", str(_BOX_UID)]
        argv += self._root_of(spec.image)
        argv += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--size",
            str(min(_SHM_BYTES, spec.limits.disk_bytes)),
            "--tmpfs",
            "/dev/shm",
        ]
        argv += ["--bind", str(place.tmp), "/tmp", "--bind", str(place.work), WORKSPACE]
        for source, target in self._readonly.items():
            argv += ["--ro-bind", source, target]
        if spec.network:
            for path in ("/etc/resolv.conf", "/etc/ssl/certs"):
                argv += ["--ro-bind-try", path, path]
        else:
            argv += ["--unshare-net"]
        argv += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [os.fsencode(argument) for argument in argv]

    def limited(self, limits: Limits, *, as_group: bool) -> list[bytes]:
        """What stands before the command: `prlimit` with the bounds of each process."""
        bounds = {
            "cpu": math.ceil(limits.cpu_s),
            "nproc": limits.pids,
            "nofile": limits.open_files,
            "fsize": limits.file_bytes,
            "core": 0,
        }
        if not as_group:
            bounds["as"] = limits.memory_bytes
        return [f"/{_LIMITER}".encode(), *(f"--{name}={value}".encode() for name, value in bounds.items()), b"--"]

    @property
    def filter_file(self) -> Path:
        return self._filter

    def close(self) -> None:
        Subreaper.release()
        self.folder.close()
        if self._groups is not None:
            self._groups.close()

    def _root_of(self, image: str | None) -> list[str]:
        """What makes up `/`: of the host only /usr, libraries and a made-up /etc; of an image all but the volatile."""
        root = Path("/") if image is None else Path(image)
        if not (root / _LIMITER).exists():
            raise SandboxUnavailable(f"{root / _LIMITER} is missing: the root file system needs util-linux")
        argv: list[str] = []
        for entry in sorted(root.iterdir()):
            if image is None and entry.name not in _SHOWN_OF_HOST:
                continue
            if entry.name in _NOT_SHOWN or (image is not None and entry.name == "etc" and not entry.is_dir()):
                continue
            if entry.is_symlink():
                argv += ["--symlink", str(entry.readlink()), f"/{entry.name}"]
            else:
                argv += ["--ro-bind", str(entry), f"/{entry.name}"]
        if image is None:
            argv += ["--ro-bind", str(self._etc), "/etc"]
        return argv


def _control_groups(name: str, wanted: bool | None) -> ControlGroups | None:
    if wanted is False:
        return None
    try:
        return ControlGroups(name)
    except OSError as error:
        if wanted:
            raise SandboxUnavailable(f"control groups cannot be made here: {error}") from error
        return None


def _all_ids_mapped() -> bool:
    """Whether this is the host's own root, or a container's with ids enough to give each box one."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, _, count = map(int, line.split())
            if inside <= _FIRST_UID and inside + count >= _FIRST_UID + _UIDS:
                return True
    return False


def _make_etc(folder: Path) -> None:
    """An /etc that says nothing about the host: accounts, the linker's cache, Debian's alternatives."""
    folder.mkdir()
    for name, text in {
        "passwd": _ACCOUNTS,
        "group": _GROUPS,
        "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "resolv.conf": "",  # mount points where the network is open
    }.items():
        (folder / name).write_text(text)
    (folder / "ssl" / "certs").mkdir(parents=True)
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        shutil.copyfile(cache, folder / cache.name)
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        shutil.copytree(alternatives, folder / alternatives.name, symlinks=True)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
