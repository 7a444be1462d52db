"""Attention over prefix trees: every node sees its ancestors and itself.

Owns the layout of one pass, made once and shared by all layers, and the ways to compute it. Never knows the model, the
loss, or why rows share a prefix.

A layout is a class that is made from the branches of a pass; its `attend` is called by every layer:

    Paths     sdpa     one call per branch, or 1,024 queries of it, K and V gathered by its path; all calls share a
                       dense mask of that height. Any device and dtype.
    Varlen    varlen   one flash kernel for all branches: their sizes are the queries' lengths, their paths the keys',
                       causal from the bottom right. K and V gathered by path, no masks. CUDA, bfloat16 or float16.
    Subtrees  flex     FlexAttention over the nodes, K and V as they are. Nodes are in preorder, so node j is an
                       ancestor of i, or i, if j <= i < end of j's subtree: the mask needs one number per node.
                       Compiled on CUDA, any dtype (float32 as exact as `torch.set_float32_matmul_precision` says);
                       on the CPU it makes the [N, N] scores: for tests.

On an H100 flex is quickest, needs the least memory, and its gradients of K and V are three times as exact as those that
are summed over copies in bfloat16 (`benchmarks/gpu_attention.md`): `auto` takes it first.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.errors import ConfigError, first_line
from agentrl.host import compile_cache
from agentrl.learner.data.device_copy import moved
from agentrl.learner.data.prefix_trees import Branch

_NO_SCORES = frozenset({"dropout", "position_ids", "cache_position"})  # passed, but used before attention or not
_BLOCK = 128  # nodes of a side of FlexAttention's blocks
# With a mask of this height for all, memory grows with the length of a branch and not with its square
# (`test_long_branches_take_memory_in_proportion_to_their_length`).
_QUERIES = 1024  # that share a mask


Gather = Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]
"""Makes the keys and values of a pass from those of this rank's nodes; the name of what they are for goes with them."""


class Layout(Protocol):
    """The branches of one pass, ready for the attention of every layer: all of them, or pieces, in the order of their
    nodes. These are the queries; keys and values are those of all nodes of the pass. What it makes of the branches it
    makes on the host, and brings it to the device in one copy: no layer, and no pass, waits for a number."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        """`device` is that of the pass; default: where the paths are."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, H, n, D], key and value [1, H_kv, N, D] give [1, n, H, D]. `window`: how many tokens a node sees,
        itself among them. `sinks` [H]: a score beside those of the keys, of nothing."""
        ...


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    gather: Gather | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. query [1, H, N, D], key and value [1, H_kv, N, D] give [1, N, H, D]. With
    `gather` all three are of this rank's nodes. Dropout of transformers' interface is not used.

    Raises ValueError for a mask, or for a number or tensor of unknown name: it could change the scores."""
    if layout is None:
        raise ValueError("its layers do not hand the layout of a tree to their attention")
    if attention_mask is not None:
        raise ValueError("its attention has a mask of its own")
    # transformers hands unknown arguments on without a word: a softcap or a bias of a new architecture would be left
    # out, and the learner would train another model than the engine serves.
    refuse_unknown(options)
    if torch.is_autocast_enabled(query.device.type):  # norms and rotations leave float32 behind
        autocast_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(autocast_dtype), key.to(autocast_dtype), value.to(autocast_dtype)
    if gather is not None:
        key, value = gather(key, value, f"keys and values of layer {getattr(module, 'layer_idx', '?')}")
    return layout.attend(query, key, value, sliding_window, scaling, s_aux), None


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raises ValueError for a number or tensor that may change the scores."""
    for option_name, option_value in options.items():
        if option_name not in _NO_SCORES and option_value is not None and not isinstance(option_value, bool):
            raise ValueError(f"its attention takes {option_name!r}")


class Paths:
    """Calls of torch's scaled dot product attention: one for each branch, for each `_QUERIES` of its queries if it
    needs a mask."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        self.branches = branches
        self.sizes = [branch.stop - branch.start for branch in branches]
        self.lengths = [len(branch.path) for branch in branches]
        joint_paths = torch.cat([branch.path for branch in branches])
        self.paths = moved(joint_paths, device or joint_paths.device)
        self.masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        is_grouped = query.shape[1] != key.shape[1]
        branch_queries = query.split(self.sizes, 2)
        branch_keys = key.index_select(2, self.paths).split(self.lengths, 2)
        branch_values = value.index_select(2, self.paths).split(self.lengths, 2)
        call_outputs: list[Tensor] = []
        for branch_index, (query_count, key_count) in enumerate(zip(self.sizes, self.lengths, strict=True)):
            is_causal = sinks is None and _is_causal(query_count, key_count, window)
            queries_per_call = query_count if is_causal else _QUERIES
            for first_query in range(0, query_count, queries_per_call):
                stop_query = min(first_query + queries_per_call, query_count)
                stop_key = key_count - query_count + stop_query
                # Keys before the window of the first query are cut off rather than masked: a window of 4,096 in a row
                # of 100,000 then costs what it sees.
                first_key = 0 if window is None else max(0, stop_key - (stop_query - first_query) - window + 1)
                call_inputs = (
                    branch_queries[branch_index][:, :, first_query:stop_query],
                    branch_keys[branch_index][:, :, first_key:stop_key],
                    branch_values[branch_index][:, :, first_key:stop_key],
                )
                call_mask = None
                if not is_causal:
                    largest_mask = self._mask(window, query, every=sinks is not None)
                    call_mask = largest_mask[first_query - stop_query :, first_key - stop_key :]
                    # CUDA wants it aligned.
                    call_mask = call_mask if query.device.type == "cpu" else call_mask.contiguous()
                if sinks is not None:
                    call_inputs, call_mask = _with_sinks(*call_inputs, call_mask, sinks)
                call_outputs.append(
                    functional.scaled_dot_product_attention(
                        *call_inputs, attn_mask=call_mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
                    )
                )
        return torch.cat(call_outputs, 2).transpose(1, 2)

    def _mask(self, window: int | None, like: Tensor, *, every: bool) -> Tensor:
        """An additive mask [n, L] whose lower right corners are the masks of all calls that need one: what a query sees
        depends on how far it is from the last query and a key from the last key. `every` branch needs one, or those
        that are not plain rows."""
        if window not in self.masks:
            branch_sizes = list(zip(self.sizes, self.lengths, strict=True))
            masked_sizes = [
                branch_size for branch_size in branch_sizes if every or not _is_causal(*branch_size, window)
            ]
            most_queries, most_keys = (max(branch_lengths) for branch_lengths in zip(*masked_sizes, strict=True))
            self.masks[window] = _mask(window, like, min(most_queries, _QUERIES), most_keys)
        return self.masks[window]


