"""A checkpoint of some ranks goes on under any other number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.train.learner import Learner
from agentrl.train.parallel.ranks import Leader

from .test_ranks import STEP_OF, config, groups, moments


@pytest.mark.slow
def test_a_checkpoint_goes_from_two_ranks_to_four_to_one_bit_for_bit(qwen3_dir: Path, tmp_path: Path) -> None:
    folder, found = qwen3_dir, list[tuple[dict[str, str], Path]]()
    for size in (2, 4):
        ranks = Leader([torch.device("cpu")] * size, deadline_s=120, start_s=200)
        try:
            learner = Learner(config(), qwen3_dir, ranks=ranks)
            if found:
                learner.load(folder)
                learner.trained = [()]  # else nothing is to be saved
            else:
                learner.step(groups(3), step_of=STEP_OF)
            folder = learner.save(tmp_path / str(size))
            found.append((learner.hashes(), folder))
            after = learner.step(groups(3, 1), step_of=STEP_OF)
        finally:
            ranks.close()
    alone = Learner(config(), qwen3_dir)
    alone.load(folder)
    assert alone.hashes() == found[0][0] == found[1][0]
    two, four = (moments(folder) for _, folder in found)
    assert two.keys() == four.keys() and all(torch.equal(two[key], four[key]) for key in two)
    assert alone.step(groups(3, 1), step_of=STEP_OF).loss == pytest.approx(after.loss, abs=1e-5)
