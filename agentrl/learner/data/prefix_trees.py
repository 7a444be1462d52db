"""Rows become prefix trees, trees become packs. One forward pass computes a pack: each distinct token once.

Owns the layout. Never knows the loss, nor the model that runs the pass.

Rows with the same beginning share its nodes, so the shared prompt and shared turns of a group are computed once:

    row 0:  P Q A B          nodes  0:P 1:Q 2:A 3:B      branch [0, 4)  path 0 1 2 3
    row 1:  P Q A C D        nodes  4:C 5:D              branch [4, 6)  path 0 1 2 4 5
    row 2:  P Q E            nodes  6:E                  branch [6, 7)  path 0 1 6

The rows are laid in the order of their tokens, so nodes are in preorder, and a row's new nodes are the end of its path
and lie side by side. So a branch's queries are a slice, its keys and
values are gathered by its path, and the mask is causal from the bottom right: attention costs what the rows need
beyond their shared prefix, there is no [N, N] mask, and several trees lie in one pass without padding and without
seeing each other. The depth of a node is its position id.

A group with more nodes than a pass is divided into trees, each with a pass of its own. All begin with the same nodes,
their stem, which may then be computed once (`agentrl.learner.data.shared_prompt`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algos.algorithm import Algorithm
from agentrl.learner.data.ragged import Ragged
from agentrl.learner.data.rows import Row
from agentrl.learner.moe import expert_records as routes
from agentrl.learner.moe.expert_records import Routes
from agentrl.tokens import images
from agentrl.tokens.images import Image

_SAVED = 0.05  # of a divided group's nodes, so many must be: a stem is a pass more


# Why the nodes lie in preorder, and why there is no mask over all of them.
#
# A pack has N nodes and needs attention in which a node sees its ancestors alone. Written as a mask it has N² entries:
# 4 GB for 64k nodes, more than the weights of a small model, and most of it says no. Kernels that take a sparse mask
# exist for some GPUs and not for a CPU; a run has to compute the same everywhere.
#
# If the rows are laid in the order of their tokens, each row adds its new nodes side by side, behind those that it
# shares. Its queries are then a slice, its keys and values are gathered by its path, and the mask that is left is the
# plain causal one, aligned at the bottom right: the form that every attention kernel has. The price is one call a
# branch and a gather of keys that rows share. Attention over shared nodes is computed once, as part of the row that
# brought them.
#
# The depth of a node is its position, so a token has the position that the engine gave it, however many rows are in
# the pack. Two members that sampled the same token after the same prefix share the node and not its entry in the loss:
# each keeps its advantage and its behaviour log-probability, so the loss is that of the rows (`Pack`).
#
# `tests/learner/test_packing.py` and `tests/learner/test_model.py` compare packs with plain rows, one by one.
@dataclass(frozen=True, slots=True)
class Branch:
    """Nodes `start` to `stop` (exclusive) are the last ones of the root path `path` (node numbers in order, on the host
    wherever the pass is computed)."""

    start: int
    stop: int
    path: Tensor


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The prefix tree of some rows, with N nodes; `paths` holds every row's node numbers."""

    token_ids_N: tuple[int, ...]
    depth_N: tuple[int, ...]
    branches: tuple[Branch, ...]
    rows: tuple[Row, ...]
    paths: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Stem:
    """The first nodes of each of `passes` passes over one group, before any that predicts. `experts` is a digest of the
    experts recorded for them: the same tokens with other experts are another stem."""

    token_ids: tuple[int, ...]
    passes: int
    experts: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The content of one pass. Suffixes: N nodes, P nodes that predict a scored or observed token, K scored tokens, all
    of one policy and trained by one algorithm, O observed ones, see `Row`.

    A token sampled by two members after the same prefix is one node and two scored tokens: each keeps its own advantage
    and behaviour log-prob, so the loss is that of the rows."""

    token_ids_N: Tensor
    depth_N: Tensor
    branches: tuple[Branch, ...]
    predictors_P: Tensor  # node numbers, ascending
    predictor_K: Tensor  # index into predictors_P
    target_K: Tensor  # token ids
    columns: Mapping[str, Tensor]  # [K, ...] by name: those of the rows
    algo: Algorithm  # that of the rows
    policy: str | None  # that of the rows
    row_tokens: int  # tokens of the same rows without sharing
    observer_O: Tensor  # index into predictors_P, of observed tokens
    observed_O: Tensor  # token ids
    observed_weight_O: Tensor  # shares of the loss on observations
    scored_P: NDArray[np.int64] | None = None  # how many scored tokens each predicts: on the host, wherever the pass is
    observed_P: NDArray[np.int64] | None = None  # the same of observed ones
    ragged: Mapping[str, Ragged] = field(default_factory=dict[str, Ragged])  # those of the rows
    images: Mapping[int, Image] = field(default_factory=dict[int, Image])  # those of its nodes, by token
    routes: Routes | None = None  # which experts compute the nodes of a mixture; None: its routers choose
    stem: Stem | None = None  # its first nodes, if these are computed once for several passes

    @property
    def distinct(self) -> float:
        """Nodes that it computes, with its share of those of its stem."""
        node_count = len(self.token_ids_N)
        return node_count if self.stem is None else node_count - len(self.stem) * (1 - 1 / self.stem.passes)

    def having(self, columns: Mapping[str, Tensor]) -> Pack:
        """The pack with these columns, [K, ...] each."""
        return replace(self, columns={**self.columns, **columns})


def build_tree(rows: Sequence[Row]) -> PrefixTree:
    """The prefix tree of `rows`. Its nodes are in preorder: a node's descendants follow it, side by side."""
    row_token_ids = [torch.tensor(row.token_ids) for row in rows]
    node_token_ids: list[Tensor] = []
    branches: list[Branch] = []
    row_paths = row_token_ids[:]  # each is replaced
    node_count, previous_index = 0, -1
    for row_index in _order(rows):
        shared_count = _shared(row_token_ids[previous_index], row_token_ids[row_index]) if branches else 0
        new_count = len(row_token_ids[row_index]) - shared_count
        row_paths[row_index] = torch.cat(
            [row_paths[previous_index][:shared_count], torch.arange(node_count, node_count + new_count)]
        )
        node_token_ids.append(row_token_ids[row_index][shared_count:])
        if new_count:
            branches.append(Branch(node_count, node_count + new_count, row_paths[row_index]))
        node_count, previous_index = node_count + new_count, row_index
    node_depths = [
        path_index for branch in branches for path_index in range(len(branch.path))[branch.start - branch.stop :]
    ]
    return PrefixTree(
        tuple(torch.cat(node_token_ids).tolist()), tuple(node_depths), tuple(branches), tuple(rows), tuple(row_paths)
    )


