"""A learner that leaves its device between steps: the same numbers, steps and checkpoints as one that stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.offload import Parking

from .making import random_group, run_config

KINDS = {
    "adamw": Train(warmup_steps=0),
    "masters": Train(warmup_steps=0, dtype="bfloat16", weights="bfloat16"),
    "offloaded": Train(warmup_steps=0, offload_optimizer=True),
}


def learner_of(kind: str, folder: Path) -> Learner:
    return Learner(run_config(algo=GRPO(kl_weight=0.1, reference=2), train=KINDS[kind]).learner, folder)


def step(learner: Learner) -> float:
    groups = [random_group(id, seed=10 * learner.step_index + id) for id in (1, 2)]
    return learner.step(groups, step_of=lambda version: 0).loss


def numbers(learner: Learner) -> list[Tensor]:
    states = [state for one in learner.models.optimizers.values() for state in one.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*(tensor for held in learner.models.held() for tensor in held), *learner.models.masters(), *moments]


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_left_and_came_back_steps_as_one_that_stayed(kind: str, qwen3_dir: Path, tmp_path: Path) -> None:
    stayed, moved = (learner_of(kind, qwen3_dir) for _ in range(2))
    parking = Parking(moved.models, least=1)
    for _ in range(3):
        assert step(stayed) == step(moved)
        objects, places = numbers(moved), [tensor.data_ptr() for tensor in numbers(moved)]
        parking.begin()
        parking.leave()
        away = numbers(moved)
        assert [id(tensor) for tensor in away] == [id(tensor) for tensor in objects]
        apart = [tensor for tensor, place in zip(away, places, strict=True) if tensor.data_ptr() != place]
        tied = {id(tensor): tensor.nbytes for tensor in apart}
        assert parking.bytes == sum(tied.values()) > 0.9 * sum({id(one): one.nbytes for one in away}.values())
        parking.leave()  # again: it has left
        saved = [learner.save(tmp_path / str(at) / str(moved.step_index)) for at, learner in enumerate((stayed, moved))]
        files = [sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file()) for one in saved]
        assert files[0] == files[1] and any(path.suffix == ".safetensors" for path in files[0])
        parking.back()
    for ours, theirs in zip(numbers(stayed), numbers(moved), strict=True):
        assert torch.equal(ours, theirs)
    again = learner_of(kind, qwen3_dir)
    again.load(saved[1])
    assert again.hashes() == stayed.hashes()


def test_the_first_update_waits_for_what_comes_back_last(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, order = learner_of("adamw", qwen3_dir), list[str]()
    parking = Parking(learner.models, least=1)
    monkeypatch.setattr(parking, "_wait", lambda: order.append("wait"))
    learner.models.optimizers["policy"].register_step_pre_hook(lambda *_: order.append("update"))
    step(learner)
    assert order == ["wait", "update"]


def test_small_tensors_and_parts_of_larger_ones_stay(qwen3_dir: Path) -> None:
    learner = learner_of("adamw", qwen3_dir)
    step(learner)
    parking = Parking(learner.models, least=1 << 40)
    parking.leave()
    assert parking.bytes == 0
    parking = Parking(learner.models, least=1)
    whole = torch.zeros(64)
    assert [*parking._mine([whole[:32], whole, whole])] == [whole]
