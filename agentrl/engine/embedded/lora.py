"""LoRA adapters of the embedded engine: PEFT's folders, packed as the model packs the weights that they change.

Owns their reading and packing. Never knows requests, nor which version an adapter is. Float32.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and safetensors leave parts of their signatures untyped)

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from agentrl.engine.embedded.architecture import Architecture
from agentrl.errors import ModelError

_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a layer, and the weights that each joins."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The factors of the product that an adapter adds to a layer's: x @ down_IR @ up_RO."""

    down_IR: torch.Tensor
    up_RO: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`layers` has the changed products of each layer. `key` distinguishes its keys and values from those of other
    weights: below 0, and never used again."""

    name: str
    key: int
    layers: tuple[Mapping[str, Pair], ...]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rows of a pass that run with an adapter: all of them, and their places among the rows that have logits."""

    adapter: Adapter
    rows_N: torch.Tensor
    logit_places_W: torch.Tensor

    def add(self, out: torch.Tensor, x: torch.Tensor, layer: int, part: str, *, only_logit_rows: bool) -> None:
        """Add the adapter's part to `out`, a product of `x`, whose rows are all or those that have logits."""
        low_rank_pair = self.adapter.layers[layer].get(part)
        if low_rank_pair is not None:
            adapted_rows = self.logit_places_W if only_logit_rows else self.rows_N
            # Down first, then up: two thin products. Their product in advance would be a whole weight for each
            # adapter, and every batch with two adapters would compute it twice.
            out.index_add_(0, adapted_rows, x[adapted_rows] @ low_rank_pair.down_IR @ low_rank_pair.up_RO)


def adapted(adapters: Sequence[Adapter | None], logit_rows: Sequence[int]) -> tuple[Adapted, ...]:
    """The rows of a pass by adapter, from the adapter of each row (None: without one) and the rows that have logits."""
    adapter_by_id = {id(adapter): adapter for adapter in adapters if adapter is not None}
    return tuple(
        Adapted(
            adapter,
            torch.tensor([row_number for row_number, row_adapter in enumerate(adapters) if row_adapter is adapter]),
            torch.tensor([place for place, row in enumerate(logit_rows) if adapters[row] is adapter], dtype=torch.long),
        )
        for adapter in adapter_by_id.values()
    )


def rotary(tensor: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """The rows of q or k with rotary pairs side by side: transformers rotates dimension i with i + D/2."""
    paired_dimensions = torch.arange(size).view(2, -1).t().reshape(-1)
    return tensor.view(heads, size, *tensor.shape[1:])[:, paired_dimensions].reshape(tensor.shape)


def read(
    folder: Path,
    architecture: Architecture,
    *,
    name: str,
    key: int,
    file: Callable[[str], bytes] | None = None,
) -> Adapter:
    """Read an adapter from a folder; `file` gives the bytes of a file in there, if they are not simply read. Raises
    ModelError, in one line, if it is not one of a model of this architecture."""
    file = file or (lambda name: (folder / name).read_bytes())
    try:
        adapter_settings = cast("dict[str, Any]", json.loads(file("adapter_config.json")))
        # From bytes, and not from a path: what was checked is then what is loaded, however the file changes in
        # between.
        tensors = {_short(name): tensor.float() for name, tensor in load(file("adapter_model.safetensors")).items()}
        lora_scale = float(adapter_settings["lora_alpha"]) / float(adapter_settings["r"])
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {reason}") from error
    layer_pairs = tuple(
        _layer(architecture, tensors, lora_scale, layer_number, folder) for layer_number in range(architecture.layers)
    )
    # What no layer took would be left out in silence, an adapted output layer say, and the policy would sample from
    # other weights than the learner trains.
    if tensors:
        raise ModelError(f"the adapter in {str(folder)!r} changes {min(tensors)}, which the embedded engine cannot")
    return Adapter(name, key, layer_pairs)


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _layer(
    a: Architecture, tensors: dict[str, torch.Tensor], scale: float, at: int, folder: Path
) -> Mapping[str, Pair]:
    """Take the tensors of a layer out of `tensors`, and pack them."""
    shapes = a.shapes()
    layer_pairs: dict[str, Pair] = {}
    for product, names in _PARTS.items():
        down_matrices: list[torch.Tensor] = []
        up_matrices: list[torch.Tensor] = []
        for weight_name in (f"model.layers.{at}.{suffix}" for suffix in names):
            output_width, input_width = shapes[f"{weight_name}.weight"]
            down_matrix = tensors.pop(f"{weight_name}.lora_A.weight", torch.zeros(0, input_width))
            up_matrix = tensors.pop(f"{weight_name}.lora_B.weight", torch.zeros(output_width, 0)) * scale
            if down_matrix.shape != (up_matrix.shape[1], input_width) or up_matrix.shape[0] != output_width:
                raise ModelError(f"the adapter in {str(folder)!r} is of another model: {weight_name}")
            if weight_name.endswith("q_proj"):
                # The rows of `lora_B` are rows of the weight that it adds to, so they are permuted as `_pack`
                # permutes q and k; `lora_A` reads the hidden state, whose order does not change.
                up_matrix = rotary(up_matrix, a.heads, a.head_dim)
            if weight_name.endswith("k_proj"):
                up_matrix = rotary(up_matrix, a.kv_heads, a.head_dim)
            down_matrices.append(down_matrix)
            up_matrices.append(up_matrix)
        joined_down = torch.cat(down_matrices)
        if len(joined_down):
            # q, k and v are one product here. Their adapters have inputs of their own ranks, so the down matrices
            # are stacked and the up matrices are block-diagonal: no rank of q may reach k.
            layer_pairs[product] = Pair(joined_down.t().contiguous(), torch.block_diag(*up_matrices).t().contiguous())
    return layer_pairs