def _order(rows: Sequence[Row]) -> list[int]:
    """Row numbers by their tokens, a row before those that are its beginning. A row shares more with its neighbours
    than with any other."""
    return sorted(range(len(rows)), key=lambda index: (*rows[index].token_ids, math.inf))


def _shared(one: Tensor, other: Tensor) -> int:
    """The length of the longest common prefix."""
    common_length = min(len(one), len(other))
    return int((one[:common_length] == other[:common_length]).long().cumprod(0).sum())


def chains(rows: Sequence[Row]) -> list[PrefixTree]:
    """A tree of each row; rows that are its beginning lie in it. None has a second branch."""
    row_chains: list[list[int]] = []
    for row_index in _order(rows):
        token_ids, longest_ids = rows[row_index].token_ids, rows[row_chains[-1][0]].token_ids if row_chains else ()
        if row_chains and longest_ids[: len(token_ids)] == token_ids:
            row_chains[-1].append(row_index)
        else:
            row_chains.append([row_index])
    return [build_tree([rows[row_index] for row_index in chain_rows]) for chain_rows in sorted(map(sorted, row_chains))]


def forest(rows: Sequence[Row], budget: int) -> list[PrefixTree]:
    """One tree, or several of at most `budget` nodes if one would be larger. Rows stay with their neighbours in the
    order of their tokens, divided so that the trees have the fewest nodes together, then so that they are fewest. A
    longer row has a tree of its own."""
    row_order = _order(rows)
    row_token_ids = [torch.tensor(rows[row_index].token_ids) for row_index in row_order]
    shared = [0, *map(_shared, row_token_ids, row_token_ids[1:])]  # of a row and the one before it
    # Of the first rows: nodes, trees, where their last tree begins.
    best_divisions: list[tuple[int, int, int]] = [(0, 0, 0)]
    for stop_row in range(1, len(row_token_ids) + 1):
        tree_size, divisions = 0, list[tuple[int, int, int]]()
        # Dynamic programming over neighbours: the best division of the first rows is known when the next one comes.
        # To fill passes greedily would cut where the budget ends, in the middle of a long shared beginning.
        for start_row in reversed(range(stop_row)):  # a tree of the rows from start to stop
            tree_size += len(row_token_ids[start_row]) - (shared[start_row + 1] if start_row + 1 < stop_row else 0)
            # At least one option: a single row longer than the budget gets a pass of its own. To cut it would change
            # the log-probs of its tokens.
            if tree_size > budget and divisions:
                break
            divisions.append((best_divisions[start_row][0] + tree_size, best_divisions[start_row][1] + 1, start_row))
        # Tuples compare by nodes first, then by trees, then by place, so ties are broken alike on every machine.
        best_divisions.append(min(divisions))
    divided_rows: list[list[int]] = []
    stop_row = len(row_token_ids)
    while stop_row:
        start_row = best_divisions[stop_row][2]
        divided_rows.append(sorted(row_order[start_row:stop_row]))
        stop_row = start_row
    return [build_tree([rows[row_index] for row_index in tree_rows]) for tree_rows in sorted(divided_rows)]


