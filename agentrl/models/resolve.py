"""Resolves a model's name: a folder, an id that a package registered, or an id of the Hugging Face hub.

The process that asks first for a model of the hub downloads it (no other framework's weights), before a run starts
anything; the others find the files in the cache of this machine.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from agentrl import registry
from agentrl.config import EngineSettings, RunConfig
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError
from agentrl.learner.checkpoints import digests
from agentrl.learner.checkpoints.folders import newest_written

_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?")
# No pickles (`*.bin`, `*.pt`): loading one runs code, and hub folders often hold the same weights twice. No `*.py`
# either, for the same reason.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def is_hub_id(name: str) -> bool:
    """Whether `name` can be a hub id: `organisation/model`, or `organisation/model@revision`."""
    return _ID.fullmatch(name) is not None


def hub_folder(name: str) -> Path:
    """The folder with the model `name`. Raises ModelError, which says how to get the model by hand."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import RepositoryNotFoundError

    name_parts = _ID.fullmatch(name)
    assert name_parts is not None
    model_id, revision = name_parts["id"], name_parts["revision"]
    # The cache first: a run on a machine without a network, or a hub that is down, must not fail for a question about
    # a newer revision.
    if (cached_folder := _in_cache(name, model_id, revision)) is not None:
        return cached_folder
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=_FILES))
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {name!r}, or asks for a login: hf auth login") from None
    except Exception as error:  # errors of httpx, the hub, the disk: the caller need not tell them apart
        reason = str(error).partition("\n")[0].strip()
        folder = f"models/{model_id.rpartition('/')[2]}"
        raise ModelError(
            f"model {name!r} is not on this machine and cannot be downloaded ({type(error).__name__}: {reason}): where "
            f"there is a network run hf download {model_id} --local-dir {folder}, copy the folder here, and give "
            f"model = {folder!r}"
        ) from error


def _in_cache(name: str, id: str, revision: str | None) -> Path | None:
    """The folder of a model of the hub in the cache of this machine, if it is there as a whole. Raises ModelError for
    what is no id."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached_folder = Path(snapshot_download(id, revision=revision, allow_patterns=_FILES, local_files_only=True))
        weight_file.parts(cached_folder)  # an interrupted download lacks some of them
        return cached_folder
    except (LocalEntryNotFoundError, ModelError):
        return None
    except HFValidationError as error:
        raise ModelError(f"model {name!r} is no id of the hub: {error}") from None


def frozen_model_dir(config: RunConfig, policy: str) -> Path:
    """The folder of a model that plays a role and does not learn; for `"frozen"` it is the run's own model. Raises
    ModelError, also if its tokenizer differs from the run's: one renderer serves all models."""
    run_model = model_dir(config.model)
    if policy == "frozen":
        return run_model
    policy_model = model_dir(policy)
    # Byte for byte: two tokenizers that differ in one merge agree on most texts, and the tokens of a few turns would
    # mean something else.
    if (policy_model / "tokenizer.json").read_bytes() != (run_model / "tokenizer.json").read_bytes():
        raise ModelError(f"model {policy!r} has another tokenizer.json than {config.model!r}: it cannot play a role")
    return policy_model


def slot_dir(config: RunConfig, name: str) -> Path:
    """The folder of a model that reads the policy's tokens: one that an algorithm compares the policy with, such as a
    teacher, or one that a role trains. Raises ModelError, also if it does not say how probable each token of the policy
    is."""
    run_model, other_model = model_dir(config.model), model_dir(name)
    tokenizer_files = [model_folder / "tokenizer.json" for model_folder in (run_model, other_model)]
    if (
        all(tokenizer_file.is_file() for tokenizer_file in tokenizer_files)
        and tokenizer_files[0].read_bytes() != tokenizer_files[1].read_bytes()
    ):
        raise ModelError(f"model {name!r} has another tokenizer.json than {config.model!r}: token for token needs one")
    sizes = vocabulary(run_model), vocabulary(other_model)
    # Fewer rows than the policy has tokens: the gather of a log-prob would be out of range, in the middle of a step.
    if sizes[0] is not None and sizes[1] is not None and sizes[1] < sizes[0]:
        raise ModelError(
            f"model {name!r} has {sizes[1]} tokens, {config.model!r} has {sizes[0]}: give one with as many"
        )
    return other_model


