"""Models that ship with the package: small enough to train on a laptop, real enough to be served by vLLM."""

from __future__ import annotations

from pathlib import Path


def tiny_coder() -> Path:
    """The folder of the tiny coder: a Qwen3 of about a million parameters with its own tokenizer, warm-started on the
    repairs of an expert that is mostly wrong (`examples/make_tiny_coder.py`)."""
    return Path(__file__).parent / "tiny_coder"


def tiny_locksmith() -> Path:
    """The folder of the tiny locksmith: a Qwen3 of less than two hundred thousand parameters that knows the format of
    `agentrl/Combination-v0`, and half of its sums (`examples/make_tiny_locksmith.py`)."""
    return Path(__file__).parent / "tiny_locksmith"
