"""From hidden states to log-probs and entropies, a chunk of tokens at a time: no [tokens, vocabulary] matrix is held.

Owns a model's way from its last hidden states to logits, and the gradients of what is read from them. Never knows
packs, trees or losses.

Of logits z [P, V], q = log_softmax(z / T), p = exp(q) and H = -sum(p q) in each row. A pass reads q at some places,
log_softmax(z) at others, and H. With their gradients a, b and h,

    dz = (scatter(a) - p sum(a) - h p (q + H)) / T + scatter(b) - softmax(z) sum(b)

If there is room for the logits of all rows, the backward pass gets those of the forward pass, and turns them into dz
where they lie. If not, it computes each chunk's logits again. Beside the logits of a chunk, only a block of its rows is
held at a time: memory that is allocated again and again has to be small, since the system clears large pieces of it
each time, which takes longer than the arithmetic.

Suffixes: C rows of a chunk, b rows of a block, I places of `TokenQuery.own`, O places of `TokenQuery.plain`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_COPIES = 4  # of a block's logits in float32 that are held at once
_BLOCK_BYTES = {"cpu": 4 << 20}  # of a block in float32: what a cache holds
# A GPU needs millions of numbers at a time to be busy; a CPU is quickest with what stays in its cache.
_BLOCK_BYTES_ELSEWHERE = 64 << 20  # on a device that needs much work at a time
_PROBE = 200.0  # logits as large as a model may say, to see what becomes of them


@dataclass(frozen=True, slots=True)
class OutputHead:
    """An output layer, and what its architecture does to what the layer says."""

    layer: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden_CH: Tensor) -> Tensor:
        return self.shaped(self.layer(hidden_CH))

    def shaped(self, raw_CV: Tensor) -> Tensor:
        """Logits from what the layer says."""
        logits_CV = raw_CV if self.scale == 1.0 else raw_CV * self.scale
        return logits_CV if self.cap is None else torch.tanh(logits_CV / self.cap) * self.cap


@contextmanager
def overheard(layer: Any, instead: Callable[[Tensor], Tensor] | None = None) -> Generator[list[Tensor]]:
    """Inside, a pass leaves the input of its output layer [1, P, H]; `instead` is computed in the layer's place."""
    layer_inputs: list[Tensor] = []
    forward = instead or layer.forward

    def hear(hidden_1PH: Tensor) -> Tensor:
        layer_inputs.append(hidden_1PH)
        return forward(hidden_1PH)

    layer.forward = hear
    try:
        yield layer_inputs
    finally:
        del layer.forward


@torch.no_grad()
def head_of(module: Any, run: Callable[[], Tensor], positions: int) -> OutputHead | None:
    """How a transformers model gets from its last hidden states to its logits; None if it does anything else than to
    multiply and cap what a plain linear layer says of so many `positions`. `run` makes a pass and gives its logits."""
    output_layer, text_config = module.get_output_embeddings(), module.config.get_text_config()
    # `type` and not `isinstance`: a subclass may compute something else (an adapter's, a quantised one), and its
    # gradient is not that of a plain product.
    if type(output_layer) is not nn.Linear:
        return None
    # Known numbers in the place of the layer's output show what the architecture does to logits: scales and caps are
    # recognised by what they do, not by the model's name.
    probe_1PV = torch.linspace(-_PROBE, _PROBE, output_layer.out_features, device=output_layer.weight.device).expand(
        1, positions, -1
    )
    with overheard(output_layer, lambda _: probe_1PV) as layer_inputs:
        shaped_PV = run()
    if [layer_input.shape[:2] for layer_input in layer_inputs] != [(1, positions)]:
        return None
    logit_cap = getattr(text_config, "final_logit_softcapping", None)
    logit_divisor = getattr(text_config, "logits_scaling", None)
    logit_scales = (1.0, getattr(text_config, "logit_scale", None), 1 / logit_divisor if logit_divisor else None)
    candidate_heads = [
        OutputHead(output_layer, float(logit_scale), logit_cap) for logit_scale in logit_scales if logit_scale
    ]
    fitting_heads = (
        candidate_head
        for candidate_head in candidate_heads
        if torch.allclose(candidate_head.shaped(probe_1PV[0]), shaped_PV, rtol=1e-4, atol=1e-3)
    )
    return next(fitting_heads, None)


