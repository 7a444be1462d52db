"""Passes for several ranks cost about the same, which is more than to have as many tokens."""

from __future__ import annotations

from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.flops import Prices, pairs
from agentrl.learner.parallel.pass_schedule import laid

from .test_packing import row

PAIRS = Prices(node=0.0, predictor=0.0, pair=1.0)


def seen(pack: Pack) -> float:
    return PAIRS.of(0, 0, pack.branches)


def test_a_long_row_has_a_pass_of_its_own_though_others_have_more_tokens() -> None:
    rows = [[row([at % 7 for at in range(800)])], *([row([k] * 200)] for k in range(8))]
    passes = laid(rows, 4000, 2, "cpu", cost=lambda tree: PAIRS.of(0, 0, tree.branches))
    assert sorted(map(seen, passes)) == [8 * pairs(200, 200), pairs(800, 800)]


def test_no_pass_has_more_tokens_than_the_budget_however_cheap_they_are() -> None:
    rows = [[row([at % 7 for at in range(800)])], *([row([k] * 200)] for k in range(8))]
    passes = laid(rows, 1000, 2, "cpu", cost=lambda tree: PAIRS.of(0, 0, tree.branches))
    assert len(passes) % 2 == 0 and max(len(pack.token_ids_N) for pack in passes) <= 1000
    assert sum(len(pack.token_ids_N) for pack in passes) == 2400
