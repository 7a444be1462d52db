"""An adapter for each role: what trains it, what an engine gets, what a checkpoint keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import load_file

from agentrl import config
from agentrl.errors import ConfigError, ModelError
from agentrl.learner.learner import Learner
from agentrl.learner.model import lora
from agentrl.learner.model.models import policy_of

from .making import VOCAB
from .test_mixed import STEP_OF, settings
from .test_role_algorithms import game

LORA = {"lora_rank": 2, "lr": 1e-2}
BOB = {"name": "bob", "adapter": True}
TOKENS = [(7 * i) % VOCAB for i in range(12)]


def learner(folder: Path, *roles: dict[str, Any], **given: Any) -> Learner:
    train = {**LORA, **given.pop("train", {})}
    return Learner(settings(roles=list(roles), train=train, **given).learner, folder)


def adapter(of: Learner, role: str | None) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in lora.parameters(of.model.module, role)]


def give(to: Learner, role: str | None, tensors: list[torch.Tensor]) -> None:
    for parameter, tensor in zip(lora.parameters(to.model.module, role), tensors, strict=True):
        parameter.data.copy_(tensor)


@pytest.mark.medium
@each_case("normalise", ["token", "sequence", 8])
@each_case("checkpointing", [False, True])
def test_each_roles_adapter_trains_as_if_it_were_alone(
    qwen3_dir: Path, normalise: str | int, checkpointing: bool
) -> None:
    """Two learners of one role each, in two steps of two updates: bit for bit the same weights, clip and all."""
    algo = {"normalise": normalise}
    train = {"grad_clip": 0.01, "epochs": 2, "gradient_checkpointing": checkpointing}
    both = learner(qwen3_dir, {**BOB, "algo": {"kind": "rloo", **algo}}, algo=algo, train=train)
    ann = learner(qwen3_dir, algo=algo, train=train)
    bob = learner(qwen3_dir, algo={"kind": "rloo", **algo}, train=train)
    give(ann, None, adapter(both, None))
    give(bob, None, adapter(both, "bob"))
    begun = adapter(both, None), adapter(both, "bob")
    for _ in range(2):
        both.step([game()], step_of=STEP_OF)
        ann.step([game(["ann"])], step_of=STEP_OF)
        bob.step([game(["bob"])], step_of=STEP_OF)
    for alone, role, before in ((ann, None, begun[0]), (bob, "bob", begun[1])):
        assert all(map(torch.equal, adapter(both, role), adapter(alone, None)))
        assert not any(map(torch.equal, adapter(both, role)[1::2], before[1::2]))
    assert both.score(TOKENS) == ann.score(TOKENS)
    assert both.score(TOKENS, role="bob") == bob.score(TOKENS)
    assert both.score(TOKENS, role="bob") != both.score(TOKENS)


def test_a_step_in_which_a_role_earned_nothing_leaves_its_adapter_and_optimizer(qwen3_dir: Path) -> None:
    one = learner(qwen3_dir, BOB)
    before = adapter(one, "bob")
    one.step([game(["ann"])], step_of=STEP_OF)
    assert all(map(torch.equal, adapter(one, "bob"), before))
    assert one.models.optimizers[policy_of("bob")].state_dict()["state"] == {}
    assert one.models.optimizers["policy"].state_dict()["state"]


def test_a_checkpoint_goes_on_with_the_adapters_of_all_roles(qwen3_dir: Path, tmp_path: Path) -> None:
    one, two = learner(qwen3_dir, BOB), learner(qwen3_dir, BOB)
    one.step([game()], step_of=STEP_OF)
    two.load(one.save(tmp_path))
    for each in (one, two):
        each.step([game()], step_of=STEP_OF)
    assert one.hashes() == two.hashes()
    assert len(one.hashes()) == 2 * len(learner(qwen3_dir).hashes())
    with pytest.raises(ModelError, match=r"cannot load the adapter in .*carl"):
        learner(qwen3_dir, {"name": "carl", "adapter": True}).load(next(tmp_path.glob("step-*")))


def test_an_export_holds_each_adapter_in_pefts_format(qwen3_dir: Path, tmp_path: Path) -> None:
    one = learner(qwen3_dir, BOB)
    one.step([game()], step_of=STEP_OF)
    folder = one.export_adapter(tmp_path / "7")
    for place, role in ((folder, None), (folder / "bob", "bob")):
        assert json.loads((place / "adapter_config.json").read_text())["r"] == 2
        told = load_file(place / lora.WEIGHTS)
        assert sorted(map(str, (tensor.sum() for tensor in told.values()))) == sorted(
            str(tensor.sum()) for tensor in adapter(one, role)
        )
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", lora.WEIGHTS, "bob"}


@each_case(
    ("sections", "wrong"),
    [
        ({"roles": [BOB]}, r"roles\.0\.adapter = True: say how large an adapter is: train\.lora_rank = 16"),
        (
            {"roles": [BOB], "train": LORA, "engine": {"sync": "full"}},
            r"engine\.sync = 'full': roles\.0\.adapter needs engines that hold several adapters: give 'auto'",
        ),
        (
            {"roles": [BOB], "train": LORA, "rollout": {"roles": {"bob": "frozen"}}},
            r"roles\.0\.adapter = True: rollout\.roles gives bob to a policy that does not learn",
        ),
        (
            {"roles": [{"name": "a/b", "adapter": True}], "train": LORA},
            r"roles\.0\.name = 'a/b': a folder and an adapter are named after it",
        ),
        (
            {"roles": [BOB], "train": {**LORA, "parallel": {"ranks": 2}}},
            r"train\.parallel\.ranks = 2: roles\.0\.adapter is trained by one rank: leave it out",
        ),
    ],
)
def test_a_role_that_cannot_have_an_adapter_is_refused(sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config.parse({"model": "m", "env": {"id": "test/one"}, **sections})


def test_adapters_of_roles_travel_alone_to_either_kind_of_engine() -> None:
    given = {"model": "m", "env": {"id": "test/one"}, "train": LORA, "roles": [BOB]}
    assert [config.parse({**given, "engine": {"kind": kind}}).sync for kind in ("embedded", "vllm")] == ["adapter"] * 2
    assert config.parse({**given, "roles": []}).sync == "full"
