"""The boxes of one bubblewrap backend share this on the host: folder, user ids, /etc, filter, control groups, view.

A bounded file system without root is a tmpfs mounted in a user and mount namespace of its own. No process lives in the
namespaces: descriptors keep them, so they end with this process, however it ends. Commands of the box enter by
`nsenter`; this process reaches the files through a descriptor of the mount.

A box without an image sees /usr of this machine without /usr/src, /usr/local (but for the interpreter, if that is where
the first `python3` is) and the packages of environments and tools, in which solutions can be read. If the kernel allows
it, the box sees /usr through an overlay of its own: the files are the same, but locks and watches on them meet nobody
else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import math
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Final

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.host.janitor import OwnedFolder, control_group, make_readable, remove_tree
from agentrl.host.platform_checks import is_linux
from agentrl.protocols import Limits, SandboxSpec
from agentrl.sandbox.bubblewrap import seccomp
from agentrl.sandbox.bubblewrap.bwrap_process import Subreaper
from agentrl.sandbox.bubblewrap.cgroup import ControlGroup, ControlGroups
from agentrl.sandbox.folder_box import FolderSnapshots
from agentrl.sandbox.work_folder import WORKSPACE, usage

_START_S = 10.0
_MOUNT = """mount -t tmpfs -o "$1" agentrl-box "$2" && mkdir "$2/work" "$2/tmp" "$2/shm" || exit
mkdir "$2/usr" && mount -t overlay -o "ro,nosuid,nodev,$3" agentrl-usr "$2/usr" 2>/dev/null || rmdir "$2/usr"
echo ready && read -r _"""


class Enclosure:
    """One namespace pair with one tmpfs. `root` is where this process finds it, `mountpoint` where its commands do."""

    def __init__(self, mountpoint: Path, *, options: str, overlay: str = "") -> None:
        """Mount over the empty folder `mountpoint`, with `overlay` (a mount option) in its folder `usr` where that can
        be. Raises OSError where this user may not."""
        tool_paths = [shutil.which(tool_name) for tool_name in ("unshare", "nsenter", "mount")]
        if None in tool_paths:
            raise OSError("util-linux is not installed")
        self._nsenter = str(tool_paths[1])
        self.mountpoint = mountpoint
        self._fds: list[int] = []
        unshare_arguments = [str(tool_paths[0]), "--user", "--map-root-user", "--mount", "--propagation", "private"]
        unshare_arguments += ["sh", "-c", _MOUNT, "sh", options, str(mountpoint), overlay]
        mount_process = subprocess.Popen(
            unshare_arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert mount_process.stdout
            has_answered = connection.wait([mount_process.stdout.fileno()], _START_S)
            if not has_answered or mount_process.stdout.readline() != b"ready\n":
                mount_process.kill()
                _, error_output = mount_process.communicate()
                raise OSError(error_output.decode(errors="replace").strip() or "no namespace of one's own")
            proc_folder = f"/proc/{mount_process.pid}"
            # The descriptors are taken while the maker waits, and keep the namespaces after it is killed. A process
            # that stays in there for the box's lifetime would be one more thing to end, for each box.
            for kept_path in (f"{proc_folder}/ns/user", f"{proc_folder}/ns/mnt", f"{proc_folder}/root{mountpoint}"):
                self._fds.append(os.open(kept_path, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise
        finally:
            mount_process.kill()
            mount_process.communicate()

    @property
    def root(self) -> Path:
        return Path(f"/proc/self/fd/{self._fds[2]}")

    @property
    def entrance(self) -> list[str]:
        """The words before a command that run it inside. They name our descriptors by our process id: were they
        inherited, the command inside would hold them too."""
        user_namespace, mount_namespace, _ = (f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._fds)
        return [self._nsenter, f"--user={user_namespace}", f"--mount={mount_namespace}", "--preserve-credentials", "--"]

    def close(self) -> None:
        """Let go: the kernel frees the file system when no command is left in it. Idempotent."""
        for descriptor in self._fds:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._fds = []


USR: Final = Path("/usr")
_GROUPS: Final = ("agentrl.environments", "agentrl.tools")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4


def hidden(usr: Path = USR, packages: Iterable[Path] | None = None) -> list[Path]:
    """The paths below `usr` that no box sees."""
    candidates = [usr / "src"]
    local_folder, interpreter_paths = usr / "local", _interpreter(usr)
    if not interpreter_paths:
        # What an operator has put into /usr/local differs from machine to machine, and may hold what a task asks for.
        candidates.append(local_folder)
    else:
        interpreter_parents = {
            parent_folder
            for interpreter_path in interpreter_paths
            for parent_folder in interpreter_path.parents
            if parent_folder.is_relative_to(local_folder)
        }
        candidates += [
            local_entry
            for parent_folder in interpreter_parents
            for local_entry in parent_folder.iterdir()
            if local_entry not in interpreter_paths and local_entry not in interpreter_parents
        ]
        candidates += [
            interpreter_path / package_folder
            for interpreter_path in interpreter_paths
            for package_folder in ("site-packages", "dist-packages")
        ]
    candidates += [
        candidate for candidate in (_packages() if packages is None else packages) if candidate.is_relative_to(usr)
    ]
    existing_paths = sorted(candidate for candidate in candidates if candidate.exists())
    # What lies below a hidden folder is hidden already, and cannot be mounted over any more once that folder is empty.
    return [
        candidate
        for candidate in existing_paths
        if not any(other_path in existing_paths for other_path in candidate.parents)
    ]


def _interpreter(usr: Path) -> set[Path]:
    """The paths below `usr/local` that `python3` needs, if that is where it is."""
    binaries = usr / "local" / "bin"
    python_program = (binaries / "python3").resolve()
    if not python_program.is_file() or not python_program.is_relative_to(usr / "local"):
        return set()
    library_folder = usr / "local" / "lib"
    binary_paths = [binaries / binary_name for binary_name in ("python", "python3", python_program.name)]
    return {
        python_program,
        *(binary_path for binary_path in binary_paths if binary_path.exists()),
        library_folder / python_program.name,
        *library_folder.glob("libpython3*"),
    }


def _packages() -> list[Path]:
    """Folders in which agentrl, and the packages that offer environments or tools, are installed."""
    package_names = {"agentrl"}
    for entry_group in _GROUPS:
        package_names |= {
            entry_point.value.partition(":")[0].partition(".")[0]
            for entry_point in importlib.metadata.entry_points(group=entry_group)
        }
    package_folders: list[Path] = []
    for package_name in package_names:
        try:
            package_spec = importlib.util.find_spec(package_name)
        # A broken package of somebody else's, or a `__main__` without a spec: nothing that a box could read.
        except (ImportError, ValueError):
            continue
        if package_spec is not None:
            package_folders += map(
                Path, package_spec.submodule_search_locations or [package_spec.origin or "/nonexistent"]
            )
    return package_folders


class Overlay:
    """Layers that show `usr` without some paths. `lower` is the mount's option, empty where layers cannot be made."""

    def __init__(self, mask: Path, without: Iterable[Path], usr: Path = USR) -> None:
        # These signs divide the options of an overlay, and the escapes for them differ between kernels.
        self.lower = "" if any(option_sign in str(mask) for option_sign in ":,\\") else f"lowerdir={mask}:{usr}"
        try:
            mask.mkdir(mode=0o755)
            for hidden_path in without:
                mask_entry = mask / hidden_path.relative_to(usr)
                mask_entry.parent.mkdir(parents=True, exist_ok=True)
                os.mknod(mask_entry, stat.S_IFCHR)  # what hides a name in an overlay; it takes no rights to make
            for mask_folder in mask.rglob("*/"):
                # The umask of this process may be stricter than the box's user needs.
                mask_folder.chmod(0o755)
        except OSError:
            self.lower = ""

    def mount(self, target: Path) -> bool:
        """Mount it over an empty folder, as root; whether that is possible here."""
        if not self.lower:
            return False
        c_library = ctypes.CDLL(None, use_errno=True)
        mount_flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        return c_library.mount(b"agentrl-usr", bytes(target), b"overlay", mount_flags, self.lower.encode()) == 0


