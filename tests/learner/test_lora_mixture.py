"""Adapters on a mixture of experts: every expert has its own of the rank asked for, the router is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from agentrl.errors import ModelError
from agentrl.learner.model import lora

from .making import VOCAB, mixture, random_group
from .test_learner import STEP_OF, same, state_of
from .test_lora import ALPHA, RANK, TOKENS, learner_on, plain_score, trained

EXPERTS = 4
LAYER = "base_model.model.model.layers.0"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("moe"))


def shared_and_dense(folder: Path) -> Path:
    """Its first layer is dense, its second has an expert that all tokens share, with a gate of its own."""
    torch.manual_seed(3)
    own = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **own, num_experts=EXPERTS)).save_pretrained(folder)
    return folder


def stacked(folder: Path) -> Path:
    """Its folder keeps the experts of a layer in one tensor too."""
    torch.manual_seed(4)
    GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, num_local_experts=EXPERTS)).save_pretrained(folder)
    return folder


def adapter_of(learner: Any, tmp_path: Path) -> dict[str, torch.Tensor]:
    return load_file(learner.export_adapter(tmp_path / "adapter") / "adapter_model.safetensors")


def adapted(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name.partition(".lora_")[0] for name in tensors}


def of_experts(*parts: str) -> set[str]:
    return {f"mlp.experts.{e}.{part}" for e in range(EXPERTS) for part in parts}


def test_attention_and_every_expert_get_the_rank_and_the_router_nothing(folder: Path, tmp_path: Path) -> None:
    tensors = adapter_of(learner_on(folder), tmp_path)
    parts = {f"self_attn.{part}" for part in ATTENTION} | of_experts("gate_proj", "up_proj", "down_proj")
    assert adapted(tensors) == {f"{LAYER}.{part}" for part in parts}
    assert {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name} == {RANK}
    assert {tensor.shape[1] for name, tensor in tensors.items() if ".lora_B." in name} == {RANK}
    facts = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (facts["r"], facts["lora_alpha"], facts["rank_pattern"]) == (RANK, ALPHA, {})
    assert sorted(facts["target_modules"]) == sorted([*ATTENTION, "gate_proj", "up_proj", "down_proj"])


@pytest.mark.medium
@each_case("make", [mixture, shared_and_dense, stacked])
def test_training_moves_the_adapter_of_every_part_and_nothing_below(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    before = state_of(learner_on(folder))
    after = state_of(trained(folder))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert {name for name in after if ".lora_B." in name} <= moved


def test_the_merged_experts_are_those_of_the_papers_equation(folder: Path, tmp_path: Path) -> None:
    """W + (alpha / r) B A for each expert, computed from the adapter's file by hand."""
    learner = trained(folder)
    whole, base = (
        load_file(learner.export(tmp_path / "whole.safetensors").path),
        load_file(folder / "model.safetensors"),
    )
    adapter = adapter_of(learner, tmp_path)
    assert whole.keys() == base.keys()
    changed: set[str] = set()
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            changed.add(prefix)
            weight = weight + (ALPHA / RANK) * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
        torch.testing.assert_close(whole[name], weight, atol=1e-6, rtol=1e-6)
    assert changed == adapted(adapter)


@pytest.mark.medium
@each_case("make", [mixture, shared_and_dense, stacked])
def test_a_checkpoint_can_be_served_and_gone_on_from(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    straight = trained(folder)
    saved = straight.save(tmp_path / "run")
    assert plain_score(saved) == pytest.approx(straight.score(TOKENS), abs=1e-4)
    assert plain_score(saved) != pytest.approx(plain_score(folder), abs=1e-2)
    again = learner_on(folder)
    again.load(saved)
    for learner in (straight, again):
        learner.step([random_group(50, seed=50)], step_of=STEP_OF)
    assert same(state_of(straight), state_of(again))


LATENT: dict[str, Any] = {
    **SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def deepseek(folder: Path) -> Path:
    """Its first layer is dense, its second has an expert that all tokens share."""
    torch.manual_seed(5)
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **ranks)).save_pretrained(folder)
    return folder


