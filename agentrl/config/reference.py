"""Every key of the run file with its default and its meaning, read from `agentrl.config` itself.

A key's meaning is the docstring below it there, which an editor shows too, so the code, this table and the
documentation page always agree. pydantic could read these docstrings itself (its setting use_attribute_docstrings), but
parses the source of every section then, whenever a process starts.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentrl import registry
from agentrl.algos.algorithm import Algorithm
from agentrl.config import run_config

_WORDS = {bool: "true or false", str: "text", int: "integer", float: "number"}
_SEVERAL = {"text": "texts", "integer": "integers", "number": "numbers", "list": "lists", "table": "tables"}
_COUNTS = {2: "two", 3: "three"}

QUESTIONS = {
    "What is trained, and on which tasks?": (
        "model",
        "env.id",
        "env.kwargs",
        "tasks[].rows",
        "algo.kind",
        "train.lora_rank",
    ),
    "What earns a reward?": (
        "env.reward",
        "rewards[].source",
        "rewards[].kind",
        "algo.process_weight",
        "algo.kl_weight",
    ),
    "How long may an episode be?": (
        "rollout.max_turns",
        "rollout.max_tokens_per_turn",
        "rollout.max_context",
        "rollout.step_deadline_s",
        "rollout.temperature",
    ),
    "How much does a step learn from?": (
        "train.steps",
        "train.lr",
        "rollout.group_size",
        "buffer.groups_per_step",
        "buffer.max_lag",
    ),
    "Where does it run, and with how much memory?": (
        "engine.kind",
        "engine.replicas",
        "rollout.max_running",
        "train.device",
        "train.dtype",
        "train.tokens_per_batch",
    ),
    "How is it measured, and what is kept?": (
        "eval.every",
        "eval.sets[].name",
        "eval.sets[].n",
        "train.checkpoint_every",
        "train.keep_checkpoints",
    ),
}
"""The keys that most run files set, by the question that each answers."""


@dataclass(frozen=True, slots=True)
class Key:
    """`name` is dotted, with `[]` after a table that may be repeated; `default` is in TOML notation, or "required"."""

    name: str
    kind: str
    default: str
    meaning: str


def all_keys() -> list[Key]:
    """All keys, in the order of the code."""
    return list(_of(run_config.RunConfig, ""))


def first_keys() -> dict[str, list[Key]]:
    """The keys that matter first, by the question that they answer."""
    keys = {key.name: key for key in all_keys()}
    return {question: [keys[name] for name in names] for question, names in QUESTIONS.items()}


def page() -> str:
    """The table as a documentation page."""
    lines = [
        "# Run file",
        "",
        "For those who write a run file: every key, its default and what it means. Made by `agentrl keys --page`:",
        "the meanings are the docstrings of files in `agentrl/config/`, and for `algo` of those in `agentrl/algos/`.",
        "A key of `algo` that not every algorithm has begins with those that do; where some differ in default or",
        "meaning, their names stand before their own: `0.2; cispo 1.0`.",
        "On the command line a key is `--set rollout.group_size=16`; `[]` marks a table that may stand several times",
        "(`[[eval.sets]]`). A value that may be `false` is none then: off, or what its meaning calls the default. So a",
        "run file undoes a default, and `--set` undoes what the run file says. For a number `off` says the same.",
        "",
        "**A run file of somebody else is code.** It names Python modules and files (`env.id`, `env.reward`, rewards,",
        "algorithms), and every command that reads it may import them, as your user, outside of any sandbox. So is the",
        "folder of a run, whose `config.json` says the same. Read them as you read a program before you start it.",
        "",
        "## The keys that matter first",
        "",
        "Most run files set no others. `agentrl keys` prints these, `agentrl keys --all` every one.",
        "",
    ]
    for question, keys in first_keys().items():
        lines += [f"### {question}", "", *_table(keys), ""]
    return "\n".join([*lines, "## Every key", "", *_table(all_keys())]) + "\n"


def _table(keys: Sequence[Key]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for key in keys:
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    kinds = get_type_hints(section, include_extras=True)
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    # Python drops a string that follows a field, so it is read from the source. Types are read from the class: matching
    # their text was tried, and showed Python's words to users for each type that no pattern knew.
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id not in section.model_fields:
            continue
        name, field = node.target.id, section.model_fields[node.target.id]
        inner = _section_of(field.annotation)
        if inner is Algorithm:
            yield from _algorithms(f"{prefix}{name}.")
        elif inner is not None:
            several = "[]" if "list" in ast.unparse(node.annotation) else ""
            yield from _of(inner, f"{prefix}{name}{several}.")
        else:
            yield Key(prefix + name, _kind(kinds[name]), _default(field), _docstring(below))


def _docstring(statement: ast.stmt | None) -> str:
    """The text of a string that stands alone, on one line; "" for any other statement."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
        case _:
            return ""


