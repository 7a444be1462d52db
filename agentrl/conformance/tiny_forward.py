"""The tiny model's log-probs, in plain Python: an engine that can say with which weights it samples. Standard library
only, and slow: a hundred tokens take half a second."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Any, Final

Vector = Sequence[float]
Matrix = Sequence[Vector]

_EPSILON: Final = 1e-6
_THETA: Final = 10000.0
_LAYER: Final = "model.layers.0"


class TinyModel:
    """The weights of a safetensors file with the tensors of `tiny_model.write_model`."""

    def __init__(self, file: Path) -> None:
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        self._matrices: dict[str, Matrix] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            values = array("f", data[begin:end])
            width = entry["shape"][-1]
            self._matrices[name] = [values[start : start + width] for start in range(0, len(values), width)]

    def _linear(self, name: str, vector: Vector) -> list[float]:
        return [math.fsum(map(mul, row, vector)) for row in self._matrices[f"{_LAYER}.{name}.weight"]]

    def _norm(self, name: str, vector: Vector) -> list[float]:
        (weights,) = self._matrices[name]
        scale = 1 / math.sqrt(math.fsum(map(mul, vector, vector)) / len(vector) + _EPSILON)
        return [value * scale * weight for value, weight in zip(vector, weights, strict=True)]

    def _heads(self, name: str, vector: Vector, place: int) -> list[list[float]]:
        """Queries or keys of a token: projected, normalised by head, rotated by place."""
        (norm,) = self._matrices[f"{_LAYER}.self_attn.{name}_norm.weight"]
        size = len(norm)
        flat = self._linear(f"self_attn.{name}_proj", vector)
        heads = [flat[start : start + size] for start in range(0, len(flat), size)]
        return [_rotated(self._norm(f"{_LAYER}.self_attn.{name}_norm.weight", head), place) for head in heads]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """In nats, of `tokens[1:]`."""
        embedding = self._matrices["model.embed_tokens.weight"]
        keys: list[list[float]] = []
        values: list[list[float]] = []
        answers: list[float] = []
        for place, token in enumerate(tokens[:-1]):
            hidden = list(embedding[token])
            normed = self._norm(f"{_LAYER}.input_layernorm.weight", hidden)
            keys.append(self._heads("k", normed, place)[0])
            values.append(self._linear("self_attn.v_proj", normed))
            mixed: list[float] = []
            for query in self._heads("q", normed, place):
                mixed += _attended(query, keys, values)
            hidden = _sum(hidden, self._linear("self_attn.o_proj", mixed))
            normed = self._norm(f"{_LAYER}.post_attention_layernorm.weight", hidden)
            gates, ups = self._linear("mlp.gate_proj", normed), self._linear("mlp.up_proj", normed)
            inner = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]
            hidden = self._norm("model.norm.weight", _sum(hidden, self._linear("mlp.down_proj", inner)))
            logits = [math.fsum(map(mul, row, hidden)) for row in embedding]
            top = max(logits)
            answers.append(logits[tokens[place + 1]] - top - math.log(sum(math.exp(logit - top) for logit in logits)))
        return answers


def _sum(first: Vector, second: Vector) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _rotated(head: Vector, place: int) -> list[float]:
    """Rotary position embedding, halves against each other."""
    half = len(head) // 2
    angles = [place * _THETA ** (-number / half) for number in range(half)]
    first = [head[i] * math.cos(angles[i]) - head[i + half] * math.sin(angles[i]) for i in range(half)]
    second = [head[i + half] * math.cos(angles[i]) + head[i] * math.sin(angles[i]) for i in range(half)]
    return first + second


def _attended(query: Vector, keys: Matrix, values: Matrix) -> list[float]:
    """One head's mixture of the values up to the query's token."""
    scores = [math.fsum(map(mul, query, key)) / math.sqrt(len(query)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [
        math.fsum(weight * value[place] for weight, value in zip(weights, values, strict=True)) / total
        for place in range(len(values[0]))
    ]
