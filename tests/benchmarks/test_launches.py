"""What the learner launches, counted on a CPU: in a pass the host never waits for the device, in an update once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _gpu_shapes import config_of, save_random, shared_prompt
from _launch_count import DEVICE, Counter, launches
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.model import attention


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("tiny") / "model", "tiny", vocab=64)


def waits(model: Path, hook: Any = None, **train: Any) -> tuple[Mapping[tuple[str, str], int], int]:
    """Of a step, by part and call, and how many passes it made."""
    settings = Train(dtype="bfloat16", tokens_per_batch=60, device="cpu", attention="sdpa", warmup_steps=0, **train)
    config = config_of(model, algo=GRPO(), train=settings, max_tokens_per_turn=16)
    learner = Learner(config.learner, model, DEVICE)
    learner.model.layout, learner.worker.on_pass = attention.Subtrees, hook
    groups = shared_prompt(3, members=3, prompt=12, sampled=8, vocab=64)
    with Counter().over(learner) as counter:
        learner.step(groups, step_of=lambda _: 0)
    assert sum(one.kernels for one in counter.counts.values()) > 300
    return dict(counter.where), counter.passes


def test_no_pass_waits_for_the_device_and_an_update_does_so_once(model: Path) -> None:
    assert waits(model) == ({("update", "tolist"): 1, ("report", "moved"): 1}, 3)
    several, passes = waits(model, minibatches=3)
    assert passes == 6  # three ahead of the first update, whose columns come to the host together
    assert several == {("pass", "moved"): 1, ("update", "tolist"): 3, ("report", "moved"): 1}


def test_a_number_that_is_read_in_a_pass_is_seen(model: Path) -> None:
    found, passes = waits(model, lambda _pack, _tokens, outputs: float(outputs.logprobs_K.sum()))
    assert found["pass", "item"] == passes == 3


@each_case(
    ("sizes", "lists", "expected"),
    [
        ([], 1, 0),
        ([10] * 110, 1, 1),
        ([10] * 111, 1, 2),  # of so many tensors a launch knows no more
        ([10] * 64, 3, 2),  # nor of so many with more lists
        ([320 * 65_536], 1, 1),
        ([320 * 65_536 + 1], 1, 2),  # nor of so many chunks
    ],
)
def test_launches_of_a_kernel_over_many_tensors(sizes: list[int], lists: int, expected: int) -> None:
    assert launches(sizes, lists) == expected