def packs(
    groups: Sequence[Sequence[Row]],
    budget: int,
    device: torch.device | str = "cpu",
    *,
    shared: bool = True,
    stems: bool = False,
) -> list[Pack]:
    """Lay the rows of each group into trees and the trees, in order, into passes of at most `budget` nodes. The rows of
    each policy, and of each algorithm, have passes of their own. If nothing is `shared`, each row
    is a tree. With `stems`, groups that are divided have them where that pays."""
    return [
        kind_pack for kind_groups in kinds(groups) for kind_pack in _packs(kind_groups, budget, device, shared, stems)
    ]


def kinds(groups: Sequence[Sequence[Row]]) -> list[list[list[Row]]]:
    """The rows of each group by their policy and algorithm."""
    distinct_kinds: list[tuple[str | None, Algorithm]] = []
    for group_row in (group_row for group_rows in groups for group_row in group_rows):
        if (group_row.policy, group_row.algo) not in distinct_kinds:
            distinct_kinds.append((group_row.policy, group_row.algo))
    return [
        [
            [group_row for group_row in group_rows if (group_row.policy, group_row.algo) == distinct_kind]
            for group_rows in groups
        ]
        for distinct_kind in distinct_kinds
    ]


def _packs(
    groups: Sequence[Sequence[Row]], budget: int, device: torch.device | str, shared: bool, stems: bool
) -> list[Pack]:
    filled_passes: list[list[PrefixTree]] = [[]]
    free_nodes = budget
    packs_with_stem: list[Pack] = []
    for group_rows in filter(None, groups):
        prefix_trees = forest(group_rows, budget) if shared else chains(group_rows)
        if stems and shared and (stem_packs := grown(prefix_trees, device)):
            packs_with_stem += stem_packs
            continue
        for prefix_tree in prefix_trees:
            tree_size = len(prefix_tree.token_ids_N)
            if tree_size > free_nodes and filled_passes[-1]:
                filled_passes.append([])
                free_nodes = budget
            filled_passes[-1].append(prefix_tree)
            free_nodes -= tree_size
    return [_pack(prefix_trees, device) for prefix_trees in filled_passes if prefix_trees] + packs_with_stem


def grown(trees: Sequence[PrefixTree], device: torch.device | str, ranks: int = 1) -> list[Pack]:
    """The passes of a group that was divided into these trees, if to compute their stem once saves the nodes that it
    must; else none. Of several `ranks` each computes the stem, and some of the passes. Of a mixture a node of the stem
    has the experts of the group's first row that has any recorded, in every pass."""
    group_rows = [group_row for tree in trees for group_row in tree.rows]
    shared_stem = stem(group_rows, len(trees))
    tree_sizes = sorted((len(tree.token_ids_N) for tree in trees), reverse=True)
    nodes_without_stem = sum(tree_sizes) / ranks
    round_sizes = tree_sizes[::ranks]  # the most that a rank computes in each
    # Each rank computes the stem once, so with many ranks and few passes there is little to save; the graph of a stem
    # is kept in memory meanwhile, which must be paid for.
    if len(shared_stem) + sum(round_sizes) - len(round_sizes) * len(shared_stem) > (1 - _SAVED) * nodes_without_stem:
        return []
    stem_size = len(shared_stem)
    prefix_experts = [None if group_row.chosen is None else group_row.chosen[:stem_size] for group_row in group_rows]
    stem_routes = routes.joined(
        [(torch.arange(stem_size), stem_size, own_SLK) for own_SLK in prefix_experts], stem_size
    )
    if stem_routes.chosen_NLK is not None:
        shared_stem = replace(
            shared_stem, experts=blake2b(stem_routes.chosen_NLK.numpy().tobytes(), digest_size=16).digest()
        )
    stem_passes = [replace(_pack([tree], device, stem_routes.chosen_NLK), stem=shared_stem) for tree in trees]
    first_routes = stem_passes[0].routes
    assert first_routes is not None, "every pass has"
    return [
        replace(stem_passes[0], routes=replace(first_routes, differing=first_routes.differing + stem_routes.differing)),
        *stem_passes[1:],
    ]


