"""The forward pass of the embedded engine: many requests' tokens through one dense decoder on CPU.

Owns packed weights and the arithmetic, and checks a safetensors file against the architecture before anything uses it.
Never knows requests, versions or HTTP: it sees rows of tokens and the cache slots they belong to. All is float32; on
request the factors of products are bfloat16: matrices, keys, values, and what meets them. Norms, rotations, the softmax
of attention, and the sum that runs through the layers are not rounded, the logits are.

Rows of one pass are flat, [N] tokens: first the *single* rows (one new token of a slot each), whose attention is
computed together, then *runs* (several new tokens of one slot), each attending on its own.
Shape suffixes: N rows, S cache slots, K key/value heads, G query heads for each of them, D head size, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.lora import Adapted, rotary
from agentrl.engine.embedded.products import Product
from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError
from agentrl.tokens.vision import TOWER_PREFIX

if TYPE_CHECKING:  # it loads transformers, which most models can do without
    from agentrl.engine.embedded.vision_tower import VisionTower


_STEP: Final = 16
"""Positions by which single rows look further in bfloat16: oneDNN compiles its products anew for each shape, 0.8 ms a
pass. MKL, which multiplies float32, does not."""


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, or of one safetensors file, in float32.

    Raises ModelError where nothing readable is there."""
    weights: dict[str, torch.Tensor] = {}
    for weight_part in weight_file.parts(path) if path.is_dir() else [path]:
        try:
            weights |= load_file(weight_part)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read weights from {str(weight_part)!r}: {error}") from error
    # Always float32 first: norms and rotations stay in it, and `Product` rounds the rest to the dtype of the passes.
    # One rounding, and the same as the learner's export.
    return {name: tensor.float() for name, tensor in weights.items()}


