"""Rotary positions whose frequencies depend on the longest row that a pass, or an earlier one, had.

transformers computes two such kinds: "longrope" takes one of two sets of frequencies by the longest position of a pass,
and "dynamic" stretches them with it and keeps them for later passes. Rows of such models are computed apart, each from
the model's own frequencies. Never knows packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn


def stretched(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parts of a model that rotate so, and the kind of each."""
    for part in module.modules():
        kind: Any = getattr(part, "rope_type", None)
        for name in cast("dict[str, Any]", kind).values() if isinstance(kind, dict) else [kind]:
            if isinstance(name, str) and (name == "longrope" or "dynamic" in name):
                yield part, name


def restart(module: nn.Module) -> None:
    """Forget the longest row so far."""
    for part, _ in stretched(module):
        for name, whole in list(part.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                part.register_buffer(name.replace("original_inv_freq", "inv_freq"), whole, persistent=False)
        for name in [name for name in vars(part) if name.endswith("max_seq_len_cached")]:
            setattr(part, name, part.original_max_seq_len)
