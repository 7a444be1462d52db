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
        span_nodes = torch.arange(*span, device=pack.token_ids_N.device)
        return cls(pack, pieces(pack.branches, [span]), _predictors(pack, span) - span[0], span_nodes)

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
        predictor_count = len(self.pack.predictors_P)
        at_P = self.row_p.new_full((predictor_count,), -1).index_copy(
            0, self.row_p, torch.arange(len(self.row_p)).to(self.row_p)
        )
        (own_places, own_J), (plain_places, plain_J) = own.only(at_P), plain.only(at_P)
        own_I, plain_O, entropy_p = statistics_of(own_places, plain_places)
        vector_sizes = len(own.row_I), len(plain.row_I), predictor_count
        own_parts = zip((own_I, plain_O, entropy_p), (own_J, plain_J, self.row_p), vector_sizes, strict=True)
        own_I, plain_O, entropy_P = self.joined(list(own_parts), "log-probs")
        return own_I[own.back_I], plain_O[plain.back_I], entropy_P

    def joined(self, parts: Sequence[tuple[Tensor, Tensor, int]], name: str) -> list[Tensor]:
        """Vectors that the ranks have parts of: the numbers that this rank has, their places, and how many there are
        of all ranks."""
        assert self.meshes is not None
        # Zeros where others have numbers, then one sum: its gradient is a sum too, so that nothing special has to be
        # written for the backward pass.
        sparse_vectors = [
            own_numbers.new_zeros(vector_size).index_copy(0, own_places, own_numbers)
            for own_numbers, own_places, vector_size in parts
        ]
        return list(
            added_up(torch.cat(sparse_vectors), self.meshes.team, name).split(
                [len(sparse_vector) for sparse_vector in sparse_vectors]
            )
        )


