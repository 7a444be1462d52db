"""A learner over ranks is that of one rank: the same losses, weights, metrics and files, whoever computes what."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, RunConfig, Train
from agentrl.records import Group
from agentrl.train.learner import Learner
from agentrl.train.parallel.ranks import ALONE, Leader, Ranks

from .making import random_group, run_config

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
TRAIN = {"lr": 1e-2, "warmup_steps": 0, "tokens_per_batch": 60}


def groups(n: int, seed: int = 0) -> list[Group]:
    return [random_group(10 * seed + at, 10 * seed + at) for at in range(n)]


def config(algo: Any = None, **train: Any) -> RunConfig:
    return run_config(algo=algo or GRPO(), rollout=SHORT, train=Train.model_validate({**TRAIN, **train}), seed=3)


@pytest.fixture(scope="module")
def two() -> Generator[Leader]:
    """Two ranks, which make learner after learner."""
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    yield ranks
    ranks.close()


def after(
    config: RunConfig, folder: Path, ranks: Ranks, *, steps: int = 2
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The reports of some steps, and all that is trained after them."""
    learner = Learner(config, folder, ranks=ranks)
    reports = [learner.step(groups(3, seed), step_of=STEP_OF) for seed in range(steps)]
    return reports, load_file(learner.export(folder / "now.safetensors").path)


@pytest.mark.parametrize(
    "config",
    [
        config(),
        config(GRPO(kl_weight=0.1, entropy_weight=0.01)),
        config(minibatches=2, epochs=2),
        config(tokens_per_batch=4000),
        config(lora_rank=2),
        config(PPO(critic="own")),
        config(PPO(critic="shared")),
        config(GRPO(kl_weight=0.1, reference_every=1)),
        config(gradient_checkpointing=True),
    ],
    ids=[
        "grpo",
        "reference",
        "several updates",
        "one pass",
        "lora",
        "own critic",
        "shared critic",
        "moving",
        "recomputed",
    ],
)
def test_two_ranks_train_as_one(config: RunConfig, two: Leader, qwen3_dir: Path) -> None:
    alone, weights = after(config, qwen3_dir, ALONE)
    shared, others = after(config, qwen3_dir, two)
    for one, other in zip(alone, shared, strict=True):
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert other.entropy == pytest.approx(one.entropy, rel=1e-5)
        assert other.algorithm == pytest.approx(one.algorithm, rel=1e-4, abs=1e-5)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=1e-5, rtol=0)
    entered = two.ledger.names(0)
    assert two.ledger.names(1) == entered
    assert {"gathering model.layers.0", "adding up the gradients of model.layers.0"} < set(entered)


def same(one: Learner, other: Learner, tmp: Path) -> bool:
    """Whether two learners have the same bits in all that a checkpoint keeps."""
    files = [learner.save(tmp / str(number)) for number, learner in enumerate((one, other))]
    for file in sorted(path.relative_to(files[0]) for path in files[0].rglob("*.safetensors")):
        mine, theirs = (load_file(folder / file) for folder in files)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
    mine, theirs = (moments(folder) for folder in files)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def moments(folder: Path) -> dict[Any, torch.Tensor]:
    """What the optimizers of a checkpoint remember."""
    states = torch.load(folder / "optimizer.pt")["optimizers"].items()
    each = ((name, at, own) for name, state in states for at, own in state["state"].items())
    return {(name, at, key): value for name, at, own in each for key, value in own.items()}


@pytest.mark.parametrize(
    "settings",
    [config(PPO(critic="own")), config(GRPO(kl_weight=0.1, reference_every=2), lora_rank=2)],
    ids=["critic", "adapter"],
)
def test_a_checkpoint_of_two_ranks_is_that_of_one(
    settings: RunConfig, two: Leader, qwen3_dir: Path, tmp_path: Path
) -> None:
    shared = Learner(settings, qwen3_dir, ranks=two)
    shared.step(groups(3), step_of=STEP_OF)
    folder = shared.save(tmp_path / "shared")
    hashes, probe = shared.hashes(), (1, 2, 3, 4)
    scores = shared.score(probe)
    alone = Learner(settings, qwen3_dir)
    alone.load(folder)
    assert alone.hashes() == hashes
    assert alone.score(probe) == pytest.approx(scores, abs=1e-5)
    again = Learner(settings, qwen3_dir, ranks=two)
    again.load(alone.save(tmp_path / "alone"))
    assert again.hashes() == hashes
    for learner in (alone, again):
        learner.trained = [()]  # else nothing is to be saved
    assert same(alone, again, tmp_path)