def stem(rows: Sequence[Row], passes: int) -> Stem:
    """The common prefix of `rows`, up to the first node that predicts, as the stem of `passes` passes."""
    # Up to the first node that predicts: a loss depends on the stem through keys and values alone then, and no logits
    # are needed of it.
    prefix_length = min(int(torch.cat([row.place_S, row.observed_O]).min()) for row in rows) - 1
    prefix_ids = [torch.tensor(row.token_ids[:prefix_length]) for row in rows]
    return Stem(rows[0].token_ids[: min(_shared(prefix_ids[0], other_ids) for other_ids in prefix_ids)], passes)


def _pack(trees: Sequence[PrefixTree], device: torch.device | str, stem_SLK: Tensor | None = None) -> Pack:
    token_ids: list[int] = []
    node_depths: list[int] = []
    branches: list[Branch] = []
    before_K: list[Tensor] = []
    target_K: list[Tensor] = []
    before_O: list[Tensor] = []
    observed_O: list[Tensor] = []
    routed_rows: list[tuple[Tensor, int, Tensor | None]] = []
    for tree in trees:
        first_node = len(token_ids)
        token_ids += tree.token_ids_N
        node_depths += tree.depth_N
        branches += [
            Branch(tree_branch.start + first_node, tree_branch.stop + first_node, tree_branch.path + first_node)
            for tree_branch in tree.branches
        ]
        for row, row_path in zip(tree.rows, tree.paths, strict=True):
            before_K.append(row_path[row.place_S - 1] + first_node)
            target_K.append(torch.tensor(row.token_ids)[row.place_S])
            before_O.append(row_path[row.observed_O - 1] + first_node)
            observed_O.append(torch.tensor(row.token_ids)[row.observed_O])
            routed_rows.append((row_path + first_node, int(row.place_S[-1]), row.chosen))
    pack_rows = [row for tree in trees for row in tree.rows]
    # Distinct and sorted: siblings that sampled different tokens after one prefix share the logits of its last node,
    # the largest tensor of a small model.
    predictors_P, predictor_KO = torch.unique(torch.cat([*before_K, *before_O]), return_inverse=True)
    scored_count = sum(map(len, before_K))
    weight_O = [torch.full(row.observed_O.shape, row.observed_weight) for row in pack_rows]
    return Pack(
        token_ids_N=torch.tensor(token_ids, device=device),
        depth_N=torch.tensor(node_depths, device=device),
        branches=tuple(branches),
        predictors_P=predictors_P.to(device),
        predictor_K=predictor_KO[:scored_count].to(device),
        target_K=torch.cat(target_K).to(device),
        columns={
            column_name: torch.cat([row.columns[column_name] for row in pack_rows]).to(device)
            for column_name in pack_rows[0].columns
        },
        algo=pack_rows[0].algo,
        policy=pack_rows[0].policy,
        row_tokens=sum(len(row.token_ids) for row in pack_rows),
        images=images.joined(row.images for row in pack_rows),
        ragged={
            column_name: Ragged.joined([row.ragged[column_name] for row in pack_rows]).to(device)
            for column_name in pack_rows[0].ragged
        },
        routes=routes.joined(routed_rows, len(token_ids), stem_SLK).to(device),
        observer_O=predictor_KO[scored_count:].to(device),
        observed_O=torch.cat(observed_O).to(device),
        observed_weight_O=torch.cat(weight_O).to(device),
        # Counted on the host, where the numbers still are: on the device they would have to be waited for in each
        # pass.
        scored_P=np.bincount(predictor_KO[:scored_count].numpy(), minlength=len(predictors_P)),
        observed_P=np.bincount(predictor_KO[scored_count:].numpy(), minlength=len(predictors_P)),
    )
