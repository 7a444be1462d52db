"""The loss on observations: which tokens, each once, and its gradient against a plain pass over each row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, RunConfig, Train
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.rows import Row
from agentrl.learner.learner import Learner
from agentrl.records import Group

from .making import episode, group_of, random_group, run_config, turn

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
ECHO = GRPO(observation_weight=0.5)


def rows_of(group: Group, algo: GRPO = ECHO, *, max_lag: int = 9) -> tuple[Row, ...]:
    return group_rows(group, algo, step_of=lambda version: version, step_now=4, max_lag=max_lag).rows


def observed(*turns: object, max_lag: int = 9) -> list[list[int]]:
    group = group_of([episode(0, turns, 1.0), episode(1, [turn(0, [1], [2], version=4)], 0.0)])  # type: ignore[arg-type]
    return [row.observed_O.tolist() for row in rows_of(group, max_lag=max_lag)]


def test_observed_are_the_answers_to_the_policy_and_not_the_task() -> None:
    turns = [turn(0, [1, 2], [3, 4]), turn(1, [5, 6, 7], [8], parent=0), turn(2, [9], [10], parent=1)]
    assert observed(*turns) == [[4, 5, 6, 8], []]


def test_an_answer_before_a_turn_that_is_not_scored_is_not_predicted() -> None:
    masked = turn(1, [5], [6], parent=0, masked=True)
    given = turn(2, [7], [8], parent=1, learns=False)
    assert observed(turn(0, [1], [2]), masked, given, turn(3, [9], [10], parent=2)) == [[6], []]


def test_shared_turns_are_predicted_once_and_rewritten_history_is_a_task() -> None:
    first = turn(0, [1], [2])
    fork = [first, turn(1, [3], [4], parent=0), turn(2, [5], [6], parent=1), turn(3, [7], [8], parent=1)]
    assert observed(*fork, turn(4, [1, 2, 3], [4])) == [[2, 4], [4], [], []]


def test_nothing_after_the_last_token_young_enough_is_predicted() -> None:
    turns = [turn(0, [1], [2], version=4), turn(1, [3], [4], parent=0, version=4), turn(2, [5], [6], parent=1)]
    assert observed(*turns, max_lag=1) == [[2], []]


def test_an_answer_before_a_stale_turn_is_not_predicted_also_if_a_younger_turn_follows() -> None:
    turns = [
        turn(0, [1], [2], version=4),
        turn(1, [3, 5], [4], parent=0),
        turn(2, [7], [6], parent=1, version=4),
        turn(3, [8], [9], parent=2),
    ]
    assert observed(*turns, max_lag=1) == [[5], []]


def test_without_the_setting_no_token_is_observed() -> None:
    assert not any(len(row.observed_O) for row in rows_of(random_group(1, seed=1), GRPO()))


# --- the gradient ---------------------------------------------------------------------------------------------------


def gradients(folder: Path, settings: RunConfig, groups: list[Group], patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    learner = Learner(settings.learner, folder)
    seen: list[torch.Tensor] = []

    def keep() -> None:
        seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))

    patch.setattr(learner.optimizer, "step", keep)
    report = learner.step(groups, step_of=STEP_OF)
    assert ("observation_loss" in report.algorithm) == settings.algo.observes
    return seen


def by_rows(folder: Path, groups: list[Group]) -> torch.Tensor:
    """The gradient of the mean cross-entropy of all observed tokens: one row at a time, without trees or packs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [row for group in groups for row in group_rows(group, ECHO, step_of=STEP_OF, step_now=0, max_lag=9).rows]
    count = sum(len(row.observed_O) for row in rows)
    assert count > 10
    for row in rows:
        logits_TV = model(input_ids=torch.tensor([row.token_ids])).logits[0].float()
        for place in row.observed_O.tolist():
            logprob_V = functional.log_softmax(logits_TV[place - 1], -1)
            (-logprob_V[row.token_ids[place]] / count).backward(retain_graph=True)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_loss_on_observations_adds_the_gradient_of_their_mean_cross_entropy(
    qwen3_dir: Path, minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [random_group(id, seed=id) for id in range(1, 4)]
    train = Train(warmup_steps=0, minibatches=minibatches, tokens_per_batch=64, grad_clip=1e9)

    def whole(weight: float) -> torch.Tensor:
        settings = run_config(algo=GRPO(observation_weight=weight), train=train, rollout=SHORT)
        found = gradients(qwen3_dir, settings, groups, monkeypatch)
        assert len(found) == minibatches
        return torch.stack(found).mean(0)

    added = whole(0.5) - whole(0.0)
    torch.testing.assert_close(added, 0.5 * by_rows(qwen3_dir, groups), atol=2e-6, rtol=1e-3)
    assert added.abs().max() > 1e-3


def test_a_group_without_signal_still_teaches_what_the_environment_answers(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = random_group(1, seed=1)
    members = [replace(one, outcome=0.0, turns=tuple(_unpaid(one.turns))) for one in group.trajectories]
    settings = run_config(algo=ECHO, train=Train(warmup_steps=0, grad_clip=1e9), rollout=SHORT)
    (found,) = gradients(qwen3_dir, settings, [group_of(members)], monkeypatch)
    assert found.abs().max() > 1e-3


def _unpaid(turns: object) -> object:
    return (replace(one, step=replace(one.step, reward=0.0)) for one in turns)  # type: ignore[attr-defined]


def test_a_critic_is_asked_nothing_about_observations(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO on a shared trunk: the critic's head hears the scored tokens alone."""
    algo = PPO(observation_weight=0.5, critic="shared", critic_warmup_steps=0)
    settings = run_config(algo=algo, train=Train(warmup_steps=0), rollout=SHORT)  # type: ignore[arg-type]
    learner = Learner(settings.learner, qwen3_dir)
    report = learner.step([random_group(1, seed=1)], step_of=STEP_OF)
    plain = Learner(run_config(algo=PPO(critic="shared", critic_warmup_steps=0), rollout=SHORT).learner, qwen3_dir)  # type: ignore[arg-type]
    expected = plain.step([random_group(1, seed=1)], step_of=STEP_OF)
    assert report.algorithm["value_error"] == pytest.approx(expected.algorithm["value_error"])
    assert report.loss != pytest.approx(expected.loss)
