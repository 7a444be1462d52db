"""Open model families, tiny and with random weights, against transformers' eager attention over single rows.

Weights are large, so that attention is far from uniform: then a cap, a sink, a bias or a window that is not computed
shows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.rows import Row
from agentrl.learner.model.policy import PolicyModel

from .making import VOCAB
from .test_packing import row

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48, "head_dim": None}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4, **EXPERTS,
}  # fmt: skip

TREES = "trees"
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "apertus": ({}, TREES),
    "arcee": ({}, TREES),
    "bloom": (OLD, "its own"),
    "cohere": ({}, TREES),
    "cohere2": (LOCAL, TREES),
    "deepseek_v3": (LATENT, TREES),
    "doge": ({"num_experts": 4}, "sdpa"),
    "ernie4_5": ({}, TREES),
    "exaone4": (LOCAL, TREES),
    "falcon": ({**OLD, "alibi": True}, "its own"),
    "gemma": ({}, TREES),
    "gemma2": ({**LOCAL, "attn_logit_softcapping": 5.0}, "eager"),
    "gemma3_text": (LOCAL, TREES),
    "glm": ({}, TREES),
    "glm4": ({}, TREES),
    "glm4_moe": (LATENT, TREES),
    "gpt2": (OLD, TREES),
    "gpt_neox": ({}, TREES),
    "gpt_oss": ({**LOCAL, **EXPERTS}, TREES),
    "granite": ({"attention_multiplier": 0.3}, TREES),
    "helium": ({}, TREES),
    "hunyuan_v1_dense": ({}, TREES),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "sdpa"),
    "llama": ({"attention_bias": True, "mlp_bias": True}, TREES),
    "ministral": (LOCAL, TREES),
    "mistral": ({"sliding_window": 5}, TREES),
    "mixtral": (EXPERTS, TREES),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}, "its own"),
    "nanochat": ({}, TREES),
    "nemotron": ({}, "sdpa"),
    "olmo2": ({}, TREES),
    "olmo3": (LOCAL, TREES),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, TREES),
    "phi": ({}, TREES),
    "phi3": ({"sliding_window": 5}, TREES),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, TREES),
    "qwen2_moe": ({**EXPERTS, "shared_expert_intermediate_size": 16}, TREES),
    "qwen3": ({}, TREES),
    "qwen3_moe": (EXPERTS, TREES),
    "seed_oss": ({"attention_bias": True}, TREES),
    "smollm3": ({"no_rope_layers": [1, 0]}, TREES),
    "stablelm": ({}, "sdpa"),
    "starcoder2": ({"sliding_window": 5}, TREES),
    "vaultgemma": ({**LOCAL, "attn_logit_softcapping": 5.0}, "eager"),
}  # of each: its own settings, and how it is computed


def made(folder: Path, kind: str, **own: Any) -> Path:
    torch.manual_seed(3)
    given = {name: value for name, value in {**SIZES, **own}.items() if name != "head_dim" or value is not None}
    config = AutoConfig.for_model(kind, **given)
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if name.endswith((".bias", ".sinks")):  # some begin at 0
            torch.nn.init.normal_(parameter, std=0.3)
    module.save_pretrained(folder)
    return folder


def rows_of(*lengths: int) -> list[list[Row]]:
    """Two groups of rows that share eight tokens each; `lengths` are those of the first."""
    drawn = torch.Generator().manual_seed(5)
    groups = []
    for g, sizes in enumerate((lengths, (12, 18))):
        prompt = torch.randint(VOCAB, (8,), generator=drawn).tolist()
        rows = []
        for size in sizes:
            tokens = prompt + torch.randint(VOCAB, (size - 8,), generator=drawn).tolist()
            rows.append(row(tokens, range(8, size), episode=10 * g + len(rows)))
        groups.append(rows)
    return groups


def difference(folder: Path, policy: PolicyModel, *lengths: int) -> tuple[float, float]:
    """The largest of log-probs, and that of the gradient relative to its norm, to eager attention over single rows,
    each by a model that has seen no other."""
    groups = rows_of(*lengths)
    found = torch.cat(
        [policy.logprobs(pack, temperature=1.0)[0] for pack in packs(groups, 64, shared=not policy.obstacle)]
    )
    expected = []
    gradients: dict[str, torch.Tensor] = {}
    for one in (one for rows in groups for one in rows):
        oracle: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        logits = oracle(torch.tensor([one.token_ids]), use_cache=False).logits[0]
        place_S = one.place_S
        own = logits.log_softmax(-1)[place_S - 1, torch.tensor(one.token_ids)[place_S]]
        own.sum().backward()
        expected.append(own.detach())
        for name, parameter in oracle.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    found.sum().backward()
    whole = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
    own = {name: one.grad for name, one in policy.module.named_parameters() if one.grad is not None}
    assert own.keys() == gradients.keys()
    apart = torch.cat([own[name].flatten() for name in sorted(own)]) - whole
    return float((found.detach() - torch.cat(expected)).abs().max()), float(apart.norm() / whole.norm())


@pytest.mark.medium
@each_case("kind", list(FAMILIES))
def test_a_family_is_computed_as_its_eager_attention_does(kind: str, tmp_path: Path) -> None:
    own, computed = FAMILIES[kind]
    folder = made(tmp_path / "model", kind, **own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = PolicyModel(folder)
    by = policy.module.config._attn_implementation if policy.module._can_set_attn_implementation() else "its own"
    by = TREES if policy.obstacle is None else by
    assert by == computed, policy.obstacle
    logprobs, gradient = difference(folder, policy, 14, 20, 24)
    assert logprobs < 1e-4
    assert gradient < 1e-4


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rows_have_the_rotations_of_their_own_length(kind: str, tmp_path: Path) -> None:
    """The shortest is within the length of pretraining, 16, the others are not; a long one comes first."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0]} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, **factors}
    limit = {"max_position_embeddings": 64 if kind == "longrope" else 16, "original_max_position_embeddings": 16}
    folder = made(tmp_path / "model", "phi3" if kind == "longrope" else "llama", rope_parameters=rope, **limit)
    with pytest.warns(UserWarning, match=f"row by row.*rotations are of type '{kind}', which depends on the length"):
        policy = PolicyModel(folder)
    logprobs, gradient = difference(folder, policy, 40, 14, 24)
    assert logprobs < 1e-4
    assert gradient < 1e-4
    alone = policy.score(tuple(range(12)))
    policy.score(tuple(i % VOCAB for i in range(60)))
    assert policy.score(tuple(range(12))) == alone
