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
from itertools import groupby
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
    key_by_name = {file_key.name: file_key for file_key in all_keys()}
    return {question: [key_by_name[key_name] for key_name in key_names] for question, key_names in QUESTIONS.items()}


def page() -> str:
    """The keys as a documentation page."""
    page_lines = [
        "# Run file",
        "",
        "For those who write a run file: every key, its values, its default and its meaning. `agentrl keys --page`",
        "makes this page from the docstrings of the settings.",
        "",
        "On the command line a key is `--set rollout.group_size=16`; `[]` marks a table that may stand several times",
        "(`[[eval.sets]]`). A value that may be `false` is switched off by it, or set back to what its meaning names",
        "for a run file without it; for a number `off` does the same.",
        "",
        "**A run file of somebody else is code.** It names Python modules and files (`env.id`, `env.reward`, rewards,",
        "algorithms), and every command that reads it may import them, as your user, outside of any sandbox. So is the",
        "folder of a run, whose `config.json` says the same. Read them as you read a program before you start it.",
        "",
        "## The keys that matter first",
        "",
        "Most run files set no others. `agentrl keys` prints them with their meanings.",
        "",
    ]
    for question, keys in first_keys().items():
        page_lines.append(f"- {question} " + ", ".join(f"`{key.name}`" for key in keys))
    for table, keys_of_table in groupby(all_keys(), key=_table_of):
        page_lines += [
            "",
            f"## {table}",
            "",
            *([_ALGO, ""] if table == "`[algo]`" else []),
            *map(_entry, keys_of_table),
        ]
    return "\n".join(page_lines) + "\n"


_ALGO = (
    "The meaning of a key that not every algorithm has begins with those that do. Where algorithms differ in default\n"
    "or meaning, their names stand before it: `0.2; cispo 1.0`."
)


def _table_of(key: Key) -> str:
    """The heading of the keys of one table of the run file."""
    table, dot, _ = key.name.partition(".")
    if not dot:
        return "`[trackers]`" if table == "trackers" else "Before all tables"
    return f"`[[{table[:-2]}]]`" if table.endswith("[]") else f"`[{table}]`"


def _entry(key: Key) -> str:
    default = key.default if key.default in ("", "required") else f"default `{key.default}`"
    return f"- `{key.name}` ({', '.join(filter(None, (key.kind, default)))}): {key.meaning}"