def renderer_of(config: RunConfig) -> Renderer:
    """Return the renderer that turns the run's messages into tokens, the same in every process that plays or measures.
    Raises ModelError, also for an argument that the model's chat template does not read."""
    run_renderer = Renderer(model_dir(config.model), template_kwargs=config.rollout.template)
    if config.engine.kind != "embedded" and not run_renderer.no_images:
        run_renderer.no_images = (
            f'engine.kind = {config.engine.kind!r} is sent no images so far (give "embedded", or no images)'
        )
    return run_renderer


def engine_dtype(settings: EngineSettings, folder: Path) -> Literal["float32", "float16", "bfloat16"]:
    """The dtype in which engines compute with the model of `folder`, and in which weights are sent. For the embedded
    engine, "auto" is the dtype in which a CPU such as this one computes the model fastest. For others it is float16 for
    a float16 model and bfloat16 for every other model, as in vLLM."""
    if settings.dtype != "auto":
        return settings.dtype
    if settings.kind == "embedded":
        return read_architecture(folder).fastest_dtype
    model_config = json.loads((folder / "config.json").read_text())
    return "float16" if "float16" in (model_config.get("dtype"), model_config.get("torch_dtype")) else "bfloat16"


def vocabulary(folder: Path) -> int | None:
    """How many tokens the model of `folder` has; None if its config.json does not say."""
    model_config: Any = json.loads((folder / "config.json").read_text())
    text_config: Any = model_config.get("text_config") or {}
    token_count: Any = model_config.get("vocab_size") or text_config.get("vocab_size")
    return token_count if isinstance(token_count, int) else None


def model_dir(name: str) -> Path:
    """The folder (Hugging Face layout) behind a path, a registered id such as `agentrl/tiny-coder`, or an id of the
    Hugging Face hub, which is downloaded if it is not in the cache. For a run's folder: its newest checkpoint.

    Raises ModelError if there is no such model, the folder has no config.json, or the run's checkpoint is damaged."""
    model_path = Path(name)
    if (model_path / "checkpoints").is_dir():  # a run: what it has trained
        newest_one = newest_written(model_path / "checkpoints")
        if newest_one is None:
            raise ModelError(f"run {name!r} has no checkpoint yet: train it for longer, or name a model")
        # A checkpoint that rotted on its disk would be measured, or served, without a word.
        digests.check(newest_one)
        model_path = newest_one
    elif not model_path.is_dir():
        model_path = _named(name)
    if not (model_path / "config.json").is_file():
        raise ModelError(
            f"model folder {str(model_path)!r} has no config.json: save a model there with save_pretrained"
        )
    return model_path


def local_model_dir(name: str) -> Path | None:
    """Return the folder of a model as `model_dir` does, but None for a model of the hub that is not in the cache of
    this machine: nothing is downloaded. Raises ModelError."""
    name_parts = _ID.fullmatch(name)
    if name_parts is None or Path(name).is_dir() or name in registry.ids("models"):
        return model_dir(name)
    return _in_cache(name, name_parts["id"], name_parts["revision"])


def _named(name: str) -> Path:
    if "://" in name:
        raise ModelError(f"{name!r} is a server, no model: agentrl eval --endpoint {name} measures what it serves")
    if ":" in name or name in registry.ids("models"):
        return Path(registry.resolve("models", name)())
    model_ids = registry.ids("models")
    if near_ids := registry.nearest(name, model_ids):
        raise ModelError(f"no model is registered as {name!r}; near: {', '.join(near_ids)}")
    refuse_missing_folder(name)
    if is_hub_id(name):
        return hub_folder(name)
    raise ModelError(
        f"model {name!r} is neither a folder, nor a registered id ({', '.join(model_ids)}), nor one of the hub (as "
        "Qwen/Qwen3-0.6B)"
    )


def refuse_missing_folder(name: str) -> None:
    """Raise ModelError if `name` can only mean a folder: else it would be looked for on the hub."""
    # `runs/demo` has the form of a hub id. Looked for there, a misspelt run would end in "the hub has no such model"
    # after a wait for the network.
    if name.startswith((".", "/", "~")) or Path(name).parts[:1] == ("runs",):
        parent_folder = Path(name).expanduser().parent
        folder_names = (
            sorted(entry.name for entry in parent_folder.iterdir() if entry.is_dir()) if parent_folder.is_dir() else []
        )
        near_names = registry.nearest(Path(name).name, folder_names) or folder_names[:3]
        correction = (
            f"{str(parent_folder)!r} has {', '.join(near_names) or 'no folder'}"
            if parent_folder.is_dir()
            else "nor is its parent"
        )
        raise ModelError(f"there is no folder {name!r} with a model or a run; {correction}")
