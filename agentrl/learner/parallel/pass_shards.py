"""A rank's share of a pass that several ranks compute together.

Owns how the nodes of a pass, and the rows of its logits, are divided among these ranks, and how the ranks' results come
together. Never knows models or losses.

context   Each rank computes some of the nodes, as queries of every layer. Before attention the ranks gather the keys
          and values of all nodes: 2 N H_kv D numbers of each layer, however many ranks there are, which stay for the
          backward pass unless layers are computed again. Of a pass with a stem they divide the stem, and what comes
          after it, each by itself.
tensor    The ranks of a row have the same nodes, and each the logits of some.

The log-probs of all tokens are on all of these ranks in the end, and each has an equal part of the loss: gradients add
up over ranks (see `layers`).

Nodes are divided into runs, which each rank gets as many of. All nodes cost the same but for attention, where one costs
as much as it sees: the dearest runs first, each to the rank that sees the least so far. Of one row a rank gets a run
near its start and one as near to its end.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from agentrl.learner.data.prefix_trees import Branch, Pack
from agentrl.learner.flops import pairs
from agentrl.learner.model.attention import Gather
from agentrl.learner.model.logprobs import Places
from agentrl.learner.moe.expert_records import Routes
from agentrl.learner.parallel.collectives import Meshes, named
from agentrl.learner.parallel.fsdp import ALL_GATHER, REDUCE_SCATTER
from agentrl.learner.parallel.layers import added_up

_RUNS = (2, 4, 8)  # of each rank: as few as will do, since in most layouts each has a copy of its path
# More runs are evener, and each run has a copy of its path in most layouts: three percent of waiting is cheaper than
# twice the copies.
_UNEVEN = 1.03  # what a rank may see more than the mean

Statistics = tuple[Tensor, Tensor, Tensor]
"""The result of `logprobs.statistics`."""

Span = tuple[int, int]
"""Nodes from one to another, exclusive."""


@dataclass(frozen=True, slots=True)
class Portion:
    """This rank's nodes `node_n` of a pass and their `branches`; `keep_c` are those of its nodes (by their place among
    them) that predict, of which it reads the logits of `rows`: the numbers of these in the pass are `row_p`."""

    pack: Pack
    branches: Sequence[Branch]
    keep_c: Tensor
    node_n: Tensor | None = None  # all of them
    rows: slice = field(default_factory=lambda: slice(None))
    row_p: Tensor | None = None  # all of them
    place_N: Tensor | None = None
    most: int = 0
    own_n: Tensor | None = None  # which of them another rank does not compute in its place: all of them
    meshes: Meshes | None = None

    @classmethod
    def whole(cls, pack: Pack, span: Span | None = None) -> Portion:
        """All nodes of a pass, or of a span."""
        if span is None:
            return cls(pack, pack.branches, pack.predictors_P)
        nodes = torch.arange(*span, device=pack.token_ids_N.device)
        return cls(pack, pieces(pack.branches, [span]), _predictors(pack, span) - span[0], nodes)

    @property
    def token_ids_n(self) -> Tensor:
        ids_N = self.pack.token_ids_N
        return ids_N if self.node_n is None else ids_N[self.node_n]

    @property
    def depth_n(self) -> Tensor:
        depth_N = self.pack.depth_N
        return depth_N if self.node_n is None else depth_N[self.node_n]

    @property
    def routes(self) -> Routes | None:
        """Routes of this rank's nodes. A node that it computes for nobody is in no row."""
        if self.pack.routes is None or self.node_n is None:
            return self.pack.routes
        node_routes = self.pack.routes.at(self.node_n)
        return node_routes if self.own_n is None else replace(node_routes, rows_N=node_routes.rows_N * self.own_n)

    def gather(self, then: Gather | None) -> Gather | None:
        """How layers get the keys and values of all nodes; `then` is what the pass does to those of a span."""
        if self.place_N is None or then is None:
            return then if self.place_N is None else self._gathered

        def both(key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
            return then(*self._gathered(key, value, name), name)

        return both

    def _gathered(self, key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Gather keys and values of all nodes [1, H_kv, N, D] from those of this rank's nodes [1, H_kv, n, D]."""
        assert self.meshes is not None and self.place_N is not None
        both_nHD = torch.cat([key, value], -1)[0].transpose(0, 1)
        both_NHD = _Gather.apply(both_nHD, self.place_N, self.most, self.meshes.context, name)
        both: Tensor = both_NHD.transpose(0, 1)[None]  # pyright: ignore
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    def read(self, own: Places, plain: Places, statistics_of: Callable[[Places, Places], Statistics]) -> Statistics:
        """Read two sets of places, and each row of logits: each rank reads its own rows, and their results are
        joined."""
        if self.row_p is None:
            return statistics_of(own, plain)
        count = len(self.pack.predictors_P)
        at_P = self.row_p.new_full((count,), -1).index_copy(0, self.row_p, torch.arange(len(self.row_p)).to(self.row_p))
        (here, own_J), (plain_places, plain_J) = own.only(at_P), plain.only(at_P)
        own_I, plain_O, entropy_p = statistics_of(here, plain_places)
        sizes = len(own.row_I), len(plain.row_I), count
        parts = zip((own_I, plain_O, entropy_p), (own_J, plain_J, self.row_p), sizes, strict=True)
        own_I, plain_O, entropy_P = self.joined(list(parts), "log-probs")
        return own_I[own.back_I], plain_O[plain.back_I], entropy_P

    def joined(self, parts: Sequence[tuple[Tensor, Tensor, int]], name: str) -> list[Tensor]:
        """Vectors that the ranks have parts of: the numbers that this rank has, their places, and how many there are
        of all ranks."""
        assert self.meshes is not None
        # Zeros where others have numbers, then one sum: its gradient is a sum too, so that nothing special has to be
        # written for the backward pass.
        vectors = [numbers.new_zeros(size).index_copy(0, places, numbers) for numbers, places, size in parts]
        return list(added_up(torch.cat(vectors), self.meshes.team, name).split([len(vector) for vector in vectors]))


def portion(pack: Pack, meshes: Meshes, span: Span | None = None) -> Portion:
    """This rank's share of all nodes of a pass, or of a span: its stem, or all after that."""
    if meshes.team is None:
        return Portion.whole(pack, span)
    if meshes.context is None:
        rank_portion = Portion.whole(pack, span)
        at_P = torch.arange(len(rank_portion.keep_c), device=rank_portion.keep_c.device)
    else:
        rank_portion, at_P = _of_nodes(pack, meshes, span or (0, len(pack.token_ids_N)))
    column, width = (0, 1) if meshes.tensor is None else (meshes.tensor.get_local_rank(1), meshes.tensor.size(1))
    rows = slice(len(at_P) * column // width, len(at_P) * (column + 1) // width)
    return replace(rank_portion, rows=rows, row_p=at_P[rows], meshes=meshes)


def _predictors(pack: Pack, span: Span) -> Tensor:
    """Predictors of a span: of a stem no node predicts, and after it are all that do."""
    return pack.predictors_P[: len(pack.predictors_P) if span[1] == len(pack.token_ids_N) else 0]


def _of_nodes(pack: Pack, meshes: Meshes, span: Span) -> tuple[Portion, Tensor]:
    """This rank's nodes of a span, and which of the pass's predictors are among them."""
    size, device = distributed.get_world_size(meshes.context), pack.token_ids_N.device
    shares = spans(pieces(pack.branches, [span]), size)
    each = [torch.cat([torch.arange(*run) for run in share]) for share in shares]
    most = max(map(len, each))
    place_N = torch.empty(span[1] - span[0], dtype=torch.long)
    for rank, node_n in enumerate(each):
        place_N[node_n - span[0]] = torch.arange(len(node_n)) + rank * most
    place_N, rank = place_N.to(device), distributed.get_rank(meshes.context)
    place_P = place_N[_predictors(pack, span) - span[0]] - rank * most
    at_P = ((place_P >= 0) & (place_P < most)).nonzero()[:, 0]
    branches, node_n = pieces(pack.branches, shares[rank]), each[rank].to(device)
    own_n = place_N[node_n - span[0]] // most == rank
    return Portion(pack, branches, place_P[at_P], node_n, place_N=place_N, most=most, own_n=own_n), at_P


def spans(branches: Sequence[Branch], size: int) -> list[list[Span]]:
    """The nodes of each of `size` ranks, of branches side by side, in order: about as many for each, and about as many
    pairs of a query and a key that it sees. If there are fewer nodes than ranks, the others compute the first node too,
    and nobody reads it."""
    shares: list[list[Span]] = []
    for runs in _RUNS:
        shares, seen = _dealt(branches, size, runs * size)
        if max(seen) * size <= _UNEVEN * sum(seen):
            break
    first = branches[0].start
    return [_merged(sorted(share or [(first, first + 1)])) for share in shares]


def _dealt(branches: Sequence[Branch], size: int, runs: int) -> tuple[list[list[Span]], list[int]]:
    """Cut the nodes into `runs` runs of about equal length, and deal them out to `size` ranks: the costliest first,
    each to the rank whose runs cost the least so far, if it may have one more. Returns the runs and the cost of each
    rank. A run costs the pairs of a query and a key that its nodes see."""
    first, nodes = branches[0].start, branches[-1].stop - branches[0].start
    edges = list(dict.fromkeys(first + nodes * number // runs for number in range(runs + 1)))
    cost = {
        run: sum(pairs(branch.stop - branch.start, len(branch.path)) for branch in pieces(branches, [run]))
        for run in pairwise(edges)
    }
    shares: list[list[Span]] = [[] for _ in range(size)]
    seen = [0] * size  # the cost of each rank
    most = -(-len(cost) // size)
    for run in sorted(cost, key=lambda run: -cost[run]):
        rank = min((rank for rank in range(size) if len(shares[rank]) < most), key=seen.__getitem__)
        shares[rank].append(run)
        seen[rank] += cost[run]
    return shares, seen


def _merged(share: Sequence[Span]) -> list[Span]:
    merged = [share[0]]
    for start, stop in share[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def pieces(branches: Sequence[Branch], share: Sequence[Span]) -> list[Branch]:
    """The parts of branches whose nodes are in some spans. All are in order."""
    parts: list[Branch] = []
    for first, last in share:
        for branch in branches:
            start, stop = max(first, branch.start), min(last, branch.stop)
            if start < stop:
                parts.append(Branch(start, stop, branch.path[: len(branch.path) - (branch.stop - stop)]))
    return parts


class _Gather(torch.autograd.Function):
    """`place_N` are the places of nodes in what the ranks have, `most` of each, one rank after the other."""

    @staticmethod
    def forward(ctx: Any, own_nX: Tensor, place_N: Tensor, most: int, group: Any, name: str) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.gathering = len(own_nX), most, group, name
        padded = torch.cat([own_nX, own_nX.new_zeros(most - len(own_nX), *own_nX.shape[1:])])
        gathered = padded.new_empty(most * distributed.get_world_size(group), *padded.shape[1:])
        with named(name):
            ALL_GATHER(gathered, padded, group=group)
        return gathered.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place_N,), (count, most, group, name) = ctx.saved_tensors, ctx.gathering
        size = most * distributed.get_world_size(group)
        whole_grad = grads[0].new_zeros(size, *grads[0].shape[1:]).index_copy(0, place_N, grads[0])
        own_grad = whole_grad.new_empty(most, *whole_grad.shape[1:])
        with named(f"{name}, backward"):
            REDUCE_SCATTER(own_grad, whole_grad, group=group)
        return own_grad[:count], None, None, None, None
