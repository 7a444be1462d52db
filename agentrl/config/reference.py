"""Every key of the run file with its default and its meaning, read from `agentrl.config` itself.

A key's meaning is the comment behind it there, so the code, this table and the documentation page always agree.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentrl import registry
from agentrl.algos.algorithm import Algorithm
from agentrl.config import run_config

_NUMBERS = (
    (r"Positive", "number above 0"),
    (r"Weight", "number from 0"),
    (r"Wait", 'number from 0, or `"always"`'),
    (r"Share", "number from 0 to 1"),
    (r"Count \| Literal\['auto'\]", 'integer from 1, or `"auto"`'),
    (r"Count", "integer from 1"),
    (r"Annotated\[int, Field\(ge=(\d+)\)\]", r"integer from \1"),
    (r"Annotated\[float, Field\(ge=0, allow_inf_nan=False\)\]", "number from 0"),
    (r"Annotated\[float, Field\(allow_inf_nan=False\)\]", "number"),
    (r"Annotated\[float, Field\(ge=0, le=1\)\]", "number from 0 to 1"),
    (r"Annotated\[float, Field\(ge=0, lt=1\)\]", "number from 0, below 1"),
    (r"Annotated\[float, Field\(gt=0, le=1\)\]", "number above 0, up to 1"),
    (r"Annotated\[str, .*\]", "text"),
    (r"list\[Annotated\[str, .*\]\]", "list of texts"),
    (r"list\[str\]", "list of texts"),
    (r"str \| list\[str\]", "text, or list of texts"),
    (r"list\[Gpus\]", "list of lists of GPUs"),
    (r"Gpus", "list of GPUs"),
    (r"tuple\[float, float\]", "two numbers"),
    (r"tuple\[int, int\]", "two integers"),
    (r"list\[Count\]", "list of integers from 1"),
    (r"dict\[.*\]", "table"),
    (r"SerializeAsAny\[Algorithm\]", "table"),
    (r"bool", "true or false"),
    (r"str", "text"),
    (r"int", "integer"),
    (r"float", "number"),
)


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


def page() -> str:
    """The table as a documentation page."""
    lines = [
        "# Run file",
        "",
        "For those who write a run file: every key, its default and what it means. Made by `agentrl keys --page`:",
        "the meanings are the comments of files in `agentrl/config/`, and for `algo` of those in `agentrl/algos/`;",
        "some begin with the kinds they are of.",
        "On the command line a key is `--set rollout.group_size=16`; `[]` marks a table that may stand several times",
        "(`[[eval.sets]]`). A value that may be `false` is none then: off, or what its meaning calls the default. So a",
        "run file undoes a default, and `--set` undoes what the run file says. For a number `off` says the same.",
        "",
        "**A run file of somebody else is code.** It names Python modules and files (`env.id`, `env.reward`, rewards,",
        "algorithms), and every command that reads it may import them, as your user, outside of any sandbox. So is the",
        "folder of a run, whose `config.json` says the same. Read them as you read a program before you start it.",
        "",
        "| key | value | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for key in all_keys():
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    source = inspect.getsource(section)
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "pyright" not in token.string
    }
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
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
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)  # of a value in brackets, several
            meaning = next((comments[line] for line in lines if line in comments), "")
            yield Key(prefix + name, _kind(ast.unparse(node.annotation)), _default(field), meaning)


def _algorithms(prefix: str) -> Iterator[Key]:
    """The keys of all algorithms, then the others, whose meaning begins with the kinds that have them."""
    kinds = {kind: run_config.algorithm(kind) for kind in registry.ids("algorithms")}
    names = ", ".join(f"`{json.dumps(kind)}`" for kind in kinds)
    for key in _of(Algorithm, prefix):
        yield replace(key, kind=names, default='"grpo"') if key.name == f"{prefix}kind" else key
    kinds_of: dict[Key, list[str]] = {}
    for kind, found in kinds.items():
        bases = [base for base in reversed(found.__mro__) if issubclass(base, Algorithm) and base is not Algorithm]
        apart = {f"{prefix}{name}" for name in {"kind", *found.unused}}
        own = {key.name: key for base in bases for key in _of(base, prefix) if key.name not in apart}
        for key in own.values():
            default = _default(found.model_fields[key.name.removeprefix(prefix)])
            kinds_of.setdefault(replace(key, default=default), []).append(kind)
    for key, having in kinds_of.items():
        others = [f"`{kind}`" for kind in kinds if kind not in having]
        named = ", ".join(f"`{kind}`" for kind in having)
        if len(others) < len(having):
            named = f"all but {', '.join(others)}" if others else "all"
        yield replace(key, meaning=f"{named}: {key.meaning}")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kind(annotation: str) -> str:
    """An annotation in words."""
    annotation = re.sub(r"^Annotated\[(.*), Field\(strict=False\)\]$", r"\1", annotation)  # of TOML's lists as tuples
    text = annotation.removesuffix(" | None")
    if text != annotation:
        return f"{_kind(text)}, or `false`"
    if match := re.fullmatch(r"Literal\[(.*)\]", text):
        return ", ".join(f"`{json.dumps(value)}`" for value in ast.literal_eval(f"({match[1]},)"))
    if match := re.fullmatch(r"(bool) \| (Literal\[.*\])", text):
        return f"{_kind(match[2])}, {_kind(match[1])}"
    for pattern, words in _NUMBERS:
        if match := re.fullmatch(pattern, text):
            return match.expand(words)
    return text


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else json.dumps(default)
