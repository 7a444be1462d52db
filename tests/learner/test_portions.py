"""Which nodes of a pass each rank of a team computes."""

from __future__ import annotations

from itertools import pairwise

import torch
from each_case import each_case

from agentrl.learner.data.prefix_trees import Branch, packs
from agentrl.learner.parallel.pass_shards import pieces, spans

from .test_attention import forked_rows


def nodes(share: list[tuple[int, int]]) -> list[int]:
    return [node for span in share for node in range(*span)]


def test_of_a_long_row_a_rank_has_a_run_near_the_start_and_one_as_near_to_the_end() -> None:
    shares = spans([Branch(0, 800, torch.arange(800))], 4)
    edges = [[(0, 100), (700, 800)], [(100, 200), (600, 700)], [(200, 300), (500, 600)], [(300, 500)]]
    assert sorted(shares) == edges


@each_case("ranks", [2, 3, 8])
def test_every_node_has_a_rank_and_ranks_have_as_many_and_see_as_much(ranks: int) -> None:
    for seed in range(4):
        (pack,) = packs(forked_rows(seed), 4096)
        shares = [nodes(share) for share in spans(pack.branches, ranks)]
        assert sorted(node for share in shares for node in share) == list(range(len(pack.token_ids_N)))
        assert all(a < b for share in shares for a, b in pairwise(share))
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 8  # one of each of its runs
        seen = [int((pack.depth_N[share] + 1).sum()) for share in shares]
        assert max(seen) * ranks <= 1.15 * sum(seen)


def test_a_piece_of_a_branch_ends_the_path_to_its_last_node() -> None:
    branches = [Branch(0, 4, torch.tensor([0, 1, 2, 3])), Branch(4, 7, torch.tensor([0, 1, 4, 5, 6]))]
    found = [(one.start, one.stop, one.path.tolist()) for one in pieces(branches, [(1, 2), (3, 6)])]
    assert found == [(1, 2, [0, 1]), (3, 4, [0, 1, 2, 3]), (4, 6, [0, 1, 4, 5])]


def test_ranks_beyond_the_number_of_nodes_compute_the_first_one_too() -> None:
    assert sorted(spans([Branch(0, 2, torch.arange(2))], 4)) == [[(0, 1)], [(0, 1)], [(0, 1)], [(1, 2)]]
