"""Several algorithms in one step, one for each environment: what each trains, and what the whole step adds up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl import config
from agentrl.algos.grpo import GRPO
from agentrl.errors import ConfigError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.records import Group, Task

from .making import episode, group_of, turn

STEP_OF = {1: 0, 2: 0}.__getitem__
RUN_FILE: dict[str, Any] = {"model": "m", "env": {"id": "test/one"}, "buffer": {"max_lag": 4}}
ROOM = {"max_context": 30, "max_tokens_per_turn": 16}
PPO = {"kind": "ppo", "critic_warmup_steps": 0, "gae_lambda": 0.9}


def settings(*tables: dict[str, Any], algo: dict[str, Any] | None = None, **sections: Any) -> config.RunConfig:
    train = {"warmup_steps": 0, "grad_clip": 1e9, **sections.pop("train", {})}
    return config.parse(
        {**RUN_FILE, "tasks": list(tables), "algo": algo or {}, "rollout": ROOM, "train": train, **sections}
    )


def played(env: str, first: int, lengths: list[int]) -> Group:
    """A group of one turn each, of so many sampled tokens, with different rewards. Ids begin at `first`."""
    members = []
    for member, length in enumerate(lengths):
        tokens = [(3 * member + 5 * at + first) % 20 + 1 for at in range(length)]
        logprobs = [-1.0 - 0.25 * ((at + member) % 5) for at in range(length)]
        own = turn(0, [1, 2, first % 19 + 1], tokens, reward=0.25 * member, logprobs=logprobs)
        members.append(replace(episode(member, [own], float(member % 2)), episode_id=first + member, group_id=first))
    return replace(group_of(members, id=first), task=Task(index=first, env=env, seed=first))


# 10 tokens in 4 episodes, and 21 tokens in 3
ONE, TWO = played("test/one", 100, [2, 5, 2, 1]), played("test/two", 200, [8, 3, 10])


def gradients(
    learner: Learner, groups: list[Group], monkeypatch: pytest.MonkeyPatch, of: Callable[[Learner], list[Any]]
) -> torch.Tensor:
    """The gradient of a step, averaged over its updates, in float64."""
    seen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:

        def keep(names: Any, **_: Any) -> float:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in of(learner)]
            seen.append(torch.cat([grad.flatten().double() for grad in grads]).clone())
            learner.models.zero_grad()
            return 0.0

        patch.setattr(torch.Tensor, "to", wide)
        patch.setattr(learner.models, "optimizer_step", keep)
        learner.step(groups, step_of=STEP_OF)
    return torch.stack(seen).mean(0)


def wide(tensor: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
    """Layers that ask for float32 compute in float64."""
    return TO(tensor, *(torch.float64 if each is torch.float32 else each for each in args), **given)


TO = torch.Tensor.to


def doubled(learner: Learner) -> Learner:
    """With models in float64, and a critic that says something."""
    learner.model.module.double()
    if (critic := learner.models.critic) is not None:
        critic._trunk.module.double()
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(4))
    return learner


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shares and losses are not rounded to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.medium
@pytest.mark.usefixtures("float64")
@each_case("critic", ["own", "shared"])
@each_case("normalise", ["token", "sequence", 8])
def test_a_mixed_steps_gradient_is_the_weighted_sum_of_those_of_two_runs(
    qwen3_dir: Path, normalise: str | int, critic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights by hand: each run's share of the tokens, or of the episodes."""
    how = {"normalise": normalise}
    ppo = {**PPO, **how, "critic": critic}
    grpo = {"kind": "grpo", **how}
    both = settings({"id": "test/one", "algo": grpo}, {"id": "test/two", "algo": ppo})

    def of(learner: Learner) -> list[Any]:
        own = learner.models.critic
        return [*learner.model.parameters(), *(own.parameters() if own is not None else [])]

    mixed = gradients(doubled(Learner(both.learner, qwen3_dir)), [ONE, TWO], monkeypatch, of)
    first = gradients(doubled(Learner(settings(algo=grpo).learner, qwen3_dir)), [ONE], monkeypatch, of)
    second = gradients(doubled(Learner(settings(algo=ppo).learner, qwen3_dir)), [TWO], monkeypatch, of)
    first = torch.cat([first, torch.zeros(len(second) - len(first)).double()])  # no critic there
    shares = (10 / 31, 21 / 31) if normalise == "token" else (4 / 7, 3 / 7)
    expected = shares[0] * first + shares[1] * second
    assert first.abs().max() > 1e-3 and second[-1].abs() > 1e-6
    assert (mixed - expected).abs().max() <= 1e-12


