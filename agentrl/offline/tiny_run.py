"""A run file made for GPUs, on this CPU: `agentrl train FILE --tiny` and `agentrl train FILE --small`.

`--small` learns, with a real pretrained language model of 135 M parameters in the model's place: see `on_cpu`.

`--tiny` takes two steps with a random model of the same architecture. Everything else is real: environment, sandbox,
rewards, store, learner, engine, sync and canary, algorithm, adapter. Only what a laptop without a GPU cannot do is made
small, see `shrunk`. Beside the run's own rewards each turn has a random one: a random model earns nothing, and steps
without signal would change no weights. It shows that a run file works, not that it learns.

Other models that the file names (of roles, teachers) are the same small one: they have to have its tokens.
What is typed with `--set` wins over what both make small; of a model set with `--tiny` only the architecture counts.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agentrl.config import RunConfig, apply_override, parse
from agentrl.errors import ModelError
from agentrl.host.cores import multiplies_bfloat16
from agentrl.host.quick_imports import quick_imports
from agentrl.learner.checkpoints.model_files import copy_description
from agentrl.models import smollm2
from agentrl.models.resolve import model_dir
from agentrl.records import Trajectory

_STAND_IN = "agentrl/tiny-coder"  # its tokenizer, byte-level: it takes every text
_CONTEXT, _TURN, _TURNS, _MEMBERS, _STEPS = 4096, 16, 2, 2, 2
# Each name is set only where the architecture's configuration has it. The head dimension stays even and above 16, as
# rotary embeddings and attention kernels need.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": _CONTEXT,
    "max_window_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_ELSEWHERE = (  # settings of engines that are somewhere else, or that a CPU has none of
    *("urls", "vllm", "replicas", "api_key_env", "sync", "hedge_after", "colocated", "weights_url"),
)
# A dry run must not download a configuration of a model of hundreds of gigabytes, nor fail where the hub is out of
# reach. For the common families the name is enough.
_FAMILIES = (  # models of the hub whose architecture follows from their name, without a network
    (r"Qwen/Qwen3-\d+B-A\d+B.*", "qwen3_moe"),
    (r"Qwen/Qwen3-[\d.]+B.*", "qwen3"),
    (r"Qwen/Qwen2\.5-.*", "qwen2"),
    (r"meta-llama/.*", "llama"),
)


_MADE_SMALL = ("rollout", "engine", "train", "buffer", "eval")  # tables in which a setting may have been replaced


def shrunk(config: RunConfig, folder: Path, settings: Sequence[str] = ()) -> RunConfig:
    """The run with a random model made in `folder`, on one CPU: two steps of one group, as small as its algorithms
    allow, short turns, engines of that model, processes and store on this machine, no held-out sets. `settings`,
    `a.b=c`, are kept nevertheless. Raises ModelError for a model whose architecture is unknown."""
    is_mixture = _make(config.model, folder)
    # The least that the algorithm takes: group baselines of one member are zero, and a step would change nothing.
    member_count = max(_MEMBERS, *(algorithm.least_members for algorithm in config.algorithms.values()))
    document = _on_one_cpu(config, folder, str(folder), members=member_count, groups=1, mixture=is_mixture)
    document["rollout"] |= {"max_turns": _TURNS, "max_tokens_per_turn": _TURN, "max_context": _CONTEXT}
    # The embedded engine has no mixtures of experts.
    document["engine"] |= {"kind": "vllm" if is_mixture else "embedded", "max_batch": 8, "kv_cache_mb": 64}
    document["train"] |= {"steps": _STEPS, "tokens_per_batch": _CONTEXT}
    noise_source = {"source": "tiny", "kind": "callable", "call": f"{__name__}:noise"}
    # A random model solves nothing, so all members of a group would have the same reward and every advantage would be
    # zero: the canary and the sync of weights would then be tested with weights that did not change.
    document["rewards"] = [*map(_short, document.get("rewards", [])), noise_source]
    document["eval"] = {**document.get("eval", {}), "every": 0, "sets": []}
    return _with(document, settings, _MADE_SMALL)


def on_cpu(config: RunConfig, settings: Sequence[str] = ()) -> RunConfig:
    """The run with SmolLM2-135M in the place of all its models, on two cores: groups of at most eight, eight a step,
    turns of at most 64 tokens, contexts of at most 1,024, the learning rate of `examples/laptop_llm.toml`, held-out
    sets of at most 64 episodes, bfloat16 where this CPU has instructions for it. Environment, rewards and algorithm are
    the file's own. `settings`, `a.b=c`, are kept nevertheless: `model=runs/warm` begins with a warm start. Raises
    ModelError with the command to type if the model's packages are missing."""
    model_folder = model_dir(smollm2.ID)
    member_count = max(
        min(config.rollout.group_size, 8), *(algorithm.least_members for algorithm in config.algorithms.values())
    )
    document = _on_one_cpu(config, model_folder, smollm2.ID, members=member_count, groups=8, mixture=False)
    rollout_section = document["rollout"]
    rollout_section["max_running"] = 64
    for limit_name, upper_limit in (("max_tokens_per_turn", 64), ("max_context", 1024)):
        rollout_section[limit_name] = min(upper_limit, getattr(config.rollout, limit_name))
    cpu_dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    document["engine"] |= {"kind": "embedded", "max_batch": 64, "kv_cache_mb": 1024, "dtype": cpu_dtype}
    document["train"] |= {"lr": 1e-5, "tokens_per_batch": 4096, "dtype": cpu_dtype}
    measured = document.get("eval", {})
    if "n_during" in measured:
        measured["n_during"] = min(32, config.eval.n_during)
    for each_set in measured.get("sets", []):
        each_set |= {"n": min(64, each_set["n"])} if "n" in each_set else {}
    return _with(document, settings, ("model", *_MADE_SMALL))


