"""Which files a request may name to an engine: those below the folders and URLs that it was started with.

A path is followed part by part from such a folder, and never through a symbolic link. In a folder where everybody may
write (`/tmp`, `/dev/shm`) only what belongs to the engine's own user is taken; elsewhere whoever may write there was
chosen by the engine's owner. A refusal is one text, whether a file is missing, foreign, unreadable or another one than
announced, so that nobody learns from it which files exist. The reason goes to the engine's own log.

Standard library and numpy only: it runs in the embedded engine and inside vLLM's processes.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from agentrl.engine.weight_sync import object_store, weight_file
from agentrl.engine.weight_sync.weight_file import Bytes
from agentrl.errors import WeightSyncError
from agentrl.host.platform_checks import memory_folder

_logger = logging.getLogger("vllm.agentrl")  # in vLLM its log, elsewhere the process's standard error


def everyday() -> list[str]:
    """Where learners of this machine keep weights: shared memory, the temporary folder, the working folder."""
    return [str(memory_folder()), tempfile.gettempdir(), str(Path.cwd())]


class Sources:
    """The `places`, folders and URLs, that an engine reads weights and adapters from."""

    def __init__(self, places: Iterable[str]) -> None:
        places = list(dict.fromkeys(places))
        self._urls = [place.rstrip("/") for place in places if object_store.is_url(place)]
        folder_paths = [Path(place).absolute() for place in places if not object_store.is_url(place)]
        # Where a folder is named by way of a link, its files may be named both ways.
        self._folders = {folder_path: Path(os.path.realpath(folder_path)) for folder_path in folder_paths}
        self._folders |= {real_path: real_path for real_path in self._folders.values()}

    def read(self, path: str, sha256: str, base: Bytes | None = None) -> Bytes:
        """The bytes of the weight file at `path`, or those that the delta there makes of `base`, which have this
        SHA-256. Raises WeightSyncError."""
        try:
            with self.open(path) as file:
                weight_bytes = weight_file.mapped(file) if base is None else weight_file.patched(base, file, path)
            # Digest and load read the same mapped file: a name that is pointed elsewhere in between changes nothing.
            if (actual_digest := weight_file.digest(weight_bytes)) != sha256:
                raise WeightSyncError(f"what it makes has SHA-256 {actual_digest[:12]}…, expected {sha256[:12]}…")
            return weight_bytes
        except (OSError, ValueError, WeightSyncError) as error:
            _logger.warning("agentrl: cannot read weight file %r: %s", path, error)
            expected = f"one with SHA-256 {sha256[:12]}…" + ("" if base is None else ", or a delta to it,")
            raise WeightSyncError(self._refusal(f"weight file {path!r}", expected)) from None

    def fetch(self, url: str, sha256: str, base: tuple[str, Bytes] | None, deadline_s: float) -> Bytes:
        """Fetch weights from a URL below those of this engine; see `object_store.fetch`. Raises WeightSyncError."""
        # A store has no symbolic links to follow, but some file systems of fsspec resolve `..`.
        if ".." in url.split("/") or not any(url.startswith(f"{root_url}/") for root_url in self._urls):
            raise WeightSyncError(self._refusal(f"weights at {url!r}", "one"))
        return object_store.fetch(url, sha256, base=base, deadline_s=deadline_s)

    def adapter(self, path: str, name: str = "adapter_config.json") -> bytes:
        """A file of the adapter in a folder. Raises WeightSyncError."""
        try:
            with self.open(f"{path}/{name}") as adapter_file:
                return adapter_file.read()
        except (OSError, ValueError) as error:
            _logger.warning("agentrl: cannot load the adapter in %r: %s", path, error)
            raise WeightSyncError(self._refusal(f"the adapter in {path!r}", "one", verb="load")) from None

    def open(self, path: str) -> BinaryIO:
        """A file that this engine may read. Raises OSError or ValueError; the text is for the engine's own log."""
        descriptor = self._descriptor(path)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError("it is no regular file")
        return os.fdopen(descriptor, "rb")

    def _refusal(self, what: str, expected: str, *, verb: str = "read") -> str:
        allowed_places = ", ".join([*map(str, self._folders), *self._urls]) or "nowhere"
        hint = "engine.weights_from or --weights-from names more; see the engine's log"
        return f"cannot {verb} {what}: there is not {expected} of this user below {allowed_places} ({hint})"

    def _descriptor(self, path: str) -> int:
        """Open the file at a path below one of the folders."""
        # `..`, doubled slashes and the like are refused and not resolved: to normalise a path first and to open
        # another spelling of it is how such checks are passed by.
        if "\0" in path or os.path.normpath(path) != path:
            raise ValueError("the path is not in its plain form")
        relative_path, start_folder = next(
            ((Path(path).relative_to(root), real) for root, real in self._folders.items() if _below(path, root)),
            (None, None),
        )
        if relative_path is None or start_folder is None:
            raise ValueError("it lies below no folder of this engine's")
        # Part by part from a descriptor, with O_NOFOLLOW at each: checking a path by `realpath` and opening it
        # afterwards leaves a moment in which a part can become a link.
        descriptor = os.open(start_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part_number, path_part in enumerate(relative_path.parts, 1):
            open_flags = 0 if part_number == len(relative_path.parts) else os.O_DIRECTORY
            try:
                next_descriptor = _open_in(descriptor, path_part, open_flags)
            finally:
                os.close(descriptor)
            descriptor = next_descriptor
        return descriptor


def _below(path: str, root: Path) -> bool:
    return Path(path) != root and Path(path).is_relative_to(root)


def _open_in(folder: int, name: str, flags: int) -> int:
    """Open a file or folder in a folder without following a link; not that of a stranger where everybody may write."""
    # O_NONBLOCK, since opening a FIFO that a stranger laid there would block a thread of the engine for ever. The
    # descriptor's own owner is checked, and not the name's.
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if os.fstat(folder).st_mode & stat.S_IWOTH and os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{name!r} belongs to somebody else, in a folder where everybody may write")
    return descriptor