def check_weights(architecture: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless `weights` are exactly this architecture's, of the right shapes and finite."""
    expected_shapes = architecture.shapes()
    unknown_names = set(weights) - set(expected_shapes) - {"lm_head.weight"}
    # Older checkpoints carry these constants; transformers computes them and ignores the file's, and so do we.
    # Anything else unknown is a model that we would serve wrongly.
    unknown_names = {name for name in unknown_names if not name.endswith("rotary_emb.inv_freq")}
    if unknown_names:
        raise ModelError(f"unknown weight {min(unknown_names)!r} ({len(unknown_names)} such) for this architecture")
    for name, shape in expected_shapes.items():
        if name not in weights:
            raise ModelError(f"weight {name!r} is missing")
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"weight {name!r} has shape {tuple(weights[name].shape)}, expected {shape}")
        # A learner that diverged sends NaN. Refused here, the old weights go on; loaded, every log-prob would be NaN
        # and every turn of the fleet would break.
        if not bool(torch.isfinite(weights[name]).all()):
            raise ModelError(f"weight {name!r} holds values that are not finite")


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Several new tokens of one slot: rows `rows` of the pass, at positions start, start + 1, …"""

    slot: int
    start: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Shared:
    """The first `length` positions of all single rows, by family: rows `order_N[start:stop]` of a family
    (slot, start, stop) have the bits of `slot` there."""

    length: int
    order_N: torch.Tensor
    families: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """One pass. `single_slots_N` are the slots of the first rows; `lengths_S` says, for every slot below the highest
    single one, how many positions its row sees (at least 1, so that a row of an unused slot is harmless)."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    single_slots_N: torch.Tensor
    lengths_S: torch.Tensor
    longest: int  # positions that are looked at for single rows: what none of them sees is masked
    shortest: int  # of the single rows
    runs: tuple[TokenRun, ...]
    logit_rows_N: torch.Tensor  # rows whose logits are computed
    shared: Shared | None = None  # what single rows have in common; None: each reads its own
    adapted: tuple[Adapted, ...] = ()  # the rows that run with an adapter
    turned_N3: torch.Tensor | None = None  # time, row and column of each token, where some differ; None: `positions_N`
    shown: tuple[tuple[slice, torch.Tensor], ...] = ()  # rows that are tokens of images, and these: [rows, hidden]

    def adapt(
        self, out: torch.Tensor, x: torch.Tensor, layer: int, part: str, *, only_logit_rows: bool = False
    ) -> torch.Tensor:
        """`out`, a product of `x`, with what the rows' adapters add to it."""
        for adapted_rows in self.adapted:
            adapted_rows.add(out, x, layer, part, only_logit_rows=only_logit_rows)
        return out

    @staticmethod
    def of_run(tokens: list[int], start: int, slot: int = 0) -> PassRows:
        """New tokens of one slot alone, with logits for each."""
        token_count, no_slots = len(tokens), torch.zeros(0, dtype=torch.long)
        return PassRows(
            tokens_N=torch.tensor(tokens),
            positions_N=torch.arange(start, start + token_count),
            single_slots_N=no_slots,
            lengths_S=no_slots,
            longest=0,
            shortest=0,
            runs=(TokenRun(slot, start, slice(0, token_count)),),
            logit_rows_N=torch.arange(token_count),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    qkv: Product
    qk_norm: torch.Tensor | None  # [heads + kv_heads, D]
    o: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All weights of a model as its passes read them; `visual` are those of its tower, if it has one."""

    embedding: torch.Tensor
    layers: list[_Layer]
    norm: torch.Tensor
    head: Product
    visual: Mapping[str, torch.Tensor]


class KVStore:
    """Keys [layers, S, K, D, T] (transposed: attention reads along T) and values [layers, S, K, T, D], zeroed.

    Zeros matter: positions beyond a row's length are masked, but 0 x NaN would still be NaN. Pages that are never
    written cost no memory. Their `dtype` is that of the model's products."""

    def __init__(self, architecture: Architecture, slots: int, length: int, dtype: torch.dtype = torch.float32) -> None:
        a = architecture
        head_shape = a.layers, slots, a.kv_heads
        self._shapes = (*head_shape, a.head_dim, length), (*head_shape, length, a.head_dim)
        self._dtype = dtype
        self.renew()

    def renew(self) -> None:
        """Hold zeros again."""
        self.keys, self.values = (torch.zeros(shape, dtype=self._dtype) for shape in self._shapes)

    def free(self) -> None:
        """Give the memory back. Nothing may be computed until `renew`."""
        self.keys = self.values = torch.zeros(0)

    @staticmethod
    def bytes_per_token(architecture: Architecture, dtype: torch.dtype = torch.float32) -> int:
        """Memory of one position of one slot."""
        return 2 * dtype.itemsize * architecture.layers * architecture.kv_heads * architecture.head_dim

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions [start, end) of one slot to another."""
        self.keys[:, target, :, :, start:end] = self.keys[:, source, :, :, start:end]
        self.values[:, target, :, start:end] = self.values[:, source, :, start:end]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        keys, values = self.keys[:, :, :, :, :length], self.values[:, :, :, :length]
        # Views alias: without the copy the first assignment would overwrite what the second one reads.
        kept_keys, kept_values = keys[:, a].clone(), values[:, a].clone()
        keys[:, a], values[:, a] = keys[:, b], values[:, b]
        keys[:, b], values[:, b] = kept_keys, kept_values


class EmbeddedModel:
    """A decoder with replaceable weights, which multiplies in `dtype`. `take` swaps all of them at once; call it only
    between two passes. A model that reads images has a `tower` for them."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, torch.Tensor],
        *,
        length: int,
        dtype: torch.dtype = torch.float32,
        tower: VisionTower | None = None,
    ) -> None:
        self.architecture, self.dtype, self.tower = architecture, dtype, tower
        frequency_axes = [axis for axis, count in enumerate(architecture.sections) for _ in range(count)]
        # Of each frequency: the coordinate that it turns by.
        self._axes = torch.tensor(frequency_axes, dtype=torch.long)
        # In float64, for the same reason as the frequencies: an angle is taken modulo a turn, and what counts is its
        # remainder.
        angles = torch.outer(
            torch.arange(length, dtype=torch.float64),
            torch.tensor(architecture.inverse_frequencies, dtype=torch.float64),
        )
        # They turn queries and keys, and shorten both so that their products have the scale of attention.
        scale = torch.full_like(angles, architecture.head_dim**-0.25)
        self._rotations = torch.polar(scale, angles).to(torch.complex64)  # [length, D / 2]
        self.load(weights)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`pack` and `take` weights. Raises ModelError and changes nothing if wrong."""
        self.take(self.pack(weights))

    def pack(self, weights: Mapping[str, torch.Tensor]) -> PackedWeights:
        """Check and pack weights named as transformers names them, beside passes with those of now. Raises ModelError
        if wrong."""
        tower_weights: dict[str, torch.Tensor] = {}
        if self.tower is not None:
            tower_weights = {name: tensor for name, tensor in weights.items() if name.startswith(TOWER_PREFIX)}
            weights = {name: tensor for name, tensor in weights.items() if name not in tower_weights}
            tower_weights = {name.removeprefix(TOWER_PREFIX): tensor for name, tensor in tower_weights.items()}
            self.tower.check(tower_weights)
        check_weights(self.architecture, weights)
        embedding = weights["model.embed_tokens.weight"].to(self.dtype).contiguous()
        output_weight = embedding if self.architecture.tied else weights["lm_head.weight"]
        layers = [_pack(self.architecture, weights, layer, self.dtype) for layer in range(self.architecture.layers)]
        return PackedWeights(
            embedding, layers, weights["model.norm.weight"], Product(output_weight, dtype=self.dtype), tower_weights
        )

    def take(self, packed: PackedWeights) -> None:
        """Compute with these from now on."""
        if self.tower is not None:
            self.tower.load(packed.visual)
        self._embedding, self._layers, self._norm = packed.embedding, packed.layers, packed.norm
        self._head = packed.head

    def attended(self, longest: int, most: int) -> int:
        """How many positions single rows look at, the longest of which sees so many; at most `most`."""
        return longest if self.dtype == torch.float32 else min(-(-longest // _STEP) * _STEP, most)

    def free(self) -> None:
        """Give the memory of the weights back. Nothing may be computed until `load`."""
        self._layers = list[_Layer]()
        self._embedding = self._norm = torch.zeros(0)
        self._head = Product(torch.zeros(0, 0), dtype=self.dtype)

    @property
    def loaded(self) -> bool:
        return bool(self._layers)

    def forward(self, rows: PassRows, kv: KVStore) -> torch.Tensor:
        """Write the rows' keys and values into `kv` and return the logits of the rows that have some, [rows, vocab]."""
        a = self.architecture
        x = F.embedding(rows.tokens_N.clamp(min=0), self._embedding).float()  # tokens of images are negative
        for image_rows, tokens_NH in rows.shown:
            x[image_rows] = tokens_NH
        rotations = self._rotations_of(rows).unsqueeze(1)
        masks = _Masks(rows, a)
        for layer_number, layer in enumerate(self._layers):
            hidden = F.rms_norm(x, (a.hidden,), layer.norm, a.eps)
            qkv = rows.adapt(layer.qkv(hidden), hidden, layer_number, "qkv")
            attended = self._attend(qkv, layer, rotations, rows, masks, kv, layer_number)
            x = rows.adapt(layer.o.onto(x, attended), attended, layer_number, "o")
            if is_last := layer_number == a.layers - 1:
                # In the last layer only rows with logits go through the MLP: nothing reads the others any more once
                # their keys and values are written.
                x = x[rows.logit_rows_N]
            hidden = F.rms_norm(x, (a.hidden,), layer.mlp_norm, a.eps)
            gate_and_up = rows.adapt(layer.gate_up(hidden), hidden, layer_number, "gate_up", only_logit_rows=is_last)
            gate, up = gate_and_up.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            x = rows.adapt(layer.down.onto(x, hidden), hidden, layer_number, "down", only_logit_rows=is_last)
        return self._head(F.rms_norm(x, (a.hidden,), self._norm, a.eps))

    def _rotations_of(self, rows: PassRows) -> torch.Tensor:
        """The rotation of each row's pairs [N, D / 2]."""
        if rows.turned_N3 is None:
            return self._rotations[rows.positions_N]
        pair_numbers = torch.arange(len(self._axes))
        return self._rotations[rows.turned_N3[:, self._axes], pair_numbers]

    def _attend(
        self,
        qkv: torch.Tensor,
        layer: _Layer,
        rotations: torch.Tensor,
        rows: PassRows,
        masks: _Masks,
        kv: KVStore,
        at: int,
    ) -> torch.Tensor:
        a = self.architecture
        turned_heads = a.heads + a.kv_heads
        heads = qkv.view(-1, turned_heads + a.kv_heads, a.head_dim)
        qk, v = heads[:, :turned_heads], heads[:, turned_heads:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.eps) * layer.qk_norm
        # One complex product turns all heads of q and k. The textbook form (split halves, negate, concatenate) writes
        # several tensors of their size in each layer.
        rotary_pairs = torch.view_as_complex(qk.reshape(-1, turned_heads, a.head_dim // 2, 2))
        keys, values = kv.keys[at], kv.values[at]
        qk = torch.view_as_real(rotary_pairs * rotations).view(-1, turned_heads, a.head_dim).to(keys.dtype)
        q, k, v = qk[:, : a.heads], qk[:, a.heads :], v.to(values.dtype)
        single_count = rows.single_slots_N.shape[0]
        outputs: list[torch.Tensor] = []
        if single_count:
            positions = rows.positions_N[:single_count]
            keys[rows.single_slots_N, :, :, positions] = k[:single_count]
            values[rows.single_slots_N, :, positions] = v[:single_count]
            # Written into the cache first and then read from there, the new token's own key too: attention then has
            # one source, whatever was cached and whatever is new.
            outputs.append(_attend_singles(q[:single_count], rows, masks.singles, keys, values))
        for run, mask in zip(rows.runs, masks.runs, strict=True):
            end = run.start + (run.rows.stop - run.rows.start)
            keys[run.slot, :, :, run.start : end] = k[run.rows].permute(1, 2, 0)
            values[run.slot, :, run.start : end] = v[run.rows].transpose(0, 1)
            outputs.append(_attend_run(q[run.rows], mask, keys[run.slot, :, :, :end], values[run.slot, :, :end]))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()


class _Masks:
    """Additive attention masks, made once a pass and used by every layer."""

    def __init__(self, rows: PassRows, architecture: Architecture) -> None:
        kv_heads = architecture.kv_heads
        hull = rows.lengths_S.shape[0]
        self.singles = torch.zeros(0)
        if hull:
            unseen = torch.arange(rows.longest) >= rows.lengths_S.unsqueeze(1)
            mask = torch.zeros(hull, rows.longest).masked_fill_(unseen, float("-inf"))
            self.singles = mask.unsqueeze(1).expand(hull, kv_heads, rows.longest).reshape(hull * kv_heads, 1, -1)
        self.runs = [_causal(run.start, run.rows.stop - run.rows.start) for run in rows.runs]


def _causal(start: int, n: int) -> torch.Tensor:
    return torch.full((n, start + n), float("-inf")).triu_(start + 1)


def _attend_singles(
    q: torch.Tensor, rows: PassRows, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of one new token a slot, over all slots up to the highest one in use: no gather of the cache."""
    n, heads, size = q.shape
    kv_heads, hull, longest = keys.shape[1], rows.lengths_S.shape[0], rows.longest
    shared_length = rows.shared.length if rows.shared else 0
    queries = torch.zeros(hull, heads, size, dtype=q.dtype)
    queries[rows.single_slots_N] = q
    # A view over all low slots, idle ones included. To gather the slots in use would copy the whole cache in every
    # layer; `PassPlanner._compact` keeps the hull dense instead.
    flat_keys = keys[:hull].view(hull * kv_heads, size, -1)[:, :, shared_length:longest]
    flat_values = values[:hull].view(hull * kv_heads, -1, size)[:, shared_length:longest]
    scores = torch.bmm(queries.view(hull * kv_heads, heads // kv_heads, size), flat_keys).float()
    scores += mask[:, :, shared_length:]
    if rows.shared:
        return _attend_shared(q, scores, rows, rows.shared, keys, values, flat_values)
    attended = torch.bmm(torch.softmax(scores, -1).to(q.dtype), flat_values)
    return attended.view(hull, heads * size)[rows.single_slots_N].view(n, heads * size)


def _attend_shared(
    q: torch.Tensor,
    own_scores: torch.Tensor,
    rows: PassRows,
    shared: Shared,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_values: torch.Tensor,
) -> torch.Tensor:
    """The rest of `_attend_singles`, the first positions read once a family. Rows are in the order of families here:
    [K, N, G, …]."""
    n, heads, size = q.shape
    kv_heads, group, length = keys.shape[1], heads // keys.shape[1], shared.length
    order_N, parts = shared.order_N, [(slot, slice(a * group, b * group)) for slot, a, b in shared.families]
    slots_N = rows.single_slots_N[order_N]
    queries = q[order_N].view(n, kv_heads, group, size).transpose(0, 1).reshape(kv_heads, n * group, size)
    first = torch.cat([torch.bmm(queries[:, part], keys[slot, :, :, :length]) for slot, part in parts], 1)
    first = first.float().view(kv_heads, n, group, length)
    if rows.shortest <= length:  # a row that is alone may be shorter than what others share
        unseen_NT = torch.arange(length) >= rows.lengths_S[slots_N].unsqueeze(1)
        first.masked_fill_(unseen_NT.unsqueeze(1), float("-inf"))
    # [S, K, G, T] here, and `[slots_N]` picks the rows in the order of families.
    own_scores = own_scores.view(-1, kv_heads, group, own_scores.shape[-1])
    # One softmax over both parts, so that nothing has to be renormalised: the two halves are computed apart only
    # where keys are read.
    weights = torch.softmax(torch.cat([first, own_scores[slots_N].transpose(0, 1)], -1), -1).to(q.dtype)
    first = weights[..., :length].reshape(kv_heads, n * group, length)
    attended = torch.cat([torch.bmm(first[:, part], values[slot, :, :length]) for slot, part in parts], 1)
    own_weights = torch.zeros_like(own_scores, dtype=q.dtype)
    own_weights[slots_N] = weights[..., length:].transpose(0, 1)
    own_attended = torch.bmm(own_weights.flatten(0, 1), own_values).view(-1, heads * size)[slots_N].float()
    result = torch.empty(n, heads * size)
    result[order_N] = attended.view(kv_heads, n, group, size).transpose(0, 1).reshape(n, heads * size) + own_attended
    return result


def _attend_run(q: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of n new tokens of one slot; keys [K, D, T], values [K, T, D]."""
    n, heads, size = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    # Query heads of a group share keys, so they are stacked along the rows: keys are read once for the group instead
    # of being repeated as often as it has heads.
    queries = q.view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * n, size)
    scores = torch.bmm(queries, keys).float().view(kv_heads, group, n, -1)
    scores += mask
    attended = torch.bmm(torch.softmax(scores, -1).to(q.dtype).view(kv_heads, group * n, -1), values)
    return attended.view(kv_heads, group, n, size).permute(2, 0, 1, 3).reshape(n, heads * size)


def _pack(architecture: Architecture, weights: Mapping[str, torch.Tensor], layer: int, dtype: torch.dtype) -> _Layer:
    """Join q/k/v and gate/up, and order rotary pairs side by side.

    transformers rotates dimension i with i + D/2; with the pairs adjacent one complex product does it. Queries and
    keys are permuted alike, so their products do not change."""
    a, prefix = architecture, f"model.layers.{layer}."

    def joined(kind: str) -> torch.Tensor:
        q = rotary(weights[f"{prefix}self_attn.q_proj.{kind}"], a.heads, a.head_dim)
        k = rotary(weights[f"{prefix}self_attn.k_proj.{kind}"], a.kv_heads, a.head_dim)
        return torch.cat([q, k, weights[f"{prefix}self_attn.v_proj.{kind}"]])

    def product(name: str, *, bias: bool) -> Product:
        return Product(
            weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"] if bias else None, dtype=dtype
        )

    def gate_up(kind: str) -> torch.Tensor:
        return torch.cat([weights[f"{prefix}mlp.{name}_proj.{kind}"] for name in ("gate", "up")])

    qk_norm = None
    if a.qk_norm:
        q_norm, k_norm = (
            rotary(weights[f"{prefix}self_attn.{name}_norm.weight"], 1, a.head_dim).expand(heads, -1)
            for name, heads in (("q", a.heads), ("k", a.kv_heads))
        )
        qk_norm = torch.cat([q_norm, k_norm])
    return _Layer(
        norm=weights[prefix + "input_layernorm.weight"],
        qkv=Product(joined("weight"), joined("bias") if a.qkv_bias else None, dtype=dtype),
        qk_norm=qk_norm,
        o=product("self_attn.o_proj", bias=a.o_bias),
        mlp_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate_up=Product(gate_up("weight"), gate_up("bias") if a.mlp_bias else None, dtype=dtype),
        down=product("mlp.down_proj", bias=a.mlp_bias),
    )
