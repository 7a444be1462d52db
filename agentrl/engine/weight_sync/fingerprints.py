"""Fingerprints of weights: enough of a tensor to tell one optimizer step from the next, and cheap after every sync.

Of a vector all values count; of a matrix all rows of a few columns. Every step changes some of them, and an engine gets
them exactly, also out of a layer that it packed: a column is what the layer makes of a one-hot input. Values are
rounded to one dtype first: a float32 file and a bfloat16 engine agree after the same rounding.

Owns which values count and how differences are named. Never knows models or engines; no torch, so that learner, client
and vLLM's processes share it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.weight_file import Bytes

TRANSPOSED = " transposed"

# Every row counts in each column, and an optimizer changes nearly all entries of a matrix at once: a few columns see
# any step. All columns would make a sync read the whole model once more.
_COLUMNS = 8
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def columns(width: int) -> list[int]:
    """The columns that count in a matrix of so many; the same everywhere."""
    generator = random.Random(f"agentrl fingerprint {width}")
    return sorted(generator.sample(range(width), min(_COLUMNS, width)))


def of(values: NDArray[Any]) -> str:
    """Fingerprint a vector, or a matrix's columns [rows, columns]."""
    # -0.0 + 0.0 is 0.0: a column that was read through a one-hot product has lost the sign, and the file has it
    # (`test_a_zero_that_lost_its_sign_in_an_engine_is_the_same`).
    contiguous = np.ascontiguousarray(values, dtype=np.float32) + 0.0  # what was computed has lost the sign of a zero
    return hashlib.blake2b(str(contiguous.shape).encode() + contiguous.tobytes(), digest_size=8).hexdigest()


def of_tensors(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprint torch vectors and matrices by name; of a square matrix also its transpose, as `NAME transposed`."""
    fingerprints: dict[str, str] = {}
    for tensor_name, tensor in tensors.items():
        if tensor.dim() == 1:
            fingerprints[tensor_name] = of(tensor.float().cpu().numpy())
        elif tensor.dim() == 2:
            chosen_columns = columns(tensor.shape[1])
            fingerprints[tensor_name] = of(tensor[:, chosen_columns].float().cpu().numpy())
            # Only a square matrix can be loaded transposed without an error: any other shape is refused at once.
            if tensor.shape[0] == tensor.shape[1]:
                fingerprints[f"{tensor_name}{TRANSPOSED}"] = of(tensor[chosen_columns].T.float().cpu().numpy())
    return fingerprints


def of_file(data: Bytes, dtype: str) -> dict[str, str]:
    """Fingerprint a weight file's vectors and matrices of floats, as an engine of `dtype` has them. Raises
    WeightSyncError for a malformed file."""
    fingerprints: dict[str, str] = {}
    for place in weight_file.places(data):
        if place.dtype in _READ and len(place.shape) in (1, 2):
            tensor = data[place.start : place.end].view(_READ[place.dtype]).reshape(place.shape)
            tensor_values = tensor if tensor.ndim == 1 else tensor[:, columns(place.shape[1])]
            if place.dtype == "BF16":  # the upper half of a float32
                tensor_values = (tensor_values.astype(np.uint32) << 16).view(np.float32)
            fingerprints[place.name] = of(_rounded(tensor_values, dtype))
    return fingerprints


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round to the nearest value of `dtype`, to the even one of two."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    float_bits = values.astype(np.float32).view(np.uint32)
    # numpy has no bfloat16. Rounding to nearest, ties to even, is torch's rule, and one bit of difference would be
    # another fingerprint.
    return ((float_bits + 0x7FFF + ((float_bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


_READ: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """The names of an engine's tensors whose weights are not the `expected` ones, each with the tensor whose weights it
    has instead, if that is known. A name that is not expected is skipped."""
    name_of_fingerprint = {fingerprint: tensor_name for tensor_name, fingerprint in expected.items()}
    wrong_tensors: list[str] = []
    for tensor_name, fingerprint in sorted(actual.items()):
        if tensor_name.endswith(TRANSPOSED):
            continue
        is_tied = tensor_name == _OUTPUT and tensor_name not in expected
        source_name = _EMBEDDING if is_tied else tensor_name
        if source_name not in expected or expected[source_name] == fingerprint:
            continue
        tensor_label = f"lm_head (tied to {_EMBEDDING})" if is_tied else tensor_name
        owner_name = name_of_fingerprint.get(fingerprint)
        if owner_name == f"{tensor_name}{TRANSPOSED}":
            tensor_label += " (holds its transpose)"
        elif owner_name is not None:
            tensor_label += f" (holds {owner_name})"
        wrong_tensors.append(tensor_label)
    return wrong_tensors
