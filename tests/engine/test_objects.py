"""Weights through a folder of an object store: what is whole arrives, what is not is never loaded."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.engine.weight_sync import object_store, weight_file
from agentrl.engine.weight_sync.object_store import ObjectFolder, Outbox, StoredVersion, fetch
from agentrl.errors import WeightSyncError

DEADLINE_S = 120.0


class Versions:
    """A learner's weight files; each version changes one value in two hundred, as a small step in bfloat16 does."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.files = scratch, dict[int, Path]()
        self._random = np.random.default_rng(0)
        self._values = self._random.normal(size=50_000).astype(np.float16)

    def make(self, version: int, *, share: float = 0.005) -> Path:
        moved = self._random.random(len(self._values)) < share
        self._values = np.where(moved, self._values * np.float16(1.01), self._values).astype(np.float16)
        self.files[version] = self.scratch / f"{version}.safetensors"
        save_file({"w": self._values}, self.files[version])
        return self.files[version]

    def sha256(self, version: int) -> str:
        return hashlib.sha256(self.files[version].read_bytes()).hexdigest()

    def kept(self, version: int) -> tuple[str, weight_file.Bytes]:
        """What an engine keeps of a version that it has."""
        return self.sha256(version), np.frombuffer(self.files[version].read_bytes(), dtype=np.uint8)


class Scene:
    def __init__(self, path: Path, *, deltas: bool = True) -> None:
        (path / "scratch").mkdir()
        self.path, self.versions = path / "store", Versions(path / "scratch")
        self.folder = ObjectFolder(f"file://{self.path}", deadline_s=DEADLINE_S)
        self.outbox = Outbox(self.folder, deltas=deltas)

    def put(self, version: int, **how: float) -> StoredVersion:
        return self.outbox.put(version, self.versions.make(version, **how), self.versions.sha256(version))

    def got(self, version: int, *, has: int | None = None) -> bool:
        """Whether an engine that has another version, or none, gets this one."""
        base = None if has is None else self.versions.kept(has)
        url, sha256 = self.folder.of_version(version), self.versions.sha256(version)
        return (
            fetch(url, sha256, base=base, deadline_s=DEADLINE_S).tobytes() == self.versions.files[version].read_bytes()
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_engine_makes_a_version_of_the_one_it_has_of_an_older_one_or_of_nothing(scene: Scene) -> None:
    sent = [scene.put(version) for version in range(1, 5)]
    whole = scene.versions.files[1].stat().st_size
    assert sent[0].bytes == whole and all(one.bytes < 0.03 * whole for one in sent[1:])
    assert scene.got(4, has=3) and scene.got(4, has=2) and scene.got(4)
    (scene.path / "00000001.full").unlink()
    assert scene.got(4, has=3), "it read no more than it needed"


def test_whole_files_come_again_when_the_deltas_have_grown_as_large(scene: Scene) -> None:
    sizes = [scene.put(version, share=0.3).bytes for version in range(1, 8)]
    whole = sizes[0]
    assert sum(size == whole for size in sizes) >= 2
    for version in range(1, 8):
        assert scene.got(version)
    start = len(sizes) - 1 - sizes[::-1].index(whole)
    assert sum(sizes[start:]) < 2 * whole


def test_without_deltas_each_version_is_whole(tmp_path: Path) -> None:
    scene = Scene(tmp_path, deltas=False)
    assert scene.put(1).bytes == scene.put(2).bytes == scene.versions.files[2].stat().st_size and scene.got(2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def turned(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("00000002.delta", cut, r"00000002\.delta is torn or damaged: \d+ bytes with SHA-256 \w+…, expected \d+ with"),
        ("00000002.delta", turned, r"00000002\.delta is torn or damaged"),
        ("00000002.delta", Path.unlink, r"cannot read file://.*/00000002\.delta: FileNotFoundError"),
        ("00000002.json", cut, r"00000002\.json is torn, or no entry of weights"),
        ("00000002.json", Path.unlink, r"cannot read file://.*/00000002\.json: FileNotFoundError"),
        ("00000001.full", cut, r"00000001\.full is torn or damaged"),
    ],
)
def test_what_is_torn_or_missing_is_never_loaded(
    name: str, harm: Callable[[Path], None], said: str, scene: Scene
) -> None:
    scene.put(1)
    scene.put(2)
    harm(scene.path / name)
    with pytest.raises(WeightSyncError, match=said):
        scene.got(2)


def test_an_entry_of_other_weights_is_refused(scene: Scene) -> None:
    scene.put(1)
    with pytest.raises(
        WeightSyncError, match=r"00000001\.json does not make the weights 000000000000… that were announced"
    ):
        fetch(scene.folder.of_version(1), "0" * 64, deadline_s=DEADLINE_S)
    entry = scene.path / "00000001.json"
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"base": "00000001.json"}))  # it never ends
    with pytest.raises(WeightSyncError, match="more than 100 deltas away from a whole file"):
        scene.got(1)


def test_old_objects_go_and_those_that_a_delta_needs_stay(scene: Scene) -> None:
    kept = scene.folder.offer(scene.versions.make(0))
    for version in range(1, 6):
        scene.put(version)
    (scene.path / "00000099.full").write_bytes(b"of a learner before this one")
    scene.outbox.tidy([4, 5])
    assert sorted(path.name for path in scene.path.iterdir() if path.name[0] == "0") == sorted(
        f"0000000{version}.{end}" for version in range(1, 6) for end in ("json", "full" if version == 1 else "delta")
    )
    scene.outbox.whole_next()
    scene.put(6)
    scene.put(7)
    scene.outbox.tidy([6, 7])
    left = {path.name for path in scene.path.iterdir()}
    assert {name for name in left if name[0] == "0"} == {
        "00000006.full", "00000006.json", "00000007.delta", "00000007.json"
    } and scene.got(7)  # fmt: skip
    assert kept.rpartition("/")[2] in left, "what was offered belongs to no version"


def test_a_store_that_hangs_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hangs(url: str) -> Any:
        release.wait()

    monkeypatch.setattr(object_store, "_file_system", hangs)
    with pytest.raises(WeightSyncError, match=r"did not answer within 0\.05 s \(half of engine\.liveness_deadline_s\)"):
        object_store.check("file:///nowhere", deadline_s=0.05)
    release.set()


def test_a_store_without_its_package_or_without_rights_is_named() -> None:
    with pytest.raises(
        WeightSyncError, match=r"cannot write nosuch://there/agentrl-check/probe: ValueError: Protocol not"
    ):
        object_store.check("nosuch://there", deadline_s=DEADLINE_S)
    with pytest.raises(WeightSyncError, match=r"cannot write file:///proc/agentrl/agentrl-check/probe"):
        object_store.check("file:///proc/agentrl", deadline_s=DEADLINE_S)