def glm(folder: Path) -> Path:
    torch.manual_seed(6)
    Glm4MoeForCausalLM(Glm4MoeConfig(**LATENT, head_dim=8)).save_pretrained(folder)
    return folder


@pytest.mark.medium
@each_case("make", [mixture, stacked, shared_and_dense, deepseek, glm])
def test_peft_itself_reads_the_adapter(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    learner = trained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, learner.export_adapter(tmp_path / "adapter"))
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(learner.score(TOKENS), abs=1e-4)


def test_an_adapter_that_peft_reads_as_another_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_on(folder)
    views = lora._views  # pyright: ignore[reportPrivateUsage]

    def misnamed(module: Any, adapter: str) -> dict[str, torch.Tensor]:
        return {name.replace("q_proj", "query"): view for name, view in views(module, adapter).items()}

    monkeypatch.setattr(lora, "_views", misnamed)
    with pytest.raises(ModelError, match=r"PEFT reads another adapter.*query"):
        learner.export_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_shared_experts_and_dense_layers_are_adapted_and_no_gate(tmp_path: Path) -> None:
    tensors = adapter_of(learner_on(shared_and_dense(tmp_path / "model")), tmp_path)
    names = {name.removeprefix("base_model.model.model.layers.") for name in adapted(tensors)}
    assert {"0.mlp.gate_proj", "1.mlp.shared_expert.up_proj", "1.mlp.experts.3.down_proj"} <= names
    assert not any(name.endswith((".gate", "shared_expert_gate")) for name in names)


def test_experts_that_the_folder_keeps_in_one_tensor_stay_so_in_the_adapter(tmp_path: Path) -> None:
    tensors = adapter_of(learner_on(stacked(tmp_path / "model")), tmp_path)
    experts = f"{LAYER}.block_sparse_moe.experts"  # PEFT nests what adapts two parameters of one module
    assert tensors[f"{experts}.base_layer.lora_A.weight"].shape == (EXPERTS * RANK, 32)
    assert tensors[f"{experts}.lora_B.weight"].shape == (32, EXPERTS * RANK)
    assert not any("router" in name for name in tensors)
    facts = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(facts["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (["q_proj", "v_proj"], {"self_attn.q_proj", "self_attn.v_proj"}),
        (["gate"], {"mlp.gate"}),
        (
            ["mlp.experts"],
            {f"mlp.experts.{e}.{p}" for e in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")},
        ),
        (["down_proj"], of_experts("down_proj")),
    ],
)
def test_targets_name_parts_as_the_models_folder_does(
    targets: list[str], parts: set[str], folder: Path, tmp_path: Path
) -> None:
    learner = trained(folder, lora_targets=targets)
    assert {name.removeprefix(f"{LAYER}.") for name in adapted(adapter_of(learner, tmp_path))} == parts
    assert plain_score(learner.save(tmp_path / "run")) == pytest.approx(learner.score(TOKENS), abs=1e-4)


def test_gates_without_what_follows_them_are_refused_since_peft_loses_them(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"PEFT reads another adapter.*experts.*train\.lora_targets"):
        learner_on(folder, lora_targets=["up_proj", "gate_proj"]).export_adapter(tmp_path / "adapter")


def test_half_of_what_the_model_keeps_as_one_tensor_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"train\.lora_targets.*name 'gate_proj' and 'up_proj', or neither"):
        learner_on(folder, lora_targets=["up_proj"])


def test_an_adapter_whose_shared_half_differs_is_refused(folder: Path, tmp_path: Path) -> None:
    """The model has one A for an expert's gate and up: another program's adapter may have two."""
    learner = trained(folder)
    saved = learner.save(tmp_path)
    (saved / "SHA256SUMS").unlink()  # as in a folder that another program wrote
    file = saved / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{LAYER}.mlp.experts.2.up_proj.lora_A.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"experts\.2\.gate_proj\.lora_A.*the model has one A"):
        learner_on(folder).load(saved)


@pytest.mark.parametrize("train", [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_every_kind_of_pass_trains_it(train: dict[str, object], folder: Path) -> None:
    fresh, after = learner_on(folder, **train), trained(folder, steps=1, **train)
    assert not same(state_of(fresh), state_of(after))
