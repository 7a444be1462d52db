"""Four ranks compute a mixture as one does, its experts on two or on four of them, with replay and balance loss."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from agentrl.train.parallel.ranks import Leader

from .making import mixture
from .test_routing import after, all_groups, largest, of, other_choice

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
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert asdict(of(other)) == pytest.approx(asdict(of(one)))
    assert largest(weights, others) < (5e-6 if "tensor" in plan else 1e-6)
