"""Adapters: only they are trained, they come back, and merged they are the model that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.errors import ModelError
from agentrl.learner.learner import Learner
from agentrl.learner.model import policy as model

from .making import VOCAB, mixture, random_group, run_config, tiny_qwen3
from .test_learner import STEP_OF, same, state_of

RANK, ALPHA = 3, 12
TOKENS = [(7 * i) % VOCAB for i in range(20)]


def config(**train: object) -> object:
    settings = {"warmup_steps": 0, "lr": 1e-2, "lora_rank": RANK, "lora_alpha": ALPHA, **train}
    return run_config(train=Train.model_validate(settings), seed=3)


def learner_on(folder: Path, **train: object) -> Learner:
    return Learner(config(**train).learner, folder)  # pyright: ignore[reportArgumentType]


def trained(folder: Path, steps: int = 2, **train: object) -> Learner:
    learner = learner_on(folder, **train)
    for step in range(steps):
        learner.step([random_group(10 * step + id, seed=10 * step + id) for id in range(3)], step_of=STEP_OF)
    return learner


def plain_score(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def test_a_score_is_that_of_transformers(qwen3_dir: Path) -> None:
    assert Learner(run_config().learner, qwen3_dir).score(TOKENS) == pytest.approx(plain_score(qwen3_dir), abs=1e-5)


def test_an_untrained_adapter_changes_nothing(qwen3_dir: Path) -> None:
    assert learner_on(qwen3_dir).score(TOKENS) == pytest.approx(plain_score(qwen3_dir), abs=1e-5)


def test_only_the_adapter_is_trained(qwen3_dir: Path) -> None:
    fresh, after = learner_on(qwen3_dir), trained(qwen3_dir)
    changed = {name for name, tensor in state_of(after).items() if not torch.equal(tensor, state_of(fresh)[name])}
    assert changed and all(".lora_" in name for name in changed)
    assert {".lora_A." in name for name in changed} == {True, False}
    layers = 2 * 7  # of each block: q, k, v, o, gate, up, down
    assert len(after.model.parameters()) == 2 * layers


def test_merged_weights_are_those_of_the_papers_equation(qwen3_dir: Path, tmp_path: Path) -> None:
    """W + (alpha / r) B A, computed from the adapter's file by hand."""
    learner = trained(qwen3_dir)
    whole = load_file(learner.export(tmp_path / "whole.safetensors").path)
    folder = learner.export_adapter(tmp_path / "adapter")
    adapter, base = load_file(folder / "adapter_model.safetensors"), load_file(qwen3_dir / "model.safetensors")
    assert whole.keys() == base.keys()
    changed = 0
    for name, weight in base.items():
        down, up = (
            adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight") for part in ("A", "B")
        )
        if down is None or up is None:
            assert torch.equal(whole[name], weight)
            continue
        changed += 1
        assert torch.allclose(whole[name], weight + (ALPHA / RANK) * up @ down, atol=1e-6)
    assert changed == len(adapter) // 2 == 14
    facts = json.loads((folder / "adapter_config.json").read_text())
    assert (facts["r"], facts["lora_alpha"], facts["peft_type"]) == (RANK, ALPHA, "LORA")


def test_going_on_from_a_checkpoint_is_going_on(qwen3_dir: Path, tmp_path: Path) -> None:
    straight = trained(qwen3_dir)
    folder = straight.save(tmp_path)
    assert folder.joinpath("adapter/adapter_model.safetensors").is_file()
    assert plain_score(folder) == pytest.approx(straight.score(TOKENS), abs=1e-4)  # any engine can serve it
    again = learner_on(qwen3_dir)
    again.load(folder)
    for learner in (straight, again):
        learner.step([random_group(50, seed=50)], step_of=STEP_OF)
    assert same(state_of(straight), state_of(again))


def test_an_adapter_of_another_shape_is_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    folder = trained(qwen3_dir, steps=1).save(tmp_path)
    with pytest.raises(ModelError, match="adapter"):
        learner_on(qwen3_dir, lora_rank=RANK + 1).load(folder)
    with pytest.raises(ModelError, match="adapter"):
        learner_on(qwen3_dir, lora_targets=["q_proj"]).load(folder)


@pytest.mark.medium
@each_case(("make", "checkpointing"), [(tiny_qwen3, True), (mixture, False)])
def test_the_reference_of_an_adapter_is_the_model_below_it_and_no_second_one(
    make: Any, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "model")
    elsewhere = Path(shutil.copytree(folder, tmp_path / "copy"))
    loaded: list[Path] = []
    load = model.load
    monkeypatch.setattr(model, "load", lambda path, *given: loaded.append(path) or load(path, *given))
    train = Train(warmup_steps=0, lr=1e-2, lora_rank=RANK, gradient_checkpointing=checkpointing)
    penalised = run_config(algo=GRPO(kl_weight=0.5), train=train, seed=3)
    one = Learner(penalised.learner, folder)
    assert loaded == [folder]
    two = Learner(penalised.learner, folder, reference_dir=elsewhere)
    assert loaded == [folder, folder, elsewhere]
    free = Learner(run_config(train=train, seed=3).learner, folder)
    for step in range(2):
        groups = [random_group(10 * step + id, seed=10 * step + id) for id in range(2)]
        for learner in (one, two, free):
            learner.step(groups, step_of=STEP_OF)
        assert one.score(TOKENS) == pytest.approx(two.score(TOKENS), abs=1e-3)
    assert one.score(TOKENS) != pytest.approx(free.score(TOKENS), abs=1e-2)  # the penalty matters
    assert all(parameter.requires_grad for parameter in one.model.parameters())
    assert len(one.model.parameters()) == len(free.model.parameters()) > 0


def test_targets_are_ends_of_layer_names(qwen3_dir: Path) -> None:
    learner = learner_on(qwen3_dir, lora_targets=["q_proj", "v_proj"])
    assert len(learner.model.parameters()) == 2 * 2 * 2
    with pytest.raises(ModelError, match=r"train\.lora_targets"):
        learner_on(qwen3_dir, lora_targets=["no_such_layer"])
