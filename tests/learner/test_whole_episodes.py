"""Corrections of whole episodes in the learner: an episode is whole however its rows are divided into passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.algos.grpo import GRPO
from agentrl.config import Rollout, Train
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport
from agentrl.records import Group
from tests.closeness import assert_gradients_alike

from .making import episode, group_of, random_group, run_config, turn

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)


def stepped(
    folder: Path, algo: GRPO, groups: list[Group], monkeypatch: pytest.MonkeyPatch, **train: float
) -> tuple[torch.Tensor, StepReport]:
    """The mean gradient of a step's updates, and its report."""
    settings = Train.model_validate({"warmup_steps": 0, "grad_clip": 1e9, **train})
    learner = Learner(run_config(algo=algo, train=settings, rollout=SHORT).learner, folder)
    seen: list[torch.Tensor] = []

    def keep() -> None:
        seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))

    monkeypatch.setattr(learner.optimizer, "step", keep)
    report = learner.step(groups, step_of=STEP_OF)
    return torch.stack(seen).mean(0), report


@pytest.mark.parametrize(
    "settings",
    [
        {"importance": "sequence", "importance_bounds": (0.0, 50.0)},
        {"importance": "geometric", "importance_mode": "mask", "importance_bounds": (0.1, 2.0)},
        {"reject": "geometric", "reject_bounds": (0.1, 2.0)},
    ],
    ids=["sequence", "geometric", "reject"],
)
def test_the_gradient_is_the_same_however_a_step_is_divided(
    qwen3_dir: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [random_group(id, seed=id) for id in range(1, 6)]
    algo = GRPO.model_validate(settings)
    whole, report = stepped(qwen3_dir, algo, groups, monkeypatch)
    assert whole.abs().max() > 1e-4
    if "reject" in settings:
        assert 0 < report.episodes_rejected < report.episodes
    elif "importance_mode" in settings:
        assert report.masked is not None and 0 < report.masked < 1
    else:
        assert (report.episodes_rejected, report.masked) == (0, 0.0)
    for train in ({"tokens_per_batch": 30}, {"minibatches": 2}):
        divided, again = stepped(qwen3_dir, algo, groups, monkeypatch, **train)
        assert (again.episodes_rejected, again.masked) == (report.episodes_rejected, report.masked)
        assert_gradients_alike({"all": divided}, {"all": whole})


def test_a_branch_without_any_advantage_counts_in_its_episodes_ratio(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches of one episode. The second earned nothing; its impossible token rejects the first as well."""

    def rejected(logprob: float) -> int:
        branches = [turn(0, (1, 2), (3, 4), reward=1.0), turn(1, (5, 6), (7, 8), logprobs=(logprob, -2.0))]
        group = group_of([episode(0, branches, 0.0), episode(1, [turn(0, (1, 2), (9,))], 0.0)])
        algo = GRPO(reject="token", reject_bounds=(1e-6, 1e6), baseline="none")
        return stepped(qwen3_dir, algo, [group], monkeypatch)[1].episodes_rejected

    assert (rejected(-2.0), rejected(-40.0)) == (0, 1)
