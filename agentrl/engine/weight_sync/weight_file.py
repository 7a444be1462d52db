"""Weight files on their way from learner to engine: digest, layout, and deltas between two of them.

A weight file is one safetensors file. A delta holds the change against another file of the same layout: the bytes of
both XORed, sorted into planes (all first bytes of the elements, all second bytes, …) so that the planes of sign,
exponent and high mantissa, which hardly change in one optimizer step, become runs of zeros, and packed with zstd.
Whoever applies a delta checks the SHA-256 of the whole result, so a wrong base or a damaged delta is never loaded.

Owns bytes on disk. Never knows versions, engines, HTTP or torch; it runs in the learner, in the embedded engine and
inside vLLM's process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ModelError, WeightSyncError

Bytes = NDArray[np.uint8]

_MAGIC = b"agentrl-delta-1\n"
_HEAD = struct.Struct("<QB")  # bytes of the file, width of an element
_MAX_HEADER = 100 << 20  # the safetensors format's own bound
_CHUNK = 8 << 20
_LEVEL = 1  # of zstd: higher levels cost more time than they save on any link faster than 100 Mbit/s


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """The place of a tensor in a weight file: `start` to `end` are offsets from the file's first byte."""

    name: str
    dtype: str  # safetensors' own name: F32, BF16, …
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def open_bytes(path: Path) -> Bytes:
    """A read-only view of a file's bytes. Raises WeightSyncError if it cannot be read or is empty."""
    try:
        # Mapped: digest, delta and upload each read once through it, and no second copy of the weights lies in the
        # learner's memory.
        return cast("Bytes", np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"cannot read weight file {str(path)!r}: {error}") from error


def mapped(file: BinaryIO) -> Bytes:
    """A read-only view of an open file's bytes. Raises OSError, or ValueError if the file is empty."""
    return cast("Bytes", np.memmap(file, dtype=np.uint8, mode="r"))


def parts(folder: Path) -> list[Path]:
    """The weight files of a model folder: several if `model.safetensors.index.json` lists them. Raises ModelError if
    there is none, or the index names one that is not there."""
    index_path = folder / "model.safetensors.index.json"
    try:
        file_names = (
            sorted(set(json.loads(index_path.read_text())["weight_map"].values())) if index_path.is_file() else []
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index_path} lists no weights ({error!r}): save the model again with save_pretrained"
        ) from error
    part_paths = [folder / file_name for file_name in file_names] or [folder / "model.safetensors"]
    if missing_files := [part_path.name for part_path in part_paths if not part_path.is_file()]:
        hint = f"it has no {missing_files[0]}: save the model again with save_pretrained"
        raise ModelError(f"cannot read weights from {str(folder)!r}: {hint}")
    return part_paths


def width(data: Bytes) -> int:
    """Bytes of an element, as most of a weight file's elements have it. Raises WeightSyncError for a malformed file."""
    # By the largest tensor, not by a count of tensors: norms are many and small, and may be float32 beside bfloat16
    # matrices.
    largest_tensor = max(places(data), key=lambda place: place.numel)
    return (largest_tensor.end - largest_tensor.start) // largest_tensor.numel


def digest(data: Bytes) -> str:
    """SHA-256 of a file's bytes, as hex."""
    return hashlib.sha256(memoryview(cast("Any", data))).hexdigest()


