"""The model over trees against transformers' own attention over single rows; and folders that cannot be used."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from agentrl.errors import ModelError
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.model import attention
from agentrl.learner.model import policy as model
from agentrl.learner.model.policy import PolicyModel
from tests.closeness import assert_gradients_alike

from .making import VOCAB, tiny_llama, tiny_qwen3
from .test_packing import row

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
}


def sliding_mistral(folder: Path, window: int = 6) -> Path:
    torch.manual_seed(2)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).save_pretrained(folder)
    return folder


def mixed_gemma(folder: Path) -> Path:
    """Layers with a window beside layers without."""
    torch.manual_seed(5)
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, layer_types=types)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def chunked_llama(folder: Path, chunk: int = 10) -> Path:
    torch.manual_seed(6)
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48}
    Llama4ForCausalLM(Llama4TextConfig(**SIZES, **experts, head_dim=8, attention_chunk_size=chunk)).save_pretrained(
        folder
    )
    return folder


def capped_gemma(folder: Path, softcap: float = 0.5) -> Path:
    """Gemma 2 squashes attention scores; a tree's attention does not."""
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=softcap)).save_pretrained(folder)
    return folder


def recurrent_qwen(folder: Path) -> Path:
    """Layers of a gated delta rule beside one of attention."""
    torch.manual_seed(8)
    config = Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder


