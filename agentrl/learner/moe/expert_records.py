"""The experts that an engine computed tokens with, on their way from turns to a pass.

Owns how the turns of a row become one table, and the tables of rows that of a pass. Never knows a model: what it does
with the table is for `agentrl.learner.moe.routers`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.records import RoutedExperts

UNTOLD = -1
"""Stands for the experts of a token for which the engine reported none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes of a mixture: its decoder layers, those of them that have experts, and the experts of each such layer, of
    which a token is computed with `per_token`."""

    layers: int
    mixed: tuple[int, ...]
    experts: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Routes of the nodes of a pass. `chosen_NLK` are the experts that each was computed with, int16, by decoder layer
    (of a dense one any numbers); None if no turn of the pass has them. `rows_N` says in how many rows the loss depends
    on a node: a row's last token predicts nothing. `differing` counts nodes whose experts differ between rows; those of
    the first row are kept. `pull_ME` is the derivative of the balance loss by the sum of each expert's probabilities,
    see `agentrl.learner.moe.routers`; None if there is no such loss."""

    chosen_NLK: Tensor | None
    rows_N: Tensor
    differing: int = 0
    pull_ME: Tensor | None = None

    def at(self, nodes_T: Tensor) -> Routes:
        """Select the routes of some nodes."""
        chosen_TLK = None if self.chosen_NLK is None else self.chosen_NLK[nodes_T]
        return replace(self, chosen_NLK=chosen_TLK, rows_N=self.rows_N[nodes_T])

    def once(self) -> Routes:
        """Count each node in one row at most."""
        return replace(self, rows_N=self.rows_N.clamp(max=1))

    def to(self, device: torch.device | str) -> Routes:
        chosen_NLK = None if self.chosen_NLK is None else self.chosen_NLK.to(device)
        return replace(self, chosen_NLK=chosen_NLK, rows_N=self.rows_N.to(device))


def read_experts(turns: Iterable[RoutedExperts | None], size: int) -> Tensor | None:
    """Read from the turns of a path the experts of its first `size` tokens [T, L, K], int16; None if no turn has
    experts. Turns of another shape than the first one are left out."""
    chosen_TLK: np.ndarray | None = None
    for turn_experts in turns:
        if turn_experts is None:
            continue
        expert_numbers = np.frombuffer(turn_experts.data, dtype=np.dtype(f"<u{turn_experts.width}"))
        expert_numbers = expert_numbers.reshape(-1, turn_experts.layers, turn_experts.per_token)[
            : max(0, size - turn_experts.start)
        ]
        if chosen_TLK is None:
            chosen_TLK = np.full((size, turn_experts.layers, turn_experts.per_token), UNTOLD, dtype=np.int16)
        # An engine that was attached anew may serve another model. Its turns count as untold, and are counted so;
        # refused here, one such turn would end the step.
        if expert_numbers.shape[1:] == chosen_TLK.shape[1:]:
            chosen_TLK[turn_experts.start : turn_experts.start + len(expert_numbers)] = expert_numbers
    return None if chosen_TLK is None else torch.from_numpy(chosen_TLK)


def joined(rows: Sequence[tuple[Tensor, int, Tensor | None]], size: int, stem_SLK: Tensor | None = None) -> Routes:
    """Join the routes of a pass of `size` nodes. Each of `rows` has the numbers of its nodes, how many of these its
    loss depends on, and the table of its experts. If the first nodes are a stem's, `stem_SLK` are their experts, and
    rows with others were counted there."""
    rows_N = torch.zeros(size, dtype=torch.int32)
    table_shapes = [
        chosen_table.shape[1:]
        for chosen_table in (stem_SLK, *(chosen_table for _, _, chosen_table in rows))
        if chosen_table is not None
    ]
    chosen_NLK = torch.full((size, *table_shapes[0]), UNTOLD, dtype=torch.int16) if table_shapes else None
    if chosen_NLK is not None and stem_SLK is not None:
        chosen_NLK[: len(stem_SLK)] = stem_SLK
    differs_N = torch.zeros(size, dtype=torch.bool)
    for path_T, needed_count, chosen_TLK in rows:
        rows_N[path_T[:needed_count]] += 1
        if chosen_NLK is None or chosen_TLK is None or chosen_TLK.shape[1:] != table_shapes[0]:
            continue
        before_TLK = chosen_NLK[path_T]
        new_T, own_T = (before_TLK < 0).any(-1).any(-1), ~(chosen_TLK < 0).any(-1).any(-1)
        # Sorted, since the order of a token's experts is that of their scores, and says nothing of which they are.
        differs_N[path_T] |= ~new_T & own_T & (before_TLK.sort(-1)[0] != chosen_TLK.sort(-1)[0]).any(-1).any(-1)
        chosen_NLK[path_T[new_T]] = chosen_TLK[new_T]
    differs_N[: 0 if stem_SLK is None else len(stem_SLK)] = False
    return Routes(chosen_NLK=chosen_NLK, rows_N=rows_N, differing=int(differs_N.sum()))


def fitted(routes: Routes, shape: ExpertShape) -> Routes:
    """Routes that a mixture of this shape can replay: experts that it lacks, and one twice, are as if untold."""
    chosen_NLK = routes.chosen_NLK
    if chosen_NLK is None or tuple(chosen_NLK.shape[1:]) != (shape.layers, shape.per_token):
        return replace(routes, chosen_NLK=None, differing=0)
    own_NMK = chosen_NLK[:, list(shape.mixed)]
    known_N = ((own_NMK >= 0) & (own_NMK < shape.experts)).all(-1).all(-1)
    ordered_NMK = own_NMK.sort(-1)[0]
    # An expert named twice would be computed once and weighed twice.
    known_N &= ~(ordered_NMK[..., 1:] == ordered_NMK[..., :-1]).any(-1).any(-1)
    return replace(routes, chosen_NLK=torch.where(known_N[:, None, None], chosen_NLK, UNTOLD))


def known(routes: Routes) -> Tensor:
    """Which nodes are replayed [N]."""
    if routes.chosen_NLK is None:
        return torch.zeros_like(routes.rows_N, dtype=torch.bool)
    return (routes.chosen_NLK >= 0).all(-1).all(-1)


def load(routes: Routes, shape: ExpertShape) -> Tensor:
    """How many tokens of rows each expert of each mixture gets [M, E], of nodes that are all replayed."""
    assert routes.chosen_NLK is not None, "the caller asked `known`"
    needed_N = routes.rows_N > 0
    own_NMK, rows_N = routes.chosen_NLK[needed_N][:, list(shape.mixed)], routes.rows_N[needed_N]
    return torch.stack([used(own_NMK[:, mixture], rows_N, shape.experts) for mixture in range(len(shape.mixed))])


def used(chosen_TK: Tensor, rows_T: Tensor, experts: int) -> Tensor:
    """How many tokens of rows each expert gets [E], float64."""
    weight_TK = rows_T.double()[:, None].expand(chosen_TK.shape)
    return weight_TK.new_zeros(experts).index_add_(0, chosen_TK.flatten().long(), weight_TK.flatten())
