"""A checkpoint as a folder of the Hugging Face layout, for others than agentrl: `agentrl export`.

    DIR/config.json, generation_config.json, tokenizer…     a whole model, read by AutoModelForCausalLM
    DIR/model.safetensors                                    or several files and model.safetensors.index.json

    DIR/adapter_config.json, tokenizer…                      an adapter in PEFT's format, which names the model below
    DIR/adapter_model.safetensors
    DIR/ROLE/…                                               that of each role with its own

How many ranks wrote the checkpoint does not matter. Memory holds one file of weights at a time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (transformers leaves parts of its signatures untyped)

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from agentrl import registry
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError, RunFailed, UsageError
from agentrl.learner.checkpoints import digests
from agentrl.learner.checkpoints.checkpoint import ADAPTER, WEIGHTS
from agentrl.learner.checkpoints.folders import named, of_role, step_of
from agentrl.learner.checkpoints.model_files import copy_description
from agentrl.models.resolve import local_model_dir, model_dir
from agentrl.offline.sft import SETTINGS
from agentrl.records import Message
from agentrl.run.run_folder import RunDir

_FILE_BYTES: Final = 5 * 10**9  # as transformers divides weights
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN: Final = 300  # characters of a prompt in an error
_CONFIG, _GENERATION, _ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"


def export(
    run: Path,
    folder: Path,
    *,
    step: int | None = None,
    role: str | None = None,
    merge: bool = False,
    dtype: str = "auto",
    most: int = _FILE_BYTES,
) -> str:
    """Write the checkpoint of `step` of a run to `folder`, which appears whole or not at all, and say what was written.
    An adapter is written as such, unless it is to be merged. `role` has a model of its own, which is written in the
    place of the others'. A file has at most so many bytes, or one tensor. Raises
    UsageError, RunFailed, or ModelError for a damaged checkpoint."""
    # Resolved at once: `.` has no name of its own to derive the draft's from.
    checkpoint, folder = _checkpoint(run, step), folder.resolve()
    source_folder = checkpoint if role is None else _of_role(checkpoint, role)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--hf {str(folder)!r} is there already: give a new folder, or remove it")
    is_model = merge or not (source_folder / ADAPTER).is_dir()
    if not is_model and dtype != "auto":
        raise UsageError(f"--dtype {dtype} is for a whole model, and an adapter stays as it is: add --merge")
    # Before a byte is written. A damaged file can be valid safetensors, and the export would spread it.
    digests.check(checkpoint)
    # Beside the folder and not in the system's temporary one: a rename is atomic only within one file system.
    # `tests/run/test_exporting.py::test_it_writes_over_nothing_and_leaves_no_half`.
    draft_folder = folder.with_name(f".{folder.name}.draft")
    try:
        shutil.rmtree(draft_folder, ignore_errors=True)
        draft_folder.mkdir(parents=True)
        exported = (
            _model(source_folder, draft_folder, dtype, most)
            if is_model
            else _adapter(source_folder, draft_folder, _model_of(run, None))
        )
        # Compared with the folder that the run began with and not with the checkpoint alone, which is where the
        # exported files come from: a template that was lost when the checkpoint was saved is missing in both. Such a
        # model is sound and looks broken, since it gets prompts that it was not trained with
        # (`test_an_export_asks_with_the_prompts_that_the_model_was_trained_with_or_is_none`).
        _check_prompts(draft_folder, _begun_with(run, role) or source_folder)
        draft_folder.rename(folder)
    except (OSError, SafetensorError) as error:
        # The run goes on meanwhile and removes old checkpoints (`train.keep_checkpoints`). That is no damage, and the
        # newest at the next try is another one.
        if source_folder.is_dir():
            raise RunFailed(f"cannot write {source_folder} to {folder}: {error}") from error
        raise RunFailed(f"the run went on and has dropped {source_folder}: type the same again") from error
    finally:
        shutil.rmtree(draft_folder, ignore_errors=True)
    return f"{folder}: {exported} of step {step_of(checkpoint)}"


def _checkpoint(run: Path, step: int | None) -> Path:
    checkpoint_folders = named(run / "checkpoints")
    if not checkpoint_folders:
        raise UsageError(f"{run} holds no checkpoint: name the folder of a run that has trained for a while")
    if step is None:
        return checkpoint_folders[-1]
    folder_by_step = {step_of(checkpoint_folder): checkpoint_folder for checkpoint_folder in checkpoint_folders}
    if step not in folder_by_step:
        raise UsageError(
            f"--step {step}: {run} has checkpoints of {', '.join(map(str, folder_by_step))} (train.keep_checkpoints)"
        )
    return folder_by_step[step]


def _of_role(checkpoint: Path, role: str) -> Path:
    role_names = sorted(role_path.name for role_path in of_role(checkpoint, role).parent.glob("*"))
    if role not in role_names:
        correction = (
            f"those that have one: {', '.join(role_names)}"
            if role_names
            else "the run trained one for no role: leave it out"
        )
        raise UsageError(f"--role {role}: {checkpoint} has no model of its own for it; {correction}")
    return of_role(checkpoint, role)


def _name_of(run: Path, role: str | None) -> str:
    """The model that a run, or a role of it, began with, as its settings name it."""
    settings_path = run / SETTINGS
    if settings_path.is_file():
        return json.loads(settings_path.read_text())["model"]
    run_config = RunDir.open(run).config()
    return run_config.model if role is None else run_config.model_of(role)


def _begun_with(run: Path, role: str | None) -> Path | None:
    """The folder of the model that a run, or a role of it, began with; None if it is no longer on this machine."""
    try:
        return local_model_dir(_name_of(run, role))
    except ModelError:
        return None


def _model_of(run: Path, role: str | None) -> str:
    """The model that a run began with, as transformers finds it: an id of the hub, or a folder of this machine."""
    model_name = _name_of(run, role)
    # A name that only this machine understands (a run's, a registered id, one with a scheme) must become a folder in
    # `adapter_config.json`; an id of the hub must stay one, so that the adapter loads on another machine.
    is_local_name = Path(model_name).is_dir() or ":" in model_name or model_name in registry.ids("models")
    return str(model_dir(model_name).resolve()) if is_local_name else model_name


def _model(source: Path, draft: Path, dtype: str, most: int) -> str:
    """Write the whole model of `source` into the folder `draft`, in files of at most `most` bytes, or of one tensor.
    Returns a line about the result for a person. Raises UsageError for a dtype that cannot be exported."""
    model_settings = json.loads((source / _CONFIG).read_text())
    dtype_name = dtype if dtype != "auto" else str(_dtype_of(model_settings) or "float32")
    if dtype_name not in _DTYPES:
        raise UsageError(f"{source / _CONFIG} has dtype {dtype_name!r}: give --dtype, of {', '.join(_DTYPES)}")
    copy_description(source, draft)
    (draft / _CONFIG).write_text(json.dumps(_having(model_settings, dtype_name), indent=2) + "\n")
    # Without this file transformers makes one from the configuration, with ends of a turn that may be fewer than
    # those the model was trained with. Written down, they are the same for every reader.
    if not (draft / _GENERATION).is_file():
        GenerationConfig.from_model_config(AutoConfig.from_pretrained(draft, local_files_only=True)).save_pretrained(
            draft
        )
    file_count = _weights(source / WEIGHTS, draft, _DTYPES[dtype_name], most)
    return f"a model in {dtype_name}, {file_count} file{'s' * (file_count > 1)} of weights"


def _weights(source: Path, draft: Path, dtype: torch.dtype, most: int) -> int:
    """Write the weights, matrices in `dtype`, in files of at most so many bytes; how many. Vectors weigh nothing and
    stay as they are: transformers reads most of them in the model's dtype, and keeps a few in float32."""
    with safe_open(source, "pt") as source_file:

        def read(name: str) -> Tensor:
            tensor = source_file.get_tensor(name)
            # Float32 stays for norms, biases and the router's corrections: bfloat16 has eight bits of significand,
            # and these few numbers scale everything else.
            return tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor

        tensor_places = weight_file.places(weight_file.open_bytes(source))
        # Sizes come from the file's header, so the split is known before a tensor is read. The factory of
        # huggingface_hub calls `get_storage_size` on whatever the values are, here already numbers.
        size_by_name = {tensor_place.name: tensor_place.numel * dtype.itemsize for tensor_place in tensor_places}
        shard_split = split_state_dict_into_shards_factory(
            cast(Any, size_by_name),
            get_storage_size=cast(Any, int),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=most,
        )
        for file_name, tensor_names in shard_split.filename_to_tensors.items():
            save_file(
                {tensor_name: read(tensor_name) for tensor_name in tensor_names},
                draft / file_name,
                metadata={"format": "pt"},
            )
    if shard_split.is_sharded:
        weight_index = {"metadata": shard_split.metadata, "weight_map": shard_split.tensor_to_filename}
        (draft / "model.safetensors.index.json").write_text(json.dumps(weight_index, indent=2) + "\n")
    return len(shard_split.filename_to_tensors)


