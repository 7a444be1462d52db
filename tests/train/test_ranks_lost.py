"""A rank that dies or hangs ends the step at once, or at a deadline, with an error that names it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from agentrl.errors import RankLost
from agentrl.train.learner import Learner
from agentrl.train.parallel.ranks import Leader

from .test_ranks import STEP_OF, config, groups


def test_a_rank_that_is_killed_ends_the_step_and_is_named(qwen3_dir: Path) -> None:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        learner = Learner(config(), qwen3_dir, ranks=ranks)
        (other,) = ranks.processes
        learner.on_pass = lambda *_: os.kill(other, signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 1 of 2 ended by SIGKILL"):
            learner.step(groups(3), step_of=STEP_OF)
        with pytest.raises(RankLost, match="start the learner again"):
            learner.step(groups(3), step_of=STEP_OF)
    finally:
        ranks.close()


def test_a_rank_that_hangs_is_named_at_the_deadline_with_the_collective(qwen3_dir: Path) -> None:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        learner = Learner(config(), qwen3_dir, ranks=ranks)
        (other,) = ranks.processes
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), distributed.group.WORLD)
        learner.on_pass = lambda *_: os.kill(other, signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"rank 1 of 2 \(process \d+\) is stopped.* did not come to '.*layer'"):
            learner.step(groups(3), step_of=STEP_OF)
        assert not Path(f"/proc/{other}").exists()
    finally:
        ranks.close()
