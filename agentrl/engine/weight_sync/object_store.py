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
            paths = cast("list[str]", fs.ls(root, detail=False) if fs.exists(root) else [])
            return [path.rstrip("/").rpartition("/")[2] for path in paths]

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
        data = self.read(name)
        try:
            record = cast("dict[str, Any]", json.loads(data))
            entry = WeightEntry(**{field.name: record[field.name] for field in fields(WeightEntry)})
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
        data = weight_file.open_bytes(path)
        sha256 = weight_file.digest(data)
        # Named by its content, so that several runs that start from one model share the upload, and nothing of theirs
        # is taken for a version.
        stem = f"whole-{sha256[:32]}"
        if f"{stem}.json" in self.names():
            return f"{self.url}/{stem}.json"
        entry = WeightEntry(sha256=sha256, object=f"{stem}.full", object_sha256=sha256, object_bytes=len(data))
        return self.put(stem, entry, path)

    def object_of(self, entry: WeightEntry) -> bytes:
        """The bytes that an entry names, checked."""
        data = self.read(entry.object)
        if (digest := hashlib.sha256(data).hexdigest()) != entry.object_sha256:
            received = f"{len(data)} bytes with SHA-256 {digest[:12]}…"
            expected = f"{entry.object_bytes} with {entry.object_sha256[:12]}…"
            raise WeightSyncError(f"{self.url}/{entry.object} is torn or damaged: {received}, expected {expected}")
        return data

    def _call(self, doing: str, call: Callable[[Any, str], _T]) -> _T:
        """On a thread that is left behind if it does not end in time: not every store has deadlines of its own."""
        answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(*_file_system(self.url)), None))
            except BaseException as error:
                answers.put((None, error))

        # A thread for each call, and no pool: one that hangs is lost, and would take a worker of the pool with it
        # each time. Daemonic, so that a process can end without the store.
        threading.Thread(target=run, name="object-store", daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._deadline_s)
        except queue.Empty:
            within = f"within {self._deadline_s:g} s (half of engine.liveness_deadline_s)"
            raise WeightSyncError(f"cannot {doing}: the store did not answer {within}") from None
        if error is not None:
            raise WeightSyncError(f"cannot {doing}: {type(error).__name__}: {error}") from error
        return cast("_T", answer)


def _file_system(url: str) -> tuple[Any, str]:
    core: Any = importlib.import_module("fsspec.core")  # it has no types; only runs that name a store load it
    return core.url_to_fs(url)


def fetch(url: str, sha256: str, *, base: tuple[str, Bytes] | None = None, deadline_s: float) -> Bytes:
    """The weight file whose entry is at `url`, made of `base` (a SHA-256 and the bytes that have it) if its deltas lead
    there. Each object is read within `deadline_s`. Raises WeightSyncError unless it has this SHA-256."""
    folder_url, _, name = url.rpartition("/")
    folder, changes = ObjectFolder(folder_url, deadline_s=deadline_s), list[WeightEntry]()
    entry = folder.entry(name)
    last = entry.sha256
    while entry.base is not None and len(changes) < _LONGEST:
        changes.append(entry)
        entry = folder.entry(entry.base)
        # Compared by digest and not by number: what counts is that these bytes are the ones that the delta was made
        # against.
        if base is not None and entry.sha256 == base[0]:
            break
    if base is not None and entry.sha256 == base[0]:
        data = base[1]
    elif entry.base is None:
        data = np.frombuffer(folder.object_of(entry), dtype=np.uint8)
    else:
        raise WeightSyncError(f"{url} is more than {_LONGEST} deltas away from a whole file")
    for change in reversed(changes):
        data = weight_file.patched(data, io.BytesIO(folder.object_of(change)), f"{folder_url}/{change.object}")
    # The whole result, and not each step: a chain of right deltas over a wrong base ends here too.
    if last != sha256 or weight_file.digest(data) != sha256:
        raise WeightSyncError(f"{url} does not make the weights {sha256[:12]}… that were announced")
    return data


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
        stem, size = f"{version:08d}", path.stat().st_size
        draft, base = path, None
        if self._deltas and self._last is not None and self._last[1].exists() and self._count < _LONGEST // 2:
            delta = path.with_suffix(".delta")
            old, new = weight_file.open_bytes(self._last[1]), weight_file.open_bytes(path)
            change = weight_file.write_delta(old, new, delta, width=weight_file.width(new))
            # As in a backup with increments: a reader reads at most one whole file and deltas of the same size.
            if self._grown + change < size:
                draft, base = delta, self._last[0]
        try:
            grown = draft.stat().st_size
            name = f"{stem}.{'full' if base is None else 'delta'}"
            digest = weight_file.digest(weight_file.open_bytes(draft))
            entry = WeightEntry(sha256=sha256, object=name, object_sha256=digest, object_bytes=grown, base=base)
            url = self._folder.put(stem, entry, draft)
        finally:
            path.with_suffix(".delta").unlink(missing_ok=True)
        self._last = (f"{stem}.json", path, sha256)
        self._bases[f"{stem}.json"] = base
        self._grown, self._count = (0, 0) if base is None else (self._grown + grown, self._count + 1)
        return StoredVersion(url=url, bytes=grown)

    def whole_next(self) -> None:
        """Put the next version whole: an engine could not read what a delta needs."""
        self._last = None

    def tidy(self, versions: Collection[int]) -> None:
        """Remove the objects of all versions but these and those that their deltas need, an earlier learner's too."""
        needed: set[str] = set()
        for version in versions:
            name: str | None = f"{version:08d}.json"
            while name is not None and name not in needed:
                needed.add(name)
                # Only entries of this process are known, which is enough: a learner that starts again begins with a
                # whole file.
                name = self._bases.get(name)
        stems = {name.removesuffix(".json") for name in needed}
        self._bases = {name: base for name, base in self._bases.items() if name in needed}
        matches = [match for name in self._folder.names() if (match := _OF_VERSION.fullmatch(name))]
        self._folder.remove([match[0] for match in matches if match[1] not in stems])


def check(url: str, *, deadline_s: float) -> None:
    """Write, read and remove a small object. Raises WeightSyncError if the store does not do it."""
    folder = ObjectFolder(f"{url.rstrip('/')}/agentrl-check", deadline_s=deadline_s)
    folder.write("probe", b"agentrl")
    if folder.read("probe") != b"agentrl":
        raise WeightSyncError(f"{folder.url}/probe was not read as it was written")
    folder.remove_all()
