"""Model folders that differ by one thing each, and a proxy that alters one thing of each request: a server is wrong
where it serves another folder than the one it is compared with, or where something stands in its way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.http_client import TrioTransport
from agentrl.http.http_server import Answer

VOCAB = 160
SPECIAL = {"<bos>": 128, "<eos>": 129, "<tool>": 130}
LAYERS = 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Folders:
    """`exact` is a model, `rounded` the same with its matrices rounded to 8 bits, in float32. The others are made of
    `rounded`, and each differs from it in one thing."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name


def make_folders(root: Path) -> Folders:
    exact = _make_model(root / "exact", 0)
    weights, others = (
        load_file(exact / "model.safetensors"),
        load_file(_make_model(root / "other", 1) / "model.safetensors"),
    )
    rounded = {name: _to_8_bits(tensor) if "proj" in name else tensor for name, tensor in weights.items()}
    _copy(exact, root / "rounded", rounded)

    def mixed(name: str, stale: Weights, parts: tuple[str, ...]) -> None:
        """Folders of an update from `old_` to `new_` that missed these parts on its way to a server: that has the
        parts of the old one, and all else of the new one."""
        for prefix, has_parts in (("old", True), ("new", False)):
            weights = {n: rounded[n] if n.startswith(parts) == has_parts else stale[n] for n in rounded}
            _copy(exact, root / f"{prefix}_{name}", weights)

    mixed("layer", others, ("model.layers.2.",))
    mixed("end", others, ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head"))
    torch.manual_seed(9)
    step = {name: tensor + 8e-3 * torch.randn(tensor.shape) for name, tensor in rounded.items()}
    mixed("step", step, ("model.layers.0.", "model.layers.3."))
    norms = {n: t + 1e-3 * torch.randn(t.shape) if "norm" in n else t for n, t in rounded.items()}
    mixed("norms", norms, ("model.layers.0.", "model.layers.3."))
    changed = rounded["model.embed_tokens.weight"].clone()
    changed[SPECIAL["<tool>"]] += 0.5
    _copy(exact, root / "new_special", {**rounded, "model.embed_tokens.weight": changed})
    _copy(exact, root / "other_template", rounded)
    (root / "other_template" / "chat_template.jinja").write_text(TEMPLATE.replace(": ", ">"))
    _copy(exact, root / "no_bos_template", rounded)
    (root / "no_bos_template" / "chat_template.jinja").write_text(TEMPLATE.replace("{{ bos_token }}", ""))
    _copy(exact, root / "windowed", rounded)
    config = json.loads((root / "windowed" / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 400, "layer_types": ["sliding_attention"] * LAYERS}
    (root / "windowed" / "config.json").write_text(json.dumps(config))
    for seed, name in enumerate(("adapter", "other_adapter")):
        _make_adapter(root / name, rounded, seed)
    _make_adapter(root / "young_adapter", rounded, 5, scale=0.01)
    _make_adapter(root / "unmoved_adapter", rounded, 5, scale=0.0001)
    return Folders(root)


def _to_8_bits(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max(dim=1, keepdim=True).values / 127
    return torch.round(weight / scale) * scale


def _make_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=128,
            max_position_embeddings=2048,
            initializer_range=0.15,
            tie_word_embeddings=False,
            bos_token_id=SPECIAL["<bos>"],
            eos_token_id=SPECIAL["<eos>"],
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder)
    vocab = {chr(id) if 32 <= id < 127 else f"t{id}": id for id in range(VOCAB) if id not in SPECIAL.values()}
    words = Tokenizer(models.WordLevel({**vocab, **SPECIAL}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens(list(SPECIAL))
    words.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", SPECIAL["<bos>"])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _copy(source: Path, target: Path, weights: Weights) -> Path:
    shutil.copytree(source, target)
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _make_adapter(folder: Path, weights: Weights, seed: int, *, rank: int = 8, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors: Weights = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * scale
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * scale
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


Alter = Callable[[str, dict[str, Any]], dict[str, Any] | None]


class Proxy:
    """Between a client and the server at `target`. `alter` gets each request's path and body, and returns the body that
    goes on; None for a path that this server is to lack. Serve it with `tests.parts.served_vllm.in_thread`."""

    def __init__(self, target: str, alter: Alter = lambda path, body: body) -> None:
        self.url, self._target, self._alter = "", target, alter
        self._client: httpx.AsyncClient | None = None

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        self._client = self._client or httpx.AsyncClient(base_url=self._target, transport=TrioTransport())
        body = self._alter(path, json.loads(content) if content else {})
        if body is None:
            return 404, b'{"detail": "Not Found"}'
        answer = await self._client.request(method, path, json=body if content else None, timeout=60)
        return answer.status_code, answer.content


class EchoServer(Proxy):
    """A server that has OpenAI's completions alone, over an embedded engine: prompts are echoed, tokens are texts."""

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        body = json.loads(content) if content else {}
        if path == "/v1/completions":
            if unknown := {"top_k", "prompt_logprobs", "return_token_ids"} & body.keys():
                return 400, json.dumps({"error": {"message": f"unknown argument {min(unknown)}"}}).encode()
            params = {"max_tokens": body["max_tokens"], "temperature": body["temperature"], "prompt_logprobs": 0}
            passed = {"token_ids": body["prompt"], "sampling_params": params}
            status, answer = await super().answer(
                method, "/inference/v1/generate", query, headers, json.dumps(passed).encode()
            )
            assert isinstance(answer, bytes)
            if status != 200:
                return status, answer
            document = json.loads(answer)
            entries = document["prompt_logprobs"][1:]
            numbers = [None, *(next(iter(entry.values()))["logprob"] for entry in entries)] if body.get("echo") else []
            numbers += [entry["logprob"] for entry in document["choices"][0]["logprobs"]["content"]]
            logprobs = {"tokens": ["x"] * len(numbers), "token_logprobs": numbers}
            return 200, json.dumps({"choices": [{"text": "", "logprobs": logprobs}]}).encode()
        if path.startswith("/v1/"):
            return await super().answer(method, path, query, headers, content)
        return 404, b'{"detail": "Not Found"}'
