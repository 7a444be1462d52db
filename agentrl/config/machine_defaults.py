"""Chooses the settings that a run file leaves out, by the machine and the model's size; never changes those it gives.

For a tiny model the defaults of `agentrl.config` hold, and without a GPU all but the dtype. The rules are arithmetic on
memory; their numbers were checked, but not by runs on GPUs.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from agentrl.config import run_config as configuration
from agentrl.config.run_config import RunConfig
from agentrl.host.cores import multiplies_bfloat16

_GIB: Final = 1 << 30
_TINY: Final = 50_000_000  # parameters; a CPU trains a smaller model as fast
_FULL_BYTES: Final = 16  # memory for each trained parameter: weight, gradient and two moments in float32
_SHARE: Final = 0.5  # the part of a GPU's memory for them; the rest is for activations, or for engines on the same GPU
_LORA_RANK: Final = 32
_LARGE_GIB: Final = 40
_KV_SHARE: Final = 0.2
_DEVICES: Final = Path("/dev")
_DRIVERS: Final = ("nvidia*", "nvhost*", "dxg", "kfd")  # NVIDIA's, on its boards and in WSL too, and AMD's


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts that defaults depend on: number of GPUs, memory of each in bytes, whether vLLM is installed here, and
    whether the CPU has instructions for bfloat16."""

    gpus: int = 0
    gpu_bytes: int = 0
    vllm: bool = False
    bfloat16: bool = False

    @classmethod
    def seen(cls) -> Machine:
        """This machine, as torch sees it; without torch it has no GPU. Torch takes a second to import, so it is
        imported only if a driver's device exists."""
        if importlib.util.find_spec("torch") is None or not any(
            any(_DEVICES.glob(driver_pattern)) for driver_pattern in _DRIVERS
        ):
            return cls(bfloat16=multiplies_bfloat16())
        import torch

        if not torch.cuda.is_available():
            return cls(bfloat16=multiplies_bfloat16())
        gpu_bytes = int(cast(Any, torch.cuda).get_device_properties(0).total_memory)
        has_vllm = importlib.util.find_spec("vllm") is not None
        return cls(gpus=torch.cuda.device_count(), gpu_bytes=gpu_bytes, vllm=has_vllm)


def parameters_of(folder: Path) -> int:
    """The number of parameters of the model in `folder`, by the size of its safetensors; 0 if it has none."""
    model_config = json.loads((folder / "config.json").read_text())
    # By the size of the files: to count the tensors they would have to be opened, and the choice below has wide
    # margins.
    bytes_per_parameter = 4 if (model_config.get("dtype") or model_config.get("torch_dtype")) == "float32" else 2
    return sum(weight_file.stat().st_size for weight_file in folder.glob("*.safetensors")) // bytes_per_parameter


def faster_in_bfloat16(machine: Machine, parameters: int) -> bool:
    """Whether the CPU of a machine without a GPU trains a model of this size faster in bfloat16 than in float32."""
    return machine.bfloat16 and parameters >= _TINY


def chosen(config: RunConfig, machine: Machine, parameters: int) -> dict[str, Any]:
    """Values chosen for this machine, by key, of the settings that `config` leaves out."""
    if parameters < _TINY:
        return {}
    defaults: dict[str, Any]
    starts_engine = not config.engine.urls and config.engine.kind != "sglang"
    if machine.gpus == 0:
        if config.cluster.on_ray or not faster_in_bfloat16(machine, parameters):
            return {}
        defaults = {"train.dtype": "bfloat16"} | ({"engine.dtype": "bfloat16"} if starts_engine else {})
        return {
            setting_key: default_value
            for setting_key, default_value in defaults.items()
            if not _is_set(config, setting_key)
        }
    is_large = machine.gpu_bytes >= _LARGE_GIB * _GIB
    rank_count = min(config.train.parallel.ranks, machine.gpus)  # each holds its share of them
    trains_whole = parameters * _FULL_BYTES <= _SHARE * machine.gpu_bytes * rank_count
    defaults = {
        "train.device": "cuda:1" if machine.gpus > 1 else "cuda",  # engines take the first one
        "train.dtype": "bfloat16",
        "train.tokens_per_batch": max(16_384 if is_large else 8_192, config.rollout.max_context),
        "train.gradient_checkpointing": parameters > 1_000_000_000,
        "train.lora_rank": 0 if trains_whole else _LORA_RANK,
    }
    if machine.vllm and starts_engine:
        cache_mb = int(_KV_SHARE * machine.gpu_bytes) >> 20
        defaults |= {"engine.kind": "vllm", "engine.dtype": "bfloat16", "engine.kv_cache_mb": cache_mb}
        defaults["rollout.max_running"] = max(256 if is_large else 128, config.rollout.group_size)
    return {
        setting_key: default_value
        for setting_key, default_value in defaults.items()
        if not _is_set(config, setting_key)
    }


def fitted(config: RunConfig, machine: Machine, parameters: int) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration for this machine, and the values chosen for it. Raises ConfigError if these contradict the run
    file."""
    chosen_values = chosen(config, machine, parameters)
    # `exclude_unset`, or every default would look as if the user had chosen it, and nothing could be fitted at the next
    # machine.
    document = config.model_dump(mode="json", exclude_unset=True)
    for setting_key, chosen_value in chosen_values.items():
        section_name, _, setting_name = setting_key.partition(".")
        document.setdefault(section_name, {})[setting_name] = chosen_value
    return (configuration.parse(document) if chosen_values else config), chosen_values


def _is_set(config: RunConfig, key: str) -> bool:
    section_name, _, setting_name = key.partition(".")
    return section_name in config.model_fields_set and setting_name in getattr(config, section_name).model_fields_set
