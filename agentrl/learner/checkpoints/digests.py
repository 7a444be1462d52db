"""Digests of a checkpoint's files: written with it, compared before anything goes on from it.

A safetensors file says nothing of a number that changed, and torch maps a file without reading its checksums, so bytes
that rotted on a disk would train on without a word. The file has the form of `sha256sum`, whose own `--check` reads it
too. SHA-256 was chosen over CRC-32 because current CPUs compute it in hardware: 500 MB take about a second.

Loads no torch: processes without it compare them too. Owns the one file; never knows what the others hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agentrl import notices
from agentrl.errors import ModelError
from agentrl.learner.checkpoints.folders import DIGESTS, STATE

_PIECE: Final = 16 << 20  # bytes between two calls of `progress`

_compared: dict[Path, frozenset[tuple[str, int, int, int]]] = {}
"""Per folder, the files as they were when this process last verified them: path, size, time of change, inode."""


def write(folder: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Write the digests of all files of `folder`, whose contents are complete. `progress` is called every few MB."""
    digest_lines = [
        f"{_digest(folder / file_name, progress)}  {file_name}\n" for file_name in sorted(_files(folder) - {DIGESTS})
    ]
    (folder / DIGESTS).write_text("".join(digest_lines))


def fault(folder: Path, progress: Callable[[], None] = lambda: None) -> str | None:
    """Describe the first file of `folder` that is not as it was written; None if all are, or if the folder was removed
    meanwhile. A process reads a folder once, unless it changes.

    A checkpoint without digests is named and not refused: another program may have written it. So are files that came
    to it later: most are somebody's notes, but a chat template among them would change every prompt."""
    try:
        digest_by_name = dict(_listed((folder / DIGESTS).read_text()))
    except FileNotFoundError:
        if (folder / STATE).is_file():
            notice_text = f"{DIGESTS} is missing: nobody can tell whether files of the checkpoint changed"
            notices.note("checkpoints", notice_text, place=str(folder))
        return None
    except (OSError, ValueError) as read_error:
        return f"{DIGESTS} cannot be read ({read_error})"
    try:
        file_stamps = frozenset(_stamp(folder, file_name) for file_name in (DIGESTS, *digest_by_name))
    except FileNotFoundError as read_error:
        # A learner that tidies may remove the whole folder while it is read here: then there is nothing to be
        # damaged.
        return f"{Path(read_error.filename).relative_to(folder)} is missing" if folder.is_dir() else None
    # Size, time and inode of all files: bytes that rot in place under an unchanged stamp are not seen again by this
    # process, but a folder of 100 GB is not read for every evaluation either.
    if _compared.get(folder) == file_stamps:
        return None
    for file_name, listed_digest in digest_by_name.items():
        try:
            if _digest(folder / file_name, progress) != listed_digest:
                return f"{file_name} does not hold the bytes that were written"
        except OSError as read_error:
            return f"{file_name} cannot be read ({read_error.strerror})" if folder.is_dir() else None
    for file_name in sorted(_files(folder) - {DIGESTS, *digest_by_name}):
        notices.note("checkpoints", "a file was not written with the checkpoint", place=str(folder / file_name))
    _compared[folder] = file_stamps
    return None


def check(folder: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Raise ModelError if a file of a checkpoint does not hold the bytes that were written."""
    if (reason := fault(folder, progress)) is not None:
        correction = "put a copy of the file in its place, or move the folder away to use the checkpoint before it"
        raise ModelError(f"checkpoint {str(folder)!r} is damaged: {reason}: {correction}")


def _listed(text: str) -> Iterator[tuple[str, str]]:
    """The files of a list, with their digests. Raises ValueError for a list that was cut off or is none."""
    if not text.endswith("\n"):
        raise ValueError("it is cut off")
    for digest_line in text.splitlines():
        file_digest, separator, file_name = digest_line.partition("  ")
        if not separator or len(file_digest) != 64 or not file_name:
            raise ValueError(f"{digest_line[:80]!r} is no digest and name of a file")
        yield file_name, file_digest


def _files(folder: Path) -> set[str]:
    """The files of a folder and of those in it, by their path."""
    return {file_path.relative_to(folder).as_posix() for file_path in folder.rglob("*") if file_path.is_file()}


def _stamp(folder: Path, name: str) -> tuple[str, int, int, int]:
    file_status = (folder / name).stat()
    return name, file_status.st_size, file_status.st_mtime_ns, file_status.st_ino


def _digest(file: Path, progress: Callable[[], None]) -> str:
    running_digest, piece_buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as opened_file:
        while piece_size := opened_file.readinto(piece_buffer):
            running_digest.update(piece_buffer[:piece_size])
            progress()
    return running_digest.hexdigest()
