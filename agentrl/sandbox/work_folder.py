"""A host folder that hostile code writes to, reached only through descriptors. Knows nothing of processes.

Every path is walked one component at a time with `O_NOFOLLOW`; symbolic links are read and resolved here, the way the
box would see them, so a link can point anywhere *inside* the folder and nowhere else, also while the box swaps it.
A failure that the box could have caused raises `SandboxPathError`; any other (an I/O error, no descriptors) raises
`SandboxError`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.host.disk_space import is_full
from agentrl.host.janitor import remove_tree

WORKSPACE = "/workspace"
"""Where every backend shows the work folder inside the box."""

_HOST_FAULTS = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.ESTALE, errno.EROFS})
_MAX_LINKS = 40
MAX_DEPTH = 100  # folders in folders, of a path or of a tree that is copied: each takes a descriptor
_MAX_ENTRIES = 1 << 16
_CHUNK = 1 << 20
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Budget:
    """Bounds a copy of a hostile tree: counts its bytes and entries; sparse files count in full."""

    limit: int
    bytes: int = 0
    entries: int = 0

    def spend(self, size: int) -> None:
        self.bytes += size
        self.entries += 1
        if self.bytes > self.limit or self.entries > _MAX_ENTRIES:
            raise SandboxPathError(f"the tree exceeds {self.limit} bytes or {_MAX_ENTRIES} entries")


class Folder:
    """The work folder of a box. `owner` (uid, gid) gets what we create; `aliases` are absolute names of the folder."""

    def __init__(
        self, root: Path, *, limit: int, owner: tuple[int, int] | None = None, bounded: bool = False, alias: str = ""
    ) -> None:
        """`limit` bounds files read and trees copied (bytes); `bounded`: a full disk is the box's own doing."""
        self.root, self.limit, self.owner, self.bounded = root, limit, owner, bounded
        self._aliases = (WORKSPACE, alias or str(root))
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- single files -------------------------------------------------------------------------------------------

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a regular file, if it has at most `most_bytes`."""
        most_read = self.limit if most_bytes is None else min(most_bytes, self.limit)
        with self._faults(path), self._parent(path) as (parent_descriptor, file_name):
            descriptor = os.open(
                file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_descriptor
            )
            with os.fdopen(descriptor, "rb") as open_file:
                _must_be_regular(path, descriptor)
                file_bytes = open_file.read(most_read + 1)
        if len(file_bytes) > most_read:
            raise SandboxPathError(f"{path!r} is larger than {most_read} bytes")
        return file_bytes

    def write(self, path: str, data: bytes) -> None:
        """Write a regular file, making parent folders as needed."""
        with self._faults(path), self._parent(path, make=True) as (parent_descriptor, file_name):
            # `O_NONBLOCK` because the name may be a pipe that nobody reads: opened without it, this thread would wait
            # for ever. And no `O_TRUNC`: emptied is only what has proved to be a regular file.
            open_flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(file_name, open_flags, 0o644, dir_fd=parent_descriptor)
            with os.fdopen(descriptor, "wb") as open_file:
                _must_be_regular(path, descriptor)
                os.ftruncate(descriptor, 0)
                self._own(descriptor)
                open_file.write(data)

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents, if they are not there."""
        with self._faults(path), self._directory(path, make=True):
            pass

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link. Raises SandboxPathError if the name is taken."""
        with self._faults(path), self._parent(path) as (parent_descriptor, link_name):
            os.symlink(target, link_name, dir_fd=parent_descriptor)

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permissions of a file or folder; a link is refused."""
        with self._faults(path), self._parent(path) as (parent_descriptor, entry_name):
            descriptor = os.open(
                entry_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_descriptor
            )
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)

    def is_directory(self, path: str) -> bool:
        """Whether `path` is a folder inside; links are followed inside."""
        try:
            with self._faults(path), self._directory(path):
                return True
        except SandboxPathError:
            return False

    # --- trees --------------------------------------------------------------------------------------------------

    def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree (trusted) to `target`; links are copied as links."""
        if source.is_file():
            self.write(target, source.read_bytes())
            self.set_mode(target, source.stat().st_mode & 0o777)
            return
        if not source.is_dir():
            raise SandboxError(f"nothing to upload at {str(source)!r} on the host")
        with self._faults(target), self._directory(target, make=True) as into, _opened(source) as origin:
            _copy_tree(origin, into, Budget(self.limit), owner=self.owner, merge=True)

    def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the box to the host path `target`.

        Left out: links that could lead out of the tree, device nodes, sockets, pipes, setuid bits."""
        if not self.is_directory(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            data = self.read(source)
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            return
        target.mkdir(parents=True, exist_ok=True)
        with self._faults(source), self._directory(source) as origin, _opened(target) as into:
            _copy_tree(origin, into, Budget(self.limit), inner_links_only=True, merge=True)

    def save(self, target: Path) -> None:
        """Copy the whole folder to a new host folder, links as they are."""
        target.mkdir(mode=0o700, parents=True)
        with self._faults("."), _opened(target) as into:
            _copy_tree(self._fd, into, Budget(self.limit))

    def load(self, source: Path) -> None:
        """Replace the folder's contents by what `save` wrote."""
        self.clear()
        with self._faults("."), _opened(source) as origin:
            _copy_tree(origin, self._fd, Budget(self.limit), owner=self.owner)

    def clear(self) -> None:
        """Remove all contents."""
        for entry in self.root.iterdir():
            remove_tree(entry)

    # --- the walk -----------------------------------------------------------------------------------------------

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Generator[tuple[int, str]]:
        """Descriptor of the folder that holds the path's last component, and that component's name."""
        parent_descriptor, last_name = self._resolve(path, make=make)
        try:
            if last_name == ".":
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            yield parent_descriptor, last_name
        finally:
            os.close(parent_descriptor)

    @contextmanager
    def _directory(self, path: str, *, make: bool = False) -> Generator[int]:
        parent_descriptor, last_name = self._resolve(path, make=make)
        try:
            descriptor = self._enter(parent_descriptor, last_name, make=make)
        finally:
            os.close(parent_descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _resolve(self, path: str, *, make: bool) -> tuple[int, str]:
        """Walk to the last component, following links inside. The caller closes the descriptor."""
        # The folders walked so far stay open, and `..` goes back to the one that was really walked. The kernel's own
        # `..` asks where the folder is now, and the box may have moved it out of the tree meanwhile.
        open_folders = [os.dup(self._fd)]
        try:
            parts_to_walk = deque(self._inside(path).split("/"))
            link_count = 0
            while parts_to_walk:
                path_part = parts_to_walk.popleft()
                if path_part in ("", "."):
                    continue
                if path_part == "..":
                    if len(open_folders) == 1:
                        raise SandboxPathError(f"{path!r} leads out of the work folder")
                    os.close(open_folders.pop())
                    continue
                link_target = _link_target(open_folders[-1], path_part)
                # Read by us and not followed by the kernel, for which an absolute link starts at this machine's root
                # and not at the box's.
                if link_target is not None:
                    link_count += 1
                    if link_count > _MAX_LINKS:
                        raise SandboxPathError(f"{path!r} has too many levels of links")
                    if link_target.startswith("/"):
                        link_target = self._inside(link_target)
                        while len(open_folders) > 1:
                            os.close(open_folders.pop())
                    parts_to_walk.extendleft(reversed(link_target.split("/")))
                elif any(later_part not in ("", ".") for later_part in parts_to_walk):
                    if len(open_folders) > MAX_DEPTH:
                        raise SandboxPathError(f"{path[:100]!r}… is deeper than {MAX_DEPTH} folders")
                    open_folders.append(self._enter(open_folders[-1], path_part, make=make))
                else:
                    return open_folders.pop(), path_part
            return open_folders.pop(), "."
        finally:
            for descriptor in open_folders:
                os.close(descriptor)

    def _inside(self, path: str) -> str:
        if not path.startswith("/"):
            return path
        for folder_alias in self._aliases:
            if path == folder_alias or path.startswith(folder_alias + "/"):
                return path[len(folder_alias) :]
        raise SandboxPathError(f"{path!r} leads out of the work folder {WORKSPACE}")

    def _enter(self, parent: int, name: str, *, make: bool) -> int:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
                if self.owner:
                    os.chown(name, *self.owner, dir_fd=parent, follow_symlinks=False)
        return os.open(name, DIRECTORY, dir_fd=parent)

    def _own(self, fd: int) -> None:
        if self.owner:
            os.fchown(fd, *self.owner)

    @contextmanager
    def _faults(self, path: str) -> Generator[None]:
        """Name an operating system's error once, as the box's doing or the host's."""
        if self._fd < 0:
            raise SandboxError("the box is closed")
        with faults_of(path, bounded=self.bounded):
            yield


def _must_be_regular(path: str, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise SandboxPathError(f"{path!r} is not a regular file")


@contextmanager
def faults_of(path: str, *, bounded: bool) -> Generator[None]:
    """Name an operating system's error once, as the box's doing or the host's; `bounded`: a full disk is the box's."""
    try:
        yield
    except OSError as error:
        # A list of the host's faults, and all else the box's: a hostile tree can produce many kinds of errors, and one
        # that was forgotten in a list of the box's would let a policy end its episode unscored.
        is_host_fault = error.errno in _HOST_FAULTS or (is_full(error) and not bounded)
        error_class = SandboxError if is_host_fault else SandboxPathError
        raise error_class(f"{path!r}: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:  # NUL bytes, lone surrogates
        raise SandboxPathError(f"{path!r} is no path: {error}") from error


def usage(*roots: Path) -> float:
    """Bytes that the trees take on disk, each entry at half a kilobyte more. Endless where a folder may not be looked
    into: hiding must not pay. Files that were deleted but are still open do not show."""
    total_bytes = 0
    hidden_errors: list[OSError] = []

    def note(error: OSError) -> None:
        if error.errno != errno.ENOENT:
            hidden_errors.append(error)

    for tree_root in roots:
        try:
            for _, folder_names, file_names, folder_descriptor in os.fwalk(tree_root, onerror=note):
                for entry_name in (*folder_names, *file_names):
                    # A file may vanish between the listing and the look, as the command runs on.
                    with contextlib.suppress(OSError):
                        total_bytes += (
                            os.stat(entry_name, dir_fd=folder_descriptor, follow_symlinks=False).st_blocks * 512 + 512
                        )
        except (PermissionError, RecursionError):
            return math.inf
    return math.inf if hidden_errors else total_bytes


@contextmanager
def _opened(path: Path) -> Generator[int]:
    """Descriptor of a trusted host folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _link_target(parent: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as link_error:
        if link_error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _copy_tree(
    origin: int,
    into: int,
    budget: Budget,
    *,
    owner: tuple[int, int] | None = None,
    inner_links_only: bool = False,
    merge: bool = False,
    depth: int = 0,
) -> None:
    """Copy folder to folder by descriptor: regular files, folders, links; modes (no setuid) and times are kept."""
    if depth > MAX_DEPTH:
        raise SandboxPathError(f"the tree is deeper than {MAX_DEPTH} folders")
    for entry_name in os.listdir(origin):
        entry_status = os.stat(entry_name, dir_fd=origin, follow_symlinks=False)
        permissions = stat.S_IMODE(entry_status.st_mode) & 0o777
        budget.spend(entry_status.st_size)
        if stat.S_ISLNK(entry_status.st_mode):
            link_target = os.readlink(entry_name, dir_fd=origin)
            if inner_links_only and not stays_inside(link_target, depth):
                continue
            if merge:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry_name, dir_fd=into)
            os.symlink(link_target, entry_name, dir_fd=into)
            if owner:
                os.chown(entry_name, *owner, dir_fd=into, follow_symlinks=False)
        elif stat.S_ISDIR(entry_status.st_mode):
            with contextlib.suppress(FileExistsError):
                os.mkdir(entry_name, 0o700, dir_fd=into)
            inner_origin = os.open(entry_name, DIRECTORY, dir_fd=origin)
            try:
                inner_into = os.open(entry_name, DIRECTORY, dir_fd=into)
                try:
                    _copy_tree(
                        inner_origin,
                        inner_into,
                        budget,
                        owner=owner,
                        inner_links_only=inner_links_only,
                        merge=merge,
                        depth=depth + 1,
                    )
                    _finish(inner_into, permissions, entry_status, owner)
                finally:
                    os.close(inner_into)
            finally:
                os.close(inner_origin)
        elif stat.S_ISREG(entry_status.st_mode):
            _copy_file(
                origin, into, entry_name, budget, merge=merge, mode=permissions, status=entry_status, owner=owner
            )


def _copy_file(
    origin: int,
    into: int,
    name: str,
    budget: Budget,
    *,
    merge: bool,
    mode: int,
    status: os.stat_result,
    owner: tuple[int, int] | None,
) -> None:
    source_descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=origin)
    try:
        open_flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if merge else os.O_EXCL)
        target_descriptor = os.open(name, open_flags, 0o600, dir_fd=into)
        try:
            remaining = status.st_size  # a file that grows meanwhile is copied as it was counted
            while remaining > 0 and (unwritten_chunk := os.read(source_descriptor, min(_CHUNK, remaining))):
                remaining -= len(unwritten_chunk)
                while unwritten_chunk:
                    unwritten_chunk = unwritten_chunk[os.write(target_descriptor, unwritten_chunk) :]
            _finish(target_descriptor, mode, status, owner)
        finally:
            os.close(target_descriptor)
    finally:
        os.close(source_descriptor)


def _finish(fd: int, mode: int, status: os.stat_result, owner: tuple[int, int] | None) -> None:
    if owner:
        os.fchown(fd, *owner)
    os.fchmod(fd, mode)
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def stays_inside(target: str, depth: int) -> bool:
    """Whether a link in a folder `depth` levels down can only lead inside: first `..` up to the tree's root, then
    names. A `..` after a name is refused: the name may be a link itself."""
    if target.startswith("/"):
        return False
    path_parts = [path_part for path_part in target.split("/") if path_part not in ("", ".")]
    levels_up = 0
    while levels_up < len(path_parts) and path_parts[levels_up] == "..":
        levels_up += 1
    return levels_up <= depth and ".." not in path_parts[levels_up:]