def _with(document: dict[str, Any], settings: Sequence[str], tables: Sequence[str]) -> RunConfig:
    for setting in settings:
        if re.split(r"[.=]", setting, maxsplit=1)[0].strip() in tables:
            apply_override(document, setting)
    return parse(document)


def _on_one_cpu(
    config: RunConfig, folder: Path, model: str, *, members: int, groups: int, mixture: bool
) -> dict[str, Any]:
    """The settings of a run with one model, whose files are in `folder`: processes and store on this machine, without
    what needs a GPU, `groups` of `members` a step."""
    document = _of_one_model(config, model)
    rollout_section, engine_section, train_section = (
        dict(document.get(key_name, {})) for key_name in ("rollout", "engine", "train")
    )
    rollout_section |= {"workers": 1, "group_size": members, "max_running": 2 * members}
    if template := rollout_section.pop("template", None):
        rollout_section["template"] = _known(template, folder)
    if "pivot" in rollout_section:
        rollout_section["pivot"] |= {"k": members}
    for key_name in _ELSEWHERE:
        engine_section.pop(key_name, None)
    if not mixture:
        engine_section.pop("routed_experts", None)
    engine_section |= {"dtype": "float32"}
    train_section |= {"device": "cpu", "dtype": "float32", "compile": False}
    for key_name in ("parallel", "weights", "attention"):
        train_section.pop(key_name, None)
    document.pop("cluster", None)
    buffer_section = {**document.get("buffer", {}), "groups_per_step": groups}
    if isinstance(buffer_section.get("close"), int):
        buffer_section["close"] = min(buffer_section["close"], members)
    return document | {
        "rollout": rollout_section,
        "engine": engine_section,
        "train": train_section,
        "buffer": buffer_section,
    }


