"""The learner against a second implementation: one row at a time, transformers' own attention, the loss spelt out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import Algo, Rollout, RunConfig, Train
from agentrl.records import Group
from agentrl.train.learner import Learner

from .making import random_group, run_config

STEP_OF = {1: 0, 2: 0}.__getitem__


def row_by_row(folder: Path, groups: list[Group], config: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one update without trees, packs or any code under test."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    algo, temperature = config.algo, config.rollout.temperature
    terms: list[tuple[int, torch.Tensor]] = []
    for group in groups:
        members = [member for member in group.trajectories if member.scored]
        for i, member in enumerate(members):
            others = [other for j, other in enumerate(members) if j != i]
            if not others:
                continue
            ids: list[int] = []
            places: list[tuple[int, int]] = []
            for t, each in enumerate(member.turns):
                ids += each.prompt_ids
                places += [(t, len(ids) + k) for k in range(len(each.token_ids))]
                ids += each.token_ids
            logprobs = torch.log_softmax(module(torch.tensor([ids])).logits[0] / temperature, -1)
            behaviour = [value for each in member.turns for value in each.logprobs]
            for (t, place), sampled_at in zip(places, behaviour, strict=True):
                to_go = algo.process_weight * sum(member.rewards[t:])
                base = sum(algo.process_weight * sum(other.rewards[t:]) for other in others) / len(others)
                outcome = member.outcome - sum(other.outcome for other in others) / len(others)
                logprob = logprobs[place - 1, ids[place]]
                now = float(logprob.detach())
                weight = min(algo.importance_cap, math.exp(now - sampled_at)) if algo.importance == "token" else 1.0
                ratio = (logprob - now).exp()
                entropy = -(logprobs[place - 1].exp() * logprobs[place - 1]).sum()
                gap = now - logprob  # the reference is the initial policy
                k3 = gap.exp() - gap - 1
                term = weight * (-ratio * (outcome + to_go - base) + algo.kl_weight * k3)
                terms.append((member.episode_id, term - algo.entropy_weight * entropy))
    lengths = {id: sum(1 for owner, _ in terms if owner == id) for id, _ in terms}
    share = {
        id: 1 / len(terms) if algo.normalise == "token" else 1 / (length * len(lengths))
        for id, length in lengths.items()
    }
    loss = torch.stack([share[id] * term for id, term in terms]).sum()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


class Stopped(Exception):
    pass


def tree_gradients(
    folder: Path, groups: list[Group], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and unclipped gradients of the learner's own first update."""
    learner = Learner(config, folder)
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> None:
        for name, parameter in learner.model.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()

    monkeypatch.setattr(learner.optimizer, "step", keep)
    report = learner.step(groups, step_of=STEP_OF)
    assert report.loss is not None
    return report.loss, gradients


@pytest.mark.parametrize(
    "algo",
    [
        Algo(),
        Algo(normalise="sequence", importance="none", process_weight=0.0),
        Algo(kl_weight=0.1, entropy_weight=0.05, importance_cap=1.2),
    ],
    ids=["default", "sequence", "penalties"],
)
@pytest.mark.parametrize("budget", [30, 4096])
def test_trees_train_as_rows(qwen3_dir: Path, algo: Algo, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [random_group(id, seed=id + 10) for id in range(1, 5)]
    config = run_config(
        algo=algo,
        train=Train(tokens_per_batch=budget, grad_clip=1e9),
        rollout=Rollout(temperature=1.3, max_context=budget, max_tokens_per_turn=16),
    )
    loss, gradients = tree_gradients(qwen3_dir, groups, config, monkeypatch)
    expected_loss, expected = row_by_row(qwen3_dir, groups, config)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2  # the comparison can fail
