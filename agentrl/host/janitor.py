"""Removes a process's resources that the kernel does not free: they are gone when the process ends, however it ends.

A janitor (`sh`, in its own session) holds the read end of a pipe whose only writer is the owner. When the owner ends,
also by SIGKILL, the janitor sees the end of the pipe, kills the processes that carry the folder's mark in their
environment, and removes folder, mounts and control groups. If the janitor is killed too, the next owner on this
machine removes the rest: labels identify dead owners by process id and start time.

The mark finds processes that the kernel does not end: a program on the host that does not ask for PR_SET_PDEATHSIG; a
`bwrap`, which asks for it some milliseconds after its start; and process 1 of its box, which asks still later. If the
parent dies before that, the child gets no signal. A process of ours ends by itself (`watch_lifeline`): its owner holds
the other end of its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError
from agentrl.host.platform_checks import memory_folder, process_start

_JANITOR = """
read -r closed
folder=$1 mark=$2 group=$3 patience=$4
shift 4
for attempt in $(seq $((patience + 100))); do
  left=
  for found in $(printf %s "$mark=$folder" | grep -lsFf - /proc/[0-9]*/environ); do
    pid=${found#/proc/}
    [ "$attempt" -le "$patience" ] || kill -9 "${pid%/environ}"
    left=yes
  done
  [ -n "$left" ] && [ "$attempt" -le "$patience" ] && sleep 0.1 && continue
  for mount in "$folder"/*/; do umount -l "$mount"; done
  rm -rf -- "$folder" || { chmod -R u+rwX -- "$folder"; rm -rf -- "$folder"; }
  for place in /sys/fs/cgroup/ /sys/fs/cgroup/*/; do
    [ -d "$place$group" ] && find "$place$group" -depth -type d -exec rmdir {} +
    [ -d "$place$group" ] && left=yes
  done
  [ $# = 0 ] || "$@" "${folder##*/}" || left=yes
  [ -z "$left" ] && [ -n "$closed" ] && exit 0
  [ -z "$left" ] && closed=soon  # a process amid an exec shows no environment for a moment
  sleep 0.1
done
"""
_PREFIX = "agentrl-boxes"
_MARK = "AGENTRL_OWNER"  # variable of every owned process, its value the owner's folder on the host
_CGROUPS = Path("/sys/fs/cgroup")
_CLEAN_S = 15.0  # time for a janitor after its patience: it gives up after a hundred rounds of 0.1 s
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


def label() -> str:
    """This process's name for a reaper: process id, start time, pid namespace, and a random part."""
    return f"{os.getpid()}.{process_start(os.getpid())}.{_pid_namespace()}.{secrets.token_hex(4)}"


def control_group(label: str) -> str:
    """Name of the control groups of a label's owner; the janitor removes them."""
    return f"{_PREFIX}.{label}"


def is_dead(label: str) -> bool:
    """Whether the process of a label is surely gone. False for labels of other pid namespaces."""
    labelled_process = _of(label)
    return labelled_process is not None and process_start(labelled_process[0]) != labelled_process[1]


def runs_here(label: str) -> int | None:
    """The process id of a label's process if it surely runs in this pid namespace, else None."""
    process = _of(label)
    return process[0] if process and process[1].isdecimal() and process_start(process[0]) == process[1] else None


def _of(label: str) -> tuple[int, str] | None:
    """The process id and start time of a label, if it is of this pid namespace."""
    process_id, start_ticks, namespace, *_ = [*label.split("."), "", "", ""]
    return (int(process_id), start_ticks) if process_id.isdecimal() and namespace == _pid_namespace() else None


# Why a second process cleans up, and how it learns that it is time.
#
# `finally`, `atexit` and handlers of signals run in the process that ends. SIGKILL and the kernel's killer for want of
# memory run none of them, and law 4 holds for these deaths too. A fork of this process could clean up, but it would
# bring along the memory, the threads' locks and the open descriptors of its parent. The system's own manager of
# services could do it, but a run has to work in a plain terminal and in a container without one. So it is `sh`, which
# every machine has.
#
# It learns of the end by a pipe. This process alone has the writing end, and the kernel closes it whatever ended the
# process. Nothing has to be polled, and no process id can be mistaken for that of a later process. The
# janitor is in a session of its own, so that Ctrl-C and a signal to the process group, which end its owner, miss it.
#
# It knows what belongs to the owner by an inherited variable. Process groups do not suffice: a program leaves its group
# by `setsid`. Neither do parents: a program that forks twice has another one. The environment goes along with both. A
# process in the middle of an exec shows none for a moment, so after a death two rounds must see no process.
#
# The prices: one `sh` for each owner; a look at the environment of every process at the end; and code that makes up an
# environment for a child must pass the mark on. Hostile code could drop the mark, so a box has a stronger bond as well:
# its processes end with process 1 of their namespace.
#
# The janitor is made before whatever it has to remove, so no instant lies between. `test_law_4_holds_at_every_instant`
# in `tests/sandbox/test_bubblewrap.py` kills the owner after each folder and process that it makes.
class Janitor:
    """Removes after this process: `folder`, mounts in it, control groups of the folder's name; ends every process that
    has `mark` in its environment. Make the janitor before anything that it has to remove."""

    def __init__(
        self,
        folder: Path,
        *,
        patience_s: float = 0.0,
        keep_open: Sequence[int] = (),
        remover: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Marked processes have `patience_s` seconds to end by themselves. `keep_open` are descriptors, such as locks,
        that stay open until all is gone. `remover` is a command that removes other resources of the owner; its last
        argument is the owner's label, it has `variables` in its environment, and it fails as long as there was
        something to remove."""
        self.mark = {_MARK: str(folder)}
        self._patience_s = patience_s
        arguments = [str(folder), _MARK, control_group(folder.name), str(round(patience_s / 0.1))]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "agentrl-janitor", *arguments, *remover],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Without the mark above all: with it the janitor would find itself among the owner's processes.
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(variables or {})},
            pass_fds=keep_open,
            start_new_session=True,
        )

    def close(self) -> None:
        """Clean up now. Call it while no process with the mark is being started. Idempotent."""
        if self._process.returncode is not None:
            return
        try:
            # The word says that this is no death: no process is in the middle of its start, so one round that sees
            # nothing is enough.
            self._process.communicate(b"closed\n", timeout=self._patience_s + _CLEAN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class OwnedFolder:
    """A host folder that this process owns, and the processes that carry its `mark`. Invariant: all of it is gone after
    `close`, or soon after this process died."""

    def __init__(self, *, prefer_memory: bool = True, patience_s: float = 0.0, remover: Sequence[str] = ()) -> None:
        """`patience_s` and `remover` are as in `Janitor`. Raises SandboxError if the host has no place for it."""
        parent_folder = memory_folder() if prefer_memory else Path(tempfile.gettempdir())
        owners_folder = parent_folder / f"{_PREFIX}-{os.getuid()}"
        try:
            owners_folder.mkdir(mode=0o711, exist_ok=True)
            if owners_folder.stat().st_uid != os.getuid() or owners_folder.is_symlink():
                raise SandboxError(f"{str(owners_folder)!r} belongs to someone else; remove it")
            # Others may pass but not list: the user ids of boxes have to reach their own folders below.
            owners_folder.chmod(0o711)
            reap(owners_folder)
            self.path = owners_folder / label()
            # Before the folder is made: a death between the two leaves a janitor with nothing to remove, and not a
            # folder without a janitor.
            self._janitor = Janitor(self.path, patience_s=patience_s, remover=remover)
            self.mark = self._janitor.mark
            self._lock = threading.Lock()
            self._mounts: set[Path] = set()
            try:
                self.path.mkdir(mode=0o700)
            except BaseException:
                self._janitor.close()
                raise
        except OSError as error:
            raise SandboxError(f"cannot make a folder for boxes in {str(parent_folder)!r}: {error.strerror}") from error

    def mount_tmpfs(self, target: Path, options: str) -> bool:
        """Mount a tmpfs over an empty folder inside; False if that is not allowed."""
        c_library = ctypes.CDLL(None, use_errno=True)
        if c_library.mount(b"agentrl-box", bytes(target), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
            error_code = ctypes.get_errno()
            if error_code in (errno.EPERM, errno.EACCES, errno.ENODEV):
                return False
            raise SandboxError(f"cannot mount a work folder: {os.strerror(error_code)}")
        with self._lock:
            self._mounts.add(target)
        return True

    def remove(self, target: Path) -> None:
        """Remove one folder inside, mounted or not."""
        with self._lock:
            is_mounted = target in self._mounts
            self._mounts.discard(target)
        if is_mounted:
            _unmount(target)
        remove_tree(target)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for mounted in list(self._mounts):
            self.remove(mounted)
        remove_tree(self.path)
        self._janitor.close()


@contextlib.asynccontextmanager
async def owned_folder(*, patience_s: float = 0.0) -> AsyncGenerator[OwnedFolder]:
    """An `OwnedFolder` for the time of the block; its mark is for processes that have to end with the block."""
    folder = await trio.to_thread.run_sync(lambda: OwnedFolder(patience_s=patience_s))
    try:
        yield folder
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(folder.close)


def make_readable(*roots: Path) -> None:
    """Give the owner of the trees its access rights back."""
    chmod_command = ["chmod", "-R", "u+rwX", "--", *map(str, roots)]
    subprocess.run(chmod_command, check=False, capture_output=True, timeout=60)


def remove_tree(path: Path) -> None:
    """Remove a file or tree that hostile code made: modes of 000 and any depth; links are never followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Python's way first, as it starts no process. Trees that it cannot remove (closed folders, ten thousand levels) are
    # left to `chmod` and `rm`.
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if path.exists():
        make_readable(path)
        subprocess.run(["rm", "-rf", "--", str(path)], check=False, capture_output=True, timeout=60)
    if path.exists():
        raise SandboxError(f"cannot remove {str(path)!r}")


def reap(home: Path) -> list[str]:
    """End and remove the remains of dead owners under `home` and among the control groups. Returns their labels."""
    control_groups = (
        owner_path
        for groups_folder in (_CGROUPS, *_CGROUPS.glob("*/"))
        for owner_path in groups_folder.glob(f"{_PREFIX}.*")
    )
    owner_labels = {owner_path.name for owner_path in home.iterdir()}
    # Groups too, and not folders alone: a janitor that was killed between the two has removed the folder already.
    owner_labels |= {
        owner_path.name.removeprefix(f"{_PREFIX}.") for owner_path in control_groups if os.access(owner_path, os.W_OK)
    }
    dead_labels = sorted(filter(is_dead, owner_labels))
    # All are started first, then closed one by one: each has its rounds to go, and they go side by side.
    for janitor in [Janitor(home / dead_label) for dead_label in dead_labels]:
        janitor.close()
    return dead_labels


def _unmount(target: Path) -> None:
    c_library = ctypes.CDLL(None, use_errno=True)
    if hasattr(c_library, "umount2"):
        # Detached and not plainly unmounted: a process of the box that is still ending holds the mount busy, and the
        # kernel frees it with the last of them.
        c_library.umount2(bytes(target), _MNT_DETACH)


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "none"


_LIFELINE_GRACE_S = 5.0


def watch_lifeline(on_end: Callable[[], None]) -> None:
    """Call `on_end` when standard input ends, and exit the process after a grace period in any case."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        # Whatever `on_end` waits for may hang, and nobody is left who could kill this process (law 4).
        grace_timer = threading.Timer(_LIFELINE_GRACE_S, os._exit, args=(70,))
        grace_timer.daemon = True
        grace_timer.start()
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