def _check_prompts(draft: Path, model: Path) -> None:
    """Raise RunFailed if the exported folder asks the model otherwise than the folder with which it was trained: the
    model would look broken. One without a tokenizer or a chat template has no prompts to compare."""
    try:
        renderer = Renderer(model)
    except ModelError:
        return
    exported = Renderer(draft)
    messages: list[Message] = [{"role": "user", "content": "What is in notes.txt?\n"}]
    path_schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    function = {"name": "read_file", "description": "Reads a file.", "parameters": path_schema}
    # With and without tools, since a template writes them in a branch of its own and a lost file may change only that
    # one.
    for tool_schemas in ((), ({"type": "function", "function": function},)):
        run_prompt, export_prompt = (
            each_renderer.start(messages, tool_schemas) for each_renderer in (renderer, exported)
        )
        if run_prompt != export_prompt:
            prompt_difference = f"{_cut(exported.decode(export_prompt))}; {model}: {_cut(renderer.decode(run_prompt))}"
            raise RunFailed(
                f"the export would ask the model with other prompts than it was trained with: {prompt_difference}"
            )
    if renderer.tool_format != exported.tool_format:
        format_difference = f"{exported.tool_format}; {model}: {renderer.tool_format}"
        raise RunFailed(
            f"the export has tools called in another format than the model was trained with: {format_difference}"
        )


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …")