def _algorithms(prefix: str) -> Iterator[Key]:
    """The keys of all algorithms, each once: the default and meaning of most kinds, and where others differ."""
    kinds = {kind: run_config.algorithm(kind) for kind in registry.ids("algorithms")}
    names = ", ".join(f"`{json.dumps(kind)}`" for kind in kinds)
    kind_key = next(key for key in _of(Algorithm, prefix) if key.name == f"{prefix}kind")
    yield replace(kind_key, kind=names, default='"grpo"')
    of_kind: dict[str, dict[str, Key]] = {}
    for kind in sorted(kinds, key=lambda kind: len(kinds[kind].unused)):  # so a key stays beside its neighbours
        for key in _of_algorithm(kinds[kind], prefix):
            of_kind.setdefault(key.name, {})[kind] = key
    for name, keys in of_kind.items():
        default, *other_defaults = _by_commonness({kind: key.default for kind, key in keys.items()})
        value, *other_values = _by_commonness({kind: key.kind for kind, key in keys.items()})
        meaning, *other_meanings = _by_commonness({kind: key.meaning for kind, key in keys.items()})
        values = [value[0], *(f"{_ticked(having)}: {text}" for text, having in other_values)]
        defaults = [default[0], *(f"{', '.join(having)} {text}" for text, having in other_defaults)]
        meanings = [meaning[0], *(f"{_ticked(having)}: {text}" for text, having in other_meanings)]
        having_it = _having([kind for kind in kinds if kind in keys], list(kinds))
        yield Key(name, "; ".join(values), "; ".join(defaults), having_it + " ".join(meanings))


def _of_algorithm(algorithm: type[Algorithm], prefix: str) -> list[Key]:
    """The keys of an algorithm without its kind. A class that only gives a setting another default inherits the
    meaning, which stands in one place then."""
    keys: dict[str, Key] = {}
    for base in reversed(algorithm.__mro__):
        if issubclass(base, Algorithm):
            for key in _of(base, prefix):
                keys[key.name] = key if key.meaning else replace(key, meaning=keys.get(key.name, key).meaning)
    apart = {f"{prefix}{name}" for name in {"kind", *algorithm.unused}}
    fields = algorithm.model_fields
    return [
        replace(key, default=_default(fields[key.name.removeprefix(prefix)]))
        for key in keys.values()
        if key.name not in apart
    ]


def _by_commonness(texts: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Different texts with the kinds that have them, the commonest text first, then by the kinds."""
    kinds_of: dict[str, list[str]] = {}
    for kind, text in texts.items():
        kinds_of.setdefault(text, []).append(kind)
    return sorted(kinds_of.items(), key=lambda entry: (-len(entry[1]), entry[1]))


def _having(having: Sequence[str], kinds: Sequence[str]) -> str:
    """The beginning of a meaning: the kinds that have the key, or those that lack it if they are fewer."""
    lacking = [kind for kind in kinds if kind not in having]
    if not lacking:
        return ""
    return f"all but {_ticked(lacking)}: " if len(lacking) < len(having) else f"{_ticked(having)}: "


def _ticked(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kind(annotation: Any) -> str:
    """The values that an annotation takes, in words."""
    kind, limits = _bare(annotation)
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in parts)
    if get_origin(kind) in (Union, UnionType):
        words = [_kind(Annotated[part, *limits] if limits else part) for part in parts if part is not NoneType]
        return ", or ".join([*words, "`false`"] if NoneType in parts else words)
    if get_origin(kind) is list:
        return f"list of {_several(_kind(parts[0]))}"
    if get_origin(kind) is tuple:
        return f"{_COUNTS[len(parts)]} {_several(_kind(parts[0]))}"
    if kind not in _WORDS:
        return "table"
    return "".join([_WORDS[kind], *_range(limits)])


def _bare(annotation: Any) -> tuple[Any, list[Any]]:
    """A type without its constraints, and these."""
    if get_origin(annotation) is not Annotated:
        return annotation, []
    kind, *fields = get_args(annotation)
    return kind, [limit for field in fields for limit in getattr(field, "metadata", [field])]


def _range(limits: Sequence[Any]) -> Iterator[str]:
    """The least and the greatest value, in words."""
    for limit in limits:
        if isinstance(limit, Ge):
            yield f" from {limit.ge}"
        elif isinstance(limit, Gt):
            yield f" above {limit.gt}"
        elif isinstance(limit, Le):
            yield f" to {limit.le}" if any(isinstance(other, Ge) for other in limits) else f", up to {limit.le}"
        elif isinstance(limit, Lt):
            yield f", below {limit.lt}"


def _several(words: str) -> str:
    first, _, rest = words.partition(" ")
    return f"{_SEVERAL.get(first, first)} {rest}".rstrip()


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else json.dumps(default)