def gpt_oss(folder: Path) -> Path:
    """Attention sinks, in layers with a window and without."""
    torch.manual_seed(9)
    config = GptOssConfig(
        **SIZES,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    module = GptOssForCausalLM(config)
    for layer in module.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    module.save_pretrained(folder)
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


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*is computed row by row")
@each_case(
    ("make", "checkpointing"),
    [
        *((make, False) for make in (tiny_qwen3, tiny_llama, sliding_mistral, mixed_gemma, gpt_oss, recurrent_qwen)),
        *((make, True) for make in (tiny_qwen3, recurrent_qwen)),
    ],
)
def test_logprobs_and_entropy_are_those_of_single_rows(make, checkpointing: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    policy = PolicyModel(folder, checkpointing=checkpointing)
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    groups = some_groups(1)
    got, entropy = [], []
    for pack in packs(groups, 60, shared=not policy.obstacle):
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
    assert_gradients_alike(gradients(policy.module), gradients(oracle))


def gradients(module: Any) -> dict[int, torch.Tensor]:
    return {at: one.grad for at, one in enumerate(module.parameters()) if one.grad is not None}


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


def test_attention_sinks_are_computed_over_trees(tmp_path: Path) -> None:
    assert PolicyModel(gpt_oss(tmp_path / "model")).obstacle is None


@each_case(
    ("make", "why"),
    [
        (lambda folder: capped_gemma(folder, 0.5), "its attention takes 'softcap'"),
        (lambda folder: capped_gemma(folder, 50.0), "its attention takes 'softcap'"),
        (lambda folder: chunked_llama(folder, 10), "layer 0 is of type 'chunked_attention', we compute full_attention"),
        (lambda folder: chunked_llama(folder, 8192), "layer 0 is of type 'chunked_attention', we compute full_attent"),
        (recurrent_qwen, "layer 0 is of type 'linear_attention', we compute full_attention, sliding_attention"),
    ],
)
def test_a_model_that_trees_do_not_reproduce_says_so_and_that_shared_tokens_cost_more(
    make: Any, why: str, tmp_path: Path
) -> None:
    """However long a chunk is, and however little a cap changes."""
    folder = make(tmp_path / "model")
    with pytest.warns(UserWarning, match=rf"row by row, not over prefix trees \({why}.*once per row"):
        policy = PolicyModel(folder)
    assert policy.obstacle is not None


def test_a_model_by_rows_gives_the_log_probs_and_gradients_that_it_gives_by_trees(qwen3_dir: Path) -> None:
    trees, rows = PolicyModel(qwen3_dir), PolicyModel(qwen3_dir)
    rows.obstacle = "as if it had one"
    rows.module.set_attn_implementation("sdpa")
    groups = some_groups(4)
    laid = [packs(groups, 60), packs(groups, 60, shared=False)]
    assert sum(len(pack.token_ids_N) for pack in laid[1]) == sum(pack.row_tokens for pack in laid[1])
    assert all(len(pack.token_ids_N) <= 60 for pack in laid[1])

    def by_token(policy: PolicyModel, made: list[Any]) -> dict[tuple[Any, ...], float]:
        found = {}
        for pack in made:
            logprobs_K, _ = policy.logprobs(pack, temperature=0.7)
            (logprobs_K * pack.columns["behaviour"]).sum().backward()
            names = zip(pack.columns["behaviour"].tolist(), pack.target_K.tolist(), strict=True)
            for name, value in zip(names, logprobs_K.tolist(), strict=True):
                found.setdefault(name, []).append(value)
        return {name: sorted(values) for name, values in found.items()}

    one, other = by_token(trees, laid[0]), by_token(rows, laid[1])
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values == pytest.approx(other[name], abs=5e-5)
    assert_gradients_alike(gradients(trees.module), gradients(rows.module))
    assert trees.score((3, 8, 2, 9, 4)) == pytest.approx(rows.score((3, 8, 2, 9, 4)), abs=5e-5)


def test_a_layer_type_that_nobody_here_knows_is_computed_by_rows(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its numbers happen to be those of full attention over the few tokens of the check."""
    load = model.load

    def loaded(*given: Any) -> Any:
        module = load(*given)
        module.config.layer_types = ["full_attention", "full_attention", "a_kind_of_next_year"]
        return module

    monkeypatch.setattr(model, "load", loaded)
    with pytest.warns(UserWarning, match="layer 2 is of type 'a_kind_of_next_year'"):
        PolicyModel(qwen3_dir)


@pytest.mark.parametrize("window", [6, 4096])
def test_a_window_that_is_one_token_too_wide_is_noticed_however_long_it_is(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sliding_mistral(tmp_path, window)
    sound = PolicyModel(folder)
    assert (sound.obstacle, sound.module.config.sliding_window) == (None, window)
    exact = attention._mask  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(attention, "_mask", lambda window, like, *size: exact(window and window + 1, like, *size))
    with pytest.warns(UserWarning, match="logits differ from those of single rows"):
        PolicyModel(folder)


def test_a_mask_of_the_models_own_is_refused(qwen3_dir: Path) -> None:
    policy = PolicyModel(qwen3_dir)
    attend = attention.tree_attention
    query = torch.zeros(1, 4, 3, 8)
    layout = attention.Paths([model.Branch(0, 3, torch.arange(3))])
    attend(policy.module, query, query, query, None, layout=layout)
    with pytest.raises(ValueError, match="a mask of its own"):
        attend(policy.module, query, query, query, torch.zeros(1, 1, 3, 3), layout=layout)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
        (Phi3ForCausalLM, Phi3Config(**{**SIZES, "pad_token_id": 0}, sliding_window=4096)),
    ],
)
def test_other_plain_models_pass(architecture: Any, config: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    architecture(config).save_pretrained(tmp_path)
    PolicyModel(tmp_path)


def test_a_score_can_be_that_of_rounded_weights_and_leaves_them_as_they_were(qwen3_dir: Path) -> None:
    policy, rounded, tokens = PolicyModel(qwen3_dir), PolicyModel(qwen3_dir), (3, 8, 2, 9, 4, 7, 1, 5)
    with torch.no_grad():
        for parameter in rounded.module.parameters():
            parameter.copy_(parameter.bfloat16())
    before = [parameter.clone() for parameter in policy.module.parameters()]
    found = policy.score(tokens, torch.bfloat16)
    assert found == pytest.approx(rounded.score(tokens), abs=1e-6)
    assert found != pytest.approx(policy.score(tokens), abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))


def test_a_head_of_its_own_in_a_file_that_the_config_ties_is_named(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path, tie=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    PolicyModel(folder)
    save_file({**tensors, "lm_head.weight": embedding + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"ties 'lm_head\.weight' to .*has another 'lm_head\.weight'.*tie_word_embeddings"
    ):
        PolicyModel(folder)


@pytest.mark.parametrize("needed", [True, False])
def test_a_tokenizer_larger_than_the_embedding_is_named(needed: bool, tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path)
    added = [{"id": VOCAB, "content": "<|turn|>"}, {"id": VOCAB + 1, "content": "<|other|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|turn|>" if needed else "a"}))
    said = rf"2 tokens beyond the model's {VOCAB}, such as '<\|turn\|>' \({VOCAB}\)"
    if needed:
        with pytest.raises(ModelError, match=f"{said}, which its conversations need"):
            PolicyModel(folder)
    else:
        with pytest.warns(UserWarning, match=f"{said}: a prompt that holds one"):
            PolicyModel(folder)
