"""Which rank computes which pass.

All ranks are in the same layer of a pass at the same time, since each holds a shard of it. So the passes of an update
are put into rounds of one pass a rank, of about equal cost, and all of one algorithm, policy and stem, which decide the
models that run. Where a round lacks a pass, the rank runs another one of the round and its gradient counts 0 times.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from agentrl.learner.data.prefix_trees import Pack, PrefixTree, build_tree, forest, grown, kinds, packs
from agentrl.learner.data.rows import Row


@dataclass(frozen=True, slots=True)
class Pass:
    """Pass number `at` of the passes that were divided; its gradient counts if `counts`."""

    at: int
    pack: Pack
    counts: bool = True


def divided(packs: Sequence[Pack], size: int, cost: Callable[[Pack], float]) -> list[list[Pass]]:
    """The passes of each of `size` ranks, as many for each."""
    if size == 1:
        return [[Pass(pack_index, pack) for pack_index, pack in enumerate(packs)]]
    # The dearest first, so that the passes of a round cost about the same: a round takes as long as its dearest pass.
    remaining = sorted(range(len(packs)), key=lambda place: -cost(packs[place]))
    rank_shares: list[list[Pass]] = [[] for _ in range(size)]
    while remaining:
        alike_indices = [
            pack_index for pack_index in remaining if _models(packs[pack_index]) == _models(packs[remaining[0]])
        ]
        for first_of_round in range(0, len(alike_indices), size):
            round_indices = alike_indices[first_of_round : first_of_round + size]
            for rank, rank_share in enumerate(rank_shares):
                # The last pass again, with a gradient that counts 0 times: the rank has to enter the same collectives
                # as the others.
                pack_index = round_indices[min(rank, len(round_indices) - 1)]
                rank_share.append(Pass(pack_index, packs[pack_index], counts=rank < len(round_indices)))
        remaining = [pack_index for pack_index in remaining if pack_index not in alike_indices]
    return rank_shares


def _models(pack: Pack) -> tuple[object, ...]:
    """Key of the models that run in a pass; passes with the same key run together."""
    return pack.algo, pack.policy, pack.stem


def laid(
    groups: Sequence[Sequence[Row]],
    budget: int,
    size: int,
    device: torch.device | str,
    *,
    cost: Callable[[PrefixTree], float],
    shared: bool = True,
    stems: bool = False,
) -> list[Pack]:
    """The passes over the rows of some groups, of at most `budget` nodes, for `size` ranks: as `packs` lays them for
    one rank; for several, of equal cost, a multiple of `size` of them where there are so many rows.

    Trees share less where a group has to be divided, so that one is divided only while a rank would be idle. If it is
    larger than a pass, and its stem is computed once on each rank, its passes are as they are."""
    if size == 1:
        return packs(groups, budget, device, shared=shared, stems=stems)
    laid_passes: list[Pack] = []
    for kind_groups in kinds(groups):
        kind_groups = (
            kind_groups if shared else [[single_row] for group_rows in kind_groups for single_row in group_rows]
        )
        small_trees: list[PrefixTree] = []
        for group_trees in (forest(group_rows, budget) for group_rows in kind_groups if group_rows):
            stem_passes = grown(group_trees, device, size) if stems else []
            laid_passes += stem_passes
            small_trees += [] if stem_passes else group_trees
        for together in _bins(small_trees, budget, size, cost):
            laid_passes += packs(together, budget, device, shared=shared)
    return laid_passes


def _bins(
    trees: Sequence[PrefixTree], budget: int, size: int, cost: Callable[[PrefixTree], float]
) -> list[list[Sequence[Row]]]:
    """The rows of the trees of each pass: the dearest trees first, each to the cheapest with room (Graham 1969)."""
    trees = list(trees)
    while len(trees) < size and (divisible_trees := [row_tree for row_tree in trees if len(row_tree.rows) > 1]):
        row_tree = max(divisible_trees, key=cost)
        trees.remove(row_tree)
        half_count = len(row_tree.rows) // 2
        trees += [build_tree(row_tree.rows[:half_count]), build_tree(row_tree.rows[half_count:])]
    round_count = -(-sum(len(row_tree.token_ids_N) for row_tree in trees) // (budget * size))
    rows_of_bins: list[list[Sequence[Row]]] = [[] for _ in range(round_count * size)]
    nodes_of_bins, costs_of_bins = [0] * len(rows_of_bins), [0.0] * len(rows_of_bins)
    for tree_cost, row_tree in sorted(((cost(row_tree), row_tree) for row_tree in trees), key=lambda pair: -pair[0]):
        tree_nodes = len(row_tree.token_ids_N)
        bins_with_room = [
            cheapest_bin
            for cheapest_bin, bin_nodes in enumerate(nodes_of_bins)
            if not bin_nodes or bin_nodes + tree_nodes <= budget
        ]
        if not bins_with_room:
            bins_with_room = [len(rows_of_bins)]
            rows_of_bins += [[] for _ in range(size)]
            nodes_of_bins += [0] * size
            costs_of_bins += [0.0] * size
        cheapest_bin = min(bins_with_room, key=costs_of_bins.__getitem__)
        rows_of_bins[cheapest_bin].append(row_tree.rows)
        nodes_of_bins[cheapest_bin] += tree_nodes
        costs_of_bins[cheapest_bin] += tree_cost
    return [bin_rows for bin_rows in rows_of_bins if bin_rows]