def _of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    type_hints = get_type_hints(section, include_extras=True)
    (class_tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(class_tree, ast.ClassDef)
    # Python drops a string that follows a field, so it is read from the source. Types are read from the class: matching
    # their text was tried, and showed Python's words to users for each type that no pattern knew.
    for statement, next_statement in zip(class_tree.body, [*class_tree.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if statement.target.id not in section.model_fields:
            continue
        field_name, field_info = statement.target.id, section.model_fields[statement.target.id]
        inner_section = _section_of(field_info.annotation)
        if inner_section is Algorithm:
            yield from _algorithms(f"{prefix}{field_name}.")
        elif inner_section is not None:
            list_mark = "[]" if "list" in ast.unparse(statement.annotation) else ""
            yield from _of(inner_section, f"{prefix}{field_name}{list_mark}.")
        else:
            yield Key(
                prefix + field_name, _kind(type_hints[field_name]), _default(field_info), _docstring(next_statement)
            )


def _docstring(statement: ast.stmt | None) -> str:
    """The text of a string that stands alone, on one line; "" for any other statement."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(string_text))):
            return " ".join(string_text.split())
        case _:
            return ""


def _algorithms(prefix: str) -> Iterator[Key]:
    """The keys of all algorithms, each once: the default and meaning of most kinds, and where others differ."""
    class_by_kind = {kind_name: run_config.algorithm(kind_name) for kind_name in registry.ids("algorithms")}
    quoted_kinds = ", ".join(f"`{json.dumps(kind_name)}`" for kind_name in class_by_kind)
    kind_key = next(file_key for file_key in _of(Algorithm, prefix) if file_key.name == f"{prefix}kind")
    yield replace(kind_key, kind=quoted_kinds, default='"grpo"')
    keys_by_name: dict[str, dict[str, Key]] = {}
    # The kind that uses most comes first, so a key stays beside its neighbours.
    for kind_name in sorted(class_by_kind, key=lambda kind: len(class_by_kind[kind].unused)):
        for file_key in _of_algorithm(class_by_kind[kind_name], prefix):
            keys_by_name.setdefault(file_key.name, {})[kind_name] = file_key
    for key_name, key_by_kind in keys_by_name.items():
        common_default, *other_defaults = _by_commonness(
            {kind_name: file_key.default for kind_name, file_key in key_by_kind.items()}
        )
        common_value, *other_values = _by_commonness(
            {kind_name: file_key.kind for kind_name, file_key in key_by_kind.items()}
        )
        common_meaning, *other_meanings = _by_commonness(
            {kind_name: file_key.meaning for kind_name, file_key in key_by_kind.items()}
        )
        value_texts = [
            common_value[0],
            *(f"{_ticked(other_kinds)}: {other_text}" for other_text, other_kinds in other_values),
        ]
        default_texts = [
            common_default[0],
            *(f"{', '.join(other_kinds)} {other_text}" for other_text, other_kinds in other_defaults),
        ]
        meaning_texts = [
            common_meaning[0],
            *(f"{_ticked(other_kinds)}: {other_text}" for other_text, other_kinds in other_meanings),
        ]
        having_it = _having([kind_name for kind_name in class_by_kind if kind_name in key_by_kind], list(class_by_kind))
        yield Key(key_name, "; ".join(value_texts), "; ".join(default_texts), having_it + " ".join(meaning_texts))


def _of_algorithm(algorithm: type[Algorithm], prefix: str) -> list[Key]:
    """The keys of an algorithm without its kind. A class that only gives a setting another default inherits the
    meaning, which stands in one place then."""
    key_by_name: dict[str, Key] = {}
    for base_class in reversed(algorithm.__mro__):
        if issubclass(base_class, Algorithm):
            for file_key in _of(base_class, prefix):
                key_by_name[file_key.name] = (
                    file_key
                    if file_key.meaning
                    else replace(file_key, meaning=key_by_name.get(file_key.name, file_key).meaning)
                )
    left_out_keys = {f"{prefix}{setting_name}" for setting_name in {"kind", *algorithm.unused}}
    model_fields = algorithm.model_fields
    return [
        replace(file_key, default=_default(model_fields[file_key.name.removeprefix(prefix)]))
        for file_key in key_by_name.values()
        if file_key.name not in left_out_keys
    ]


def _by_commonness(texts: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Different texts with the kinds that have them, the commonest text first, then by the kinds."""
    kinds_of: dict[str, list[str]] = {}
    for kind_name, kind_text in texts.items():
        kinds_of.setdefault(kind_text, []).append(kind_name)
    return sorted(kinds_of.items(), key=lambda entry: (-len(entry[1]), entry[1]))


def _having(having: Sequence[str], kinds: Sequence[str]) -> str:
    """The beginning of a meaning: the kinds that have the key, or those that lack it if they are fewer."""
    lacking_kinds = [kind_name for kind_name in kinds if kind_name not in having]
    if not lacking_kinds:
        return ""
    return f"all but {_ticked(lacking_kinds)}: " if len(lacking_kinds) < len(having) else f"{_ticked(having)}: "


def _ticked(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind_name}`" for kind_name in kinds)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for possible_class in (annotation, *get_args(annotation)):
        if isinstance(possible_class, type) and issubclass(possible_class, BaseModel):
            return possible_class
    return None


def _kind(annotation: Any) -> str:
    """The values that an annotation takes, in words."""
    bare_type, constraints = _bare(annotation)
    type_parts = get_args(bare_type)
    if get_origin(bare_type) is Literal:
        return ", ".join(f"`{json.dumps(literal_value)}`" for literal_value in type_parts)
    if get_origin(bare_type) in (Union, UnionType):
        part_words = [
            _kind(Annotated[type_part, *constraints] if constraints else type_part)
            for type_part in type_parts
            if type_part is not NoneType
        ]
        return ", or ".join([*part_words, "`false`"] if NoneType in type_parts else part_words)
    if get_origin(bare_type) is list:
        return f"list of {_several(_kind(type_parts[0]))}"
    if get_origin(bare_type) is tuple:
        return f"{_COUNTS[len(type_parts)]} {_several(_kind(type_parts[0]))}"
    if bare_type not in _WORDS:
        return "table"
    return "".join([_WORDS[bare_type], *_range(constraints)])


def _bare(annotation: Any) -> tuple[Any, list[Any]]:
    """A type without its constraints, and these."""
    if get_origin(annotation) is not Annotated:
        return annotation, []
    bare_type, *constraint_fields = get_args(annotation)
    return bare_type, [
        constraint
        for constraint_field in constraint_fields
        for constraint in getattr(constraint_field, "metadata", [constraint_field])
    ]


def _range(limits: Sequence[Any]) -> Iterator[str]:
    """The least and the greatest value, in words."""
    for constraint in limits:
        if isinstance(constraint, Ge):
            yield f" from {constraint.ge}"
        elif isinstance(constraint, Gt):
            yield f" above {constraint.gt}"
        elif isinstance(constraint, Le):
            yield (
                f" to {constraint.le}"
                if any(isinstance(other_limit, Ge) for other_limit in limits)
                else f", up to {constraint.le}"
            )
        elif isinstance(constraint, Lt):
            yield f", below {constraint.lt}"


def _several(words: str) -> str:
    first_word, _, other_words = words.partition(" ")
    return f"{_SEVERAL.get(first_word, first_word)} {other_words}".rstrip()


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else json.dumps(default)
