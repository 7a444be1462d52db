"""Folders of files that come to an engine over HTTP: the adapters of a learner that shares no disk with it.

    {"folder": ID, "file": NAME, "start": BYTE, "data": BASE64}  …  {"folder": ID, "files": {NAME: SHA-256}} ─► its path

A folder appears by one rename once all of its files have the SHA-256 that they should, or not at all. An inbox is a
folder of the engine's own, of mode 0700 and a name that nobody can guess. All that happens in it goes by descriptors,
never through a symbolic link, and an engine removes only what it received itself. Standard library only: it runs in the
embedded engine, and in each of vLLM's workers, of which those of one host make the same folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

METHOD = "agentrl_receive"
"""What the call is named at an engine (`POST /collective_rpc`)."""

_PREFIX = "agentrl-inbox-"
_NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
# In base64 and JSON it is 11 MiB, within the 32 MiB of a signed body (`auth`), and few enough pieces for an adapter
# of a gigabyte.
_PIECE = 8 << 20
_MOST = 16 << 30  # bytes of a file
_FOLDERS = 256  # that an engine has at once
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def messages(folder: Path, name: str) -> Generator[str]:
    """Yield, in order, the messages that give an engine the files of `folder` in a folder called `name`."""
    file_digests: dict[str, str] = {}
    for file_path in sorted(file_path for file_path in folder.iterdir() if file_path.is_file()):
        file_digest = hashlib.sha256()
        with file_path.open("rb") as open_file:
            piece_start = 0
            # An empty file is sent as well: it has a digest in the last message.
            while (piece_bytes := open_file.read(_PIECE)) or piece_start == 0:
                file_digest.update(piece_bytes)
                piece = {"file": file_path.name, "start": piece_start, "data": base64.b64encode(piece_bytes).decode()}
                yield json.dumps({"folder": name, **piece})
                piece_start += max(1, len(piece_bytes))
        file_digests[file_path.name] = file_digest.hexdigest()
    yield json.dumps({"folder": name, "files": file_digests})


def forgetting(path: str) -> str | None:
    """The message that removes the folder at `path`; None if that lies in no inbox."""
    folder = Path(path)
    return json.dumps({"folder": folder.name, "drop": True}) if folder.parent.name.startswith(_PREFIX) else None


def new_place() -> str:
    """Where an inbox can be: in the temporary folder, under a name of its own."""
    return str(Path(tempfile.gettempdir()) / f"{_PREFIX}{secrets.token_hex(16)}")


class Inbox:
    """The folders that came to this process, in the folder `place`, which the first message makes."""

    def __init__(self, place: str) -> None:
        self.place = Path(place)
        self._mine: set[str] = set()  # the folders that came, or are coming

    def receive(self, text: str) -> dict[str, Any]:
        """Take one message. Returns the folder's `path` once it is whole, or the line of an `error`."""
        try:
            with self._opened() as inbox_descriptor:
                return self._taken(inbox_descriptor, json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def holds(self, path: str) -> bool:
        """Whether a folder that came lies at `path`."""
        return os.path.split(path)[0] == str(self.place) and os.path.basename(path) in self._mine  # noqa: PTH119

    def open(self, path: str, file: str) -> BinaryIO:
        """A file of a folder that came. Raises OSError."""
        with self._opened() as root, _descriptor(Path(path).name, _FOLDER, root) as folder:
            return os.fdopen(os.open(_checked(file), os.O_RDONLY | _FILE, dir_fd=folder), "rb")

    def remove(self, path: str) -> None:
        """Remove a folder that came."""
        with suppress(OSError), self._opened() as inbox_descriptor:
            self._remove(inbox_descriptor, Path(path).name)

    @contextmanager
    def _opened(self) -> Generator[int]:
        """A descriptor of the inbox. Raises PermissionError if somebody else made what is there."""
        with suppress(FileExistsError):
            self.place.mkdir(mode=0o700)
        with _descriptor(str(self.place), _FOLDER) as inbox_descriptor:
            inbox_status = os.fstat(inbox_descriptor)
            if inbox_status.st_uid != os.geteuid() or inbox_status.st_mode & 0o077:
                raise PermissionError(f"{str(self.place)!r} is not this engine's alone: start it again")
            yield inbox_descriptor

    def _taken(self, root: int, message: dict[str, Any]) -> dict[str, Any]:
        folder_name = _checked(message["folder"])
        # With the process's number, since the workers of one host write the same folder at once, and two writers of
        # one draft would tear each other's files.
        draft_name = _draft(folder_name)
        if message.get("drop"):
            if folder_name in self._mine:
                self._remove(root, folder_name)
            return {}
        if "file" in message:
            file_name, piece_start, piece_text = _checked(message["file"]), int(message["start"]), str(message["data"])
            # Only folders that came through this inbox are ever removed, so a client that never unloads could fill
            # the disk.
            if folder_name not in self._mine and len(self._mine) >= _FOLDERS:
                raise ValueError(f"this engine has {_FOLDERS} folders already: unload adapters first")
            self._mine.add(folder_name)
            with suppress(FileExistsError):
                os.mkdir(draft_name, 0o700, dir_fd=root)
            with _descriptor(draft_name, _FOLDER, root) as folder:
                _write(folder, file_name, piece_start, piece_text)
            return {}
        with _descriptor(draft_name, _FOLDER, root) as folder:
            for file_name, digest in message["files"].items():
                with os.fdopen(os.open(_checked(file_name), os.O_RDONLY | _FILE, dir_fd=folder), "rb") as received:
                    if hashlib.file_digest(received, "sha256").hexdigest() != digest:
                        raise ValueError(f"{file_name} has another SHA-256 than it was sent with")
        try:
            os.rename(draft_name, folder_name, src_dir_fd=root, dst_dir_fd=root)
        except OSError:  # a worker beside this one was first, or it was sent twice
            if folder_name not in os.listdir(root):
                raise
            shutil.rmtree(draft_name, dir_fd=root)
        return {"path": str(self.place / folder_name)}

    def _remove(self, root: int, name: str) -> None:
        self._mine.discard(name)
        for removed_folder in (name, _draft(name)):
            with suppress(FileNotFoundError):  # a worker beside this one was first
                shutil.rmtree(removed_folder, dir_fd=root)


def _draft(name: str) -> str:
    return f".{name}.{os.getpid()}"


def _write(folder: int, name: str, start: int, text: str) -> None:
    piece_bytes = base64.b64decode(text, validate=True)
    if not 0 <= start <= _MOST - len(piece_bytes):
        raise ValueError(f"a file ends at {_MOST} bytes")
    # Created by the first piece alone: a later piece without it is a lost message, and fails here instead of making a
    # file with a hole.
    creation_flags = 0 if start else os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(name, os.O_WRONLY | _FILE | creation_flags, 0o600, dir_fd=folder), "wb") as written_file:
        written_file.seek(start)
        written_file.write(piece_bytes)


@contextmanager
def _descriptor(path: str, flags: int, folder: int | None = None) -> Generator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.100} is no name of a file")
    return name
