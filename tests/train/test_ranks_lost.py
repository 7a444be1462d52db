"""A rank that dies or hangs ends the step at once, or at a deadline, with an error that names it."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from agentrl.config import Train
from agentrl.errors import ConfigError, RankLost
from agentrl.train.learner import Learner
from agentrl.train.parallel.ranks import Leader

from .making import run_config
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
        with pytest.raises(
            RankLost, match=r"rank 1 of 2 \(process \d+\) is stopped.* did not come to 'gathering model.layers"
        ):
            learner.step(groups(3), step_of=STEP_OF)
        assert not Path(f"/proc/{other}").exists()
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ({"parallel": {"ranks": 2, "gpus": [0]}}, "train.parallel.gpus = [0]: name 2 GPUs"),
        ({"parallel": {"ranks": 2, "gpus": [0, 1]}}, "the learner is on the CPU: set train.device"),
        ({"device": "cuda:1", "parallel": {"ranks": 2, "gpus": [0, 1]}}, "train.device = 'cuda:1'"),
        ({"compile": True, "parallel": {"ranks": 2}}, "train.compile = True"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_what_to_set(train: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        run_config(train=Train.model_validate(train))


def test_each_rank_has_a_gpu_from_that_of_the_learner_on() -> None:
    train = {"device": "cuda:2", "parallel": {"ranks": 3}}
    assert Train.model_validate(train).gpus == [2, 3, 4]
