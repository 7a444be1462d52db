"""References and teachers in the learner: models that follow the policy, and one that the policy follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import Distil
from agentrl.config import Train
from agentrl.errors import ModelError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.learner import Learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.optimizers.master_weights import master
from agentrl.records import Group, context_ids

from .making import episode, group_of, random_group, run_config, tiny_qwen3, turn
from .test_learner import PROMPT, SHORT, STEP_OF, same, state_of

TRAIN = {"warmup_steps": 0, "lr": 1e-2}


def learner_of(folder: Path, train: dict[str, Any] | None = None, **algo: Any) -> Learner:
    given = Train.model_validate({**TRAIN, **(train or {})})
    return Learner(run_config(algo=GRPO.model_validate(algo), train=given, rollout=SHORT, seed=3).learner, folder)


def step(learner: Learner, at: int) -> dict[str, float]:
    groups = [random_group(10 * at + id, seed=10 * at + id) for id in range(2)]
    return dict(learner.step(groups, step_of=STEP_OF).algorithm)


def followed(learner: Learner) -> dict[str, torch.Tensor]:
    """Everything that a step changes."""
    state = state_of(learner) | {
        f"reference.{n}": t.clone() for n, t in learner.models.moving["reference"].tensors().items()
    }
    for at, of in learner.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{at}.{key}": value.clone() for key, value in of.items()}
    return state


def leaders(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_moving_reference_is_the_policy_of_some_steps_ago_or_their_average(qwen3_dir: Path, lora_rank: int) -> None:
    copied = learner_of(qwen3_dir, {"lora_rank": lora_rank}, kl_weight=0.1, reference=2)
    averaged = learner_of(qwen3_dir, {"lora_rank": lora_rank}, kl_weight=0.1, reference=0.75)
    older = leaders(copied)
    mean = {name: tensor.double() for name, tensor in leaders(averaged).items()}
    for at in range(1, 6):
        step(copied, at)
        step(averaged, at)
        if at % 2 == 0:
            older = leaders(copied)
        mean = {name: 0.75 * tensor + 0.25 * leaders(averaged)[name].double() for name, tensor in mean.items()}
        found = copied.models.moving["reference"].tensors()
        assert all(torch.equal(found[name], tensor) for name, tensor in older.items())
        found = averaged.models.moving["reference"].tensors()
        for name, tensor in mean.items():
            torch.testing.assert_close(found[name].double(), tensor, atol=1e-6, rtol=1e-5)
    assert not all(torch.equal(tensor, leaders(copied)[name]) for name, tensor in older.items())


@pytest.mark.parametrize("weights", ["bfloat16", "bfloat16_alone"])
def test_an_average_follows_weights_in_bfloat16(qwen3_dir: Path, weights: str) -> None:
    train = {"dtype": "bfloat16", "weights": weights}
    learner = learner_of(qwen3_dir, train, kl_weight=0.1, reference=0.75)
    before = learner.models.moving["reference"].tensors()
    before = {name: tensor.double().clone() for name, tensor in before.items()}
    step(learner, 1)
    after = {name: master(p).detach().double() for name, p in learner.model.module.named_parameters()}
    for name, tensor in learner.models.moving["reference"].tensors().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), 0.75 * before[name] + 0.25 * after[name], atol=1e-6, rtol=1e-5)


def test_a_pass_under_a_moving_reference_is_that_of_a_model_with_its_weights(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = learner_of(qwen3_dir, kl_weight=0.1, reference=2)
    for at in (1, 2, 3):
        step(learner, at)
        if at == 2:
            folder = learner.save(tmp_path)
    group = random_group(1, seed=1)
    (pack,) = packs([group_rows(group, learner.settings.algo, step_of=STEP_OF, step_now=0, max_lag=9).rows], 4096)
    second = PolicyModel(folder)
    expected = second.logprobs(pack, temperature=1.0)[0]
    assert torch.equal(learner.worker.passes.others(pack)["reference"], expected)
    assert not torch.equal(learner.worker.passes.columns(pack)["proximal"], expected)


@pytest.mark.medium
@each_case("train", [{}, {"minibatches": 2, "epochs": 2}, {"gradient_checkpointing": True}])
def test_a_reference_that_has_not_moved_yet_trains_bit_for_bit_as_a_frozen_one(
    qwen3_dir: Path, train: dict[str, Any]
) -> None:
    """Both are the model that the run began with; one of them is the policy with other parameters in it."""
    frozen = learner_of(qwen3_dir, train, kl_weight=0.5)
    moving = learner_of(qwen3_dir, train, kl_weight=0.5, reference=99)
    for at in range(3):
        told = step(frozen, at)
        assert step(moving, at) == told
        assert same(state_of(frozen), state_of(moving))
    assert abs(told["kl_reference"]) > 0.01


@pytest.mark.medium
@each_case("train", [{}, {"lora_rank": 4, "minibatches": 2}])
@each_case("algo", [{"reference": 2}, {"reference": 0.9}])
def test_a_kill_after_a_checkpoint_resumes_bit_for_bit_with_the_reference_that_moved(
    qwen3_dir: Path, tmp_path: Path, train: dict[str, Any], algo: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"kl_weight": 0.3, "kl_form": "reward", **algo}
    straight = learner_of(qwen3_dir, train, **given)
    for at in range(3):
        step(straight, at)
    folder = straight.save(tmp_path)
    at_checkpoint = followed(straight)
    again = learner_of(qwen3_dir, train, **given)
    assert again.load(folder).step == 3
    assert same(at_checkpoint, followed(again))
    for at in range(3, 6):
        step(straight, at)
        step(again, at)
    assert same(followed(straight), followed(again))
    assert not same(at_checkpoint, followed(again))


def test_a_teacher_that_averages_the_policy_pulls_it_back_and_survives_a_kill(qwen3_dir: Path, tmp_path: Path) -> None:
    """A teacher that is the policy teaches nothing; one that lags behind it does, from the same checkpoint on."""
    given: dict[str, Any] = {"distil_weight": 1.0, "teacher": 0.9}
    plain, taught = learner_of(qwen3_dir), learner_of(qwen3_dir, **given)
    step(plain, 0)
    assert step(taught, 0)["kl_teacher"] == 0
    assert same(leaders(plain), leaders(taught)), "they begin as one model"
    assert abs(step(taught, 1)["kl_teacher"]) > 1e-6
    step(plain, 1)
    assert not same(leaders(plain), leaders(taught))
    folder = taught.save(tmp_path)
    again = learner_of(qwen3_dir, **given)
    again.load(folder)
    step(taught, 2)
    step(again, 2)
    assert same(leaders(taught), leaders(again))
    assert same(taught.models.moving["teacher"].tensors(), again.models.moving["teacher"].tensors())


def test_a_checkpoint_without_a_moving_reference_is_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = learner_of(qwen3_dir, kl_weight=0.1)
    step(learner, 0)
    folder = learner.save(tmp_path)
    with pytest.raises(ModelError, match=r"no moving model in .*/reference'.* no number as algo\.reference"):
        learner_of(qwen3_dir, kl_weight=0.1, reference=1).load(folder)


# --- a teacher in the learner ---------------------------------------------------------------------------------------


def next_of(model: PolicyModel, context: list[int]) -> torch.Tensor:
    """The log-probs of the next token: [V]."""
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        logits_V = model.module(torch.tensor([context])).logits[0, -1]
    model.module.set_attn_implementation("agentrl_tree")
    return torch.log_softmax(logits_V, -1)


def sampled(learner: Learner, at: int, n: int) -> list[Group]:
    """Episodes of one token, each a group of its own, from the policy of now."""
    logprobs_V = next_of(learner.model, PROMPT)
    drawn = torch.multinomial(logprobs_V.exp(), n, replacement=True, generator=torch.Generator().manual_seed(at))
    return [
        group_of([episode(0, [turn(0, PROMPT, [t], logprobs=[float(logprobs_V[t])])], 0.0, group=id)], id=id)
        for id, t in enumerate(drawn.tolist(), 1)
    ]


@pytest.mark.medium
@pytest.mark.parametrize("level", ["token", "episode"])
def test_the_policy_moves_to_its_teacher_without_any_reward(qwen3_dir: Path, tmp_path: Path, level: str) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", seed=5)
    algo = Distil.model_validate({"teacher": "some/teacher", "distil_level": level})
    asked: list[str] = []

    def folder_of(name: str) -> Path:
        asked.append(name)
        return teacher

    learner = Learner(
        run_config(algo=algo, train=Train(warmup_steps=0, lr=5e-3)).learner, qwen3_dir, folder_of=folder_of
    )
    target_V, divergence = next_of(PolicyModel(teacher), PROMPT), []
    for at in range(16):
        now_V = next_of(learner.model, PROMPT)
        divergence.append(float((now_V.exp() * (now_V - target_V)).sum()))
        report = learner.step(sampled(learner, at, 48), step_of=lambda version, at=at: at)
        if at == 0:
            assert report.algorithm["kl_teacher"] == pytest.approx(divergence[0], rel=0.5)
    assert asked == ["some/teacher"]
    assert report.algorithm["untaught"] == 0
    assert divergence[0] > 0.5 and divergence[-1] < divergence[0] / 4


@pytest.mark.medium
def test_a_journaled_teacher_trains_as_one_in_the_learner(qwen3_dir: Path, tmp_path: Path) -> None:
    """What it said of each token is a column of the turn; a turn that has none costs nothing."""
    folder = tiny_qwen3(tmp_path / "teacher", seed=5)
    groups = [random_group(id, seed=id) for id in (1, 2)]

    def told(context: list[int], tokens: tuple[int, ...]) -> tuple[float, ...]:
        return PolicyModel(folder).score([*context, *tokens])[-len(tokens) :]

    def having(group: Group) -> Group:
        members = []
        for member in group.trajectories:
            turns = []
            for one in member.turns:
                columns = {"teacher": told(list(context_ids(member.turns, one.index)), one.token_ids)}
                turns.append(replace(one, columns=columns))
            members.append(replace(member, turns=tuple(turns)))
        return replace(group, trajectories=tuple(members))

    slot, column, silent = (
        Learner(
            run_config(algo=Distil(teacher=name), train=Train.model_validate(TRAIN), rollout=SHORT).learner, qwen3_dir
        )
        for name in (str(folder), None, None)
    )
    begun = state_of(slot)
    expected = slot.step(groups, step_of=STEP_OF)
    found = column.step([having(group) for group in groups], step_of=STEP_OF)
    assert found.algorithm["kl_teacher"] == pytest.approx(expected.algorithm["kl_teacher"], rel=1e-4)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert found.algorithm["untaught"] == 0 and not same(begun, state_of(column))
    nothing = silent.step(groups, step_of=STEP_OF)
    assert nothing.grad_norm == 0 and nothing.algorithm["untaught"] == pytest.approx(1)
