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
        size = len(self.token_ids_N)
        return size if self.stem is None else size - len(self.stem) * (1 - 1 / self.stem.passes)

    def having(self, columns: Mapping[str, Tensor]) -> Pack:
        """The pack with these columns, [K, ...] each."""
        return replace(self, columns={**self.columns, **columns})


def build_tree(rows: Sequence[Row]) -> PrefixTree:
    """The prefix tree of `rows`. Its nodes are in preorder: a node's descendants follow it, side by side."""
    ids = [torch.tensor(row.token_ids) for row in rows]
    token_ids: list[Tensor] = []
    branches: list[Branch] = []
    paths = ids[:]  # each is replaced
    size, last = 0, -1
    for now in _order(rows):
        shared = _shared(ids[last], ids[now]) if branches else 0
        new = len(ids[now]) - shared
        paths[now] = torch.cat([paths[last][:shared], torch.arange(size, size + new)])
        token_ids.append(ids[now][shared:])
        if new:
            branches.append(Branch(size, size + new, paths[now]))
        size, last = size + new, now
    depth = [number for branch in branches for number in range(len(branch.path))[branch.start - branch.stop :]]
    return PrefixTree(tuple(torch.cat(token_ids).tolist()), tuple(depth), tuple(branches), tuple(rows), tuple(paths))


def _order(rows: Sequence[Row]) -> list[int]:
    """Row numbers by their tokens, a row before those that are its beginning. A row shares more with its neighbours
    than with any other."""
    return sorted(range(len(rows)), key=lambda index: (*rows[index].token_ids, math.inf))


def _shared(one: Tensor, other: Tensor) -> int:
    """The length of the longest common prefix."""
    length = min(len(one), len(other))
    return int((one[:length] == other[:length]).long().cumprod(0).sum())


def chains(rows: Sequence[Row]) -> list[PrefixTree]:
    """A tree of each row; rows that are its beginning lie in it. None has a second branch."""
    runs: list[list[int]] = []
    for index in _order(rows):
        ids, longest = rows[index].token_ids, rows[runs[-1][0]].token_ids if runs else ()
        if runs and longest[: len(ids)] == ids:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [build_tree([rows[index] for index in part]) for part in sorted(map(sorted, runs))]


def forest(rows: Sequence[Row], budget: int) -> list[PrefixTree]:
    """One tree, or several of at most `budget` nodes if one would be larger. Rows stay with their neighbours in the
    order of their tokens, divided so that the trees have the fewest nodes together, then so that they are fewest. A
    longer row has a tree of its own."""
    order = _order(rows)
    ids = [torch.tensor(rows[index].token_ids) for index in order]
    shared = [0, *map(_shared, ids, ids[1:])]  # of a row and the one before it
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # of the first rows: nodes, trees, where their last tree begins
    for stop in range(1, len(ids) + 1):
        size, options = 0, list[tuple[int, int, int]]()
        # Dynamic programming over neighbours: the best division of the first rows is known when the next one comes.
        # To fill passes greedily would cut where the budget ends, in the middle of a long shared beginning.
        for start in reversed(range(stop)):  # a tree of the rows from start to stop
            size += len(ids[start]) - (shared[start + 1] if start + 1 < stop else 0)
            # At least one option: a single row longer than the budget gets a pass of its own. To cut it would change
            # the log-probs of its tokens.
            if size > budget and options:
                break
            options.append((best[start][0] + size, best[start][1] + 1, start))
        # Tuples compare by nodes first, then by trees, then by place, so ties are broken alike on every machine.
        best.append(min(options))
    parts: list[list[int]] = []
    stop = len(ids)
    while stop:
        start = best[stop][2]
        parts.append(sorted(order[start:stop]))
        stop = start
    return [build_tree([rows[index] for index in part]) for part in sorted(parts)]


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
    return [pack for kind_groups in kinds(groups) for pack in _packs(kind_groups, budget, device, shared, stems)]


def kinds(groups: Sequence[Sequence[Row]]) -> list[list[list[Row]]]:
    """The rows of each group by their policy and algorithm."""
    distinct: list[tuple[str | None, Algorithm]] = []
    for row in (row for rows in groups for row in rows):
        if (row.policy, row.algo) not in distinct:
            distinct.append((row.policy, row.algo))
    return [[[row for row in rows if (row.policy, row.algo) == kind] for rows in groups] for kind in distinct]


def _packs(
    groups: Sequence[Sequence[Row]], budget: int, device: torch.device | str, shared: bool, stems: bool
) -> list[Pack]:
    filled: list[list[PrefixTree]] = [[]]
    room = budget
    apart: list[Pack] = []
    for rows in filter(None, groups):
        trees = forest(rows, budget) if shared else chains(rows)
        if stems and shared and (stem_packs := grown(trees, device)):
            apart += stem_packs
            continue
        for tree in trees:
            size = len(tree.token_ids_N)
            if size > room and filled[-1]:
                filled.append([])
                room = budget
            filled[-1].append(tree)
            room -= size
    return [_pack(trees, device) for trees in filled if trees] + apart


