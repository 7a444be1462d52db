"""Ranks that enter different collectives, or in another order, are told so before one of them waits for ever."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from agentrl.errors import RankLost
from agentrl.learner.learner import Learner
from agentrl.learner.model.models import Models
from agentrl.learner.parallel.collectives import Ledger, OutOfStep, RankProgress
from agentrl.learner.parallel.ranks import Leader
from agentrl.learner.rank_orders import HashWeights

from .making import At
from .test_ranks import config


@pytest.fixture
def ledgers() -> tuple[Ledger, Ledger]:
    """The ledger as each of two ranks has it."""
    with tempfile.TemporaryFile() as file:
        return Ledger(file.fileno(), 0, 2), Ledger(file.fileno(), 1, 2)


def through(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.enter(name)
        ledger.leave()


def test_ranks_may_be_far_apart_in_the_same_order(ledgers: tuple[Ledger, Ledger]) -> None:
    names = [f"gathering {at}" for at in range(1000)]
    through(ledgers[0], *names)
    through(ledgers[1], *names[:900])
    assert ledgers[0].standings() == [RankProgress(1000, False, names[-1]), RankProgress(900, False, names[899])]
    assert ledgers[0].names(1) == ledgers[1].names(1) == names[900 - 255 : 900]


@pytest.mark.parametrize("others", [["b", "a"], ["b", "c"]], ids=["reordered", "skipped"])
def test_a_rank_that_enters_another_collective_hears_of_it_before_it_waits(
    others: list[str], ledgers: tuple[Ledger, Ledger]
) -> None:
    through(ledgers[0], "a", "b")
    with pytest.raises(OutOfStep, match=r"collective 1 of rank 1 is 'b', that of rank 0 'a': every rank must"):
        through(ledgers[1], *others)
    assert not ledgers[0].standings()[1].inside
    ledgers[0].enter("c")  # rank 1 has not come so far


def reorder() -> None:
    """From now on, this process goes through its tensors backwards."""
    tensors = Models.tensors
    Models.tensors = lambda self: dict(reversed(tensors(self).items()))  # pyright: ignore


@pytest.mark.medium
def test_a_rank_that_gathers_in_another_order_ends_the_learner_and_is_named(qwen3_dir: Path) -> None:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        learner = Learner(config().learner, qwen3_dir, ranks=ranks)
        learner.hashes()
        assert ranks.ledger.names(0) == ranks.ledger.names(1)
        with pytest.raises(RankLost, match=r"collective \d+ of rank \d is 'gathering policy.*', that of rank \d 'g"):
            ranks.run(learner.worker, [HashWeights(), At(reorder)])
    finally:
        ranks.close()
