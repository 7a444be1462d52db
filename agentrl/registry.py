"""Ids to entry points: environments, tools, sandbox backends, models, per-token columns, algorithms, orders of groups,
dialects of tool calls, ways of new weights to engines, trackers.

A package offers things under the entry-point groups `agentrl.environments`, `agentrl.tools`, `agentrl.sandboxes`,
`agentrl.models`, `agentrl.columns`, `agentrl.algorithms`, `agentrl.orders`,
`agentrl.tool_formats`, `agentrl.weight_transports`, `agentrl.trackers`; a program may also `register` at run time.
Nothing is imported before its first use.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.errors import UnknownIdError, UsageError, boundary

Kind = Literal[
    "environments",
    "tools",
    "sandboxes",
    "models",
    "columns",
    "algorithms",
    "orders",
    "tool_formats",
    "weight_transports",
    "trackers",
]
Target = str | Callable[..., Any]

_NAMED_IDS = 12  # at most so many known ids stand in an error
_registered: dict[tuple[Kind, str], Target] = {
    ("columns", "teacher"): "agentrl.tokens.columns:TEACHER",
    ("algorithms", "grpo"): "agentrl.algos.grpo:GRPO",
    ("algorithms", "ppo"): "agentrl.algos.ppo:PPO",
    ("algorithms", "gspo"): "agentrl.algos.gspo:GSPO",
    ("algorithms", "cispo"): "agentrl.algos.cispo:CISPO",
    ("algorithms", "sapo"): "agentrl.algos.sapo:SAPO",
    ("algorithms", "maxrl"): "agentrl.algos.grpo_variants:MaxRL",
    ("algorithms", "gigpo"): "agentrl.algos.gigpo:GiGPO",
    ("algorithms", "rloo"): "agentrl.algos.grpo_variants:RLOO",
    ("algorithms", "dr_grpo"): "agentrl.algos.grpo_variants:DrGRPO",
    ("algorithms", "dapo"): "agentrl.algos.grpo_variants:DAPO",
    ("algorithms", "distil"): "agentrl.algos.grpo_variants:Distil",
    ("algorithms", "reinforce++"): "agentrl.algos.reinforce:Reinforce",
    ("trackers", "mlflow"): "agentrl.run.callbacks.mlflow_tracker:MLflowTracker",
    ("trackers", "tensorboard"): "agentrl.run.callbacks.tensorboard:TensorBoard",
    ("trackers", "wandb"): "agentrl.run.callbacks.wandb_tracker:WandbTracker",
    ("weight_transports", "full"): "agentrl.engine.weight_sync.file_transport:FileTransport",
    ("weight_transports", "delta"): "agentrl.engine.weight_sync.delta_transport:DeltaTransport",
    ("weight_transports", "adapter"): "agentrl.engine.weight_sync.adapters:AdapterTransport",
    ("weight_transports", "nccl"): "agentrl.engine.weight_sync.gpu_transport:NcclTransport",
    ("weight_transports", "ipc"): "agentrl.engine.weight_sync.gpu_transport:IpcTransport",
}


def register(kind: Kind, id: str, target: Target) -> None:
    """Offer `target` (a callable, or `"module:attribute"` imported when first used) under `id`, for this process."""
    _registered[kind, id] = target


def ids(kind: Kind) -> list[str]:
    """All ids of a kind, registered here or offered by installed packages, sorted."""
    return sorted(
        _offered(kind).keys()
        | {registered_id for registered_kind, registered_id in _registered if registered_kind == kind}
    )


def resolve(kind: Kind, id: str) -> Callable[..., Any]:
    """The callable behind an id, or behind a reference `module:attribute` or `path/to/file.py:attribute`.

    Raises UnknownIdError naming the known ids, nearest first."""
    # Registrations of this process come first: a program that registers an id means its own, whatever is installed.
    if (kind, id) in _registered:
        registered_target = _registered[kind, id]
        return load_reference(registered_target) if isinstance(registered_target, str) else registered_target
    if id in _offered(kind):
        entry_point = _offered(kind)[id]
        return load_reference(f"{entry_point.module}:{entry_point.attr}")
    if ":" in id:
        return load_reference(id)
    registered_ids = ids(kind)
    known_ids = list(dict.fromkeys([*nearest(id, registered_ids), *registered_ids]))
    # More of them hide the one that was meant, and what to do.
    more_ids = f", … (agentrl list {kind} has all {len(known_ids)})" if len(known_ids) > _NAMED_IDS else ""
    listed_ids = ", ".join(known_ids[:_NAMED_IDS]) or "none"
    # An editable install takes changed code by itself, but not a changed pyproject.toml.
    hint = "if its package is new or has new entry points, pip install it again"
    raise UnknownIdError(f"no {kind} id {id!r} is registered; known: {listed_ids}{more_ids}; {hint}")


def nearest(id: str, known: list[str]) -> list[str]:
    """The few ids of `known` that are most similar to `id`."""
    return difflib.get_close_matches(id, known, n=3)


@functools.cache
def _offered(kind: Kind) -> dict[str, EntryPoint]:
    """The entry points of installed packages. Read once: every episode needs them, and a read takes over 1 ms."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=f"agentrl.{kind}")}


