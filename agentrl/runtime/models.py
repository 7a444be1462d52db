"""What a model's name stands for: a folder, or an id that a package registered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from agentrl import registry
from agentrl.config import EngineSettings, RunConfig
from agentrl.errors import ModelError, UnknownIdError


def given_model_dir(config: RunConfig, policy: str) -> Path:
    """The folder of a model that plays a role and does not learn: the run's own for `"frozen"`. Raises ModelError, also
    for one that has another tokenizer: the run's renderer writes and reads for all of them."""
    own = model_dir(config.model)
    if policy == "frozen":
        return own
    given = model_dir(policy)
    if (given / "tokenizer.json").read_bytes() != (own / "tokenizer.json").read_bytes():
        raise ModelError(f"model {policy!r} has another tokenizer.json than {config.model!r}: it cannot play a role")
    return given


def engine_dtype(settings: EngineSettings, folder: Path) -> Literal["float32", "float16", "bfloat16"]:
    """What the engines that serve the model of `folder` compute in, and so what weights travel in: for "auto" that
    of the model, or bfloat16 for one of float32, as vLLM has it."""
    if settings.kind == "embedded":
        return "float32"
    if settings.dtype != "auto":
        return settings.dtype
    config = json.loads((folder / "config.json").read_text())
    return "float16" if "float16" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def model_dir(name: str) -> Path:
    """The folder (Hugging Face layout) behind a path or a registered id such as `agentrl/tiny-coder`.

    Raises ModelError if there is neither, or the folder has no config.json."""
    path = Path(name)
    if not path.is_dir():
        try:
            path = Path(registry.resolve("models", name)())
        except UnknownIdError as error:
            raise ModelError(f"model {name!r} is neither a folder nor a registered id ({error})") from None
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {str(path)!r} has no config.json: save a model there with save_pretrained")
    return path
