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
        file_bytes = file.read_bytes()
        (header_size,) = struct.unpack("<Q", file_bytes[:8])
        tensor_entries: dict[str, Any] = json.loads(file_bytes[8 : 8 + header_size])
        self._matrices: dict[str, Matrix] = {}
        for tensor_name, tensor_entry in tensor_entries.items():
            if tensor_name == "__metadata__":
                continue
            data_begin, data_end = (8 + header_size + data_offset for data_offset in tensor_entry["data_offsets"])
            tensor_values = array("f", file_bytes[data_begin:data_end])
            row_width = tensor_entry["shape"][-1]
            self._matrices[tensor_name] = [
                tensor_values[row_start : row_start + row_width]
                for row_start in range(0, len(tensor_values), row_width)
            ]

    def _linear(self, name: str, vector: Vector) -> list[float]:
        return [math.fsum(map(mul, matrix_row, vector)) for matrix_row in self._matrices[f"{_LAYER}.{name}.weight"]]

    def _norm(self, name: str, vector: Vector) -> list[float]:
        (norm_weights,) = self._matrices[name]
        inverse_rms = 1 / math.sqrt(math.fsum(map(mul, vector, vector)) / len(vector) + _EPSILON)
        return [
            component * inverse_rms * norm_weight for component, norm_weight in zip(vector, norm_weights, strict=True)
        ]

    def _heads(self, name: str, vector: Vector, place: int) -> list[list[float]]:
        """Queries or keys of a token: projected, normalised by head, rotated by place."""
        (norm_weights,) = self._matrices[f"{_LAYER}.self_attn.{name}_norm.weight"]
        head_size = len(norm_weights)
        projected = self._linear(f"self_attn.{name}_proj", vector)
        head_vectors = [
            projected[head_start : head_start + head_size] for head_start in range(0, len(projected), head_size)
        ]
        return [
            _rotated(self._norm(f"{_LAYER}.self_attn.{name}_norm.weight", head_vector), place)
            for head_vector in head_vectors
        ]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """In nats, of `tokens[1:]`."""
        embedding = self._matrices["model.embed_tokens.weight"]
        attention_keys: list[list[float]] = []
        attention_values: list[list[float]] = []
        token_logprobs: list[float] = []
        for position, token_id in enumerate(tokens[:-1]):
            hidden_state = list(embedding[token_id])
            normed_state = self._norm(f"{_LAYER}.input_layernorm.weight", hidden_state)
            attention_keys.append(self._heads("k", normed_state, position)[0])
            attention_values.append(self._linear("self_attn.v_proj", normed_state))
            attention_output: list[float] = []
            for query_vector in self._heads("q", normed_state, position):
                attention_output += _attended(query_vector, attention_keys, attention_values)
            hidden_state = _sum(hidden_state, self._linear("self_attn.o_proj", attention_output))
            normed_state = self._norm(f"{_LAYER}.post_attention_layernorm.weight", hidden_state)
            gate_values, up_values = (
                self._linear("mlp.gate_proj", normed_state),
                self._linear("mlp.up_proj", normed_state),
            )
            mlp_activations = [
                gate_value / (1 + math.exp(-gate_value)) * up_value
                for gate_value, up_value in zip(gate_values, up_values, strict=True)
            ]
            hidden_state = self._norm(
                "model.norm.weight", _sum(hidden_state, self._linear("mlp.down_proj", mlp_activations))
            )
            token_logits = [math.fsum(map(mul, token_embedding, hidden_state)) for token_embedding in embedding]
            largest_logit = max(token_logits)
            token_logprobs.append(
                token_logits[tokens[position + 1]]
                - largest_logit
                - math.log(sum(math.exp(token_logit - largest_logit) for token_logit in token_logits))
            )
        return token_logprobs


def _sum(first: Vector, second: Vector) -> list[float]:
    return [first_component + second_component for first_component, second_component in zip(first, second, strict=True)]


def _rotated(head: Vector, place: int) -> list[float]:
    """Rotary position embedding, halves against each other."""
    half_size = len(head) // 2
    rotation_angles = [place * _THETA ** (-frequency_index / half_size) for frequency_index in range(half_size)]
    first_half = [
        head[i] * math.cos(rotation_angles[i]) - head[i + half_size] * math.sin(rotation_angles[i])
        for i in range(half_size)
    ]
    second_half = [
        head[i + half_size] * math.cos(rotation_angles[i]) + head[i] * math.sin(rotation_angles[i])
        for i in range(half_size)
    ]
    return first_half + second_half


def _attended(query: Vector, keys: Matrix, values: Matrix) -> list[float]:
    """One head's mixture of the values up to the query's token."""
    attention_scores = [math.fsum(map(mul, query, key_vector)) / math.sqrt(len(query)) for key_vector in keys]
    largest_score = max(attention_scores)
    softmax_weights = [math.exp(attention_score - largest_score) for attention_score in attention_scores]
    total_weight = sum(softmax_weights)
    return [
        math.fsum(
            softmax_weight * value_vector[component]
            for softmax_weight, value_vector in zip(softmax_weights, values, strict=True)
        )
        / total_weight
        for component in range(len(values[0]))
    ]
