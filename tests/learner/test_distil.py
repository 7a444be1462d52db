"""A student that samples for itself comes near its teacher, in the learner or told of in the journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.algos.grpo_variants import Distil
from agentrl.config import Rollout, Train
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport
from agentrl.records import Group

from .making import VOCAB, episode, group_of, run_config, tiny_qwen3, turn

STEPS, EPISODES, TOKENS = 24, 32, 6


def sampled(student: Any, teacher: Any | None, seed: int) -> list[Group]:
    """Groups of one episode of one turn, with the log-probs of a teacher that an engine holds."""
    generator = torch.Generator().manual_seed(seed)
    context_BT = torch.randint(VOCAB, (EPISODES, 2), generator=generator)
    with torch.no_grad():
        for _ in range(TOKENS):
            next_BV = student(context_BT).logits[:, -1].softmax(-1)
            context_BT = torch.cat([context_BT, torch.multinomial(next_BV, 1, generator=generator)], 1)

        def told(model: Any) -> list[list[float]]:
            logprobs_BTV = model(context_BT).logits[:, 1:-1].log_softmax(-1)
            return logprobs_BTV.gather(2, context_BT[:, 2:, None])[:, :, 0].tolist()

        own, theirs = told(student), None if teacher is None else told(teacher)
    groups: list[Group] = []
    for at, ids in enumerate(context_BT.tolist()):
        one = turn(0, ids[:2], ids[2:], logprobs=own[at])
        one = one if theirs is None else replace(one, columns={"teacher": theirs[at]})
        groups.append(group_of([episode(0, [one], 0.0, group=at + 1)], id=at + 1))
    return groups


@pytest.mark.medium
@pytest.mark.parametrize("where", ["in the learner", "journaled"])
def test_a_student_comes_near_its_teacher(tmp_path: Path, where: str) -> None:
    """The mean of log student - log teacher on the student's own tokens is the reverse KL, and falls."""
    folders = tiny_qwen3(tmp_path / "student"), tiny_qwen3(tmp_path / "teacher", seed=1)
    inside = where == "in the learner"
    config = run_config(
        algo=Distil(teacher=str(folders[1]) if inside else None),
        rollout=Rollout(max_context=30, max_tokens_per_turn=16, group_size=1),
        train=Train(steps=STEPS, lr=2e-2, warmup_steps=0),
    )
    learner = Learner(config.learner, folders[0], folder_of=lambda name: Path(str(name)))
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    steps: list[StepReport] = []
    for seed in range(STEPS):
        student.load_state_dict(learner.model.module.state_dict())
        groups = sampled(student, None if inside else teacher, seed)
        steps.append(learner.step(groups, step_of=lambda _: learner.step_index))
    divergence = [report.algorithm["kl_teacher"] for report in steps]
    assert fmean(divergence[-5:]) < 0.65 * fmean(divergence[:5])
    assert all(report.algorithm["untaught"] == 0 for report in steps)
