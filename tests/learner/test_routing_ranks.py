"""Four ranks compute a mixture as one does, its experts on two or on four of them, with replay and balance loss."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learner.parallel.ranks import Leader
from tests.closeness import assert_gradients_alike, numbers_of

from .making import mixture
from .test_routing import after, all_groups, of, other_choice, told
from .test_stems import long_prompt, prompt_in_every_pass

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four() -> Generator[Leader]:
    ranks = Leader([torch.device("cpu")] * 4, deadline_s=120, start_s=200)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("plan", [{"expert": 4}, {"expert": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_four_ranks_have_the_gradients_of_one(plan: dict[str, int], four: Leader, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model", layers=2, kv_heads=2)
    made = all_groups(other_choice)
    one, weights = after(folder, tmp_path, made, balance_weight=0.5)
    other, others = after(folder, tmp_path, made, four, balance_weight=0.5, parallel={"ranks": 4, **plan})
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert numbers_of(of(other)) == pytest.approx(numbers_of(of(one)), rel=1e-5)
    assert_gradients_alike(others, weights, norm=one.grad_norm)


def test_two_teams_of_two_ranks_compute_the_prompt_of_a_group_once_each(four: Leader, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model", layers=2, kv_heads=2)
    made = [told(long_prompt(1), other_choice), told(long_prompt(2, members=9), other_choice)]
    settings: dict[str, Any] = {"balance_weight": 0.5, "tokens_per_batch": 40, "gradient_checkpointing": True}
    with prompt_in_every_pass():
        one, weights = after(folder, tmp_path, made, **settings)
    plan = {"ranks": 4, "context": 2, "expert": 4}
    other, others = after(folder, tmp_path, made, four, **settings, parallel=plan)
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert numbers_of(of(other)) == pytest.approx(numbers_of(of(one)), rel=1e-5)
    assert_gradients_alike(others, weights, norm=one.grad_norm)
    assert len({tuple(four.ledger.names(rank)) for rank in range(4)}) == 1
    assert other.tokens_distinct < 0.9 * one.tokens_distinct
