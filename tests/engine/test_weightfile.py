"""Weight files: layout against the safetensors library, deltas against the bytes they stand for, damage refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from each_case import each_case
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.weight_sources import Sources
from agentrl.errors import ModelError, WeightSyncError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def as_bytes(data: bytes) -> weight_file.Bytes:
    return np.frombuffer(data, dtype=np.uint8)


def test_places_are_those_of_the_library(folder: Path) -> None:
    tensors = {
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.uint8),
        "c": np.zeros((0, 4), dtype=np.float16),
        "d": np.array(3.5),
    }
    path = folder / "w.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    data = weight_file.open_bytes(path)
    found = {place.name: place for place in weight_file.places(data)}
    with safe_open(path, "np") as library:
        assert set(found) == set(library.keys())
        for name, place in found.items():
            expected = library.get_tensor(name)
            assert place.shape == expected.shape
            assert data[place.start : place.end].tobytes() == expected.tobytes()
    assert {place.dtype for place in found.values()} == {"F32", "U8", "F16", "F64"}


def test_the_files_of_a_folder_are_one_or_those_of_its_index(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        weight_file.parts(folder)
    (folder / "model.safetensors").touch()
    assert weight_file.parts(folder) == [folder / "model.safetensors"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": names[1], "a": names[0], "c": names[1]}}))
    (folder / names[0]).touch()
    with pytest.raises(ModelError, match=f"has no {names[1]}"):
        weight_file.parts(folder)
    (folder / names[1]).touch()
    assert weight_file.parts(folder) == [folder / name for name in names]
    index.write_text("[]")
    with pytest.raises(ModelError, match="lists no weights"):
        weight_file.parts(folder)


def test_the_width_of_a_file_is_that_of_most_of_its_elements(folder: Path) -> None:
    path = folder / "w.safetensors"
    save_file({"vector": np.zeros(7, dtype=np.float32), "matrix": np.zeros((9, 9), dtype=np.float16)}, path)
    assert weight_file.width(weight_file.open_bytes(path)) == 2


@each_case(
    "data",
    [
        b"",
        b"short",
        (10**6).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]" + b"rest",
        (4).to_bytes(8, "little") + b"nope",
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2]}}       ',
        (57).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8000]}}',
        (57).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-900,8]}}',
    ],
)
def test_a_malformed_file_is_one_readable_error(data: bytes) -> None:
    with pytest.raises(WeightSyncError, match=r"not a (whole )?safetensors file"):
        list(weight_file.places(as_bytes(data)))


def test_a_digest_is_sha256(folder: Path) -> None:
    path = folder / "w"
    path.write_bytes(b"weights")
    assert weight_file.digest(weight_file.open_bytes(path)) == hashlib.sha256(b"weights").hexdigest()


@settings(max_examples=60, deadline=None)
@given(
    base=st.binary(min_size=1, max_size=300),
    flips=st.dictionaries(st.integers(0, 299), st.integers(1, 255), max_size=40),
    width=st.sampled_from([1, 2, 4, 8]),
    chunk=st.sampled_from([8, 24, 1 << 20]),
)
def test_a_delta_makes_the_new_file_of_the_old(
    tmp_path_factory: pytest.TempPathFactory, base: bytes, flips: dict[int, int], width: int, chunk: int
) -> None:
    new = bytearray(base)
    for at, flip in flips.items():
        new[at % len(new)] ^= flip
    target = tmp_path_factory.mktemp("delta") / "d"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_file, "_CHUNK", chunk)
        size = weight_file.write_delta(as_bytes(base), as_bytes(bytes(new)), target, width=width)
        assert size == target.stat().st_size
        with target.open("rb") as file:
            result = weight_file.patched(as_bytes(base), file, "d")
    assert result.tobytes() == bytes(new)


def test_what_hardly_changed_packs_small(folder: Path) -> None:
    """A step that moves bfloat16 weights by less than their spacing changes few bits of few elements."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 200_000).astype(np.float32)
    moved = weights * (1 + 1e-4 * rng.normal(size=weights.shape).astype(np.float32))
    old, new = ((array.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for array in (weights, moved))
    size = weight_file.write_delta(old, new, folder / "d", width=2)
    assert 0 < (old != new).mean() < 0.05
    assert size < 0.12 * len(old)


def test_damage_and_wrong_bases_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, new = as_bytes(bytes(1000)), as_bytes(bytes(999) + b"x")
    digest = weight_file.digest(new)
    target = folder / "d"
    weight_file.write_delta(base, new, target, width=4)

    def refused(base: weight_file.Bytes, reason: str) -> None:
        """What a request is told is the same each time; the reason is for the engine's log."""
        caplog.clear()
        with pytest.raises(WeightSyncError, match=f"^cannot read weight file .* SHA-256 {digest[:12]}…, or a delta"):
            Sources([str(folder)]).read(str(target), digest, base)
        assert re.search(reason, caplog.text)

    assert bytes(Sources([str(folder)]).read(str(target), digest, base)) == bytes(new)
    refused(as_bytes(b"y" * 1000), "expected " + digest[:12])
    refused(base[:500], "is a delta of 1000 bytes, its base has 500")
    with pytest.raises(WeightSyncError, match="not 1000 and 500 bytes"):
        weight_file.write_delta(base, new[:500], target, width=4)
    whole = target.read_bytes()
    for damaged, says in (
        (whole[:-4], "cannot apply"),
        (whole[:30], "cannot apply"),
        (b"something else" + whole, "is not a delta"),
        (whole[:-9] + bytes([whole[-9] ^ 255]) + whole[-8:], "cannot apply|expected"),
    ):
        target.write_bytes(damaged)
        refused(base, says)
    target.unlink()
    refused(base, "No such file")


def test_a_delta_is_there_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> bytes:
        raise RuntimeError("killed")

    monkeypatch.setattr(weight_file, "_planes", torn)
    with pytest.raises(RuntimeError):
        weight_file.write_delta(as_bytes(b"ab"), as_bytes(b"ac"), folder / "d", width=1)
    assert list(folder.iterdir()) == []