def _adapter(source: Path, draft: Path, model: str) -> str:
    """`model` is the one below it."""
    copy_description(source, draft, but={_CONFIG, _GENERATION})
    shutil.copytree(source / ADAPTER, draft, dirs_exist_ok=True)
    model_name, _, revision = model.partition("@")
    # PEFT reads a hub id and its revision from two fields; `id@revision` in one would be looked up as a name.
    for config_path in draft.rglob(_ADAPTER_CONFIG):
        adapter_settings = json.loads(config_path.read_text()) | {
            "base_model_name_or_path": model_name,
            "revision": revision or None,
        }
        config_path.write_text(json.dumps(adapter_settings, indent=2) + "\n")
    return f"an adapter over {model} (--merge writes a whole model)"


def _dtype_of(settings: dict[str, Any]) -> str | None:
    """Return the dtype that a configuration names, in itself or in that of its text model; None if it names none."""
    return settings.get("dtype") or settings.get("torch_dtype") or (settings.get("text_config") or {}).get("dtype")


def _having(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration that says this dtype, also in those of its parts."""
    part_configs = {
        setting_name: _having(part_settings, dtype)
        for setting_name, part_settings in settings.items()
        # Models with several parts (text and vision) name the dtype in each part's configuration as well, and
        # transformers believes the inner one.
        if setting_name.endswith("_config") and "dtype" in (part_settings or {})
    }
    other_settings = {
        setting_name: setting_value for setting_name, setting_value in settings.items() if setting_name != "torch_dtype"
    }
    return other_settings | part_configs | {"dtype": dtype}