def _is_causal(size: int, length: int, window: int | None) -> bool:
    """Whether a branch is a whole row within a window."""
    return size == length and (window is None or length <= window)


def _mask(window: int | None, like: Tensor, n: int, length: int) -> Tensor:
    query_n1 = torch.arange(length - n, length, device=like.device)[:, None]
    key_1L = torch.arange(length, device=like.device)[None, :]
    hidden_nL = key_1L > query_n1
    if window is not None:
        hidden_nL |= key_1L <= query_n1 - window
    return torch.zeros(n, length, dtype=like.dtype, device=like.device).masked_fill_(hidden_nL, float("-inf"))


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """One more key, of zeros, which the mask gives the score of each head's sink."""
    assert mask is not None
    query_count, key_count = mask.shape
    score_parts = [
        mask.expand(len(sinks), query_count, key_count),
        sinks.to(mask.dtype)[:, None, None].expand(-1, query_count, 1),
    ]
    return (query, functional.pad(key, (0, 0, 0, 1)), functional.pad(value, (0, 0, 0, 1))), torch.cat(score_parts, -1)[
        None
    ]


class Varlen:
    """One flash kernel over all branches of a pass."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        query_counts = [branch.stop - branch.start for branch in branches]
        key_counts = [len(branch.path) for branch in branches]
        joint_paths = torch.cat([branch.path for branch in branches])
        sequence_starts = torch.tensor(
            [[0, *accumulate(query_counts)], [0, *accumulate(key_counts)]], dtype=torch.int32
        )
        self.paths, sequence_starts = moved((joint_paths, sequence_starts), device or joint_paths.device)
        self.query_starts, self.key_starts = sequence_starts.unbind()
        self.longest = (max(query_counts), max(key_counts))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if sinks is not None:
            raise ValueError("it has no attention sinks")  # its log-sum-exp has no gradient
        kernel_options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
        if "enable_gqa" in _parameters(varlen_attn):  # older ones take fewer heads of K and V unasked
            kernel_options["enable_gqa"] = query.shape[1] != key.shape[1]
        output_NHD = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1).index_select(0, self.paths),
            value[0].transpose(0, 1).index_select(0, self.paths),
            self.query_starts,
            self.key_starts,
            *self.longest,
            **kernel_options,
        )
        return cast(Tensor, output_NHD)[None]


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, object]:
    return inspect.signature(function).parameters


class Subtrees:
    """FlexAttention over the nodes of a pass; queries and keys are padded to whole blocks. Raises ValueError if the
    nodes are not in preorder. Suffixes: n nodes that are queries, N nodes that they may see."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        joint_paths = torch.cat([branch.path for branch in branches])
        self._device, joint_paths = device or joint_paths.device, joint_paths.cpu()
        stop_nodes, path_lengths, query_counts = torch.tensor(
            [(branch.stop, len(branch.path), branch.stop - branch.start) for branch in branches]
        ).unbind(1)
        self.size, self.count = branches[-1].stop, int(query_counts.sum())
        self.padding = -self.count % _BLOCK
        key_count = self.size + self.padding
        node_N = torch.arange(key_count + -key_count % _BLOCK)
        # the last branch below a node ends its subtree; a padding node sees itself, so that its softmax is finite
        self.end_N = (node_N + 1).scatter_reduce(0, joint_paths, stop_nodes.repeat_interleave(path_lengths), "amax")
        self.depth_N = node_N.scatter(0, joint_paths, _numbered(torch.zeros_like(path_lengths), path_lengths))
        own_n = _numbered(stop_nodes - query_counts, query_counts)
        self.node_n = torch.cat([own_n, node_N[self.size : key_count]])
        seen_counts = torch.searchsorted(own_n, self.end_N) - torch.searchsorted(own_n, node_N)
        # The mask "j <= i < end of j" is only right in preorder. Counting pairs from above (subtrees) and from below
        # (depths) finds any other order at the cost of two sums.
        if int(seen_counts[: self.size].sum()) != int((self.depth_N[own_n] + 1).sum()):
            raise ValueError("the nodes of a tree are not in preorder")  # its pairs are counted once from either side
        self.masks: dict[int | None, Any] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        if window not in self.masks:
            self.masks[window] = self._mask(window)
        padding_keys = len(self.end_N) - self.size
        padded_keys_values = [
            functional.pad(key_or_value[:, :, : self.size], (0, 0, 0, padding_keys)) for key_or_value in (key, value)
        ]
        padded_inputs = [functional.pad(query, (0, 0, 0, self.padding)), *padded_keys_values]
        is_grouped = query.shape[1] != key.shape[1]
        flex_options: dict[str, Any] = {"block_mask": self.masks[window], "scale": scale, "enable_gqa": is_grouped}
        if sinks is None:
            attended = _flex(query.device.type)(*padded_inputs, **flex_options)
        else:
            attended, auxiliary = _flex(query.device.type)(
                *padded_inputs, **flex_options, return_aux=AuxRequest(lse=True)
            )
            # A sink takes exp(sink) of the softmax's mass and adds nothing: exp(lse) / (exp(lse) + exp(sink)) is this
            # sigmoid.
            attended = attended * (auxiliary.lse - sinks[:, None]).sigmoid()[..., None].to(attended.dtype)
        return attended[:, :, : self.count].transpose(1, 2)

    def _mask(self, window: int | None) -> Any:
        """Block sparsity from the ends of the blocks' intervals, in [blocks, blocks] numbers."""
        from torch.nn.attention.flex_attention import BlockMask

        end_N, depth_N, node_n = self.end_N, self.depth_N, self.node_n  # on the host, as all blocks
        is_whole = len(node_n) == len(end_N)  # query and node have the same number
        key_B, end_B, above_B = (part_B.view(1, -1, _BLOCK) for part_B in (torch.arange(len(end_N)), end_N, depth_N))
        query_B, below_B = (part_B.view(-1, 1, _BLOCK) for part_B in (node_n, depth_N[node_n]))
        # Three kinds of blocks: no pair seen (skipped), all pairs seen (no mask is evaluated), and some. `some` may
        # be too generous, which costs time; `every` must be exact, or hidden nodes would be seen
        # (`test_flex_visits_the_blocks_that_hold_a_visible_pair_and_trusts_only_full_ones`).
        some_seen = (key_B[..., 0] <= query_B[..., -1]) & (end_B.amax(-1) > query_B[..., 0])
        every_seen = (key_B[..., -1] <= query_B[..., 0]) & (end_B.amin(-1) > query_B[..., -1])
        if window is not None:
            some_seen &= below_B.amin(-1) - above_B.amax(-1) < window
            every_seen &= below_B.amax(-1) - above_B.amin(-1) < window
        block_indices = [
            part_B[None, None]
            for chosen_blocks in (some_seen & ~every_seen, every_seen)
            for part_B in _indices(chosen_blocks)
        ]
        block_indices, end_N, depth_N, node_n = moved((block_indices, end_N, depth_N, node_n), self._device)

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query_node = query if is_whole else node_n[query]
            return (key <= query_node) & (query_node < end_N[key])

        def near(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query_node = query if is_whole else node_n[query]
            return (
                (key <= query_node)
                & (query_node < end_N[key])
                & (depth_N[query_node] - depth_N[key] < cast(int, window))
            )

        return BlockMask.from_kv_blocks(
            *block_indices,
            BLOCK_SIZE=_BLOCK,
            mask_mod=seen if window is None else near,
            seq_lengths=(len(node_n), len(end_N)),
        )


def _numbered(first_B: Tensor, count_B: Tensor) -> Tensor:
    """Count up from each first number, `count_B` numbers each, one run after the other."""
    positions = torch.arange(int(count_B.sum()), device=first_B.device)
    return positions + (first_B - count_B.cumsum(0) + count_B).repeat_interleave(count_B)


def _indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks a row of `chosen` holds, and which: those first, in order."""
    return chosen.sum(1, dtype=torch.int32), chosen.int().argsort(dim=1, descending=True, stable=True).int()


@cache
def _flex(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cpu":  # one graph for passes of any length
        compile_cache.choose()
        # Dynamic, since every pass has another number of nodes: one compilation for each shape would take longer than
        # the passes.
        return cast(Callable[..., Any], torch.compile(flex_attention, dynamic=True))

    def eager(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return cast(Any, flex_attention)(*args, **options)

    return eager


LAYOUTS: Mapping[str, type[Layout]] = {"sdpa": Paths, "varlen": Varlen, "flex": Subtrees}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Features of a model's attention that a layout must support."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    sinks: bool = False
    windows: bool = True


def choose(name: str, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> type[Layout]:
    """The layout of a name of `train.attention` for passes of `dtype`. `auto` takes the first that works of flex,
    varlen and sdpa on CUDA, elsewhere sdpa. A layout works if it agrees with sdpa in float32 on a small tree.

    Raises ConfigError, with the reason, for a named one that does not work."""
    if name == "sdpa" or (name == "auto" and device.type == "cpu"):
        return Paths
    for candidate in ("flex", "varlen") if name == "auto" else (name,):
        reason = _refusal(LAYOUTS[candidate], device, dtype, shape)
        if reason is None:
            return LAYOUTS[candidate]
        if name != "auto":
            raise ConfigError("train.attention", name, f"{reason}: give auto or sdpa")
    return Paths


def _refusal(layout: type[Layout], device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
    """Why a layout does not work here; None if it does."""
    if layout is Varlen and (device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16)):
        return f"its kernel wants train.device cuda and train.dtype bfloat16, not {device.type} and {_short(dtype)}"
    generator = torch.Generator().manual_seed(0)
    part_sizes = [(1, head_count, 200, shape.head_dim) for head_count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    drawn_parts = [
        torch.randn(part_size, generator=generator)
        for part_size in [*part_sizes, (shape.heads,)][: 4 if shape.sinks else 3]
    ]
    device_parts = [drawn_part.to(device, dtype) for drawn_part in drawn_parts]
    node_numbers = torch.arange(200)
    branches = [
        Branch(0, 150, node_numbers[:150]),
        Branch(150, 200, torch.cat([node_numbers[:70], node_numbers[150:]])),
    ]
    for window in (None, 40) if shape.windows else (None,):
        exact_parts = _outcome(Paths(branches, device), [drawn_part.float() for drawn_part in device_parts], window)
        try:
            computed_parts = _outcome(layout(branches, device), device_parts, window)
        except Exception as layout_error:  # kernels and compilers fail in many ways
            reason = first_line(layout_error)
            return f"it fails on {device.type} in {_short(dtype)} ({reason})"
        largest_error = max(
            float((computed_part.float() - exact_part).abs().max() / exact_part.abs().max())
            for computed_part, exact_part in zip(computed_parts, exact_parts, strict=True)
        )
        # Not "greater": a NaN has to fail too. Each layout is tried here, forward and backward, on a tree with two
        # branches, since kernels are refused or wrong on some devices only.
        if not largest_error <= max(2 * torch.finfo(dtype).eps, 1e-3):
            return f"it is {largest_error:.1g} off on {device.type} in {_short(dtype)}"
    return None


@torch.enable_grad()
def _outcome(layout: Layout, parts: Sequence[Tensor], window: int | None) -> list[Tensor]:
    """The outputs of attention, and their gradients."""
    query, key, value, *sinks = leaf_inputs = [input_part.clone().requires_grad_() for input_part in parts]
    attended = layout.attend(query, key, value, window, None, *sinks)
    return [attended.detach(), *torch.autograd.grad(attended.square().sum(), leaf_inputs)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
