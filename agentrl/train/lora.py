"""LoRA (Hu et al., 2021): a small trained adapter over frozen weights, in the format of PEFT.

Owns how an adapter is put into a model, written, read back, and merged into the weights below. Never knows what the
adapter is trained for, nor which version it becomes. `peft` is imported only when there is an adapter to train.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (peft and transformers leave parts of their signatures untyped)

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.config import Train
from agentrl.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's names are those of a model that it has wrapped


def inject(module: Any, train: Train, folder: Path) -> None:
    """Put a fresh adapter into a transformers model and freeze the rest. It starts as nothing: B is 0.

    Raises ModelError if `train.lora_targets` names no layer of the model."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = train.lora_targets or "all-linear"
    alpha = train.lora_alpha or 2 * train.lora_rank
    config = LoraConfig(r=train.lora_rank, lora_alpha=alpha, target_modules=targets, bias="none")
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        reason = str(error).partition(". ")[0]
        raise ModelError(f"cannot put an adapter into {str(folder)!r} (train.lora_targets): {reason}") from error


def has_adapter(module: Any) -> bool:
    """Whether `inject` was called on the model."""
    return hasattr(module, "peft_config")


def merged(module: Any) -> dict[str, Tensor]:
    """The state of a model as if its adapter, if it has one, had been added to the weights below."""
    state = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in module.state_dict().items()
        if ".lora_" not in name
    }
    if has_adapter(module):
        from peft.tuners.lora import LoraLayer

        for name, layer in module.named_modules():
            if isinstance(layer, LoraLayer):
                for adapter in layer.active_adapters:
                    state[f"{name}.weight"] = state[f"{name}.weight"] + _delta(layer, adapter)
    return state


@torch.no_grad()
def _delta(layer: Any, adapter: str) -> Tensor:
    return layer.get_delta_weight(adapter)


def save(module: Any, folder: Path) -> Path:
    """Write the adapter to `folder`, whole or not at all, for PEFT or an engine to load."""
    from peft import get_peft_model_state_dict

    tensors = {
        _PREFIX + name: tensor.detach().to("cpu").contiguous()
        for name, tensor in get_peft_model_state_dict(module).items()
    }
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
    (config,) = module.peft_config.values()
    config.save_pretrained(draft)
    return draft.rename(folder)


def load(module: Any, folder: Path) -> None:
    """Take a written adapter into a model that has one of the same shape. Raises ModelError otherwise."""
    from peft import set_peft_model_state_dict

    try:
        tensors = load_file(folder / WEIGHTS)
        found = set_peft_model_state_dict(module, {name.removeprefix(_PREFIX): t for name, t in tensors.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()))
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {reason}") from error
    lacking = [name for name in found.missing_keys if ".lora_" in name]
    if lacking or found.unexpected_keys:
        first = next(iter([*lacking, *found.unexpected_keys]))
        raise ModelError(f"the adapter in {str(folder)!r} is of another shape: {first} (train.lora_rank, lora_targets)")
