"""Trees as tar archives, for boxes whose files this host cannot reach. An archive that a box packed is hostile.

A packed box of such a backend is `agentrl2` and a zstandard stream: u16 length · folder of the box · u64 length · tar.
"""

from __future__ import annotations

import contextlib
import io
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import zstandard

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.sandbox.work_folder import Budget, Folder, stays_inside

OVERHEAD = 1 << 20
"""Bytes that headers and padding may add to an archive of small files."""


_MAGIC: Final = b"agentrl2"
_PART: Final = struct.Struct("<H")
_SIZE: Final = struct.Struct("<Q")
_LEVEL: Final = 1
_WINDOW: Final = 8 << 20  # memory that reading a stream may take


def join(parts: Mapping[str, bytes], most_bytes: int) -> bytes:
    """The tars of a box's folders as one packed box. The entry of the folder itself, which may be another user's, is
    left out. Raises SandboxPathError if they come to more than `most_bytes`."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    data = bytearray(_MAGIC)
    for folder, tar in parts.items():
        name = folder.encode()
        inner = memoryview(tar)[512 if tar.startswith(b"./\0") else 0 :]
        data += compressor.compress(_PART.pack(len(name)) + name + _SIZE.pack(len(inner)))
        data += compressor.compress(inner)
    data += compressor.flush()
    if len(data) > most_bytes:
        raise SandboxPathError(f"the files of the box come to more than {most_bytes} bytes, packed")
    return bytes(data)


def split(data: bytes, folders: Sequence[str], limit: int) -> Iterator[tuple[str, bytes]]:
    """Folder and tar, one after the other where there is one, of what `join` made.

    Raises SandboxError if it is something else or names other folders than `folders`, SandboxPathError for a tar of
    more than `limit` bytes."""
    if not data.startswith(_MAGIC):
        raise SandboxError("these bytes are no packed box of this backend")
    remaining = list(folders)
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data[len(_MAGIC) :]) as stream:
            while length := stream.read(_PART.size):
                name = stream.read(_PART.unpack(length)[0]).decode(errors="replace")
                if name not in remaining:
                    raise SandboxError(f"the packed box is damaged: a folder {name[:40]!r} too many")
                remaining.remove(name)
                size = _SIZE.unpack(stream.read(_SIZE.size))[0]
                # Looked at before it is read: the size is the sender's word, and a packed box may come from a box that
                # a policy has written.
                if size > limit:
                    raise SandboxPathError(f"the packed box exceeds {limit} bytes")
                tar = stream.read(size)
                if len(tar) < size:
                    raise SandboxError("the packed box is damaged: it ends too early")
                if tar:
                    yield name, tar
    except (zstandard.ZstdError, struct.error) as error:
        raise SandboxError(f"the packed box is damaged: {error}") from error
    if remaining:
        raise SandboxError(f"the packed box is damaged: it ends without {remaining[0]}")


def pack(source: Path, limit: int) -> bytes:
    """A host tree (trusted) as an archive: modes, links and empty folders are kept, owners are not."""
    if not source.is_dir():
        raise SandboxError(f"nothing to upload at {str(source)!r} on the host")
    budget = Budget(limit)

    def strip(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        budget.spend(member.size)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isfile() or member.isdir() or member.issym() else None

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT, dereference=False) as archive:
        for entry in sorted(source.iterdir()):
            archive.add(entry, arcname=entry.name, filter=strip)
    return data.getvalue()


def unpack(data: bytes, target: Path, limit: int) -> None:
    """Write an archive that a box made into a host folder. Left out: names and links that could lead out of it, device
    nodes, pipes, setuid bits. Raises SandboxPathError if it is broken or larger than `limit` bytes."""
    target.mkdir(parents=True, exist_ok=True)
    folder = Folder(target, limit=limit)
    budget = Budget(limit)
    real: set[tuple[str, ...]] = {()}  # folders that are no links
    # Links come last, when no file is written any more. Made in the archive's order, a link to /etc and after it a file
    # below the link's name would write outside of the folder; that is the oldest attack with tar.
    links: list[tuple[tuple[str, ...], str]] = []
    modes: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
                if ".." in parts or member.name.startswith("/") or not parts:
                    continue
                name = "/".join(parts)
                budget.spend(member.size)
                if member.isdir():
                    folder.make_folder(name)
                    real.add(parts)
                    modes.append((name, member.mode & 0o777))
                elif member.issym():
                    links.append((parts, member.linkname))
                elif (file := archive.extractfile(member) if member.isfile() or member.islnk() else None) is not None:
                    content = file.read(limit + 1)
                    budget.spend(len(content) - member.size)  # a second name of a file has no size of its own
                    folder.write(name, content)
                    folder.set_mode(name, member.mode & 0o777)
        for parts, goal in links:
            if parts[:-1] in real and stays_inside(goal, len(parts) - 1):
                with contextlib.suppress(SandboxPathError):
                    folder.link("/".join(parts), goal)
        # Modes of folders last and from the inside: a folder that its own mode closes could not be filled.
        for name, mode in reversed(modes):
            folder.set_mode(name, mode)
    except (tarfile.TarError, EOFError, ValueError, RecursionError, KeyError) as error:
        raise SandboxPathError(f"the box's archive is broken: {error}") from error
    finally:
        folder.close()