_LIMITER = "usr/bin/prlimit"
_BOX_UID = 1000  # inside the box
_FIRST_UID, _UIDS = 1_880_000_000, 200_000_000  # outside, as root: a range that no distribution hands out
_NOT_SHOWN = frozenset({"dev", "proc", "sys", "tmp", "workspace", "run"})  # of an image
_SHOWN_OF_HOST = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"})
_ACCOUNTS = """root:x:0:0::/nonexistent:/bin/false
agent:x:1000:1000::/tmp:/bin/sh
nobody:x:65534:65534::/nonexistent:/bin/false
"""
_GROUP_FILE = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"


@dataclass(slots=True, kw_only=True)
class BoxPlace:
    """The place of one box on the host."""

    root: Path  # as this process sees it
    mountpoint: Path  # as bwrap sees it
    folder: OwnedFolder
    owner: tuple[int, int]
    bounded: bool  # a file system of its own size
    enclosure: Enclosure | None = None
    group: ControlGroup | None = None

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def shm(self) -> Path:
        return self.root / "shm"

    @property
    def usr(self) -> Path:
        """/usr as the box sees it, if it has an overlay of its own."""
        return self.root / "usr"

    def oom_kills(self) -> int:
        return self.group.out_of_memory_kills() if self.group else 0

    def usage(self) -> float:
        """Bytes on disk; endless where that cannot be measured."""
        used_bytes = usage(self.work, self.tmp, self.shm)
        if used_bytes == math.inf:
            # A command may take away the read permission of its own folders. What cannot be measured would otherwise
            # have no bound at all.
            make_readable(self.work, self.tmp, self.shm)
            used_bytes = usage(self.work, self.tmp, self.shm)
        return used_bytes

    def clear_tmp(self) -> None:
        for temporary_entry in (*self.tmp.iterdir(), *self.shm.iterdir()):
            remove_tree(temporary_entry)

    def close(self) -> None:
        if self.enclosure is not None:
            self.enclosure.close()
        self.folder.remove(self.mountpoint)
        if self.group is not None:
            self.group.close()


