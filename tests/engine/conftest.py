"""Tiny random models, made in a second, and an embedded engine process shared by the tests that talk HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # peaked distributions: mistakes show
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_model(folder: Path, family: str = "qwen3", seed: int = 0, **overrides: object) -> Path:
    """Write a small random model of a family, with norms and biases that are not trivial."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = kinds[family]
    extra = {} if family == "qwen2" else {"head_dim": 32}
    torch.manual_seed(seed)
    model = model_class(config_class(**{**COMMON, **extra, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of the same shape with other weights."""
    return make_model(tmp_path_factory.mktemp("models") / "other", seed=1, tie_word_embeddings=True)


class Server:
    """An embedded engine process."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        ready = folder / f"ready-{time.monotonic_ns()}.json"
        argv = [
            sys.executable,
            "-m",
            "agentrl.engine.embedded",
            "--no-key",
            "--model",
            str(model),
            "--ready-file",
            str(ready),
        ]
        argv += ["--lifeline", "--kv-cache-mb", "16", *options]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        deadline = time.monotonic() + 300
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.02)
        self.url: str = json.loads(ready.read_text())["url"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_dir, tmp_path_factory.mktemp("server"), "--stream-tokens", "4", "--max-batch", "8")
    yield running
    running.close()
