"""The learning rate over a run's steps, and the same weights whether the run was interrupted or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

from agentrl.config import Train
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.lr_schedule import lr_share

from .making import random_group, run_config
from .test_learner import STEP_OF, same, state_of


@each_case(
    ("settings", "expected"),
    [
        ({}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "linear"}, [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "linear", "lr_min": 0.05}, [0.25, 0.5, 0.75, 1.0, 0.7, 0.4, 0.1]),
        ({"lr_schedule": "cosine"}, [0.25, 0.5, 0.75, 1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        ({"lr_schedule": "cosine", "lr_min": 0.25}, [0.25, 0.5, 0.75, 1.0, 0.875, 0.625, 0.5]),
    ],
)
def test_the_learning_rate_rises_then_falls_to_its_least_at_the_last_step(settings: Any, expected: list[float]) -> None:
    """By hand: cosine is (1 + cos(pi x)) / 2 at x = 0, 1/3, 2/3, 1. To 0 it falls in a step that is not made: x = 0,
    1/4, 1/2, 3/4."""
    train = Train(lr=0.5, warmup_steps=3, steps=7, **settings)
    assert [lr_share(train, step) for step in range(1, 8)] == pytest.approx(expected)
    assert lr_share(train, 9) == pytest.approx(expected[-1])  # a run that goes on beyond its steps


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    assert lr_share(Train(lr_schedule="cosine", warmup_steps=0, steps=1), 1) == 1.0


def test_a_least_rate_that_nothing_falls_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr_min = 0\.1: .*train\.lr_schedule"):
        Train(lr=0.5, lr_min=0.1)
    with pytest.raises(ConfigError, match=r"train\.lr_min = 0\.6: must be below train\.lr = 0\.5"):
        Train(lr=0.5, lr_min=0.6, lr_schedule="linear")


def test_a_falling_rate_goes_on_after_a_resume_bit_by_bit(qwen3_dir: Path, tmp_path: Path) -> None:
    config = run_config(train=Train(lr=0.01, warmup_steps=1, steps=4, lr_schedule="cosine", lr_min=0.001))
    whole, rates = Learner(config.learner, qwen3_dir), []
    for step in range(4):
        rates.append(whole.step([random_group(step, seed=step)], step_of=STEP_OF).lr)
        if step == 1:
            folder = whole.save(tmp_path / "checkpoints")
    assert rates == pytest.approx([0.005, 0.01, 0.001 + 0.009 * (1 + math.cos(math.pi / 2)) / 2, 0.001])
    resumed = Learner(config.learner, qwen3_dir)
    resumed.load(folder)
    for step in (2, 3):
        assert resumed.step([random_group(step, seed=step)], step_of=STEP_OF).lr == rates[step]
    assert same(state_of(whole), state_of(resumed))
