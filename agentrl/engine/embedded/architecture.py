"""Reads a model folder's `config.json`: the architecture, and the names and shapes of its weights.

Owns which architectures the embedded engine serves. Needs no torch, so that a model it lacks is refused at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from agentrl.errors import ModelError
from agentrl.host.cores import multiplies_bfloat16
from agentrl.tokens.vision import FAMILIES, Vision, read_vision

_FAMILIES = {  # (q/k norm, q/k/v bias)
    "qwen3": (True, False),
    "qwen2": (False, True),
    "llama": (False, False),
    # The language part of Qwen's vision models is a Qwen2, whatever its `model_type` says.
    **dict.fromkeys(FAMILIES, (False, True)),
}
LARGE: Final = 20_000_000
"""Parameters from which a second thread is worth its waits, and bfloat16 its rounding."""
_ROPES = ("default", "linear", "llama3", "mrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    eps: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    inverse_frequencies: tuple[float, ...]  # of the rotary embedding, [head_dim / 2]
    eos_token_ids: tuple[int, ...]
    vision: Vision | None = None  # how it reads images; None: it reads none
    sections: tuple[int, ...] = ()  # of these frequencies, those that turn by a token's time, row, and column

    @property
    def parameters(self) -> int:
        """How many numbers its weights have."""
        return sum(map(math.prod, self.shapes().values()))

    @property
    def fastest_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype in which this machine computes it fastest: float32 where bfloat16 would gain nothing."""
        return "bfloat16" if self.parameters >= LARGE and multiplies_bfloat16() else "float32"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight, under the names that transformers gives them."""
        query_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer_number in range(self.layers):
            prefix = f"model.layers.{layer_number}."
            shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (
                self.hidden,
            )
            linears = {
                "self_attn.q_proj": (query_width, self.hidden, self.qkv_bias),
                "self_attn.k_proj": (kv_width, self.hidden, self.qkv_bias),
                "self_attn.v_proj": (kv_width, self.hidden, self.qkv_bias),
                "self_attn.o_proj": (self.hidden, query_width, self.o_bias),
                "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
                "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
                "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
            }
            for linear_name, (row_count, column_count, has_bias) in linears.items():
                shapes[f"{prefix}{linear_name}.weight"] = (row_count, column_count)
                if has_bias:
                    shapes[f"{prefix}{linear_name}.bias"] = (row_count,)
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = (
                    self.head_dim,
                )
        return shapes


def read_architecture(folder: Path) -> Architecture:
    """Read `config.json`. Raises ModelError for a missing file or an architecture the embedded engine lacks."""
    config_path = folder / "config.json"
    try:
        config = cast("dict[str, Any]", json.loads(config_path.read_text()))
    except OSError as error:
        raise ModelError(f"cannot read {str(config_path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{config_path} is not valid JSON: {error}") from error
    model_type, vision = config.get("model_type"), None
    if model_type in FAMILIES:
        vision, config = read_vision(folder), {**config, **config.get("text_config", {})}
    if model_type not in _FAMILIES:
        raise ModelError(
            f"{config_path}: the embedded engine serves {', '.join(_FAMILIES)} models, not {model_type!r}; "
            'set engine.kind = "vllm" for this one'
        )
    # Qwen2 writes a window into every config.json, and `use_sliding_window` says whether it counts. Serving such a
    # model with full attention would answer plausibly with other log-probabilities than the learner's.
    if config.get("use_sliding_window"):
        raise ModelError(
            f'{config_path}: use_sliding_window = true is not served by the embedded engine; set engine.kind = "vllm"'
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{config_path}: hidden_act = {config['hidden_act']!r}; the embedded engine serves 'silu' only"
        )
    qk_norm, qkv_bias = _FAMILIES[model_type]
    attention_bias = _flag(config_path, config, "attention_bias")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        eos: Any = config.get("eos_token_id")
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=head_dim,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            max_positions=config.get("max_position_embeddings", 2048),
            eps=config.get("rms_norm_eps", 1e-6),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias or attention_bias,
            # transformers gives Qwen2 biases for q, k and v alone, whatever the config says; Llama's `attention_bias`
            # means all four.
            o_bias=attention_bias and model_type != "qwen2",
            mlp_bias=_flag(config_path, config, "mlp_bias"),
            tied=_flag(config_path, config, "tie_word_embeddings"),
            inverse_frequencies=_inverse_frequencies(config_path, config, head_dim),
            eos_token_ids=tuple(cast("list[int]", eos)) if isinstance(eos, list) else () if eos is None else (eos,),
            vision=vision,
            sections=tuple(_rope(config)["mrope_section"]) if vision else (),
        )
    except KeyError as error:
        raise ModelError(f"{config_path} lacks {error.args[0]!r}") from None


def _flag(path: Path, config: Mapping[str, Any], name: str) -> bool:
    flag_value = config.get(name) or False
    if not isinstance(flag_value, bool):
        raise ModelError(f"{path}: {name} = {flag_value!r} is no truth value")
    return flag_value


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _inverse_frequencies(path: Path, config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Rotary frequencies, [head_dim / 2]. Llama 3's stretching of low ones: arXiv 2407.21783, section 3.2."""
    rope = _rope(config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{path}: rotary embedding {rope_type!r} is not served by the embedded engine (it has "
            f"{', '.join(_ROPES)}); "
            'set engine.kind = "vllm"'
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    # In Python's doubles: the angle of position 30,000 is this number times 30,000, and float32 would lose four of
    # its digits.
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope_type == "linear":
        return tuple(f / rope["factor"] for f in frequencies)
    if rope_type in ("default", "mrope"):
        return tuple(frequencies)
    factor, low_factor, high_factor = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original_length = rope["original_max_position_embeddings"]
    stretched: list[float] = []
    for frequency in frequencies:
        turn_count = original_length * frequency / (2 * math.pi)
        smoothing = min(max((turn_count - low_factor) / (high_factor - low_factor), 0.0), 1.0)
        stretched.append((1 - smoothing) * frequency / factor + smoothing * frequency)
    return tuple(stretched)
