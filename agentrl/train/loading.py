"""A Hugging Face folder becomes a module, of which each rank reads only its shards.

Never knows packs, adapters, or in what numbers are held: they are float32 here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers
from torch._guards import detect_fake_mode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from agentrl.errors import ConfigError, ModelError
from agentrl.train.parallel.ranks import Ranks


def load(folder: Path, ranks: Ranks, attention: str) -> Any:
    """The model of a folder, with the attention that transformers knows under this name. Raises ModelError, in one
    line, for a folder that cannot be trained; ConfigError for a model that the ranks cannot cut."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"no model in {str(folder)!r}: it holds no config.json")
    if detect_fake_mode() is not None:
        module = _hollow(folder, attention)
        if ranks.size > 1:
            ranks.spread(module)
        return module
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()

    def loaded(attention: str) -> tuple[Any, dict[str, Any]]:
        with _spread(ranks) as asked:
            return cast(Any, AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                **asked,
            )

    try:
        try:
            module, info = loaded(attention)
        except KeyError as error:  # an old kind, which has a class for each attention that it knows
            if error.args != (attention,):
                raise
            module, info = loaded("eager")
    except ConfigError:  # the model cannot be cut so
        raise
    except Exception as error:  # transformers raises many kinds for a broken folder; the user must mend each
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"cannot load the model in {str(folder)!r}: {reason}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"the weights in {str(folder)!r} lack {len(missing)} tensors, first {missing[0]!r}")
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ModelError(f"{type(module).__name__} in {str(folder)!r} cannot compute logits of chosen positions only")
    return module


@contextmanager
def _spread(ranks: Ranks) -> Generator[dict[str, Any]]:
    """Inside, transformers reads only this rank's shards of the weights, if it is given these arguments: it cuts a
    model that is to be distributed after it was made on the meta device, before a weight is read."""
    if ranks.size == 1:
        yield {}
        return

    def laid(_: object, model: Any, *__: object) -> Any:
        ranks.spread(model)
        return model

    with patch.object(PreTrainedModel, "maybe_distribute_model", classmethod(laid)):
        yield {"distributed_config": DistributedConfig()}


def _hollow(folder: Path, attention: str) -> Any:
    """The model of a config.json, of tensors that have no numbers."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:  # of many kinds; the user must mend each
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"cannot make the model that {str(folder / 'config.json')!r} describes: {reason}") from error