class Host:
    """One backend's share of this machine. Invariant: all of it is gone after `close`, or after this process died."""

    def __init__(self, readonly: Mapping[str, str], want_groups: bool | None) -> None:
        """Raises SandboxUnavailable with what to install, SandboxError if the host fails."""
        bwrap_path = shutil.which("bwrap")
        if not is_linux():
            correction = "give sandbox = 'docker', or 'local-unsafe' at your own risk"
            raise SandboxUnavailable(f"bubblewrap needs Linux: {correction}")
        if bwrap_path is None:
            raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman, apk)")
        self._bwrap = bwrap_path
        self._setpriv = shutil.which("setpriv")
        self._readonly = dict(readonly)
        self.drops_user = os.geteuid() == 0 and _all_ids_mapped() and self._setpriv is not None
        self._encloses = True
        self._count = itertools.count()
        self._first_uid = secrets.randbelow(_UIDS)
        self._groups: ControlGroups | None = None
        self.folder = OwnedFolder()
        try:
            self.folder.path.chmod(0o711)  # each box has a user of its own
            self._groups = _control_groups(control_group(self.folder.path.name), want_groups)
            self.snapshots = FolderSnapshots(self.folder.path / "snapshots")
            self._etc = self.folder.path / "etc"
            _make_etc(self._etc)
            self._hidden = hidden()
            self._nothing = self.folder.path / "nothing"
            self._nothing.mkdir(mode=0o755)
            self._overlay = Overlay(self.folder.path / "mask", self._hidden)
            self._filter = self.folder.path / "filter.bpf"
            self._filter.write_bytes(seccomp.program("uncounted" if self._groups is None else "seccomp"))
        except BaseException:
            self.folder.close()
            raise
        Subreaper.hold()

    def place(self, limits: Limits) -> BoxPlace:
        """Make the folders and the control group of a new box. Raises SandboxError."""
        place_name = f"box{next(self._count)}"
        try:
            box_place = self._folders(place_name, limits)
        except OSError as host_error:
            raise SandboxError(f"cannot make the folders of a box: {host_error}") from host_error
        try:
            if self._groups is not None:
                file_bytes = limits.disk_bytes if box_place.bounded else 0
                box_place.group = self._groups.group(place_name, limits, extra_memory=file_bytes)
        except OSError as host_error:
            box_place.close()
            raise SandboxError(f"cannot make the control group of a box: {host_error}") from host_error
        return box_place

    # Why the files of a box lie in memory.
    #
    # The code of a model writes without an end: one large file, a hundred thousand empty ones, or files with holes that
    # only look large. A box that fills a disk which others use fails the episodes of others, and these have done
    # nothing wrong (law 3). So the files of a box need a bound that holds at each write.
    #
    # An rlimit bounds the size of each file and not their number. To measure the folder while a command runs is too
    # late for a fast writer, and each measurement walks the whole tree. Quotas of a disk would do, but whether they
    # exist depends on the file system and its mount options.
    #
    # A tmpfs has a bound of bytes and one of files, and every Linux has it. Beyond the bound the command gets "No space
    # left on device", as on a full disk, and nobody else notices. The work folder, /tmp and /dev/shm are folders of the
    # same tmpfs, so that one number bounds them together. When the box ends, the kernel frees it at once; nobody
    # deletes its files one by one. Root mounts it on the host; others mount it in a user namespace (`Enclosure`).
    #
    # The price is memory: `Limits.disk_bytes` of every box may be in use at the same time. The kernel counts these
    # pages in the box's control group. So `place` adds them to the group's bound, or a box that fills its disk would
    # die for want of memory instead. Where no tmpfs can be mounted, only the measurement is left
    # (`BubblewrapBox._watch_disk`).
    #
    # Without the bounds, "filling the disk from /tmp and /dev/shm" and "a hundred thousand empty files" succeed: two of
    # the attacks that `tests/sandbox/test_bubblewrap.py` runs.
    def _folders(self, name: str, limits: Limits) -> BoxPlace:
        """A file system of bounded size: mounted as root, else in a namespace; else a plain folder to be measured."""
        mount_options = f"size={limits.disk_bytes},nr_inodes={max(1024, limits.disk_bytes >> 12)},mode=0711"
        place_path = self.folder.path / name
        place_path.mkdir(mode=0o711)
        box_owner = os.geteuid(), os.getegid()
        if self.drops_user:
            # A user id for each box, since the kernel counts processes and watches on files by user: with a common id,
            # one box could use up what another one may have. The start is random, so that two backends rarely meet.
            box_user_id = _FIRST_UID + (self._first_uid + next(self._count)) % _UIDS
            box_owner = box_user_id, box_user_id
        box_place = BoxPlace(root=place_path, mountpoint=place_path, folder=self.folder, owner=box_owner, bounded=True)
        try:
            if os.geteuid() == 0 and self.folder.mount_tmpfs(
                place_path, f"{mount_options},uid={box_owner[0]},gid={box_owner[1]}"
            ):
                for box_folder in (box_place.work, box_place.tmp, box_place.shm):
                    box_folder.mkdir(mode=0o755)
                    os.chown(box_folder, *box_owner)
                box_place.usr.mkdir()
                if not self._overlay.mount(box_place.usr):
                    box_place.usr.rmdir()
                return box_place
            if self._encloses:
                try:
                    box_place.enclosure = Enclosure(place_path, options=mount_options, overlay=self._overlay.lower)
                    box_place.root = box_place.enclosure.root
                    return box_place
                except OSError:
                    self._encloses = False  # not allowed here; do not try again
            box_place.bounded = False
            for box_folder in (box_place.work, box_place.tmp, box_place.shm):
                box_folder.mkdir(mode=0o755)
            return box_place
        except BaseException:
            box_place.close()
            raise

    def bwrap(self, spec: SandboxSpec, place: BoxPlace) -> list[bytes]:
        """The bwrap command of a box, up to what differs from one of its commands to the next."""
        arguments: list[str] = place.enclosure.entrance if place.enclosure else []
        if self.drops_user:
            user_id, group_id = place.owner
            arguments += [str(self._setpriv), f"--reuid={user_id}", f"--regid={group_id}", "--clear-groups", "--"]
        arguments += [self._bwrap, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        # `--disable-userns` because a namespace of its own would give a command capabilities in it, and with them much
        # more of the kernel to attack. `--new-session` because a command with our terminal could type into it.
        arguments += ["--unshare-cgroup-try", "--disable-userns", "--cap-drop", "ALL"]
        arguments += ["--die-with-parent", "--new-session"]
        arguments += ["--clearenv", "--hostname", "box", "--uid", str(_BOX_UID), "--gid", str(_BOX_UID)]
        mountpoint = place.mountpoint
        arguments += self._root_of(spec.image, mountpoint / "usr" if place.usr.is_dir() else None)
        for shown_path in spec.covered:
            if spec.image is not None and Path(spec.image, shown_path.lstrip("/")).is_dir():
                arguments += ["--ro-bind", str(self._nothing), shown_path]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        for folder_name, target_path in (("shm", "/dev/shm"), ("tmp", "/tmp"), ("work", WORKSPACE)):
            # One file system, whose bytes and files are bounded.
            arguments += ["--bind", str(mountpoint / folder_name), target_path]
        for source_path, target_path in self._readonly.items():
            arguments += ["--ro-bind", source_path, target_path]
        # Only what names and certificates need: the rest of /etc names the host's accounts, mounts and services.
        if spec.network:
            for shown_path in ("/etc/resolv.conf", "/etc/ssl/certs"):
                arguments += ["--ro-bind-try", shown_path, shown_path]
        else:
            arguments += ["--unshare-net"]
        # Last, as bwrap creates the mount points of everything above on this root. Both are tmpfs without a bound of
        # their own: left writable, they would be memory that no limit counts where there is no control group.
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [os.fsencode(argument) for argument in arguments]

    def limited(self, limits: Limits, *, as_group: bool) -> list[bytes]:
        """The words before the command: `prlimit` with the bounds of each process."""
        process_limits = {
            "cpu": math.ceil(limits.cpu_s),
            "nproc": limits.pids,
            "nofile": limits.open_files,
            "fsize": limits.file_bytes,
            "core": 0,
        }
        if not as_group:
            # Only without a group: an address space is often much larger than the memory that is used (a runtime
            # reserves gigabytes and touches a few), so with this bound some programs fail that would fit.
            process_limits["as"] = limits.memory_bytes
        return [
            f"/{_LIMITER}".encode(),
            *(f"--{limit_name}={limit_value}".encode() for limit_name, limit_value in process_limits.items()),
            b"--",
        ]

    @property
    def filter_file(self) -> Path:
        return self._filter

    def close(self) -> None:
        Subreaper.release()
        self.folder.close()

    def _root_of(self, image: str | None, usr: Path | None) -> list[str]:
        """Return the bwrap arguments that make up `/`: of the host only /usr, libraries and a made-up /etc; of an image
        all but the volatile. `usr` is the box's own overlay of the host's."""
        root_folder = Path("/") if image is None else Path(image)
        if not (root_folder / _LIMITER).exists():
            raise SandboxUnavailable(f"{root_folder / _LIMITER} is missing: the root file system needs util-linux")
        arguments: list[str] = []
        for root_entry in sorted(root_folder.iterdir()):
            if image is None and root_entry.name not in _SHOWN_OF_HOST:
                continue
            if root_entry.name in _NOT_SHOWN or (
                image is not None and root_entry.name == "etc" and not root_entry.is_dir()
            ):
                continue
            if image is None and root_entry == USR:
                arguments += ["--ro-bind", str(usr), "/usr"] if usr else self._plain_usr()
            elif root_entry.is_symlink():
                arguments += ["--symlink", str(root_entry.readlink()), f"/{root_entry.name}"]
            else:
                arguments += ["--ro-bind", str(root_entry), f"/{root_entry.name}"]
        if image is None:
            arguments += ["--ro-bind", str(self._etc), "/etc"]
        return arguments

    def _plain_usr(self) -> list[str]:
        """/usr where no overlay can be mounted: what is hidden lies below an empty folder."""
        arguments = ["--ro-bind", str(USR), "/usr"]
        for hidden_path in self._hidden:
            arguments += ["--ro-bind", str(self._nothing) if hidden_path.is_dir() else "/dev/null", str(hidden_path)]
        return arguments


def _control_groups(name: str, required: bool | None) -> ControlGroups | None:
    if required is False:
        return None
    try:
        return ControlGroups(name)
    except OSError as group_error:
        if required:
            raise SandboxUnavailable(f"control groups cannot be made here: {group_error}") from group_error
        return None


def _all_ids_mapped() -> bool:
    """Whether this is the host's own root, or a container's with ids enough to give each box one."""
    with contextlib.suppress(OSError, ValueError):
        for map_line in Path("/proc/self/uid_map").read_text().splitlines():
            first_id, _, id_count = map(int, map_line.split())
            # A container's root often has 65,536 ids. A `setpriv` to an id beyond them fails, so such a root keeps its
            # own user.
            if first_id <= _FIRST_UID and first_id + id_count >= _FIRST_UID + _UIDS:
                return True
    return False


def _make_etc(folder: Path) -> None:
    """An /etc that says nothing about the host: accounts, the linker's cache, Debian's alternatives."""
    folder.mkdir()
    for file_name, file_text in {
        "passwd": _ACCOUNTS,
        "group": _GROUP_FILE,
        "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "resolv.conf": "",  # mount points where the network is open
    }.items():
        (folder / file_name).write_text(file_text)
    (folder / "ssl" / "certs").mkdir(parents=True)
    linker_cache = Path("/etc/ld.so.cache")
    if linker_cache.exists():
        shutil.copyfile(linker_cache, folder / linker_cache.name)
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        shutil.copytree(alternatives, folder / alternatives.name, symlinks=True)
    for etc_path in (folder, *folder.rglob("*")):
        if not etc_path.is_symlink():
            etc_path.chmod(0o755 if etc_path.is_dir() else 0o644)
