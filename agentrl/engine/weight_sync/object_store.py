"""Weights by way of an object store: a folder at a URL, for a learner and engines that share neither disk nor memory.

    00000007.json     what version 7 is: the SHA-256 of its file, the object, and the version that a delta is against
    00000007.full     the whole weight file, or …
    00000007.delta    … what turns the file before it into it (`weight_file`)

An object is there before its JSON, and whoever reads checks both: the object as it came, and the file that it makes. An
engine follows the deltas back to weights that it has kept, or to a whole file; so it may join at any time, or miss
versions. Whatever is torn, missing or late ends as a WeightSyncError, before any weight is touched.

Owns names and bytes in the folder. Any store that fsspec has a file system for will do, and its own package for that
(for s3:// the package s3fs). Never knows versions' meaning, HTTP or torch; it runs in the learner, in the supervisor,
in the embedded engine and inside vLLM's process.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import queue
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.weight_file import Bytes
from agentrl.errors import WeightSyncError

# An engine that starts should not read further back. `Outbox` begins anew at half of it, so that the bound is never
# met in order.
_LONGEST = 100  # deltas that an engine applies one after the other
_PLAIN = re.compile(r"\w[\w.-]{0,200}", re.ASCII)  # a name in the folder: an entry leads nowhere else
_OF_VERSION = re.compile(r"(\d{8,})\.(json|full|delta)")
_T = TypeVar("_T")


def is_url(path: object) -> bool:
    """Whether a weight file is named by the URL of its JSON, and not by a path."""
    return isinstance(path, str) and "://" in path


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """The JSON of a version: `sha256` is that of its weight file; `base` the name of the entry that its delta is
    against."""

    sha256: str
    object: str
    object_sha256: str
    object_bytes: int
    base: str | None = None


class ObjectFolder:
    """A folder at `url`. Each call ends within `deadline_s`. Raises WeightSyncError."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self.url, self._deadline_s = url.rstrip("/"), deadline_s

    def read(self, name: str) -> bytes:
        return self._call(f"read {self.url}/{name}", lambda fs, root: fs.cat_file(f"{root}/{name}"))

    def write(self, name: str, data: bytes | Path) -> None:
        def write(fs: Any, root: str) -> None:
            fs.makedirs(root, exist_ok=True)
            if isinstance(data, Path):
                fs.put_file(str(data), f"{root}/{name}")
            else:
                fs.pipe_file(f"{root}/{name}", data)

        self._call(f"write {self.url}/{name}", write)

    def names(self) -> list[str]:
        def names(fs: Any, root: str) -> list[str]:
            # fsspec remembers listings, and other processes write here.
            fs.invalidate_cache()
            object_paths = cast("list[str]", fs.ls(root, detail=False) if fs.exists(root) else [])
            return [object_path.rstrip("/").rpartition("/")[2] for object_path in object_paths]

        return self._call(f"list {self.url}", names)

    def remove(self, names: Collection[str]) -> None:
        def remove(fs: Any, root: str) -> None:
            for name in names:
                fs.rm_file(f"{root}/{name}")

        self._call(f"remove {len(names)} objects of {self.url}", remove)

    def remove_all(self) -> None:
        self._call(f"remove {self.url}", lambda fs, root: fs.rm(root, recursive=True) if fs.exists(root) else None)

    def entry(self, name: str) -> WeightEntry:
        """The entry of that name."""
        entry_bytes = self.read(name)
        try:
            entry_fields = cast("dict[str, Any]", json.loads(entry_bytes))
            entry = WeightEntry(**{field.name: entry_fields[field.name] for field in fields(WeightEntry)})
            # Whoever may write an entry may not make an engine read `../../secrets`: an entry leads nowhere but into
            # its own folder.
            if not all(_PLAIN.fullmatch(name) for name in (entry.object, entry.base or entry.object)):
                raise ValueError("it names an object outside of its folder")
            return entry
        except (ValueError, LookupError, TypeError) as error:
            raise WeightSyncError(f"{self.url}/{name} is torn, or no entry of weights ({error!r})") from error

    def put(self, stem: str, entry: WeightEntry, data: Path) -> str:
        """Write an object, then its entry; returns the URL of the entry."""
        # The object before the entry: a reader that sees the entry finds the object whole. A learner that dies in
        # between leaves an object without an entry, which `tidy` removes.
        self.write(entry.object, data)
        self.write(f"{stem}.json", json.dumps(asdict(entry)).encode())
        return f"{self.url}/{stem}.json"

    def of_version(self, version: int) -> str:
        """The URL of a version's entry."""
        return f"{self.url}/{version:08d}.json"

    def offer(self, path: Path) -> str:
        """Put a whole weight file that belongs to no version into the folder, unless it is there; returns the URL of
        its entry."""
        weight_bytes = weight_file.open_bytes(path)
        sha256 = weight_file.digest(weight_bytes)
        # Named by its content, so that several runs that start from one model share the upload, and nothing of theirs
        # is taken for a version.
        entry_stem = f"whole-{sha256[:32]}"
        if f"{entry_stem}.json" in self.names():
            return f"{self.url}/{entry_stem}.json"
        entry = WeightEntry(
            sha256=sha256, object=f"{entry_stem}.full", object_sha256=sha256, object_bytes=len(weight_bytes)
        )
        return self.put(entry_stem, entry, path)

    def object_of(self, entry: WeightEntry) -> bytes:
        """The bytes that an entry names, checked."""
        object_bytes = self.read(entry.object)
        if (digest := hashlib.sha256(object_bytes).hexdigest()) != entry.object_sha256:
            received = f"{len(object_bytes)} bytes with SHA-256 {digest[:12]}…"
            expected = f"{entry.object_bytes} with {entry.object_sha256[:12]}…"
            raise WeightSyncError(f"{self.url}/{entry.object} is torn or damaged: {received}, expected {expected}")
        return object_bytes

    def _call(self, doing: str, call: Callable[[Any, str], _T]) -> _T:
        """On a thread that is left behind if it does not end in time: not every store has deadlines of its own."""
        answer_queue: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer_queue.put((call(*_file_system(self.url)), None))
            except BaseException as error:
                answer_queue.put((None, error))

        # A thread for each call, and no pool: one that hangs is lost, and would take a worker of the pool with it
        # each time. Daemonic, so that a process can end without the store.
        threading.Thread(target=run, name="object-store", daemon=True).start()
        try:
            answer, error = answer_queue.get(timeout=self._deadline_s)
        except queue.Empty:
            within_deadline = f"within {self._deadline_s:g} s (half of engine.liveness_deadline_s)"
            raise WeightSyncError(f"cannot {doing}: the store did not answer {within_deadline}") from None
        if error is not None:
            raise WeightSyncError(f"cannot {doing}: {type(error).__name__}: {error}") from error
        return cast("_T", answer)


