"""A rank that dies or hangs ends the step at once, or at a deadline, with an error that names it."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from each_case import each_case
from torch import distributed

from agentrl.config import Train
from agentrl.errors import ConfigError, RankLost, RunFailed
from agentrl.learner.checkpoints.folders import newest
from agentrl.learner.learner import Learner
from agentrl.learner.parallel import optimizer_state
from agentrl.learner.parallel.ranks import Leader
from agentrl.learner.rank_orders import HashWeights

from .making import At, run_config
from .test_ranks import STEP_OF, config, groups


def stuck() -> None:
    """From now on, the disk of this process takes nothing."""
    optimizer_state.write = lambda *_: threading.Event().wait()  # pyright: ignore


def elsewhere() -> None:
    """From now on, this process writes where no other one sees it."""
    optimizer_state.write = lambda *_: None  # pyright: ignore


def full() -> None:
    """From now on, the disk of this process is full."""

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    optimizer_state.write = write


@pytest.mark.medium
def test_a_rank_that_crashes_or_cannot_write_ends_the_step_or_the_checkpoint_and_is_named(
    qwen3_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        learner = Learner(config().learner, qwen3_dir, ranks=ranks)
        learner.step(groups(3), step_of=STEP_OF)
        (other,) = ranks.processes

        def saves(disk: Callable[[], None]) -> Callable[[], object]:
            ranks.run(learner.worker, [HashWeights(), At(disk)])
            write = learner.copy(tmp_path)
            assert write is not None
            return partial(write, lambda: None)

        with pytest.raises(RunFailed, match=r"rank 1 wrote its part .* on a file system that all ranks share"):
            saves(elsewhere)()
        with pytest.raises(OSError, match=r"rank 1 could not write its part .*No space left") as raised:
            saves(full)()
        assert raised.value.errno == errno.ENOSPC  # as if it were rank 0's: the learner starts again, at no cost
        write = saves(stuck)
        ranks._deadline_s = 0.2
        with pytest.raises(RankLost, match=rf"rank 1 of 2 \(process {other}\), last in .* wrote nothing .* for 0.2 s"):
            write()
        ranks._deadline_s, write = 120, saves(stuck)
        learner.worker.on_pass = lambda *_: os.kill(other, signal.SIGABRT)
        with pytest.raises(RankLost, match=r"rank 1 of 2 ended by SIGABRT"):
            learner.step(groups(3), step_of=STEP_OF)
        with pytest.raises(RankLost, match="start the learner again"):
            learner.step(groups(3), step_of=STEP_OF)
        with pytest.raises(RankLost, match=r"rank 1 of 2 ended by SIGABRT.* had not written its part of a checkpoint"):
            write()
        said = capfd.readouterr().err
        assert "Fatal Python error: Aborted" in said and "parallel/rank_process.py" in said
        (draft,) = tmp_path.iterdir()
        assert draft.name.startswith(".draft-") and newest(tmp_path) is None
    finally:
        ranks.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("together", "collective"),
    [
        (None, "gathering model.layers"),
        pytest.param("tensor", "adding up model.layers.0", marks=pytest.mark.slow),
        pytest.param("context", "keys and values of layer", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_at_the_deadline_with_the_collective(
    together: str | None, collective: str, qwen3_dir: Path
) -> None:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    try:
        learner = Learner(
            config(parallel={"ranks": 2} | ({together: 2} if together else {})).learner, qwen3_dir, ranks=ranks
        )
        (other,) = ranks.processes
        met = list(distributed.distributed_c10d._world.pg_map)
        for group in met:
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=120)

        def stop(*_: object) -> None:
            os.kill(other, signal.SIGSTOP)
            for group in met:  # from here on: until now, the other may be late
                distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)

        if together is None:
            learner.worker.on_pass = stop
        else:  # it hangs in one that computes a pass together, or, where its part was sent, in the one after
            part = learner.model.module.model.layers[0].self_attn
            (part.o_proj if together == "tensor" else part.q_proj).register_forward_pre_hook(stop)
        with pytest.raises(RankLost, match=rf"rank 1 of 2 \(process \d+\) is stopped.* did not come to '{collective}"):
            learner.step(groups(3), step_of=STEP_OF)
        assert not Path(f"/proc/{other}").exists()
    finally:
        ranks.close()


@each_case(
    ("train", "text"),
    [
        ({"device": "cuda:0,1", "parallel": {"ranks": 3}}, "train.device = 'cuda:0,1': name one GPU, or 3"),
        ({"device": "cuda:1,1", "parallel": {"ranks": 2}}, "train.device = 'cuda:1,1': name one GPU, or 2"),
        ({"compile": True, "parallel": {"ranks": 2}}, "train.compile = True"),
        (
            {"parallel": {"ranks": 4, "tensor": 3}},
            "train.parallel.tensor = 3: it has to divide train.parallel.ranks = 4",
        ),
        (
            {"parallel": {"ranks": 4, "context": 3}},
            "train.parallel.context = 3: it has to divide train.parallel.ranks = 4: give 1 or 2 or 4",
        ),
        (
            {"parallel": {"ranks": 8, "context": 8, "tensor": 2}},
            "train.parallel.context = 8: it has to divide train.parallel.ranks = 8 by train.parallel.tensor = 2: give "
            "1 or 2 or 4",
        ),
        ({"parallel": {"expert": 2}}, "train.parallel.expert = 2: it has to divide train.parallel.ranks = 1: give 1"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_what_to_set(train: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        run_config(train=Train.model_validate(train))


def test_each_rank_has_a_gpu_from_that_of_the_learner_on() -> None:
    train = {"device": "cuda:2", "parallel": {"ranks": 3}}
    assert Train.model_validate(train).gpus == [2, 3, 4]
