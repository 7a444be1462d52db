"""Two models in the learner: the critic's values, what PPO learns, and checkpoints that hold both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from each_case import each_case
from transformers import AutoModelForCausalLM

from agentrl.algos.algorithm import Trunk
from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, Train
from agentrl.errors import ModelError
from agentrl.learner.checkpoints import checkpoint
from agentrl.learner.checkpoints.folders import newest
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.learner import Learner
from agentrl.records import Group

from .making import episode, group_of, random_group, run_config, turn
from .test_checkpoint import Killed
from .test_learner import BAD, GOOD, PROMPT, STEP_OF, same, sequence_logprob, state_of

TRUNKS: list[Trunk] = ["own", "shared"]
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)


def ppo(**settings: object) -> PPO:
    return PPO.model_validate({"critic_warmup_steps": 0, **settings})


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """Everything that a step changes: both models and both optimizers."""
    critic = learner.models.critic
    state = state_of(learner)
    if critic is not None:
        state |= {f"critic.{at}": p.detach().clone() for at, p in enumerate(critic.parameters())}
    for name, optimizer in learner.models.optimizers.items():
        for at, of in optimizer.state_dict()["state"].items():
            state |= {f"{name}.{at}.{key}": value.clone() for key, value in of.items()}
    return state


def train(learner: Learner, step: int) -> None:
    learner.step([random_group(10 * step + id, seed=10 * step + id) for id in range(3)], step_of=STEP_OF)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_values_over_trees_are_those_of_single_rows(qwen3_dir: Path, trunk: Trunk) -> None:
    learner = Learner(run_config(algo=ppo(critic=trunk)).learner, qwen3_dir)
    critic = learner.models.critic
    assert critic is not None
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    algo = learner.settings.algo
    rows = group_rows(random_group(1, seed=3), algo, step_of=STEP_OF, step_now=0, max_lag=9).rows
    (pack,) = packs([rows], 4096)
    got = learner.worker.passes.columns(pack)["values"]
    module = AutoModelForCausalLM.from_pretrained(qwen3_dir, attn_implementation="eager")
    expected = []
    for row in rows:
        hidden = module.model(torch.tensor([row.token_ids])).last_hidden_state[0]
        expected.append((hidden @ critic.head.weight[0] + critic.head.bias)[row.place_S - 1])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert got.std() > 0.1


@pytest.mark.parametrize("trunk", TRUNKS)
def test_each_trunk_learns_from_its_own_loss(qwen3_dir: Path, trunk: Trunk) -> None:
    """In the warm-up the policy stays as it is; a trunk of its own moves without it."""
    learner = Learner(run_config(algo=ppo(critic=trunk, critic_warmup_steps=1)).learner, qwen3_dir)
    begun = whole(learner)
    train(learner, 0)
    warm = whole(learner)
    assert same(state_of(learner), begun)
    critic = [name for name in begun if name.startswith("critic.")]
    head = len(critic) - 2
    assert not torch.equal(warm[f"critic.{head}"], begun[f"critic.{head}"])
    assert (len(critic) == 2) == (trunk == "shared")
    train(learner, 1)
    assert not same(state_of(learner), begun)


def lone(id: int, answer: list[int], learner: Learner) -> Group:
    """A group of one episode, which earns 1 for the good answer."""
    logprobs = [sequence_logprob(learner, PROMPT + answer[:k], [token]) for k, token in enumerate(answer)]
    return group_of([episode(0, [turn(0, PROMPT, answer, logprobs=logprobs)], float(answer == GOOD), group=id)], id=id)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_ppo_learns_from_groups_of_one(qwen3_dir: Path, level: str) -> None:
    algo = ppo(level=level, critic_warmup_steps=5, critic_lr=3e-2)
    learner = Learner(run_config(algo=algo, train=Train(lr=1e-2, warmup_steps=0)).learner, qwen3_dir)
    before, losing = (sequence_logprob(learner, PROMPT, answer) for answer in (GOOD, BAD))
    reports = []
    for now in range(25):
        groups = [lone(2 * now, GOOD, learner), lone(2 * now + 1, BAD, learner)]
        reports.append(learner.step(groups, step_of=lambda version, now=now: now))
    assert sequence_logprob(learner, PROMPT, GOOD) > before + 1
    assert sequence_logprob(learner, PROMPT, BAD) < losing - 1
    assert reports[0].algorithm["value_mean"] == 0
    assert reports[5].algorithm["value_mean"] == pytest.approx(0.5, abs=0.3)  # half of the episodes earn 1
    assert reports[-1].advantage_std is not None and reports[-1].groups_without_signal == 0


@each_case("normalise", ["token", "sequence", 8])
def test_what_is_told_of_values_and_targets_is_a_mean_however_the_loss_is_normalised(
    qwen3_dir: Path, normalise: str | int
) -> None:
    learner = Learner(run_config(algo=ppo(normalise=normalise), train=Train(minibatches=2)).learner, qwen3_dir)
    critic = learner.models.critic
    assert critic is not None
    torch.nn.init.constant_(critic.head.bias, 0.25)
    groups = [lone(0, GOOD, learner), lone(1, GOOD, learner)]
    told = learner.step(groups, step_of=STEP_OF).algorithm
    assert told["target_mean"] == pytest.approx(1.0, rel=1e-4)
    assert told["value_mean"] == pytest.approx(0.25, rel=1e-4)
    assert told["value_error"] == pytest.approx(0.75**2, rel=1e-4)


def test_a_late_member_is_judged_by_itself(qwen3_dir: Path) -> None:
    """Its rows are the same with and without the record of a group that closed before."""
    late = episode(1, [turn(0, PROMPT, GOOD, reward=0.5), turn(1, [9], BAD, parent=0)], 1.0)
    early = episode(0, [turn(0, PROMPT, BAD)], 7.0)
    closed = replace(group_of([late]), size=2, record={0: early.record})
    (alone,), (beside,) = (
        group_rows(group, ppo(process_weight=2.0), step_of=STEP_OF, step_now=0, max_lag=9).rows
        for group in (group_of([late]), closed)
    )
    assert alone.columns["to_go"].tolist() == [2.0] * 3 + [1.0] * 3
    assert torch.equal(alone.columns["to_go"], beside.columns["to_go"])


def test_stale_tokens_are_valued_by_the_critic_of_now(qwen3_dir: Path) -> None:
    learner = Learner(run_config(algo=ppo(critic_lr=3e-2)).learner, qwen3_dir)
    group = random_group(1, seed=3)
    values = [learner.step([group], step_of=STEP_OF).algorithm["value_mean"] for _ in range(3)]
    assert learner.step_index == 3 and len(set(values)) == 3  # the same tokens, sampled at step 0


# --- checkpoints ----------------------------------------------------------------------------------------------------

CASES = [
    pytest.param({"critic": "own"}, {}, id="own"),
    pytest.param({"critic": "shared", "level": "turn"}, {"minibatches": 2, "epochs": 2}, id="shared"),
    pytest.param({"critic": "own", "kl_weight": 0.1}, {"lora_rank": 4, "lr": 1e-2}, id="adapter"),
]


@pytest.mark.medium
@each_case(("algo", "of_train"), CASES)
def test_a_kill_between_step_and_checkpoint_loses_nothing_and_resumes_bit_for_bit(
    qwen3_dir: Path, tmp_path: Path, algo: dict[str, object], of_train: dict[str, object]
) -> None:
    settings = run_config(algo=ppo(**algo), train=Train.model_validate(of_train), rollout=SHORT, seed=3)
    straight = Learner(settings.learner, qwen3_dir)
    for step in range(4):
        train(straight, step)

    killed = Learner(settings.learner, qwen3_dir)
    train(killed, 0)
    train(killed, 1)
    folder = killed.save(tmp_path)
    train(killed, 2)  # and dies here, without a checkpoint
    again = Learner(settings.learner, qwen3_dir)
    assert not same(whole(killed), whole(again))
    assert again.load(folder).step == 2
    train(again, 2)
    assert same(whole(killed), whole(again))
    train(again, 3)
    assert same(whole(straight), whole(again))


@pytest.mark.medium
@each_case("victim", ["critic", "optimizers", "rename"])
def test_a_kill_in_the_middle_of_a_checkpoint_resumes_bit_for_bit(
    victim: str, qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = run_config(algo=ppo(), seed=3)
    straight = Learner(settings.learner, qwen3_dir)
    train(straight, 0)
    straight.save(tmp_path)
    train(straight, 1)

    def die(*_: object, **__: object) -> None:
        raise Killed

    owner, name = {"critic": (checkpoint, "save_file"), "optimizers": (torch, "save"), "rename": (Path, "rename")}[
        victim
    ]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            straight.save(tmp_path)
    train(straight, 2)

    again = Learner(settings.learner, qwen3_dir)
    found = newest(tmp_path)
    assert found is not None and again.load(found).step == 1
    for step in (1, 2):
        train(again, step)
    assert same(whole(straight), whole(again))
    assert again.save(tmp_path).name == "step-00000003"


def test_an_engine_sees_no_critic_in_a_checkpoint(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = Learner(run_config(algo=ppo()).learner, qwen3_dir)
    train(learner, 0)
    folder = learner.save(tmp_path)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert same(state_of(learner), AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_a_checkpoint_without_a_fitting_critic_is_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    for name, algo in (("grpo", GRPO()), ("shared", ppo(critic="shared"))):
        learner = Learner(run_config(algo=algo).learner, qwen3_dir)
        train(learner, 0)
        learner.save(tmp_path / name)
    fresh = Learner(run_config(algo=ppo()).learner, qwen3_dir)
    with pytest.raises(ModelError, match=r"no critic in .* was another algo\.kind trained"):
        fresh.load(tmp_path / "grpo" / "step-00000001")
    with pytest.raises(ModelError, match=r"is another one: trunk\..* \(algo\.critic, train\.lora_rank\)"):
        fresh.load(tmp_path / "shared" / "step-00000001")
