"""Weights as one safetensors file, for an engine to load.

Owns names, completeness and atomicity of the file. Never knows who reads it, nor which version it becomes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.engine.weight_sync import fingerprints as fingerprint
from agentrl.errors import RunFailed
from agentrl.learner.model import lora
from agentrl.learner.optimizers.master_weights import masters
from agentrl.learner.parallel.fsdp import gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A written file: `sha256` of its bytes, `names` of its tensors as a Hugging Face folder has them, size, and
    fingerprints of its tensors as an engine of the file's dtype has them."""

    path: Path
    sha256: str
    names: tuple[str, ...]
    size_bytes: int
    fingerprints: dict[str, str]


def held(module: Any) -> dict[str, Tensor]:
    """The tensors of a transformers model under its own names, not copied; an adapter is merged into them, and
    masters stand for what is rounded from them. A tied one
    (`lm_head.weight` of a model with tied embeddings) is there once, under its source's name."""
    tied = set(module.all_tied_weights_keys)
    state = lora.merged(module) | masters(module)
    return {name: tensor.detach() for name, tensor in state.items() if name not in tied}


def checkpoint_names(module: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's checkpoint format names and divides it."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(module, state).items()}


def checkpoint_tensors(module: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a transformers model as its checkpoint format has them, on the CPU, cast to `dtype`. Vectors stay
    as they are: they weigh nothing, and engines keep some (a router's biases) in float32 whatever their dtype.

    Every rank of a sharded model takes part, rank 0 gets them."""
    return {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() and tensor.dim() > 1 else None)
        for name, tensor in checkpoint_names(module, gathered(held(module))).items()
    }


def export_weights(
    module: Any, path: Path, *, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None
) -> WeightFile:
    """`write_weights` of a model that is not sharded."""
    return write_weights(checkpoint_tensors(module, dtype), path, dtype=dtype, metadata=metadata)


def write_weights(
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WeightFile:
    """Write what `checkpoint_tensors` returned to `path`: the whole file or none, a reader never sees half of one.
    Raises RunFailed if its folder has no room for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(tensors), draft, metadata={"format": "pt", **(metadata or {})})
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = draft.stat().st_size
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    marks = fingerprint.of_tensors({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()})
    return WeightFile(path=path, sha256=digest, names=tuple(sorted(tensors)), size_bytes=size, fingerprints=marks)


def check_room(folder: Path, size_bytes: int) -> None:
    """Raises RunFailed if so many bytes do not fit. Called before a write: shared memory that overflows kills a writer
    that maps it."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise RunFailed(
            f"{folder} has {free >> 20} MiB left, and the weights take {-(-size_bytes >> 20)}: free some, or name a "
            "folder with more room in scratch_dir"
        )
