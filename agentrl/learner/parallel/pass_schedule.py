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
        return [[Pass(place, pack) for place, pack in enumerate(packs)]]
    # The dearest first, so that the passes of a round cost about the same: a round takes as long as its dearest pass.
    remaining = sorted(range(len(packs)), key=lambda place: -cost(packs[place]))
    shares: list[list[Pass]] = [[] for _ in range(size)]
    while remaining:
        alike = [place for place in remaining if _models(packs[place]) == _models(packs[remaining[0]])]
        for start in range(0, len(alike), size):
            turn = alike[start : start + size]
            for rank, share in enumerate(shares):
                # The last pass again, with a gradient that counts 0 times: the rank has to enter the same collectives
                # as the others.
                place = turn[min(rank, len(turn) - 1)]
                share.append(Pass(place, packs[place], counts=rank < len(turn)))
        remaining = [place for place in remaining if place not in alike]
    return shares


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
    passes: list[Pack] = []
    for kind_groups in kinds(groups):
        kind_groups = kind_groups if shared else [[row] for rows in kind_groups for row in rows]
        trees: list[PrefixTree] = []
        for divided in (forest(rows, budget) for rows in kind_groups if rows):
            apart = grown(divided, device, size) if stems else []
            passes += apart
            trees += [] if apart else divided
        for together in _bins(trees, budget, size, cost):
            passes += packs(together, budget, device, shared=shared)
    return passes


def _bins(
    trees: Sequence[PrefixTree], budget: int, size: int, cost: Callable[[PrefixTree], float]
) -> list[list[Sequence[Row]]]:
    """The rows of the trees of each pass: the dearest trees first, each to the cheapest with room (Graham 1969)."""
    trees = list(trees)
    while len(trees) < size and (parts := [tree for tree in trees if len(tree.rows) > 1]):
        tree = max(parts, key=cost)
        trees.remove(tree)
        half = len(tree.rows) // 2
        trees += [build_tree(tree.rows[:half]), build_tree(tree.rows[half:])]
    rounds = -(-sum(len(tree.token_ids_N) for tree in trees) // (budget * size))
    bins: list[list[Sequence[Row]]] = [[] for _ in range(rounds * size)]
    nodes, costs = [0] * len(bins), [0.0] * len(bins)
    for tree_cost, tree in sorted(((cost(tree), tree) for tree in trees), key=lambda pair: -pair[0]):
        count = len(tree.token_ids_N)
        room = [place for place, had in enumerate(nodes) if not had or had + count <= budget]
        if not room:
            room = [len(bins)]
            bins += [[] for _ in range(size)]
            nodes += [0] * size
            costs += [0.0] * size
        place = min(room, key=costs.__getitem__)
        bins[place].append(tree.rows)
        nodes[place] += count
        costs[place] += tree_cost
    return [rows for rows in bins if rows]