def grown(trees: Sequence[PrefixTree], device: torch.device | str, ranks: int = 1) -> list[Pack]:
    """The passes of a group that was divided into these trees, if to compute their stem once saves the nodes that it
    must; else none. Of several `ranks` each computes the stem, and some of the passes. Of a mixture a node of the stem
    has the experts of the group's first row that has any recorded, in every pass."""
    rows = [row for tree in trees for row in tree.rows]
    shared_stem = stem(rows, len(trees))
    sizes = sorted((len(tree.token_ids_N) for tree in trees), reverse=True)
    without = sum(sizes) / ranks
    rounds = sizes[::ranks]  # the most that a rank computes in each
    # Each rank computes the stem once, so with many ranks and few passes there is little to save; the graph of a stem
    # is kept in memory meanwhile, which must be paid for.
    if len(shared_stem) + sum(rounds) - len(rounds) * len(shared_stem) > (1 - _SAVED) * without:
        return []
    size = len(shared_stem)
    prefix_experts = [None if row.chosen is None else row.chosen[:size] for row in rows]
    prompt = routes.joined([(torch.arange(size), size, own_SLK) for own_SLK in prefix_experts], size)
    if prompt.chosen_NLK is not None:
        shared_stem = replace(
            shared_stem, experts=blake2b(prompt.chosen_NLK.numpy().tobytes(), digest_size=16).digest()
        )
    passes = [replace(_pack([tree], device, prompt.chosen_NLK), stem=shared_stem) for tree in trees]
    first = passes[0].routes
    assert first is not None, "every pass has"
    return [replace(passes[0], routes=replace(first, differing=first.differing + prompt.differing)), *passes[1:]]


def stem(rows: Sequence[Row], passes: int) -> Stem:
    """The common prefix of `rows`, up to the first node that predicts, as the stem of `passes` passes."""
    # Up to the first node that predicts: a loss depends on the stem through keys and values alone then, and no logits
    # are needed of it.
    first = min(int(torch.cat([row.place_S, row.observed_O]).min()) for row in rows) - 1
    ids = [torch.tensor(row.token_ids[:first]) for row in rows]
    return Stem(rows[0].token_ids[: min(_shared(ids[0], other) for other in ids)], passes)


def _pack(trees: Sequence[PrefixTree], device: torch.device | str, stem_SLK: Tensor | None = None) -> Pack:
    token_ids: list[int] = []
    depth: list[int] = []
    branches: list[Branch] = []
    before_K: list[Tensor] = []
    target_K: list[Tensor] = []
    before_O: list[Tensor] = []
    observed_O: list[Tensor] = []
    routed: list[tuple[Tensor, int, Tensor | None]] = []
    for tree in trees:
        first = len(token_ids)
        token_ids += tree.token_ids_N
        depth += tree.depth_N
        branches += [Branch(b.start + first, b.stop + first, b.path + first) for b in tree.branches]
        for row, path in zip(tree.rows, tree.paths, strict=True):
            before_K.append(path[row.place_S - 1] + first)
            target_K.append(torch.tensor(row.token_ids)[row.place_S])
            before_O.append(path[row.observed_O - 1] + first)
            observed_O.append(torch.tensor(row.token_ids)[row.observed_O])
            routed.append((path + first, int(row.place_S[-1]), row.chosen))
    rows = [row for tree in trees for row in tree.rows]
    # Distinct and sorted: siblings that sampled different tokens after one prefix share the logits of its last node,
    # the largest tensor of a small model.
    predictors_P, predictor_KO = torch.unique(torch.cat([*before_K, *before_O]), return_inverse=True)
    scored = sum(map(len, before_K))
    weight_O = [torch.full(row.observed_O.shape, row.observed_weight) for row in rows]
    return Pack(
        token_ids_N=torch.tensor(token_ids, device=device),
        depth_N=torch.tensor(depth, device=device),
        branches=tuple(branches),
        predictors_P=predictors_P.to(device),
        predictor_K=predictor_KO[:scored].to(device),
        target_K=torch.cat(target_K).to(device),
        columns={name: torch.cat([row.columns[name] for row in rows]).to(device) for name in rows[0].columns},
        algo=rows[0].algo,
        policy=rows[0].policy,
        row_tokens=sum(len(row.token_ids) for row in rows),
        images=images.joined(row.images for row in rows),
        ragged={name: Ragged.joined([row.ragged[name] for row in rows]).to(device) for name in rows[0].ragged},
        routes=routes.joined(routed, len(token_ids), stem_SLK).to(device),
        observer_O=predictor_KO[scored:].to(device),
        observed_O=torch.cat(observed_O).to(device),
        observed_weight_O=torch.cat(weight_O).to(device),
        # Counted on the host, where the numbers still are: on the device they would have to be waited for in each
        # pass.
        scored_P=np.bincount(predictor_KO[:scored].numpy(), minlength=len(predictors_P)),
        observed_P=np.bincount(predictor_KO[scored:].numpy(), minlength=len(predictors_P)),
    )
