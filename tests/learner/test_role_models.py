"""A model for each role: what trains it, what an engine gets, what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import load_file

from agentrl import config
from agentrl.errors import ConfigError, ModelError
from agentrl.learner.learner import Learner
from agentrl.learner.model.models import policy_of
from agentrl.learner.model.policy import PolicyModel

from .making import VOCAB, tiny_qwen3
from .test_mixed import PPO, STEP_OF, settings
from .test_role_algorithms import game

TRAIN = {"lr": 1e-2, "grad_clip": 0.01, "epochs": 2}
TOKENS = [(7 * i) % VOCAB for i in range(12)]


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape than `qwen3_dir`, for the same tokens."""
    return tiny_qwen3(tmp_path_factory.mktemp("other"), seed=5, layers=3, hidden=16)


def learner(folder: Path, *roles: dict[str, Any], **given: Any) -> Learner:
    return Learner(settings(roles=list(roles), train={**TRAIN, **given.pop("train", {})}, **given).learner, folder)


def weights(of: PolicyModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.parameters()]


def same(one: PolicyModel, two: PolicyModel) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(weights(one), weights(two), strict=True))


KINDS = [
    {"normalise": "token"},
    {"normalise": "sequence", "kl_weight": 0.1},  # a reference each
    {"normalise": 8, "kl_weight": 0.1, "reference": 1},  # which follows each
]


@pytest.mark.parametrize("algo", KINDS)
def test_each_roles_model_trains_as_if_it_were_alone(qwen3_dir: Path, other_dir: Path, algo: dict[str, Any]) -> None:
    """Two learners of one role each, in two steps of two updates: bit for bit the same weights, clip and all."""
    bobs = {**algo, "kind": "rloo"}
    both = learner(qwen3_dir, {"name": "bob", "model": str(other_dir), "algo": bobs}, algo=algo)
    ann, bob = learner(qwen3_dir, algo=algo), learner(other_dir, algo=bobs)
    begun = weights(both.model), weights(both.models.of("bob"))
    assert len(begun[0]) != len(begun[1])
    for _ in range(2):
        both.step([game()], step_of=STEP_OF)
        ann.step([game(["ann"])], step_of=STEP_OF)
        bob.step([game(["bob"])], step_of=STEP_OF)
    for alone, role, before in ((ann, None, begun[0]), (bob, "bob", begun[1])):
        assert same(both.models.of(role), alone.model)
        assert not all(map(torch.equal, weights(alone.model), before))
        assert both.score(TOKENS, role=role) == alone.score(TOKENS)


def test_the_loss_of_one_roles_tokens_has_no_gradient_in_the_model_of_the_other(
    qwen3_dir: Path, other_dir: Path
) -> None:
    both = learner(qwen3_dir, {"name": "bob", "model": str(other_dir)})
    before = weights(both.models.of("bob"))
    both.step([game(["ann"])], step_of=STEP_OF)
    assert all(map(torch.equal, before, weights(both.models.of("bob"))))
    assert both.models.optimizers[policy_of("bob")].state_dict()["state"] == {}
    assert both.models.optimizers["policy"].state_dict()["state"]


def test_a_role_with_its_own_model_may_have_another_kind_of_algorithm(qwen3_dir: Path, other_dir: Path) -> None:
    both = learner(qwen3_dir, {"name": "bob", "model": str(other_dir), "algo": PPO})
    begun = weights(both.model), weights(both.models.of("bob"))
    both.step([game()], step_of=STEP_OF)
    assert not all(map(torch.equal, begun[0], weights(both.model)))
    assert not all(map(torch.equal, begun[1], weights(both.models.of("bob"))))
    assert both.models.optimizers["critic"].state_dict()["state"]


def test_a_checkpoint_goes_on_with_both_models(qwen3_dir: Path, other_dir: Path, tmp_path: Path) -> None:
    """Bit for bit: weights, optimizers, references that follow."""
    algo = KINDS[2]
    own = {"name": "bob", "model": str(other_dir)}
    one, two = learner(qwen3_dir, own, algo=algo), learner(qwen3_dir, own, algo=algo)
    one.step([game()], step_of=STEP_OF)
    folder = one.save(tmp_path)
    two.load(folder)
    assert same(learner(folder / "roles" / "bob").model, two.models.of("bob"))  # a model's folder as any other
    assert one.hashes() == two.hashes() and any(name.startswith("policy.bob.") for name in one.hashes())
    for each in (one, two):
        each.step([game()], step_of=STEP_OF)
    assert one.hashes() == two.hashes()
    with pytest.raises(ModelError, match="carl"):
        learner(qwen3_dir, {"name": "carl", "model": str(other_dir)}).load(folder)


def test_an_engine_gets_the_weights_of_the_role_that_it_plays(qwen3_dir: Path, other_dir: Path, tmp_path: Path) -> None:
    both = learner(qwen3_dir, {"name": "bob", "model": str(other_dir)})
    both.step([game()], step_of=STEP_OF)
    for role in (None, "bob"):
        file = both.export(tmp_path / f"{role}.safetensors", role=role)
        told, own = load_file(file.path), dict(both.models.of(role).module.named_parameters())
        assert told.keys() == own.keys()
        assert all(torch.equal(told[name], own[name]) for name in own)


OWN = {"name": "bob", "model": "other"}


@each_case(
    ("sections", "wrong"),
    [
        (
            {"roles": [OWN], "rollout": {"roles": {"bob": "frozen"}}},
            r"roles\.0\.model = 'other': rollout\.roles gives bob to a policy that does not learn",
        ),
        (
            {"roles": [OWN, {"name": "ann", "adapter": True}], "train": {"lora_rank": 2}},
            r"roles\.1\.adapter = True: it is of adapters, and roles\.0\.model trains all weights: leave one",
        ),
        (
            {"roles": [OWN], "train": {"lora_rank": 2}},
            r"train\.lora_rank = 2: roles\.0\.model trains all weights of every model: leave it out",
        ),
        (
            {"roles": [OWN], "train": {"parallel": {"ranks": 2}}},
            r"train\.parallel\.ranks = 2: roles\.0\.model is trained by one rank: leave it out",
        ),
        (
            {"roles": [OWN], "engine": {"kind": "vllm", "sync": "delta"}},
            r"engine\.sync = 'delta': the weights of roles\.0\.model travel as whole files: give 'auto'",
        ),
        (
            {"roles": [OWN], "engine": {"kind": "vllm", "urls": ["http://there"]}},
            r"engine\.urls = .*: the run starts the engines of roles\.0\.model itself: leave it out and give",
        ),
        (
            {"roles": [OWN], "algo": {"kind": "ppo", "critic": "shared"}},
            r"algo\.critic = 'shared': it is on the trunk of the run's model, and bob has another",
        ),
        ({"roles": [{**OWN, "name": "a/b"}]}, r"roles\.0\.name = 'a/b': a folder"),
    ],
)
def test_what_a_run_cannot_have_beside_a_roles_own_model_is_refused(sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config.parse({"model": "m", "env": {"id": "test/one"}, **sections})