def room(bytes_: int, vocab: int, head: OutputHead | None, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Rows of a chunk, whose logits of `dtype` so many bytes have room for, and rows of a block; at least one each."""
    block_rows = max(
        1, min(_BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE), bytes_ // (2 * _COPIES)) // (4 * vocab)
    )
    # Gradients take the place of the logits, unless others read these; what shapes logits makes more of them.
    logit_copies = 2 if head is None else 1 + (head.scale != 1.0) + 3 * (head.cap is not None)
    return max(1, (bytes_ - _COPIES * 4 * vocab * block_rows) // (logit_copies * dtype.itemsize * vocab)), block_rows


# --- statistics -------------------------------------------------------------------------------------------------------


class Places:
    """Places of a [P, V] matrix, by row and token id; the same one may be named many times."""

    def __init__(self, row_I: Tensor, id_I: Tensor, counts_P: NDArray[np.int64] | None = None) -> None:
        """`counts_P` says on the host how many places are in each row, so that nobody has to wait for a device."""
        # By row, so that the places of a chunk are one slice. Stable, so that the order, and with it each sum, is the
        # same every time.
        order_I = row_I.argsort(stable=True)
        self.row_I, self.id_I, self.back_I = row_I[order_I], id_I[order_I], order_I.argsort()
        self._before_P = None if counts_P is None else np.concatenate([[0], counts_P.cumsum()])

    def only(self, at_P: Tensor) -> tuple[Places, Tensor]:
        """Select the places in rows for which `at_P` has a number, which becomes their row. Returns these places, and
        their indices among all."""
        row_I = at_P[self.row_I]
        own_J = (row_I >= 0).nonzero()[:, 0]
        return Places(row_I[own_J], self.id_I[own_J]), own_J

    def cut(self, edges: Sequence[int]) -> list[tuple[slice, Tensor, Tensor]]:
        """Divide the places at `edges` of rows. Returns for each two edges the slice of the places between them, their
        rows counted from the first edge, and their ids."""
        if not len(self.row_I):
            place_bounds = [0] * len(edges)
        elif self._before_P is not None:
            place_bounds = self._before_P[list(edges)].tolist()
        else:
            place_bounds = torch.searchsorted(self.row_I, torch.tensor(edges, device=self.row_I.device)).tolist()
        place_spans = [slice(start_place, stop_place) for start_place, stop_place in pairwise(place_bounds)]
        return [
            (place_span, self.row_I[place_span] - first_row, self.id_I[place_span])
            for place_span, first_row in zip(place_spans, edges, strict=False)
        ]


Block = tuple[slice, tuple[slice, Tensor, Tensor], tuple[slice, Tensor, Tensor]]
"""The rows of a block, counted from the first row of its chunk; its `own` and its `plain` places, as `Places.cut` gives
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenQuery:
    """Places to read from logits: `own` at `temperature`, `plain` at 1. The logits of `rows` are computed at once, and
    read `block` rows at a time; if `rows` are all there are, the backward pass does not compute them again."""

    own: Places
    plain: Places
    temperature: float
    rows: int
    block: int

    def chunks(self, count: int) -> Iterator[tuple[slice, list[Block]]]:
        """Divide `count` rows into chunks, and yield for each the slice of its rows and its blocks. The logits of a
        chunk are computed at once; they are widened and read block by block."""
        chunk_ranges = [range(first_row, min(first_row + self.rows, count)) for first_row in range(0, count, self.rows)]
        block_edges = [*(start_row for chunk_rows in chunk_ranges for start_row in chunk_rows[:: self.block]), count]
        all_blocks = zip(pairwise(block_edges), self.own.cut(block_edges), self.plain.cut(block_edges), strict=True)
        for chunk_rows in chunk_ranges:
            blocks_inside = islice(all_blocks, len(chunk_rows[:: self.block]))
            chunk_blocks = [
                (slice(start_row - chunk_rows.start, stop_row - chunk_rows.start), own_places, plain_places)
                for (start_row, stop_row), own_places, plain_places in blocks_inside
            ]
            yield slice(chunk_rows.start, chunk_rows.stop), chunk_blocks


def statistics(
    head: Callable[[Tensor], Tensor], hidden_PH: Tensor, parameters: Sequence[Tensor], query: TokenQuery
) -> tuple[Tensor, Tensor, Tensor]:
    """Read from `head(hidden_PH)` the log-probs [I] at the query's `own` places and [O] at its `plain` ones, and the
    entropy [P] of each row, in float32 and nats. `parameters` are those of `head`. Gradients reach them and
    `hidden_PH`, through all three."""
    own_I, plain_O, entropy_P = _Statistics.apply(hidden_PH, head, query, *parameters)  # pyright: ignore
    return own_I[query.own.back_I], plain_O[query.plain.back_I], entropy_P


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, head: Callable[[Tensor], Tensor], query: TokenQuery, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide_dtype = torch.promote_types(hidden_PH.dtype, torch.float32)
        own_I, plain_O, entropy_P = (
            hidden_PH.new_empty(len(places), dtype=wide_dtype)
            for places in (query.own.row_I, query.plain.row_I, hidden_PH)
        )
        # Without parameters there is nothing to compute again.
        keeps_logits = any(ctx.needs_input_grad) and parameters and len(hidden_PH) <= query.rows
        ctx.kept = None
        for chunk_rows, chunk_blocks in query.chunks(len(hidden_PH)):
            part_CH = hidden_PH[chunk_rows].detach().requires_grad_()
            with torch.set_grad_enabled(bool(keeps_logits)):
                logits_CV = head(part_CH)
            if keeps_logits:
                ctx.kept = part_CH, logits_CV
            logits_CV = logits_CV.detach()
            for block_rows, (own_span, own_row, own_id), (plain_span, plain_row, plain_id) in chunk_blocks:
                wide_bV = logits_CV[block_rows].to(wide_dtype)
                if len(plain_row):
                    plain_O[plain_span] = wide_bV[plain_row, plain_id] - wide_bV.logsumexp(-1)[plain_row]
                scaled_bV = wide_bV if query.temperature == 1.0 else wide_bV / query.temperature
                logprobs_bV = scaled_bV.log_softmax(-1)
                own_I[own_span] = logprobs_bV[own_row, own_id]
                entropy_P[chunk_rows][block_rows] = -logprobs_bV.exp().mul_(logprobs_bV).sum(-1)
            del logits_CV
        # A loss without an entropy term has no gradient for it: None spares a matrix of zeros of the vocabulary's
        # size.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_PH, *parameters)
        ctx.head, ctx.query = head, query
        return own_I, plain_O, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a_I, b_O, h_P = grads
        hidden_PH, *parameters = ctx.saved_tensors
        query: TokenQuery = ctx.query
        needs_grad = ctx.needs_input_grad[3:]
        trained_parameters = [
            parameter for parameter, needs_sum in zip(parameters, needs_grad, strict=True) if needs_sum
        ]
        gradient_sums: list[Tensor] = []
        dhidden_PH = torch.empty_like(hidden_PH)
        for chunk_rows, chunk_blocks in query.chunks(len(hidden_PH)):
            computed, ctx.kept = ctx.kept, None  # its numbers are overwritten: a second backward pass makes its own
            if computed is None:
                part_CH = hidden_PH[chunk_rows].detach().requires_grad_()
                with torch.enable_grad():
                    computed = part_CH, ctx.head(part_CH)
            part_CH, logits_CV = computed
            own_CV = logits_CV.detach()
            # Without a head the logits are the input, which others may read.
            dlogits_CV = own_CV if parameters else torch.empty_like(own_CV)
            for block_rows, (own_span, *own_at), (plain_span, *plain_at) in chunk_blocks:
                dlogits_CV[block_rows] = _gradient(
                    own_CV[block_rows],
                    query.temperature,
                    (own_at, None if a_I is None else a_I[own_span]),
                    (plain_at, None if b_O is None else b_O[plain_span]),
                    None if h_P is None else h_P[chunk_rows][block_rows],
                )
            dhidden_PH[chunk_rows], *gradients = torch.autograd.grad(
                logits_CV, [part_CH, *trained_parameters], dlogits_CV
            )
            del computed, logits_CV, own_CV, dlogits_CV
            # The gradient of the output layer is a sum over chunks: added up in bfloat16, later chunks would vanish
            # in it.
            wide_gradients = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
            for gradient_sum, gradient in zip(gradient_sums, wide_gradients, strict=False):
                gradient_sum += gradient
            gradient_sums = gradient_sums or wide_gradients
            del gradients, wide_gradients
        if not len(hidden_PH):
            gradient_sums = [torch.zeros_like(parameter_tensor) for parameter_tensor in trained_parameters]
        cast_gradients = iter(
            gradient_sum.to(parameter_tensor.dtype)
            for gradient_sum, parameter_tensor in zip(gradient_sums, trained_parameters, strict=True)
        )
        return dhidden_PH, None, None, *(next(cast_gradients) if needs_sum else None for needs_sum in needs_grad)


def _gradient(
    logits_CV: Tensor,
    temperature: float,
    own: tuple[Sequence[Tensor], Tensor | None],
    plain: tuple[Sequence[Tensor], Tensor | None],
    h_C: Tensor | None,
) -> Tensor:
    """dz of the formula above, in float32."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    (own_at, a_I), (plain_at, b_O) = own, plain
    scaled_CV = wide_CV if temperature == 1.0 else wide_CV / temperature
    total_C1 = _sums(wide_CV, own_at[0], a_I)
    if h_C is None:
        dlogits_CV = scaled_CV.softmax(-1).mul_(-total_C1)
    else:
        logprobs_CV = scaled_CV.log_softmax(-1)
        probs_CV = logprobs_CV.exp()
        entropy_C1 = -(probs_CV * logprobs_CV).sum(-1, keepdim=True)
        dlogits_CV = logprobs_CV.add_(entropy_C1).mul_(h_C[:, None]).add_(total_C1).mul_(probs_CV).neg_()
        del probs_CV
    del scaled_CV
    _scatter(dlogits_CV, own_at, a_I)
    if temperature != 1.0:
        dlogits_CV.div_(temperature)
    if b_O is not None and len(b_O):
        dlogits_CV.sub_(wide_CV.softmax(-1).mul_(_sums(wide_CV, plain_at[0], b_O)))
        _scatter(dlogits_CV, plain_at, b_O)
    return dlogits_CV


def _sums(like_CV: Tensor, row_I: Tensor, a_I: Tensor | None) -> Tensor:
    """The sum of `a_I` in each row [C, 1]."""
    total_C = like_CV.new_zeros(len(like_CV))
    if a_I is not None:
        _add(total_C, row_I, a_I)
    return total_C[:, None]


def _scatter(into_CV: Tensor, at: Sequence[Tensor], a_I: Tensor | None) -> None:
    if a_I is not None:
        row_I, id_I = at
        _add(into_CV.view(-1), row_I * into_CV.shape[1] + id_I, a_I)


def _add(into_X: Tensor, at_I: Tensor, what_I: Tensor) -> None:
    """Add each to its place, in the same order every time: of these two, each is deterministic on its device alone."""
    # `index_add_` is deterministic on a CPU and atomic (in any order) on CUDA, `index_put_` with `accumulate` sorts
    # on CUDA. A run under one seed must give the same bits.
    if into_X.device.type == "cpu":
        into_X.index_add_(0, at_I, what_I)
    else:
        into_X.index_put_((at_I,), what_I, accumulate=True)
