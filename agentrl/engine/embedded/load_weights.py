"""Weights from safetensors, checked against an architecture before anything uses them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, or of one safetensors file, in float32.

    Raises ModelError where nothing readable is there."""
    weights: dict[str, torch.Tensor] = {}
    for part in weight_file.parts(path) if path.is_dir() else [path]:
        try:
            weights |= load_file(part)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read weights from {str(part)!r}: {error}") from error
    return {name: tensor.float() for name, tensor in weights.items()}


def check_weights(architecture: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless `weights` are exactly this architecture's, of the right shapes and finite."""
    shapes = architecture.shapes()
    spare = set(weights) - set(shapes) - {"lm_head.weight"}
    spare = {name for name in spare if not name.endswith("rotary_emb.inv_freq")}
    if spare:
        raise ModelError(f"unknown weight {min(spare)!r} ({len(spare)} such) for this architecture")
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelError(f"weight {name!r} is missing")
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"weight {name!r} has shape {tuple(weights[name].shape)}, expected {shape}")
        if not bool(torch.isfinite(weights[name]).all()):
            raise ModelError(f"weight {name!r} holds values that are not finite")
