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
    packed_bytes = bytearray(_MAGIC)
    for folder_path, folder_tar in parts.items():
        folder_name = folder_path.encode()
        tar_content = memoryview(folder_tar)[512 if folder_tar.startswith(b"./\0") else 0 :]
        packed_bytes += compressor.compress(_PART.pack(len(folder_name)) + folder_name + _SIZE.pack(len(tar_content)))
        packed_bytes += compressor.compress(tar_content)
    packed_bytes += compressor.flush()
    if len(packed_bytes) > most_bytes:
        raise SandboxPathError(f"the files of the box come to more than {most_bytes} bytes, packed")
    return bytes(packed_bytes)


def split(data: bytes, folders: Sequence[str], limit: int) -> Iterator[tuple[str, bytes]]:
    """Folder and tar, one after the other where there is one, of what `join` made.

    Raises SandboxError if it is something else or names other folders than `folders`, SandboxPathError for a tar of
    more than `limit` bytes."""
    if not data.startswith(_MAGIC):
        raise SandboxError("these bytes are no packed box of this backend")
    remaining = list(folders)
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data[len(_MAGIC) :]) as packed_stream:
            while name_length := packed_stream.read(_PART.size):
                folder_name = packed_stream.read(_PART.unpack(name_length)[0]).decode(errors="replace")
                if folder_name not in remaining:
                    raise SandboxError(f"the packed box is damaged: a folder {folder_name[:40]!r} too many")
                remaining.remove(folder_name)
                tar_size = _SIZE.unpack(packed_stream.read(_SIZE.size))[0]
                # Looked at before it is read: the size is the sender's word, and a packed box may come from a box that
                # a policy has written.
                if tar_size > limit:
                    raise SandboxPathError(f"the packed box exceeds {limit} bytes")
                folder_tar = packed_stream.read(tar_size)
                if len(folder_tar) < tar_size:
                    raise SandboxError("the packed box is damaged: it ends too early")
                if folder_tar:
                    yield folder_name, folder_tar
    except (zstandard.ZstdError, struct.error) as stream_error:
        raise SandboxError(f"the packed box is damaged: {stream_error}") from stream_error
    if remaining:
        raise SandboxError(f"the packed box is damaged: it ends without {remaining[0]}")


def pack(source: Path, limit: int) -> bytes:
    """A host tree (trusted) as an archive: modes, links and empty folders are kept, owners are not."""
    if not source.is_dir():
        raise SandboxError(f"nothing to upload at {str(source)!r} on the host")
    tree_budget = Budget(limit)

    def strip(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        tree_budget.spend(member.size)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isfile() or member.isdir() or member.issym() else None

    tar_buffer = io.BytesIO()
    with tarfile.open(fileobj=tar_buffer, mode="w", format=tarfile.GNU_FORMAT, dereference=False) as tar_archive:
        for tree_entry in sorted(source.iterdir()):
            tar_archive.add(tree_entry, arcname=tree_entry.name, filter=strip)
    return tar_buffer.getvalue()


def unpack(data: bytes, target: Path, limit: int) -> None:
    """Write an archive that a box made into a host folder. Left out: names and links that could lead out of it, device
    nodes, pipes, setuid bits. Raises SandboxPathError if it is broken or larger than `limit` bytes."""
    target.mkdir(parents=True, exist_ok=True)
    target_folder = Folder(target, limit=limit)
    tree_budget = Budget(limit)
    real_folders: set[tuple[str, ...]] = {()}  # folders that are no links
    # Links come last, when no file is written any more. Made in the archive's order, a link to /etc and after it a file
    # below the link's name would write outside of the folder; that is the oldest attack with tar.
    member_links: list[tuple[tuple[str, ...], str]] = []
    folder_modes: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar_archive:
            for member in tar_archive:
                name_parts = tuple(name_part for name_part in member.name.split("/") if name_part not in ("", "."))
                if ".." in name_parts or member.name.startswith("/") or not name_parts:
                    continue
                member_name = "/".join(name_parts)
                tree_budget.spend(member.size)
                if member.isdir():
                    target_folder.make_folder(member_name)
                    real_folders.add(name_parts)
                    folder_modes.append((member_name, member.mode & 0o777))
                elif member.issym():
                    member_links.append((name_parts, member.linkname))
                elif (
                    member_file := tar_archive.extractfile(member) if member.isfile() or member.islnk() else None
                ) is not None:
                    file_content = member_file.read(limit + 1)
                    tree_budget.spend(len(file_content) - member.size)  # a second name of a file has no size of its own
                    target_folder.write(member_name, file_content)
                    target_folder.set_mode(member_name, member.mode & 0o777)
        for name_parts, link_target in member_links:
            if name_parts[:-1] in real_folders and stays_inside(link_target, len(name_parts) - 1):
                with contextlib.suppress(SandboxPathError):
                    target_folder.link("/".join(name_parts), link_target)
        # Modes of folders last and from the inside: a folder that its own mode closes could not be filled.
        for member_name, folder_mode in reversed(folder_modes):
            target_folder.set_mode(member_name, folder_mode)
    except (tarfile.TarError, EOFError, ValueError, RecursionError, KeyError) as tar_error:
        raise SandboxPathError(f"the box's archive is broken: {tar_error}") from tar_error
    finally:
        target_folder.close()
