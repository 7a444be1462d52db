"""Prefix trees and packs against the definition: a node's ancestors are the tokens before it in its rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from agentrl.algos.grpo import GRPO
from agentrl.learner.data.prefix_trees import build_tree, forest, packs
from agentrl.learner.data.rows import Row


def row(
    token_ids: Sequence[int], place: Sequence[int] | None = None, *, episode: int = 0, advantage: float = 1.0
) -> Row:
    at = list(place) if place is not None else [len(token_ids) - 1]
    return Row(
        group_id=0,
        episode_id=episode,
        algo=GRPO(),
        token_ids=tuple(token_ids),
        place_S=torch.tensor(at),
        columns={
            "behaviour": -torch.arange(1.0, len(at) + 1),
            "lag": torch.zeros(len(at), dtype=torch.long),
            "origin": torch.zeros(len(at), dtype=torch.long),
            "advantage": torch.full((len(at),), advantage),
            "weight": torch.ones(len(at)),
        },
    )


def test_the_worked_example_of_the_module() -> None:
    p, q, a, b, c, d, e = range(7)
    tree = build_tree([row([p, q, a, b]), row([p, q, a, c, d]), row([p, q, e])])
    assert tree.token_ids_N == (p, q, a, b, c, d, e)
    assert tree.depth_N == (0, 1, 2, 3, 3, 4, 2)
    assert [(x.start, x.stop, x.path.tolist()) for x in tree.branches] == [
        (0, 4, [0, 1, 2, 3]),
        (4, 6, [0, 1, 2, 4, 5]),
        (6, 7, [0, 1, 6]),
    ]


def test_a_row_that_brings_nothing_new_has_no_branch_but_keeps_its_path() -> None:
    tree = build_tree([row([1, 2, 3]), row([1, 2]), row([1, 2, 3])])
    assert len(tree.branches) == 1
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def random_rows(seed: int) -> list[Row]:
    rng = random.Random(seed)
    rows: list[Row] = []
    for index in range(rng.randint(1, 8)):
        length = rng.randint(2, 9)
        tokens = [rng.randrange(2) for _ in range(length)]  # two tokens only: many shared prefixes
        places = sorted(rng.sample(range(1, length), rng.randint(1, length - 1)))
        rows.append(row(tokens, places, episode=index, advantage=rng.random()))
    return rows


def test_trees_hold_each_distinct_prefix_once() -> None:
    for seed in range(200):
        rows = random_rows(seed)
        prefixes = {r.token_ids[: n + 1] for r in rows for n in range(len(r.token_ids))}
        tree = build_tree(rows)
        assert len(tree.token_ids_N) == len(prefixes)
        for r, path in zip(rows, tree.paths, strict=True):
            assert tuple(tree.token_ids_N[node] for node in path.tolist()) == r.token_ids
            assert [tree.depth_N[node] for node in path.tolist()] == list(range(len(r.token_ids)))
        covered = [node for branch in tree.branches for node in range(branch.start, branch.stop)]
        assert covered == list(range(len(prefixes)))  # every node is some branch's query exactly once
        for branch in tree.branches:
            assert branch.path[-(branch.stop - branch.start) :].tolist() == list(range(branch.start, branch.stop))


def test_packs_keep_every_scored_token_with_its_own_data() -> None:
    for seed in range(100):
        groups = [random_rows(3 * seed + k) for k in range(3)]
        budget = 12
        made = packs(groups, budget)
        rows = [r for rows in groups for r in rows]
        assert all(len(pack.token_ids_N) <= budget for pack in made)
        assert sum(pack.row_tokens for pack in made) == sum(len(r.token_ids) for r in rows)
        entries = [
            (int(target), int(pack.token_ids_N[pack.predictors_P[predictor]]), float(behaviour), float(advantage))
            for pack in made
            for target, predictor, behaviour, advantage in zip(
                pack.target_K, pack.predictor_K, pack.columns["behaviour"], pack.columns["advantage"], strict=True
            )
        ]
        assert sorted(entries) == sorted(
            (
                r.token_ids[place],
                r.token_ids[place - 1],
                float(r.columns["behaviour"][k]),
                float(r.columns["advantage"][k]),
            )
            for r in rows
            for k, place in enumerate(r.place_S.tolist())
        )


def test_a_tree_beyond_the_budget_is_divided_and_a_long_row_stands_alone() -> None:
    rows = [row([0, 1, 2, 3]), row([0, 1, 4, 5]), row([0, 9, 9, 9, 9, 9])]
    assert [len(tree.token_ids_N) for tree in forest(rows, 100)] == [11]
    assert [len(tree.token_ids_N) for tree in forest(rows, 10)] == [
        6,
        6,
    ]  # not 4 and 9: the two that share more stay together
    assert [len(tree.token_ids_N) for tree in forest(rows, 5)] == [4, 4, 6]


def test_a_divided_group_has_the_fewest_nodes_that_neighbours_within_the_budget_can_have() -> None:
    """Against all places to cut the rows in the order of their tokens, a row before those that are its beginning."""
    for seed in range(40):
        rows = sorted(random_rows(seed), key=lambda r: (*r.token_ids, 9))
        for budget in (9, 12, 15):
            least = 10**9
            for chosen in range(2 ** (len(rows) - 1)):
                cuts = [0, *(at + 1 for at in range(len(rows) - 1) if chosen >> at & 1), len(rows)]
                sizes = [
                    len({r.token_ids[: n + 1] for r in rows[start:stop] for n in range(len(r.token_ids))})
                    for start, stop in pairwise(cuts)
                ]
                least = min(least, sum(sizes)) if max(sizes) <= budget else least
            trees = forest(rows, budget)
            assert all(len(tree.token_ids_N) <= budget for tree in trees)
            assert sum(len(tree.token_ids_N) for tree in trees) == least, (seed, budget)
            assert sorted(id(r) for tree in trees for r in tree.rows) == sorted(map(id, rows))


def test_siblings_that_came_apart_stay_with_those_that_they_share_most_with() -> None:
    """Two branches of a group, its members in turns of arrival: halves by arrival would compute each branch twice."""
    rows = [row([7] * 10 + [branch] * 30 + [member] * 5) for member in range(4) for branch in (1, 2)]
    assert [len(tree.token_ids_N) for tree in forest(rows, 60)] == [60, 60]


def test_groups_without_rows_make_no_pack() -> None:
    assert packs([[], []], 100) == []