@pytest.mark.medium
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("others", ["token", "sequence"])
def test_a_mixed_steps_gradient_is_the_same_however_it_is_divided(
    qwen3_dir: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into passes and into minibatches; also where the algorithms normalise in different ways."""
    tables = [{"id": "test/one"}, {"id": "test/two", "algo": {**PPO, "normalise": others}}]
    groups = [played(env, first, [2, 5, 1]) for first, env in enumerate(("test/one", "test/two") * 2, 1)]
    groups = [replace(group, id=10 * at) for at, group in enumerate(groups)]

    def gradient(**train: Any) -> torch.Tensor:
        learner = doubled(Learner(settings(*tables, train=train).learner, qwen3_dir))
        return gradients(learner, groups, monkeypatch, lambda one: list(one.model.parameters()))

    whole = gradient()
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient(tokens_per_batch=30), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(minibatches=2), whole, atol=1e-12, rtol=0)


def test_entries_that_name_the_same_algorithm_train_bit_for_bit_as_one(qwen3_dir: Path) -> None:
    algo = {**PPO, "kl_weight": 0.1}
    tables = [{"id": "test/one", "algo": algo}, {"id": "test/two", "algo": dict(algo)}]

    def trained(*tables: dict[str, Any]) -> tuple[Any, ...]:
        learner = Learner(settings(*tables, algo=algo, train={"lr": 1e-2, "minibatches": 2}).learner, qwen3_dir)
        reports = [learner.step([ONE, TWO], step_of=STEP_OF) for _ in range(2)]
        told = [replace(report, seconds={}, use=None) for report in reports]  # pyright: ignore
        return told, [parameter.detach().clone() for parameter in learner.model.parameters()]

    (told, weights), (expected, as_one) = trained(*tables), trained()
    assert told == expected
    assert all(map(torch.equal, weights, as_one))
    assert not all(map(torch.equal, weights, Learner(settings().learner, qwen3_dir).model.parameters()))


def test_an_episodes_share_is_the_same_whatever_its_environment_normalises_by() -> None:
    """Half of the episodes are of each: one environment's count by their tokens, the other's by themselves."""
    rows = [
        group_rows(group, algo, step_of=STEP_OF, step_now=0, max_lag=9)
        for group, algo in (
            (played("test/one", 100, [1, 3]), GRPO()),
            (played("test/two", 200, [4, 12]), GRPO(normalise="sequence")),
        )
    ]
    (weighed,) = weigh([rows])
    sums = [[float(row.columns["weight"].sum()) for row in group] for group in weighed]
    assert sums == [pytest.approx([1 / 8, 3 / 8]), pytest.approx([1 / 4, 1 / 4])]


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_a_critic_that_warms_up_beside_another_algorithm_does_not_move_the_policy(qwen3_dir: Path, critic: str) -> None:
    """The policy moves as if the warming environment were not there, but for the other's share of the loss."""
    warm = {**PPO, "critic": critic, "critic_warmup_steps": 1}
    tables = [{"id": "test/one", "algo": {"normalise": 4}}, {"id": "test/two", "algo": warm}]
    learner = Learner(settings(*tables, train={"lr": 1e-2}).learner, qwen3_dir)
    alone = Learner(settings(algo={"normalise": 7}, train={"lr": 1e-2}).learner, qwen3_dir)
    begun = [parameter.detach().clone() for parameter in learner.model.parameters()]
    report = learner.step([ONE, TWO], step_of=STEP_OF)
    alone.step([ONE], step_of=STEP_OF)  # 4 episodes of divisor 7, as 4 of 7 of divisor 4
    for one, two in zip(learner.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)
    assert not all(map(torch.equal, begun, learner.model.parameters()))
    assert learner.models.critic is not None and learner.models.critic.head.bias.abs() > 0
    assert report.algorithm["tasks.1.algo.target_mean"] > 0


def test_a_step_tells_of_each_environment(qwen3_dir: Path) -> None:
    tables = [{"id": "test/one"}, {"id": "test/two", "algo": {**PPO, "normalise": "sequence"}}]
    report = Learner(settings(*tables).learner, qwen3_dir).step([ONE, TWO], step_of=STEP_OF)
    one, two = (report.environments[env] for env in ("test/one", "test/two"))
    assert (one.episodes, one.tokens_scored, two.episodes, two.tokens_scored) == (4, 10, 3, 21)
    assert (one.outcome_mean, one.reward_mean) == (0.5, 0.5 + 0.25 * 1.5)
    assert (one.share, two.share) == (pytest.approx(4 / 7), pytest.approx(3 / 7))
    assert one.lag_mean == 0 and one.clip_fraction == 0
    parts = [(each.entropy, each.tokens_computed) for each in (one, two)]
    assert report.entropy == pytest.approx(sum((entropy or 0) * n for entropy, n in parts) / 31, rel=1e-5)


def test_only_the_critics_own_rows_need_the_critic(qwen3_dir: Path) -> None:
    alone = settings({"id": "test/one"}, {"id": "test/two"})
    assert Learner(alone.learner, qwen3_dir).models.critic is None
    unused = settings({"id": "test/one", "algo": {"kind": "grpo"}}, algo=PPO)
    assert Learner(unused.learner, qwen3_dir).models.critic is None, "no task is trained by [algo]"
    mixed = Learner(settings({"id": "test/one"}, {"id": "test/two", "algo": PPO}).learner, qwen3_dir)
    mixed.step([ONE], step_of=STEP_OF)
    assert mixed.models.optimizers["critic"].state_dict()["state"] == {}
    mixed.step([TWO], step_of=STEP_OF)
    assert mixed.models.optimizers["critic"].state_dict()["state"]


@each_case(
    ("tables", "sections", "wrong"),
    [
        ([{}, {"id": "b", "algo": {"kind": "grbo"}}], {}, r"tasks\.1\.algo\.kind.*'grbo' is registered; known: "),
        ([{"algo": {"clip_lo": 1}}], {}, r"tasks\.0\.algo\.clip_lo.*did you mean 'clip_low'"),
        (
            [{"algo": {"clip_low": 0.1}}, {}],
            {},
            r"tasks\.1\.algo = 'grpo': tasks\.0 plays test/one too, with another algorithm: give both the same",
        ),
        (
            [{"algo": PPO}, {"id": "b", "algo": {**PPO, "critic": "shared"}}],
            {},
            r"tasks\.1\.algo\.critic = 'shared': a run has one critic, and tasks\.0\.algo another",
        ),
        (
            [{"algo": {"baseline": "none"}}, {"id": "b", "algo": PPO}],
            {"buffer": {"skip_without_signal": True}},
            r"buffer\.skip_without_signal.*tasks\.1\.algo\.kind = 'ppo' learns from a group whose returns are equal",
        ),
    ],
)
def test_a_wrong_entry_is_named(tables: list[dict[str, Any]], sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        settings(*tables, **sections)


def test_a_run_file_with_several_algorithms_is_read_back_equal() -> None:
    given = settings({"id": "test/one"}, {"id": "test/two", "algo": PPO})
    assert config.from_json(config.to_json(given)) == given
    assert [given.algo_of(env).kind for env in ("test/one", "test/two")] == ["grpo", "ppo"]
