"""What an engine of a planned run holds on each of its GPUs, and how quickly it samples.

Owns how `engine.gpus` and `[engine.vllm]` lay an engine over several GPUs. What GPUs send each other takes no time
here. Never knows the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from agentrl.config import RunConfig

_EIGHT_BITS = "fp8"  # how the names of eight-bit dtypes begin


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An engine over `gpus` GPUs has `copies` of its layers, each over `gpus / copies` of them: every GPU has the share
    `1 / parts` of all weights but experts, `1 / apart` of the experts, and `1 / cached` of a token's keys and values.
    `width` are bytes of a weight, `kv` those of a token's keys and values on all GPUs of a copy together; `cache` is
    room for these on each GPU."""

    gpus: int
    copies: int
    parts: int
    apart: int
    cached: int
    width: int
    kv: int
    cache: int

    @classmethod
    def of(cls, config: RunConfig, described: Mapping[str, Any], width: int) -> Self:
        """That of a run whose model's config.json says `described`, of weights of `width` bytes."""
        given = config.engine.vllm
        layers, heads = described["num_hidden_layers"], described["num_attention_heads"]
        size = described.get("head_dim") or described["hidden_size"] // heads
        kv_heads = described.get("num_key_value_heads") or heads
        gpus = gpus_of(config)
        copies = _count(given, "data-parallel-size") * _count(given, "prefill-context-parallel-size")
        stages = _count(given, "pipeline-parallel-size")
        tensor = max(1, gpus // (copies * stages))
        cell = 1 if str(given.get("kv-cache-dtype")).startswith(_EIGHT_BITS) else 2
        return cls(
            gpus=gpus,
            copies=copies,
            parts=tensor * stages,
            apart=gpus if given.get("enable-expert-parallel") else tensor * stages,
            cached=min(tensor, kv_heads) * stages,
            width=1 if str(given.get("quantization")).startswith(_EIGHT_BITS) else width,
            kv=2 * layers * kv_heads * size * cell,
            cache=config.engine.kv_cache_mb << 20,
        )

    def weights(self, parameters: float, experts: float) -> float:
        """Bytes on each GPU."""
        return self.width * ((parameters - experts) / self.parts + experts / self.apart)

    def token(self) -> float:
        """Bytes of a token's keys and values on each GPU of the copy that has it."""
        return self.kv / self.cached

    def token_s(self, tokens: int, row: int, *, parameters: float, experts: float, used: float, rates: Rates) -> float:
        """Seconds of a pass that samples a token each of so many rows in every copy, of which a row has `row` tokens at
        last, and a token is sent to the share `used` of the `experts`, evenly."""
        of_all = tokens * self.apart // self.parts  # tokens of copies that share experts
        asleep = experts * (1 - used) ** of_all  # of experts that no token is sent to
        reads = self.weights(parameters - asleep, experts - asleep) + tokens * self.token() * row / 2
        operations = 2 * ((parameters - experts) * tokens / self.parts + experts * used * of_all / self.apart)
        return max(reads / rates.bytes, operations / rates.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU reaches of its vendor's figures, a second."""

    bytes: float
    operations: float


def gpus_of(config: RunConfig) -> int:
    """GPUs of each engine, the most of them if they differ."""
    return max((len(own) for own in config.engine.gpus), default=max(1, config.cluster.engine.gpus))


def _count(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name, 1)
    return value if type(value) is int and value > 0 else 1
