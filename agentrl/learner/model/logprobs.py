"""From hidden states to log-probs and entropies, a chunk of tokens at a time: no [tokens, vocabulary] matrix is held.

Owns a model's way from its last hidden states to logits, and the gradients of what is read from them. Never knows
packs, trees or losses.

Of logits z [P, V], q = log_softmax(z / T), p = exp(q) and H = -sum(p q) in each row. A pass reads q at some places,
log_softmax(z) at others, and H. With their gradients a, b and h,

    dz = (scatter(a) - p sum(a) - h p (q + H)) / T + scatter(b) - softmax(z) sum(b)

The backward pass computes each chunk's logits again. `_C` are the rows of a chunk, `_I` the places of
`TokenQuery.own`, `_O` those of `TokenQuery.plain`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_COPIES = 5  # of a chunk's logits in float32 that the backward pass holds at once
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
    heard: list[Tensor] = []
    forward = instead or layer.forward

    def hear(hidden_1PH: Tensor) -> Tensor:
        heard.append(hidden_1PH)
        return forward(hidden_1PH)

    layer.forward = hear
    try:
        yield heard
    finally:
        del layer.forward


@torch.no_grad()
def head_of(module: Any, run: Callable[[], Tensor], positions: int) -> OutputHead | None:
    """How a transformers model gets from its last hidden states to its logits; None if it does anything else than to
    multiply and cap what a plain linear layer says of so many `positions`. `run` makes a pass and gives its logits."""
    layer, config = module.get_output_embeddings(), module.config.get_text_config()
    if type(layer) is not nn.Linear:
        return None
    probe_1PV = torch.linspace(-_PROBE, _PROBE, layer.out_features, device=layer.weight.device).expand(1, positions, -1)
    with overheard(layer, lambda _: probe_1PV) as heard:
        shaped_PV = run()
    if [hidden.shape[:2] for hidden in heard] != [(1, positions)]:
        return None
    cap = getattr(config, "final_logit_softcapping", None)
    divided = getattr(config, "logits_scaling", None)
    scales = (1.0, getattr(config, "logit_scale", None), 1 / divided if divided else None)
    heads = [OutputHead(layer, float(scale), cap) for scale in scales if scale]
    fits = (head for head in heads if torch.allclose(head.shaped(probe_1PV[0]), shaped_PV, rtol=1e-4, atol=1e-3))
    return next(fits, None)


def rows_within(bytes_: int, vocab: int) -> int:
    """Rows of a chunk that so many bytes have room for; at least one."""
    return max(1, bytes_ // (4 * _COPIES * vocab))


# --- statistics -------------------------------------------------------------------------------------------------------


class Places:
    """Places of a [P, V] matrix, by row and token id; the same one may be named many times."""

    def __init__(self, row_I: Tensor, id_I: Tensor) -> None:
        order_I = row_I.argsort(stable=True)
        self.row_I, self.id_I, self.back_I = row_I[order_I], id_I[order_I], order_I.argsort()

    def only(self, at_P: Tensor) -> tuple[Places, Tensor]:
        """Those in rows that `at_P` has a number for, which is theirs then, and where they are among these."""
        row_I = at_P[self.row_I]
        own_J = (row_I >= 0).nonzero()[:, 0]
        return Places(row_I[own_J], self.id_I[own_J]), own_J

    def cut(self, edges: Sequence[int]) -> list[tuple[slice, Tensor, Tensor]]:
        """Those between each two edges of rows: which of them in their order, their rows from the first edge, ids."""
        at = torch.searchsorted(self.row_I, torch.tensor(edges, device=self.row_I.device)).tolist()
        spans = [slice(start, stop) for start, stop in pairwise(at)]
        return [(span, self.row_I[span] - edge, self.id_I[span]) for span, edge in zip(spans, edges, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenQuery:
    """What to read from logits: `own` at `temperature`, `plain` at 1; `rows` are computed at once."""

    own: Places
    plain: Places
    temperature: float
    rows: int

    def chunks(self, count: int) -> Iterator[tuple[slice, tuple[slice, Tensor, Tensor], tuple[slice, Tensor, Tensor]]]:
        """The chunks of so many rows, and the places in each."""
        edges = [*range(0, count, self.rows), count]
        rows = [slice(start, stop) for start, stop in pairwise(edges)]
        return zip(rows, self.own.cut(edges), self.plain.cut(edges), strict=True)


def statistics(
    head: Callable[[Tensor], Tensor], hidden_PH: Tensor, parameters: Sequence[Tensor], asked: TokenQuery
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `head(hidden_PH)`: log-probs [I] at `asked.own` and [O] at `asked.plain`, and the entropy [P] of each row, in
    float32 and nats. `parameters` are those of `head`. Gradients reach them and `hidden_PH`, through all three."""
    own_I, plain_O, entropy_P = _Statistics.apply(hidden_PH, head, asked, *parameters)  # pyright: ignore
    return own_I[asked.own.back_I], plain_O[asked.plain.back_I], entropy_P


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, head: Callable[[Tensor], Tensor], asked: TokenQuery, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden_PH.dtype, torch.float32)
        own_I, plain_O, entropy_P = (
            hidden_PH.new_empty(len(what), dtype=dtype) for what in (asked.own.row_I, asked.plain.row_I, hidden_PH)
        )
        for rows, (own, own_row, own_id), (plain, plain_row, plain_id) in asked.chunks(len(hidden_PH)):
            logits_CV = head(hidden_PH[rows]).to(dtype)
            if len(plain_row):
                plain_O[plain] = logits_CV[plain_row, plain_id] - logits_CV.logsumexp(-1)[plain_row]
            scaled_CV = logits_CV if asked.temperature == 1.0 else logits_CV / asked.temperature
            del logits_CV
            logprobs_CV = scaled_CV.log_softmax(-1)
            del scaled_CV
            own_I[own] = logprobs_CV[own_row, own_id]
            entropy_P[rows] = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_PH, *parameters)
        ctx.head, ctx.asked = head, asked
        return own_I, plain_O, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a_I, b_O, h_P = grads
        hidden_PH, *parameters = ctx.saved_tensors
        asked: TokenQuery = ctx.asked
        wanted = ctx.needs_input_grad[3:]
        trained = [parameter for parameter, wants in zip(parameters, wanted, strict=True) if wants]
        sums = [torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in trained]
        dhidden_PH = torch.empty_like(hidden_PH)
        for rows, (own, *own_at), (plain, *plain_at) in asked.chunks(len(hidden_PH)):
            part_CH = hidden_PH[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits_CV = ctx.head(part_CH)
            dlogits_CV = _gradient(
                logits_CV.detach(),
                asked.temperature,
                (own_at, None if a_I is None else a_I[own]),
                (plain_at, None if b_O is None else b_O[plain]),
                None if h_P is None else h_P[rows],
            )
            dhidden_PH[rows], *found = torch.autograd.grad(logits_CV, [part_CH, *trained], dlogits_CV)
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
        given = iter(total.to(tensor.dtype) for total, tensor in zip(sums, trained, strict=True))
        return dhidden_PH, None, None, *(next(given) if wants else None for wants in wanted)


def _gradient(
    logits_CV: Tensor,
    temperature: float,
    own: tuple[Sequence[Tensor], Tensor | None],
    plain: tuple[Sequence[Tensor], Tensor | None],
    h_C: Tensor | None,
) -> Tensor:
    """dz of the formula above, in the dtype of the logits."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    (at, a_I), (plain_at, b_O) = own, plain
    logprobs_CV = (wide_CV / temperature).log_softmax(-1)
    probs_CV = logprobs_CV.exp()
    total_C1 = _sums(wide_CV, at[0], a_I)
    if h_C is None:
        found_CV = probs_CV.mul_(-total_C1)
    else:
        entropy_C1 = -(probs_CV * logprobs_CV).sum(-1, keepdim=True)
        found_CV = logprobs_CV.add_(entropy_C1).mul_(h_C[:, None]).add_(total_C1).mul_(probs_CV).neg_()
    del logprobs_CV, probs_CV
    _scatter(found_CV, at, a_I)
    found_CV.div_(temperature)
    if b_O is not None and len(b_O):
        found_CV.sub_(wide_CV.softmax(-1).mul_(_sums(wide_CV, plain_at[0], b_O)))
        _scatter(found_CV, plain_at, b_O)
    return found_CV.to(logits_CV.dtype)


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
    if into_X.device.type == "cpu":
        into_X.index_add_(0, at_I, what_I)
    else:
        into_X.index_put_((at_I,), what_I, accumulate=True)
