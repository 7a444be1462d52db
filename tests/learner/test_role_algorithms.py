"""An algorithm for each role of an episode: what each trains, and what a whole step adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl import config
from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.errors import ConfigError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.records import Group, StopReason

from .making import episode, group_of, turn
from .test_mixed import PPO as PPO_TABLE
from .test_mixed import STEP_OF, doubled, float64, gradients, settings  # noqa: F401 (a fixture)

SPOKEN = {"ann": [[2, 5], [1, 1], [3, 1]], "bob": [[4, 1], [6, 2], [1, 9]]}  # tokens of each turn, by member


def game(learning: Sequence[str] = ("ann", "bob")) -> Group:
    """Three members in which ann and bob take turns, twice each, with process rewards and outcomes of their own."""
    members = []
    for member in range(3):
        turns = []
        for index in range(4):
            role, again = ("ann", "bob")[index % 2], index // 2
            tokens = [(3 * member + 5 * at + 7 * index) % 20 + 1 for at in range(SPOKEN[role][member][again])]
            logprobs = [-1.0 - 0.25 * ((at + member) % 5) for at in range(len(tokens))]
            turns.append(
                turn(
                    index,
                    [1, 2, index + 1],
                    tokens,
                    parent=index - 2 if again else None,
                    reward=0.25 * member * (index + 1),
                    logprobs=logprobs,
                    role=role,
                    learns=role in learning,
                )
            )
        played = replace(episode(member, turns, 0.0), outcomes={"ann": float(member % 2), "bob": -0.5 * member})
        members.append(played)
    return group_of(members)


def tokens_of(role: str) -> int:
    return sum(map(sum, SPOKEN[role]))


@pytest.mark.medium
@pytest.mark.usefixtures("float64")
@each_case("critic", ["own", "shared"])
@each_case("normalise", ["token", "sequence", 8])
def test_the_gradient_of_two_roles_algorithms_is_the_weighted_sum_of_those_of_each_alone(
    qwen3_dir: Path, normalise: str | int, critic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights by hand: each role's share of the tokens, or half each, since both play every episode."""
    how = {"normalise": normalise}
    ppo, grpo = {**PPO_TABLE, **how, "critic": critic}, {"kind": "grpo", **how}

    def of(learner: Learner) -> list[Any]:
        own = learner.models.critic
        return [*learner.model.parameters(), *(own.parameters() if own is not None else [])]

    both = settings(algo=grpo, roles=[{"name": "bob", "algo": ppo}])
    mixed = gradients(doubled(Learner(both.learner, qwen3_dir)), [game()], monkeypatch, of)
    ann = gradients(doubled(Learner(settings(algo=grpo).learner, qwen3_dir)), [game(["ann"])], monkeypatch, of)
    bob = gradients(doubled(Learner(settings(algo=ppo).learner, qwen3_dir)), [game(["bob"])], monkeypatch, of)
    ann = torch.cat([ann, torch.zeros(len(bob) - len(ann)).double()])  # no critic there
    whole = tokens_of("ann") + tokens_of("bob")
    shares = (tokens_of("ann") / whole, tokens_of("bob") / whole) if normalise == "token" else (0.5, 0.5)
    expected = shares[0] * ann + shares[1] * bob
    assert ann.abs().max() > 1e-3 and bob[-1].abs() > 1e-6
    assert (mixed - expected).abs().max() <= 1e-12


@pytest.mark.usefixtures("float64")
def test_roles_with_the_same_algorithm_train_as_one_algorithm_does(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = {"kind": "grpo", "normalise": "sequence", "process_weight": 0.5}

    def gradient(**given: Any) -> torch.Tensor:
        learner = doubled(Learner(settings(**given).learner, qwen3_dir))
        return gradients(learner, [game()], monkeypatch, lambda one: list(one.model.parameters()))

    one = gradient(algo=algo)
    assert one.abs().max() > 1e-3
    assert torch.equal(gradient(algo=algo, roles=[{"name": name, "algo": dict(algo)} for name in ("ann", "bob")]), one)
    assert not torch.equal(gradient(algo=algo, roles=[{"name": "bob", "algo": {**algo, "process_weight": 0.0}}]), one)


def test_rows_of_a_role_have_the_columns_of_its_algorithm_alone() -> None:
    ready = group_rows(
        game(), GRPO(), step_of=STEP_OF, step_now=0, max_lag=9, by_role={"bob": PPO.model_validate(PPO_TABLE)}
    )
    (weighed,) = weigh([[ready]])
    rows = [row for group in weighed for row in group]
    assert [row.algo.kind for row in rows] == ["grpo", "ppo"] * 3
    extra = [{"advantage"} & row.columns.keys() for row in rows]
    assert extra == [{"advantage"}, set()] * 3
    assert sum(float(row.columns["weight"].sum()) for row in rows) == pytest.approx(1.0)


def test_a_role_has_the_same_algorithm_in_every_environment() -> None:
    given = settings({"id": "test/one"}, {"id": "test/two", "algo": PPO_TABLE}, roles=[{"name": "bob", "algo": {}}])
    assert [given.algo_of(env, "ann").kind for env in ("test/one", "test/two")] == ["grpo", "ppo"]
    assert [given.algo_of(env, "bob").kind for env in ("test/one", "test/two")] == ["grpo", "grpo"]
    assert config.from_json(config.to_json(given)) == given


@each_case(
    ("sections", "wrong"),
    [
        ({"roles": [{"name": "b", "algo": {"kind": "grbo"}}]}, r"roles\.0\.algo\.kind.*'grbo' is registered; known: "),
        ({"roles": [{"name": "b", "algo": {"clip_lo": 1}}]}, r"roles\.0\.algo\.clip_lo.*did you mean 'clip_low'"),
        ({"roles": [{"name": "b"}, {"name": "b"}]}, r"roles\.1\.name = 'b': another \[\[roles\]\] table has this name"),
        (
            {"algo": PPO_TABLE, "roles": [{"name": "b", "algo": {"kind": "grpo"}}], "rollout": {"group_size": 1}},
            r"rollout\.group_size = 1: roles\.0\.algo\.kind = 'grpo' compares siblings: give at least 2",
        ),
        (
            {"roles": [{"name": "b", "algo": PPO_TABLE}], "rollout": {"roles": {"b": "frozen"}}},
            r"roles\.0\.algo = 'ppo': rollout\.roles gives b to a policy that does not learn",
        ),
    ],
)
def test_a_wrong_role_is_named(sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config.parse({"model": "m", "env": {"id": "test/one"}, **sections})


@pytest.mark.parametrize("scale", ["std_by_source", "leave_one_out_by_source"])
def test_a_role_that_only_a_failed_member_reached_leaves_the_rows_of_the_others(scale: str) -> None:
    """The oracle is the same group without the failed member."""
    algo = GRPO.model_validate({"scale": scale})
    played = [
        episode(at, [turn(0, [1, 2], [3 + at], role="a", reward=0.1 * at)], outcome)
        for at, outcome in enumerate((1.0, 0.0, 0.5))
    ]
    turns = [turn(0, [1, 2], [9], role="a"), turn(1, [4], [5], parent=0, role="b")]
    failed = episode(3, turns, None, stop=StopReason.ENGINE_FAILED)
    made = [
        group_rows(group_of(members), algo, step_of=lambda _: 0, step_now=0, max_lag=4).rows
        for members in ([*played, failed], played)
    ]
    found, expected = ([row.columns["advantage"].tolist() for row in rows] for rows in made)
    assert found == expected and len(found) == 3
