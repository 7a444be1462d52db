"""The run file of a data set and reward functions, which `Trainer` writes beside the run's folder.

runs/run.toml            what `agentrl train` reads again
runs/run.train.jsonl     the rows, and `runs/run.eval.jsonl` those that are held out
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agentrl.env.dataset_env import ID
from agentrl.errors import UsageError
from agentrl.run.dataset.notebook import reference_of

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file or `hf:NAME:SPLIT`; or rows, as a list or a data set of Hugging Face's `datasets`."""


Rewards = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]
"""Reward functions, or their references; one may stand alone."""


def document_of(
    out: Path,
    dataset: Rows,
    reward_funcs: Rewards,
    *,
    eval_dataset: Rows | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The sections `env`, `tasks` and `eval` laid under those that are `given`; files of rows stand beside `out`.
    Raises UsageError for rows that JSON cannot carry, and for functions that another process cannot import."""
    functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else reward_funcs
    rewards = [each if isinstance(each, str) else reference_of(each, out) for each in functions]
    env = dict(cast("Mapping[str, Any]", given.get("env", {})))
    kwargs = {"rewards": rewards, **env.get("kwargs", {})}
    document = {**given, "env": {**env, "id": ID, "kwargs": kwargs}}
    if "tasks" not in given:
        document["tasks"] = [{"rows": _file(dataset, out, "train")}]
    if eval_dataset is not None:
        held_out, size = _file(eval_dataset, out, "eval"), _size(eval_dataset)
        evaluation = dict(cast("Mapping[str, Any]", given.get("eval", {})))
        one = {"name": "held_out", "kwargs": {"rows": held_out}, "first_seed": 0, **({"n": size} if size else {})}
        document["eval"] = {**evaluation, "sets": [one, *evaluation.get("sets", [])]}
    return document


def _size(rows: Rows) -> int | None:
    return None if isinstance(rows, str | Path) else len(cast("Sequence[Any]", rows))


def _file(rows: Rows, out: Path, kind: str) -> str:
    if isinstance(rows, str | Path):
        return str(rows) if str(rows).startswith("hf:") else str(Path(rows).resolve())
    file = out.with_name(f"{out.name}.{kind}.jsonl")
    lines: list[str] = []
    for at, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"row {at} of the data set is nothing that JSON can carry: {error}") from error
    if not lines:
        raise UsageError("the data set has no rows: give one with at least one")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file.resolve())


def write(document: Mapping[str, Any], file: Path) -> None:
    """The document as a run file. TOML has no null: what is None is left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in document.items() if value is not None}
    plain = [f"{key} = {_toml(value)}" for key, value in values.items() if not _is_table(value)]
    tables: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            tables += ["", f"[{key}]", *_lines(cast("dict[str, Any]", value))]
        elif _is_table(value):
            for each in cast("list[dict[str, Any]]", value):
                tables += ["", f"[[{key}]]", *_lines(each)]
    file.write_text("\n".join([*plain, *tables]) + "\n", encoding="utf-8")


def _is_table(value: Any) -> bool:
    items = cast("list[Any]", value)
    return isinstance(value, dict) or (isinstance(value, list) and bool(items) and isinstance(items[0], dict))


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        inner = ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in table.items() if each is not None)
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in cast('Sequence[Any]', value))}]"
    # TOML's texts are JSON's, but that it knows no pairs of surrogates, and no DEL as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
