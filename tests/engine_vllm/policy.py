"""The learner's side in the tests: a tiny model, its versions, and what transformers says of their log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.learner.weight_export import WeightFile, export_weights
from agentrl.records import Generation

VOCAB = 128


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def make_model(folder: Path, *, experts: int = 0, seed: int = 0, **overrides: object) -> Path:
    """Write a small random Qwen3, tied, with peaked distributions, and a tokenizer for it."""
    torch.manual_seed(seed)
    common = {**SIZES, "initializer_range": 0.3, "tie_word_embeddings": True, **overrides}
    if experts:
        mixture = {"moe_intermediate_size": 32, "num_experts": experts, "num_experts_per_tok": 2}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **mixture, norm_topk_prob=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    return with_tokenizer(model, folder)


def make_reward_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a small random Qwen3 that gives one number instead of a next token, with the same tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES, num_labels=1, initializer_range=0.3)
    return with_tokenizer(Qwen3ForSequenceClassification(config), folder)


def with_tokenizer(model: Any, folder: Path) -> Path:
    """Save a model with a tokenizer of one token a character: the printable ones have their ASCII number."""
    model.save_pretrained(folder)
    vocab = {text_of([id]): id for id in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def text_of(ids: Iterable[int]) -> str:
    """What that tokenizer reads."""
    return "".join(chr(id) if 32 <= id < 127 else f"t{id}" for id in ids)


class Policy:
    """Version 1 is the folder's weights; `update` makes the next one and keeps all for `logprobs`. `dtype` has all
    their values."""

    def __init__(self, folder: Path, scratch: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.scratch, self.dtype = folder, scratch, dtype
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.states: dict[int, dict[str, torch.Tensor]] = {1: self._state()}
        self.files: dict[int, WeightFile] = {}

    @property
    def version(self) -> int:
        return max(self.states)

    def update(self, scale: float = 0.05) -> tuple[int, WeightFile]:
        """New weights in every tensor, written where an engine can load them."""
        version = self.version + 1
        generator = torch.Generator().manual_seed(version)
        self.model.load_state_dict(self.states[max(self.files, default=1)])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
                parameter.copy_(parameter.to(self.dtype))
        self.states[version] = self._state()
        path = self.scratch / f"{version}.safetensors"
        self.files[version] = export_weights(self.model, path, dtype=self.dtype)
        return version, self.files[version]

    def adapter(self, rank: int = 8, alpha: float = 16.0, scale: float = 0.1) -> tuple[int, Path]:
        """A new version that is a LoRA adapter over the newest full weights, in PEFT's format."""
        base, version = self.states[max(self.files, default=1)], self.version + 1
        generator = torch.Generator().manual_seed(version)
        tensors: dict[str, torch.Tensor] = {}
        merged = dict(base)
        for name, weight in base.items():
            if not name.endswith("_proj.weight"):
                continue
            module = name.removesuffix(".weight")
            down = torch.randn(rank, weight.shape[1], generator=generator) * scale
            up = torch.randn(weight.shape[0], rank, generator=generator) * scale
            tensors |= {
                f"base_model.model.{module}.lora_A.weight": down,
                f"base_model.model.{module}.lora_B.weight": up,
            }
            merged[name] = weight + (alpha / rank) * up @ down
        folder = self.scratch / f"adapter-{version}"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear", "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        self.states[version] = merged
        return version, folder

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], version: int) -> list[float]:
        """Of `tokens` after `prompt`, under one version's weights, at temperature 1."""
        self.model.load_state_dict(self.states[version])
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return found.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()

    def error(self, prompt: Sequence[int], generation: Generation) -> float:
        """The largest |Δ| of a generation's log-probs against those of each token's own version."""
        worst = 0.0
        for version in {span.version for span in generation.spans}:
            reference = self.logprobs(prompt, generation.token_ids, version)
            for span in generation.spans:
                if span.version == version:
                    for at in range(span.start, span.end):
                        worst = max(worst, abs(reference[at] - generation.logprobs[at]))
        return worst

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