def _file_system(url: str) -> tuple[Any, str]:
    fsspec_core: Any = importlib.import_module("fsspec.core")  # it has no types; only runs that name a store load it
    return fsspec_core.url_to_fs(url)


def fetch(url: str, sha256: str, *, base: tuple[str, Bytes] | None = None, deadline_s: float) -> Bytes:
    """The weight file whose entry is at `url`, made of `base` (a SHA-256 and the bytes that have it) if its deltas lead
    there. Each object is read within `deadline_s`. Raises WeightSyncError unless it has this SHA-256."""
    folder_url, _, entry_name = url.rpartition("/")
    object_folder, delta_entries = ObjectFolder(folder_url, deadline_s=deadline_s), list[WeightEntry]()
    entry = object_folder.entry(entry_name)
    final_digest = entry.sha256
    while entry.base is not None and len(delta_entries) < _LONGEST:
        delta_entries.append(entry)
        entry = object_folder.entry(entry.base)
        # Compared by digest and not by number: what counts is that these bytes are the ones that the delta was made
        # against.
        if base is not None and entry.sha256 == base[0]:
            break
    if base is not None and entry.sha256 == base[0]:
        weight_bytes = base[1]
    elif entry.base is None:
        weight_bytes = np.frombuffer(object_folder.object_of(entry), dtype=np.uint8)
    else:
        raise WeightSyncError(f"{url} is more than {_LONGEST} deltas away from a whole file")
    for delta_entry in reversed(delta_entries):
        weight_bytes = weight_file.patched(
            weight_bytes, io.BytesIO(object_folder.object_of(delta_entry)), f"{folder_url}/{delta_entry.object}"
        )
    # The whole result, and not each step: a chain of right deltas over a wrong base ends here too.
    if final_digest != sha256 or weight_file.digest(weight_bytes) != sha256:
        raise WeightSyncError(f"{url} does not make the weights {sha256[:12]}… that were announced")
    return weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version in the folder: the URL of its entry, and how many bytes were written for it."""

    url: str
    bytes: int


class Outbox:
    """Puts one version after the other into a folder: with `deltas` the changes since the one before, and a whole file
    when those since the last one have grown as large as it. So an engine never reads more than twice the weights."""

    def __init__(self, folder: ObjectFolder, *, deltas: bool) -> None:
        self._folder, self._deltas = folder, deltas
        self._last: tuple[str, Path, str] | None = None  # entry, local file, its SHA-256
        self._bases: dict[str, str | None] = {}  # of the entries put here
        self._grown, self._count = 0, 0

    def put(self, version: int, path: Path, sha256: str) -> StoredVersion:
        """Write a version whose file is at `path`, which stays there until the next one was put."""
        entry_stem, full_bytes = f"{version:08d}", path.stat().st_size
        object_path, base_entry = path, None
        if self._deltas and self._last is not None and self._last[1].exists() and self._count < _LONGEST // 2:
            delta_path = path.with_suffix(".delta")
            base_bytes, new_bytes = weight_file.open_bytes(self._last[1]), weight_file.open_bytes(path)
            delta_bytes = weight_file.write_delta(base_bytes, new_bytes, delta_path, width=weight_file.width(new_bytes))
            # As in a backup with increments: a reader reads at most one whole file and deltas of the same size.
            if self._grown + delta_bytes < full_bytes:
                object_path, base_entry = delta_path, self._last[0]
        try:
            object_bytes = object_path.stat().st_size
            object_name = f"{entry_stem}.{'full' if base_entry is None else 'delta'}"
            object_digest = weight_file.digest(weight_file.open_bytes(object_path))
            entry = WeightEntry(
                sha256=sha256,
                object=object_name,
                object_sha256=object_digest,
                object_bytes=object_bytes,
                base=base_entry,
            )
            url = self._folder.put(entry_stem, entry, object_path)
        finally:
            path.with_suffix(".delta").unlink(missing_ok=True)
        self._last = (f"{entry_stem}.json", path, sha256)
        self._bases[f"{entry_stem}.json"] = base_entry
        self._grown, self._count = (0, 0) if base_entry is None else (self._grown + object_bytes, self._count + 1)
        return StoredVersion(url=url, bytes=object_bytes)

    def whole_next(self) -> None:
        """Put the next version whole: an engine could not read what a delta needs."""
        self._last = None

    def tidy(self, versions: Collection[int]) -> None:
        """Remove the objects of all versions but these and those that their deltas need, an earlier learner's too."""
        needed_names: set[str] = set()
        for version in versions:
            name: str | None = f"{version:08d}.json"
            while name is not None and name not in needed_names:
                needed_names.add(name)
                # Only entries of this process are known, which is enough: a learner that starts again begins with a
                # whole file.
                name = self._bases.get(name)
        needed_stems = {name.removesuffix(".json") for name in needed_names}
        self._bases = {name: base for name, base in self._bases.items() if name in needed_names}
        version_matches = [match for name in self._folder.names() if (match := _OF_VERSION.fullmatch(name))]
        self._folder.remove([match[0] for match in version_matches if match[1] not in needed_stems])


def check(url: str, *, deadline_s: float) -> None:
    """Write, read and remove a small object. Raises WeightSyncError if the store does not do it."""
    check_folder = ObjectFolder(f"{url.rstrip('/')}/agentrl-check", deadline_s=deadline_s)
    check_folder.write("probe", b"agentrl")
    if check_folder.read("probe") != b"agentrl":
        raise WeightSyncError(f"{check_folder.url}/probe was not read as it was written")
    check_folder.remove_all()
