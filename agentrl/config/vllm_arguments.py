"""`[engine.vllm]`: any argument of vLLM's server, by the name it has there, and how it is written on a command line.

Owns the list of those that the run itself decides, each with the setting that says it. Whether vLLM knows an argument
and takes its value, only vLLM can say: `agentrl.engine.vllm.launch` asks it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl.errors import ConfigError

_ADDRESS = "each engine gets an address of its own, on this machine: leave it out"
_SAMPLING = "a turn is sampled as rollout.temperature, top_p, top_k and min_p say: give those"
_CACHE = "give engine.kv_cache_mb"
_ADAPTERS = "adapters are those that the run trains: give train.lora_rank and train.lora_targets"
_WEIGHTS = "give engine.sync, which says how new weights travel"
_NEEDED = "training needs it, and it is always on: leave it out"
_ONE = "an engine is one server of its own: give engine.replicas"
_PLAIN = "the run reaches the engine without it, on this machine alone: leave it out"

RESERVED: dict[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "grpc", "grpc-port", "root-path"), _ADDRESS),
    **dict.fromkeys(("api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "middleware"), _PLAIN),
    **dict.fromkeys(("headless", "api-server-count"), _ONE),
    **dict.fromkeys(("config", "help"), "write its arguments into [engine.vllm] one by one"),
    **dict.fromkeys(("model", "model-tag", "tokenizer", "runner", "convert"), "the run's model is served: give model"),
    "served-model-name": "the run knows its model by a name of its own: leave it out",
    "max-model-len": "give rollout.max_context",
    "max-num-seqs": "give engine.max_batch",
    "dtype": "give engine.dtype",
    "stream-interval": "give engine.stream_tokens",
    "logprobs-mode": "the learner needs the log-probs that tokens were sampled with: leave it out",
    **dict.fromkeys(("generation-config", "override-generation-config", "logits-processors"), _SAMPLING),
    "return-sampling-mask": "it is on where rollout.top_p, top_k or min_p cut: give those",
    **dict.fromkeys(("weight-transfer-config", "worker-extension-cls"), _WEIGHTS),
    **dict.fromkeys(("enable-scale-out", "enable-prompt-tokens-details"), _NEEDED),
    **dict.fromkeys(("kv-cache-memory-bytes", "gpu-memory-utilization"), _CACHE),
    **dict.fromkeys(("enable-lora", "max-lora-rank", "max-loras", "lora-modules", "lora-target-modules"), _ADAPTERS),
    "enable-return-routed-experts": "give engine.routed_experts",
    "device-ids": "give engine.replicas, as [[0], [1]]",
}
"""Arguments that the run decides, and what to do instead."""

_TENSOR_SPLIT = "tensor-parallel-size"
_SPLITS = (
    _TENSOR_SPLIT,
    "pipeline-parallel-size",
    "data-parallel-size",
    "prefill-context-parallel-size",
)
"""Arguments whose product is the number of GPUs of a server."""


def normal(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by vLLM's spelling, with dashes. Raises ConfigError for one that the run decides, and for what is
    no name of an argument."""
    return spelled(arguments, "engine.vllm", RESERVED, example="max-num-batched-tokens = 8192")


def spelled(arguments: Mapping[str, Any], table: str, reserved: Mapping[str, str], *, example: str) -> dict[str, Any]:
    """The arguments of a `table` by the spelling of a command line. Raises ConfigError for a `reserved` one, with the
    reason from there, and for a name that no argument can have."""
    # Both spellings are one argument: otherwise `max_model_len` would pass by the list that refuses `max-model-len`.
    value_by_flag = {
        argument_name.replace("_", "-"): argument_value for argument_name, argument_value in arguments.items()
    }
    for argument_name, argument_value in value_by_flag.items():
        # A name becomes a word of a command line. One with a blank or an equals sign could bring along a second
        # argument that the list above refuses.
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", argument_name):
            raise ConfigError(f"{table}.{argument_name}", argument_value, f"write its long name, as {example}")
        if argument_name in reserved:
            raise ConfigError(f"{table}.{argument_name}", argument_value, reserved[argument_name])
    return value_by_flag


def split_over(arguments: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """The argument that has a server use all of its `gpus` GPUs: each layer is cut over those that the user's own
    splits in `arguments` leave (tensor parallelism). Empty if the user cuts layers already, if one GPU is left, or if a
    split is no number. Raises ConfigError if the splits need another number of GPUs."""
    split_sizes = {split_name: arguments[split_name] for split_name in _SPLITS if split_name in arguments}
    if any(type(split_size) is not int or split_size < 1 for split_size in split_sizes.values()):
        return {}  # vLLM says what is wrong with it
    product = math.prod(cast("dict[str, int]", split_sizes).values())
    tensor_width = 1 if _TENSOR_SPLIT in split_sizes else max(1, gpus // product)
    if tensor_width * product != gpus:
        example_gpus = ", ".join(str(gpu_index) for gpu_index in range(product))
        hint = (
            f"they need {product} GPUs for each replica, and it has {gpus}: give engine.replicas = [[{example_gpus}]]"
        )
        raise ConfigError("engine.vllm", split_sizes, hint)
    return {_TENSOR_SPLIT: tensor_width} if tensor_width > 1 else {}


def words(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments as words of a command line: a flag for true, the flag that switches it off for false, JSON
    for a table, one word for each item of a list."""
    command_line: list[str] = []
    for argument_name, argument_value in arguments.items():
        if isinstance(argument_value, bool):
            command_line.append(f"--{argument_name}" if argument_value else f"--no-{argument_name}")
        elif isinstance(argument_value, list | tuple):
            command_line += [
                f"--{argument_name}",
                *(_word(list_item) for list_item in cast("Sequence[Any]", argument_value)),
            ]
        else:
            command_line += [f"--{argument_name}", _word(argument_value)]
    return command_line


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