def places(data: Bytes) -> Iterator[TensorPlace]:
    """The tensors of a safetensors file in the order of their bytes. Raises WeightSyncError for a malformed header."""
    try:
        (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
        # Before it is used to slice: a torn file has any number there.
        if header_bytes > min(_MAX_HEADER, len(data) - 8):
            raise ValueError(f"header of {header_bytes} bytes in a file of {len(data)}")
        header = cast("dict[str, Any]", json.loads(data[8 : 8 + header_bytes].tobytes()))
        header.pop("__metadata__", None)
        tensor_places = [
            TensorPlace(
                name=tensor_name,
                dtype=tensor_entry["dtype"],
                shape=tuple(tensor_entry["shape"]),
                start=8 + header_bytes + tensor_entry["data_offsets"][0],
                end=8 + header_bytes + tensor_entry["data_offsets"][1],
            )
            for tensor_name, tensor_entry in header.items()
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"not a safetensors file: {error}") from error
    for tensor_place in sorted(tensor_places, key=lambda place: place.start):
        if not 8 + header_bytes <= tensor_place.start <= tensor_place.end <= len(data):
            raise WeightSyncError(
                f"not a whole safetensors file: {tensor_place.name} lies outside its {len(data)} bytes"
            )
        yield tensor_place


def write_delta(base: Bytes, new: Bytes, target: Path, *, width: int) -> int:
    """Write what turns `base` into `new`, atomically; returns its bytes. `width` is that of most elements (2 for
    bfloat16, 4 for float32) and decides only how well it packs. Raises WeightSyncError if the layouts differ."""
    zstandard = _zstandard()
    if len(base) != len(new):
        raise WeightSyncError(f"a delta needs two files of one layout, not {len(base)} and {len(new)} bytes")
    # In the same folder, since a rename over the border of a file system is a copy, and a copy can be seen half done.
    draft_path = target.with_name(f".{target.name}.{os.getpid()}")
    chunk_bytes = _CHUNK // width * width
    try:
        with draft_path.open("wb") as draft_file:
            draft_file.write(_MAGIC + _HEAD.pack(len(new), width))
            with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(draft_file, closefd=False) as packer:
                for chunk_start in range(0, len(new), chunk_bytes):
                    chunk = slice(chunk_start, chunk_start + chunk_bytes)
                    changed_bits = np.bitwise_xor(base[chunk], new[chunk])
                    packer.write(_planes(changed_bits, width))
        draft_path.replace(target)
    finally:
        draft_path.unlink(missing_ok=True)
    return target.stat().st_size


def patched(base: Bytes, delta: BinaryIO, name: str) -> Bytes:
    """Apply a delta, called `name` in errors, to `base`; whoever asks checks the result's digest. Raises
    WeightSyncError if it is no delta, or of another size."""
    zstandard = _zstandard()
    try:
        if delta.read(len(_MAGIC)) != _MAGIC:
            raise WeightSyncError(f"{name!r} is not a delta of weights")
        new_bytes, element_bytes = _HEAD.unpack(delta.read(_HEAD.size))
        if new_bytes != len(base) or element_bytes < 1:
            raise WeightSyncError(f"{name!r} is a delta of {new_bytes} bytes, its base has {len(base)}")
        new_weights = np.empty(new_bytes, dtype=np.uint8)
        chunk_bytes = _CHUNK // element_bytes * element_bytes
        with zstandard.ZstdDecompressor().stream_reader(delta, closefd=False) as unpacker:
            for chunk_start in range(0, new_bytes, chunk_bytes):
                chunk_length = min(chunk_bytes, new_bytes - chunk_start)
                chunk = slice(chunk_start, chunk_start + chunk_length)
                planes = np.frombuffer(_read_exactly(unpacker, chunk_length), dtype=np.uint8)
                np.bitwise_xor(base[chunk], _interleaved(planes, element_bytes), out=new_weights[chunk])
    except (OSError, ValueError, struct.error, zstandard.ZstdError) as error:
        raise WeightSyncError(f"cannot apply delta {name!r}: {error}") from error
    return new_weights


def _planes(change: Bytes, width: int) -> bytes:
    """Byte `k` of every element, for each `k` in turn; a remainder shorter than an element stays at the end."""
    full_length = len(change) // width * width
    return change[:full_length].reshape(-1, width).T.tobytes() + change[full_length:].tobytes()


def _interleaved(planes: Bytes, width: int) -> Bytes:
    full_length = len(planes) // width * width
    elements = planes[:full_length].reshape(width, -1).T.reshape(-1)
    return np.concatenate([elements, planes[full_length:]])


def _read_exactly(stream: Any, length: int) -> bytes:
    read_parts: list[bytes] = []
    while length:
        read_bytes = cast("bytes", stream.read(length))
        if not read_bytes:
            raise ValueError(f"it ends {length} bytes early")
        read_parts.append(read_bytes)
        length -= len(read_bytes)
    return b"".join(read_parts)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise WeightSyncError("deltas need the Python package 'zstandard' on both sides: install it") from error
    return zstandard