def portion(pack: Pack, meshes: Meshes, span: Span | None = None) -> Portion:
    """This rank's share of all nodes of a pass, or of a span: its stem, or all after that."""
    if meshes.team is None:
        return Portion.whole(pack, span)
    if meshes.context is None:
        rank_portion = Portion.whole(pack, span)
        at_P = torch.arange(len(rank_portion.keep_c), device=rank_portion.keep_c.device)
    else:
        rank_portion, at_P = _of_nodes(pack, meshes, span or (0, len(pack.token_ids_N)))
    own_column, column_count = 0, 1
    if meshes.tensor is not None:
        own_column, column_count = meshes.tensor.get_local_rank(1), meshes.tensor.size(1)
    own_rows = slice(len(at_P) * own_column // column_count, len(at_P) * (own_column + 1) // column_count)
    return replace(rank_portion, rows=own_rows, row_p=at_P[own_rows], meshes=meshes)


def _predictors(pack: Pack, span: Span) -> Tensor:
    """Predictors of a span: of a stem no node predicts, and after it are all that do."""
    return pack.predictors_P[: len(pack.predictors_P) if span[1] == len(pack.token_ids_N) else 0]


def _of_nodes(pack: Pack, meshes: Meshes, span: Span) -> tuple[Portion, Tensor]:
    """This rank's nodes of a span, and which of the pass's predictors are among them."""
    rank_count, device = distributed.get_world_size(meshes.context), pack.token_ids_N.device
    rank_shares = spans(pieces(pack.branches, [span]), rank_count)
    nodes_by_rank = [torch.cat([torch.arange(*node_run) for node_run in rank_share]) for rank_share in rank_shares]
    most_nodes = max(map(len, nodes_by_rank))
    place_N = torch.empty(span[1] - span[0], dtype=torch.long)
    for rank, node_n in enumerate(nodes_by_rank):
        place_N[node_n - span[0]] = torch.arange(len(node_n)) + rank * most_nodes
    place_N, rank = place_N.to(device), distributed.get_rank(meshes.context)
    place_P = place_N[_predictors(pack, span) - span[0]] - rank * most_nodes
    at_P = ((place_P >= 0) & (place_P < most_nodes)).nonzero()[:, 0]
    branches, node_n = pieces(pack.branches, rank_shares[rank]), nodes_by_rank[rank].to(device)
    own_n = place_N[node_n - span[0]] // most_nodes == rank
    return Portion(pack, branches, place_P[at_P], node_n, place_N=place_N, most=most_nodes, own_n=own_n), at_P


def spans(branches: Sequence[Branch], size: int) -> list[list[Span]]:
    """The nodes of each of `size` ranks, of branches side by side, in order: about as many for each, and about as many
    pairs of a query and a key that it sees. If there are fewer nodes than ranks, the others compute the first node too,
    and nobody reads it."""
    rank_shares: list[list[Span]] = []
    for runs_per_rank in _RUNS:
        rank_shares, rank_costs = _dealt(branches, size, runs_per_rank * size)
        if max(rank_costs) * size <= _UNEVEN * sum(rank_costs):
            break
    first_node = branches[0].start
    return [_merged(sorted(rank_share or [(first_node, first_node + 1)])) for rank_share in rank_shares]


def _dealt(branches: Sequence[Branch], size: int, runs: int) -> tuple[list[list[Span]], list[int]]:
    """Cut the nodes into `runs` runs of about equal length, and deal them out to `size` ranks: the costliest first,
    each to the rank whose runs cost the least so far, if it may have one more. Returns the runs and the cost of each
    rank. A run costs the pairs of a query and a key that its nodes see."""
    first_node, node_count = branches[0].start, branches[-1].stop - branches[0].start
    run_edges = list(dict.fromkeys(first_node + node_count * edge_index // runs for edge_index in range(runs + 1)))
    run_costs = {
        node_run: sum(pairs(branch.stop - branch.start, len(branch.path)) for branch in pieces(branches, [node_run]))
        for node_run in pairwise(run_edges)
    }
    rank_shares: list[list[Span]] = [[] for _ in range(size)]
    rank_costs = [0] * size  # the cost of each rank
    most_runs = -(-len(run_costs) // size)
    for node_run in sorted(run_costs, key=lambda run: -run_costs[run]):
        rank = min((rank for rank in range(size) if len(rank_shares[rank]) < most_runs), key=rank_costs.__getitem__)
        rank_shares[rank].append(node_run)
        rank_costs[rank] += run_costs[node_run]
    return rank_shares, rank_costs


def _merged(share: Sequence[Span]) -> list[Span]:
    merged_spans = [share[0]]
    for start, stop in share[1:]:
        if start == merged_spans[-1][1]:
            merged_spans[-1] = (merged_spans[-1][0], stop)
        else:
            merged_spans.append((start, stop))
    return merged_spans


def pieces(branches: Sequence[Branch], share: Sequence[Span]) -> list[Branch]:
    """The parts of branches whose nodes are in some spans. All are in order."""
    branch_pieces: list[Branch] = []
    for span_start, span_stop in share:
        for branch in branches:
            piece_start, piece_stop = max(span_start, branch.start), min(span_stop, branch.stop)
            if piece_start < piece_stop:
                branch_pieces.append(
                    Branch(piece_start, piece_stop, branch.path[: len(branch.path) - (branch.stop - piece_stop)])
                )
    return branch_pieces


class _Gather(torch.autograd.Function):
    """`place_N` are the places of nodes in what the ranks have, `most` of each, one rank after the other."""

    @staticmethod
    def forward(ctx: Any, own_nX: Tensor, place_N: Tensor, most: int, group: Any, name: str) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.gathering = len(own_nX), most, group, name
        padded_nodes = torch.cat([own_nX, own_nX.new_zeros(most - len(own_nX), *own_nX.shape[1:])])
        gathered_nodes = padded_nodes.new_empty(most * distributed.get_world_size(group), *padded_nodes.shape[1:])
        with named(name):
            ALL_GATHER(gathered_nodes, padded_nodes, group=group)
        return gathered_nodes.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place_N,), (own_count, most_nodes, group, name) = ctx.saved_tensors, ctx.gathering
        padded_count = most_nodes * distributed.get_world_size(group)
        whole_grad = grads[0].new_zeros(padded_count, *grads[0].shape[1:]).index_copy(0, place_N, grads[0])
        own_grad = whole_grad.new_empty(most_nodes, *whole_grad.shape[1:])
        with named(f"{name}, backward"):
            REDUCE_SCATTER(own_grad, whole_grad, group=group)
        return own_grad[:own_count], None, None, None, None
