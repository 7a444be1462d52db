"""The embedded engine's forward pass against transformers', over families and ways of feeding tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from each_case import each_case

from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, PassRows, read_weights
from agentrl.errors import ModelError

from .conftest import VOCAB, make_model
from .oracle import reference_logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "llama with biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "no grouping": ("qwen3", {"num_key_value_heads": 4}),
}


def load(folder: Path, slots: int = 3, length: int = 200) -> tuple[EmbeddedModel, KVStore]:
    architecture = read_architecture(folder)
    return EmbeddedModel(architecture, read_weights(folder), length=length), KVStore(architecture, slots, length)


@each_case("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_model(tmp_path / "model", family, **overrides)
    model, kv = load(folder)
    tokens = torch.randint(VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = reference_logits(folder, tokens)
    whole = model.forward(PassRows.of_run(tokens, 0, 1), kv)
    torch.testing.assert_close(whole, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-5)


def test_chunks_and_single_rows_continue_what_is_cached(model_dir: Path) -> None:
    model, kv = load(model_dir)
    generator = torch.Generator().manual_seed(4)
    contexts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (40, 60)]
    for slot, tokens in zip((0, 2), contexts, strict=True):
        model.forward(PassRows.of_run(tokens[:25], 0, slot), kv)
        model.forward(PassRows.of_run(tokens[25:-1], 25, slot), kv)
    rows = PassRows(
        tokens_N=torch.tensor([contexts[0][-1], contexts[1][-1]]),
        positions_N=torch.tensor([39, 59]),
        single_slots_N=torch.tensor([0, 2]),
        lengths_S=torch.tensor([40, 1, 60]),
        longest=60,
        shortest=40,
        runs=(),
        logit_rows_N=torch.arange(2),
    )
    logits = model.forward(rows, kv)
    for row, tokens in zip(logits, contexts, strict=True):
        torch.testing.assert_close(row, reference_logits(model_dir, tokens)[-1], atol=1e-4, rtol=1e-5)


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@each_case(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe"}, 'engine.kind = "vllm"'),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_an_architecture_it_lacks_is_refused_in_one_line(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = edit_config(make_model(tmp_path / "model"), **changes)
    with pytest.raises(ModelError, match=words) as caught:
        read_architecture(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(model_dir: Path) -> None:
    model, kv = load(model_dir)
    tokens = [5, 6, 7]
    before = model.forward(PassRows.of_run(tokens, 0, 0), kv)
    good = read_weights(model_dir)
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "missing": {key: value for key, value in good.items() if key != name},
        "shape": good | {name: good[name][:1]},
        "unknown weight": good | {"model.layers.9.mlp.up_proj.weight": good[name]},
        "not finite": good | {name: good[name] * float("nan")},
    }
    for words, weights in wrong.items():
        with pytest.raises(ModelError, match=words):
            model.load(weights)
    torch.testing.assert_close(model.forward(PassRows.of_run(tokens, 0, 0), kv), before, rtol=0, atol=0)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_architecture(tmp_path)
    with pytest.raises(ModelError, match="cannot read weights"):
        read_weights(tmp_path)