def load_reference(reference: str) -> Callable[..., Any]:
    """Import `module:attribute` or `path/to/file.py:attribute`. Raises UsageError if either half is missing, or the
    module cannot be imported."""
    module_reference, _, attribute = reference.rpartition(":")
    import_failure = f"cannot import {module_reference!r} of {reference!r}:"
    with boundary(UsageError, import_failure, place=True):
        try:
            loaded_module = (
                _module_from_file(Path(module_reference))
                if module_reference.endswith(".py")
                else importlib.import_module(module_reference)
            )
        except (ImportError, FileNotFoundError) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == module_reference
            correction = f" (for a file write path/to/{module_reference}.py:{attribute})" if is_missing else ""
            raise UsageError(f"{import_failure} {error}{correction}") from error
    referenced_object: Any = loaded_module
    for attribute_part in attribute.split("."):
        if not hasattr(referenced_object, attribute_part):
            raise UsageError(f"{module_reference!r} has no {attribute!r} (from {reference!r})")
        referenced_object = getattr(referenced_object, attribute_part)
    return cast("Callable[..., Any]", referenced_object)


def reference_of(function: Callable[..., Any]) -> str:
    """The reference under which another process can import a module-level `function`.

    Raises UsageError for lambdas, closures, methods and objects: another process cannot import them by name."""
    if not hasattr(function, "__qualname__"):
        raise UsageError(f"{function!r} is no function or class: give the reference of its name, 'module:name'")
    function_module = sys.modules.get(function.__module__)
    if "<" in function.__qualname__ or function_module is None:
        raise UsageError(f"{function.__qualname__!r} must be a function at module level: workers import it by name")
    # In another process `__main__` is another file, so the reference names the file.
    if function.__module__ == "__main__":
        if not getattr(function_module, "__file__", None):
            raise UsageError(f"{function.__qualname__!r} is defined interactively: put it into a file")
        return f"{Path(cast(str, function_module.__file__)).resolve()}:{function.__qualname__}"
    return f"{function.__module__}:{function.__qualname__}"


def _module_from_file(path: Path) -> Any:
    # With the path in it: two files of one name, in two folders, are two modules.
    module_name = f"agentrl_user_{path.stem}_{abs(hash(path.resolve())):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    loaded_module = importlib.util.module_from_spec(module_spec)
    # Before it runs, as an import does it: dataclasses and pickling look their module up there while it is still being
    # read.
    sys.modules[module_name] = loaded_module
    try:
        module_spec.loader.exec_module(loaded_module)
    except BaseException:
        # Half of a module must not be found by the next try, which would go on with what it has.
        del sys.modules[module_name]
        raise
    return loaded_module
