"""The files of a box as bytes, for a box that goes on elsewhere. Both the tree and the bytes may be hostile.

Kept are regular files with their holes and second names, folders, links as they are, pipes; modes and times of change.
Left out are device nodes, sockets and setuid bits. Everything is reached by descriptor, one name at a time and without
following links: names of a path never meet. Time and memory are bounded by `limit` and by `most_bytes`. The bytes are
`agentrl1` and a zstandard stream of entries; an entry is little-endian::

    u8 kind · u32 mode · u16 length of the name · u64 size · i64 time of change (ns) · name · content

    R a folder of the box, by name     D a folder, entered      U leave the folder      E the end
    F a file, of `size` bytes          L a link, to `size` bytes                        P a pipe
    H a second name of the `size`-th file
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import zstandard

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.host.janitor import remove_tree
from agentrl.sandbox.work_folder import DIRECTORY, MAX_DEPTH, Budget, faults_of

_MAGIC: Final = b"agentrl1"
_ENTRY: Final = struct.Struct("<cIHQq")
_LEVEL: Final = 1
_CHUNK: Final = 64 << 10
_ZEROS: Final = bytes(_CHUNK)
_NAME: Final = 255  # bytes that a name may have
_TARGET: Final = 4096  # bytes that a link may have
_LATEST_NS: Final = (1 << 63) - 1  # a file may say that it is of a later time still
_WINDOW: Final = 8 << 20  # memory that reading a stream may take


def pack(roots: Mapping[str, Path], *, most_bytes: int, limit: int, still: Callable[[], None] = lambda: None) -> bytes:
    """The trees of `roots`, by name. `still` is called between chunks, and ends the work if it raises.

    Raises SandboxPathError if they hold more than `limit` bytes or come to more than `most_bytes`, SandboxError if the
    host fails."""
    bounded_output = _Bounded(most_bytes)
    bounded_output.write(_MAGIC)
    with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(bounded_output, closefd=False) as packed_stream:
        tree_packer = _Packer(packed_stream, Budget(limit), still)
        for root_name, root_path in roots.items():
            with faults_of(root_name, bounded=True):
                root_descriptor = os.open(root_path, DIRECTORY)
                try:
                    tree_packer.folder(b"R", os.fsencode(root_name), root_descriptor)
                finally:
                    os.close(root_descriptor)
        packed_stream.write(_ENTRY.pack(b"E", 0, 0, 0, 0))
    return bounded_output.getvalue()


def unpack(
    data: bytes,
    roots: Mapping[str, Path],
    *,
    limit: int,
    owner: tuple[int, int] | None = None,
    bounded: bool = False,
    still: Callable[[], None] = lambda: None,
) -> None:
    """Replace what is in the folders `roots` by the trees of `data`. `owner` (uid, gid) gets what is made. If it fails,
    they hold a part.

    Raises SandboxError if the bytes are no packed box, or another kind of box's; SandboxPathError if they hold more
    than `limit` bytes, or find no room (`bounded`: that is not the host's fault)."""
    # Emptied before the bytes are looked at: what a failed unpacking leaves is a part of the new tree, and never a
    # mixture of two.
    for root_path in roots.values():
        for old_entry in root_path.iterdir():
            remove_tree(old_entry)
    if not data.startswith(_MAGIC):
        raise SandboxError("these bytes are no packed box")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    try:
        with decompressor.stream_reader(io.BytesIO(data[len(_MAGIC) :])) as packed_stream, ExitStack() as open_folders:
            tree_unpacker = _Unpacker(packed_stream.read, roots, Budget(limit), owner, still)
            open_folders.callback(tree_unpacker.close)
            with faults_of("the packed box", bounded=bounded):
                tree_unpacker.run()
    except zstandard.ZstdError as zstd_error:
        raise SandboxError(f"the packed box is damaged: {zstd_error}") from zstd_error


class _Bounded(io.BytesIO):
    """Bytes that may not become more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.tell() + len(data) > self._most:
            raise SandboxPathError(f"the files of the box come to more than {self._most} bytes, packed")
        return super().write(data)


class _Packer:
    """Writes entries to `stream`."""

    def __init__(self, stream: zstandard.ZstdCompressionWriter, budget: Budget, still: Callable[[], None]) -> None:
        self._stream, self._budget, self._still = stream, budget, still
        self._names: dict[tuple[int, int], int] = {}  # of files with several names: device and inode -> number
        self._files = 0

    def folder(self, kind: bytes, name: bytes, fd: int, depth: int = 0) -> None:
        """A folder and all in it."""
        if depth > MAX_DEPTH:
            raise SandboxPathError(f"the tree is deeper than {MAX_DEPTH} folders")
        self._write(kind, name, os.fstat(fd))
        with os.scandir(fd) as folder_entries:
            for folder_entry in folder_entries:
                self._entry(os.fsencode(folder_entry.name), fd, depth)
        self._stream.write(_ENTRY.pack(b"U", 0, 0, 0, 0))

    def _entry(self, name: bytes, parent: int, depth: int) -> None:
        self._still()
        entry_status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        self._budget.spend(entry_status.st_size)
        if stat.S_ISDIR(entry_status.st_mode):
            with _opened(name, DIRECTORY, parent) as descriptor:
                self.folder(b"D", name, descriptor, depth + 1)
        elif stat.S_ISLNK(entry_status.st_mode):
            link_target = os.readlink(name, dir_fd=parent)
            self._write(b"L", name, entry_status, len(link_target))
            self._stream.write(link_target)
        elif stat.S_ISFIFO(entry_status.st_mode):
            self._write(b"P", name, entry_status)
        elif stat.S_ISREG(entry_status.st_mode):
            file_identity = entry_status.st_dev, entry_status.st_ino
            if file_identity in self._names:
                self._write(b"H", name, entry_status, self._names[file_identity])
                return
            if entry_status.st_nlink > 1:
                self._names[file_identity] = self._files
            self._files += 1
            with _opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, parent) as descriptor:
                self._write(b"F", name, entry_status, entry_status.st_size)
                self._content(descriptor, entry_status.st_size)

    def _content(self, fd: int, size: int) -> None:
        while size > 0:
            self._still()
            file_chunk = os.read(fd, min(_CHUNK, size)) or _ZEROS[: min(_CHUNK, size)]  # it shrank meanwhile
            self._stream.write(file_chunk)
            size -= len(file_chunk)

    def _write(self, kind: bytes, name: bytes, status: os.stat_result, size: int = 0) -> None:
        permissions = stat.S_IMODE(status.st_mode) & 0o777
        # A command may set any time; one that does not fit into the entry must not make the box impossible to pack.
        time_ns = max(-_LATEST_NS, min(status.st_mtime_ns, _LATEST_NS))
        self._stream.write(_ENTRY.pack(kind, permissions, len(name), size, time_ns) + name)


# Why the format is our own, and why an entry has a name and no path.
#
# A box that goes on elsewhere brings files that a model's code made, and the bytes come through a store. tarfile reads
# the usual format. But an entry of a tar is a path, and to make a file at a path is to trust every folder in it. An
# earlier entry may have made one of them a link that leads out of the box, and a reader that checks the whole path
# first has to be right about every link in it. A tar may also name what nobody should make, such as devices and setuid
# programs.
#
# Here the tree is written as it is walked: enter a folder, write its files, leave it. An entry has one name, without a
# slash. It is made below the descriptor of the folder that was entered last, and a link in its way is an error and
# never a way out (O_NOFOLLOW, O_EXCL). No path is ever put together. A second name of a file is the number of a file of
# this stream, so it cannot mean a file of the host. Kinds that nobody should make do not exist in the format. A size is
# taken off the budget before anything is written, and one chunk at a time is in memory.
#
# The price is bytes that no other program reads, and a descriptor for each level of a deep tree, bounded by
# `MAX_DEPTH`. Owners do not come along: all files belong to the new box.
#
# An episode that lost its worker keeps its sampled turns and goes on in a new box with these bytes, so law 1 rests on
# them. `tests/sandbox/test_packing.py` tries the lies: `test_hostile_bytes_stay_inside_and_say_what_is_wrong` and
# `test_links_that_lead_out_are_never_followed`.
class _Unpacker:
    """Makes what the entries of `read` say, in `roots`."""

    def __init__(
        self,
        read: Callable[[int], bytes],
        roots: Mapping[str, Path],
        budget: Budget,
        owner: tuple[int, int] | None,
        still: Callable[[], None],
    ) -> None:
        self._read, self._roots, self._budget, self._owner, self._still = read, roots, budget, owner, still
        self._inside: list[tuple[int, int, int, bytes]] = []  # the folders entered: descriptor, mode, time, name
        self._files: list[tuple[str, tuple[bytes, ...]]] = []  # where each file lies: root, names
        self._root = ""
        self._seen: set[str] = set()

    def run(self) -> None:
        while (next_entry := self._next())[0] != b"E":
            entry_kind, permissions, entry_name, entry_size, time_ns = next_entry
            if entry_kind == b"R" and not self._inside:
                self._enter_root(os.fsdecode(entry_name), permissions, time_ns)
            elif entry_kind == b"U" and self._inside:
                self._leave()
            elif entry_kind in (b"F", b"H", b"D", b"L", b"P") and self._inside:
                self._make(entry_kind, permissions, _checked(entry_name), entry_size, time_ns)
            else:
                raise SandboxError(f"the packed box is damaged: an entry {entry_kind!r} where none can be")
        if self._inside:
            raise SandboxError("the packed box is damaged: it ends within a folder")

    def close(self) -> None:
        for descriptor, *_ in self._inside:
            os.close(descriptor)
        self._inside.clear()

    def _next(self) -> tuple[bytes, int, bytes, int, int]:
        self._still()
        entry_kind, permissions, name_length, entry_size, time_ns = _ENTRY.unpack(self._exactly(_ENTRY.size))
        return entry_kind, permissions & 0o777, self._exactly(name_length), entry_size, time_ns

    def _exactly(self, size: int) -> bytes:
        read_bytes = self._read(size) if size else b""
        while len(read_bytes) < size and (more_bytes := self._read(size - len(read_bytes))):
            read_bytes += more_bytes
        if len(read_bytes) < size:
            raise SandboxError("the packed box is damaged: it ends too early")
        return read_bytes

    def _enter_root(self, name: str, mode: int, time_ns: int) -> None:
        if name not in self._roots or name in self._seen:
            raise SandboxError(f"the packed box has a folder {name[:40]!r} too many: it is another kind of box's")
        self._seen.add(name)
        self._root = name
        self._inside.append((os.open(self._roots[name], DIRECTORY), mode, time_ns, b""))

    def _leave(self) -> None:
        descriptor, permissions, time_ns, _ = self._inside.pop()
        try:
            _finish(descriptor, permissions, time_ns, self._owner)
        finally:
            os.close(descriptor)

    def _make(self, kind: bytes, mode: int, name: bytes, size: int, time_ns: int) -> None:
        parent = self._inside[-1][0]
        self._budget.spend(size if kind in (b"F", b"L") else 0)
        if kind == b"D":
            if len(self._inside) > MAX_DEPTH:
                raise SandboxPathError(f"the tree is deeper than {MAX_DEPTH} folders")
            os.mkdir(name, 0o700, dir_fd=parent)
            self._inside.append((os.open(name, DIRECTORY, dir_fd=parent), mode, time_ns, name))
        elif kind == b"F":
            self._files.append((self._root, (*(folder_name for *_, folder_name in self._inside[1:]), name)))
            with _opened(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, parent
            ) as descriptor:
                self._fill(descriptor, size)
                _finish(descriptor, mode, time_ns, self._owner)
        elif kind == b"H":
            self._link(size, name, parent)
        elif kind == b"L":
            if size > _TARGET:
                raise SandboxError(f"the packed box is damaged: a link of {size} bytes")
            os.symlink(self._exactly(size), name, dir_fd=parent)
            if self._owner:
                os.chown(name, *self._owner, dir_fd=parent, follow_symlinks=False)
        else:
            os.mkfifo(name, 0o600, dir_fd=parent)
            with _opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, parent) as descriptor:
                _finish(descriptor, mode, time_ns, self._owner)

    def _fill(self, fd: int, size: int) -> None:
        remaining = size
        while remaining:
            self._still()
            unwritten_chunk = self._exactly(min(_CHUNK, remaining))
            remaining -= len(unwritten_chunk)
            # A hole is not written: else a file that took no room in one box would not fit into the next one.
            if unwritten_chunk == _ZEROS[: len(unwritten_chunk)]:
                os.lseek(fd, len(unwritten_chunk), os.SEEK_CUR)
                continue
            while unwritten_chunk:
                unwritten_chunk = unwritten_chunk[os.write(fd, unwritten_chunk) :]
        os.ftruncate(fd, size)

    def _link(self, number: int, name: bytes, parent: int) -> None:
        if number >= len(self._files):
            raise SandboxError(f"the packed box is damaged: a name of file {number}, which did not come before it")
        root_name, (*folder_names, original_name) = self._files[number]
        with ExitStack() as open_folders:
            descriptor = open_folders.enter_context(_opened(os.fsencode(self._roots[root_name]), DIRECTORY, None))
            for folder_name in folder_names:
                descriptor = open_folders.enter_context(_opened(folder_name, DIRECTORY, descriptor))
            os.link(original_name, name, src_dir_fd=descriptor, dst_dir_fd=parent, follow_symlinks=False)


def _checked(name: bytes) -> bytes:
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name or len(name) > _NAME:
        raise SandboxError(f"the packed box is damaged: {name[:40]!r} is no name")
    return name


def _finish(fd: int, mode: int, time_ns: int, owner: tuple[int, int] | None) -> None:
    if owner:
        os.fchown(fd, *owner)
    os.fchmod(fd, mode)
    os.utime(fd, ns=(time_ns, time_ns))


@contextmanager
def _opened(name: bytes, flags: int, parent: int | None) -> Generator[int]:
    descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
