"""The model over trees against transformers' own attention over single rows; and folders that cannot be used."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from agentrl.errors import ModelError
from agentrl.train.model import PolicyModel
from agentrl.train.packing import packs

from .making import VOCAB, tiny_llama, tiny_qwen3
from .test_packing import row


def sliding_mistral(folder: Path) -> Path:
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


def some_groups(seed: int) -> list[list[object]]:
    rng = random.Random(seed)
    groups = []
    for g in range(3):
        prompt = [rng.randrange(VOCAB) for _ in range(8)]
        rows = []
        for m in range(4):
            tokens = prompt + [rng.randrange(3) for _ in range(rng.randint(2, 9))]
            rows.append(row(tokens, range(8, len(tokens)), episode=10 * g + m))
        groups.append(rows)
    return groups


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama, sliding_mistral])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_entropy_are_those_of_single_rows(make, checkpointing: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    policy = PolicyModel(folder, checkpointing=checkpointing)
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    groups = some_groups(1)
    got, entropy = [], []
    for pack in packs(groups, 60):
        logprobs_K, entropy_K = policy.logprobs(pack, temperature=0.7)
        got.append(logprobs_K)
        entropy.append(entropy_K)
    expected, expected_entropy = [], []
    for r in (r for rows in groups for r in rows):
        logprobs = torch.log_softmax(oracle(torch.tensor([r.token_ids])).logits[0] / 0.7, -1)
        for place in r.place_S.tolist():
            expected.append(logprobs[place - 1, r.token_ids[place]])
            expected_entropy.append(-(logprobs[place - 1].exp() * logprobs[place - 1]).sum())
    torch.testing.assert_close(torch.cat(got), torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(entropy), torch.stack(expected_entropy), atol=1e-5, rtol=1e-5)
    torch.cat(got).sum().backward()
    torch.stack(expected).sum().backward()
    for (name, parameter), twin in zip(policy.module.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_bfloat16_passes_keep_float32_weights(qwen3_dir: Path) -> None:
    policy = PolicyModel(qwen3_dir, dtype=torch.bfloat16)
    exact = PolicyModel(qwen3_dir)
    (pack,) = packs(some_groups(0), 4096)
    rough, _ = policy.logprobs(pack, temperature=1.0)
    fine, _ = exact.logprobs(pack, temperature=1.0)
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, fine)
    torch.testing.assert_close(rough, fine, atol=0.3, rtol=0.1)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        PolicyModel(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError) as error:
        PolicyModel(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_lack_a_tensor_are_not_made_up(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, first 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        PolicyModel(folder)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="no_such_model"):
        PolicyModel(tmp_path)


def test_attention_that_trees_do_not_reproduce_is_refused(tmp_path: Path) -> None:
    """Gemma 2 squashes attention scores; ours does not, so its numbers would be wrong."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be computed over prefix trees"):
        PolicyModel(tmp_path)