def _of_one_model(config: RunConfig, model: str) -> dict[str, Any]:
    """The settings of a run file with one model in the place of all that it names."""
    # Without what was not set: a default is the program's own answer to this machine and model, and a dump with all
    # of them would pin the answers for the large one.
    document = config.model_dump(mode="json", exclude_unset=True)
    for algo_field, algorithm in config.algorithms.items():
        algo_table: Any = document
        for table_key in algo_field.split("."):
            algo_table = algo_table[int(table_key)] if table_key.isdigit() else algo_table.setdefault(table_key, {})
        algo_table |= {
            slot_name: model for slot_name, frozen_model in algorithm.slots.frozen.items() if frozen_model is not None
        }
    for role in document.get("roles", []):
        role |= {"model": model} if role.get("model") else {}
    if config.rollout.roles:
        other_models = config.rollout.frozen_models() - {"frozen"}
        played_roles = {
            role: model if player in other_models else player for role, player in config.rollout.roles.items()
        }
        document["rollout"]["roles"] = played_roles
    return document | {"model": model}


def _short(source: dict[str, Any]) -> dict[str, Any]:
    """A source of rewards for short turns."""
    return source | {"margin_tokens": 1} if source["kind"] == "overlong" else source


def noise(trajectory: Trajectory) -> float:
    """Something from 0 to 1 that its sampled tokens decide."""
    sampled_tokens = [played_turn.token_ids for played_turn in trajectory.turns]
    # From the tokens, not from a clock or a generator: played again, the same episode gets the same reward, and one
    # dry run can be compared with another.
    return random.Random(repr(sampled_tokens)).random()


def _known(template: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments that the stand-in's chat template reads too: none, unless the model came with its own."""
    settings_path = folder / "tokenizer_config.json"
    template_text = str(json.loads(settings_path.read_text()).get("chat_template")) if settings_path.is_file() else ""
    template_text += "".join(template_file.read_text() for template_file in folder.rglob("*.jinja"))
    # An argument that a template does not read is an error in a real run, rightly. The stand-in has another template,
    # and this error would be about the stand-in.
    return {
        argument_name: argument_value
        for argument_name, argument_value in template.items()
        if re.search(rf"\b{re.escape(argument_name)}\b", template_text)
    }


@quick_imports()
def _make(model: str, folder: Path) -> bool:
    """Save a random model of the architecture of `model`; whether it is a mixture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # The file is written at once, and its bar would be the first line of the command.
    cast(Any, logging).disable_progress_bar()
    family = next((model_kind for name_pattern, model_kind in _FAMILIES if re.fullmatch(name_pattern, model)), None)
    source_folder = model_dir(_STAND_IN if family else model)
    folder.mkdir(parents=True, exist_ok=True)
    copy_description(source_folder, folder, but={"config.json"})
    source_config: dict[str, Any] = json.loads((source_folder / "config.json").read_text())
    token_settings = {
        config_key: source_config.get(config_key)
        for config_key in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")
    }
    model_kind = family or str(source_config.get("model_type"))
    try:
        default_config = cast(Any, AutoConfig).for_model(model_kind)
        tiny_sizes = {
            config_key: size_value for config_key, size_value in _SIZES.items() if hasattr(default_config, config_key)
        }
        # The vocabulary and the special tokens stay those of the tokenizer that is used, or ids beyond the table
        # would be looked up.
        tiny_config: Any = cast(Any, AutoConfig).for_model(
            model_kind, **tiny_sizes, **token_settings, tie_word_embeddings=True
        )
        # The same weights each time, so that a dry run that fails can be repeated.
        cast(Any, torch).manual_seed(0)
        random_model: Any = cast(Any, AutoModelForCausalLM).from_config(tiny_config, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model}: no tiny model of its architecture {model_kind!r} can be made: {error}") from error
    random_model.save_pretrained(folder)
    if (source_folder / "generation_config.json").is_file():
        shutil.copyfile(source_folder / "generation_config.json", folder / "generation_config.json")
    return bool(tiny_sizes.get("num_experts") or tiny_sizes.get("num_local_experts"))
