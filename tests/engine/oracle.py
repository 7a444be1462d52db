"""The second implementation: transformers' own forward pass over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@cache
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[T, vocab]"""
    with torch.no_grad():
        return reference(folder)(torch.tensor([list(tokens)])).logits[0]


def reference_logprobs(folder: Path, tokens: Sequence[int], prompt: int, temperature: float = 1.0) -> list[float]:
    """Log-probs of tokens[prompt:] given what stands before each."""
    logprobs = (reference_logits(folder, tokens) / temperature).log_softmax(-1)
    return [float(logprobs[at - 1, tokens[at]]) for at in range(prompt, len(tokens))]
