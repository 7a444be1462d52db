"""`[engine.sglang]`: any argument of SGLang's server, by the name it has there.

Owns the list of those that the run itself decides, each with the setting that says it. Whether SGLang knows an argument
and takes its value, SGLang says when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.vllm_arguments import spelled

_ADDRESS = "each engine gets an address of its own, on this machine: leave it out"
_PLAIN = "the run reaches the engine without it, on this machine alone: leave it out"
_MODEL = "the run's model is served: give model"
_ADAPTERS = "adapters are those that the run trains: give train.lora_rank and train.lora_targets"
_NEEDED = "training needs it, and it is always on: leave it out"
_ONE = "an engine is one server of its own: give engine.replicas"

RESERVED: dict[str, str] = {
    **dict.fromkeys(("host", "port", "grpc-port", "grpc-mode", "smg-grpc-mode", "fastapi-root-path"), _ADDRESS),
    **dict.fromkeys(("api-key", "admin-api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"), _PLAIN),
    **dict.fromkeys(("model-path", "model", "tokenizer-path", "served-model-name", "weight-version"), _MODEL),
    **dict.fromkeys(("nnodes", "node-rank", "dp-size", "data-parallel-size", "use-ray"), _ONE),
    **dict.fromkeys(("incremental-streaming-output", "enable-metrics"), _NEEDED),
    **dict.fromkeys(
        ("enable-lora", "max-lora-rank", "lora-target-modules", "lora-paths", "max-loras-per-batch"), _ADAPTERS
    ),
    **dict.fromkeys(("config", "help"), "write its arguments into [engine.sglang] one by one"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "base-gpu-id"), "give engine.replicas, as [[0, 1]]"),
    "context-length": "give rollout.max_context",
    "max-running-requests": "give engine.max_batch",
    "dtype": "give engine.dtype",
    "stream-interval": "give engine.stream_tokens",
    "sampling-defaults": "a turn is sampled as rollout.temperature, top_p, top_k and min_p say: give those",
    "enable-return-routed-experts": "its answer does not say their shape: take engine.kind = 'vllm'",
}
"""Arguments that the run decides, and what to do instead."""


def normal(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by SGLang's spelling, with dashes. Raises ConfigError for one that the run decides, and for what is
    no name of an argument."""
    return spelled(arguments, "engine.sglang", RESERVED, example="mem-fraction-static = 0.8")
