"""The run file of a data set and reward functions, which `Trainer` writes beside the run's folder.

    runs/run.toml            what `agentrl train` reads again
    runs/run.train.jsonl     the rows, and `runs/run.eval.jsonl` those that are held out

Functions and classes of a notebook's cells, or of a plain script, become files that other processes can import: a
worker cannot see a notebook, and would train itself if it imported a script that does. So the source of what it needs
is written beside the run, with all that the source names: imports, constants, other functions and classes. A script
whose training stands under `if __name__ == "__main__":` is imported as it is. Never runs anything of either.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from agentrl import registry
from agentrl.env.dataset_env import ID, TOOLS_ID
from agentrl.env.tools.tools import FunctionTool
from agentrl.errors import UsageError


def reference_of(thing: Callable[..., Any], out: Path) -> str:
    """The reference under which workers import `thing`: its own, or that of `OUT.NAME.py`, which is written, if a
    notebook, a prompt or a script that trains as it is imported defines it. Raises UsageError for what no file can
    hold, with the reason."""
    main_module = sys.modules.get("__main__")
    script_path = getattr(main_module, "__file__", None)
    if getattr(thing, "__module__", None) != "__main__" or (
        script_path is not None and not _trains_at_import(Path(script_path))
    ):
        return registry.reference_of(thing)
    thing_name = getattr(thing, "__qualname__", "")
    if not thing_name.isidentifier():  # a lambda, a closure, a method
        return registry.reference_of(thing)
    module_file = out.with_name(f"{out.name}.{thing_name}.py").resolve()
    source_parts = _Parts(vars(main_module), "notebook" if script_path is None else "script")
    try:
        source_parts.add(thing_name, thing)
    except UsageError as error:
        if script_path is None:
            raise
        raise UsageError(f'{error}; or put what trains under if __name__ == "__main__":') from None
    module_file.parent.mkdir(parents=True, exist_ok=True)
    source_lines = ["from __future__ import annotations", *source_parts.imports, "", *source_parts.definitions]
    if script_path is not None:  # its neighbours can be imported, as it can itself
        source_lines[1:1] = ["import sys", f"sys.path.append({str(Path(script_path).resolve().parent)!r})"]
    module_file.write_text("\n".join(source_lines) + "\n", encoding="utf-8")
    return f"{module_file}:{thing_name}"


def _trains_at_import(script: Path) -> bool:
    """Whether no `if __name__ == …` at its top keeps a script from doing all of its work when it is imported."""
    try:
        statements = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):  # no source: nothing but an import can be tried
        return False
    test_walks = [ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If)]
    return not any(
        isinstance(test_node, ast.Name) and test_node.id == "__name__"
        for test_walk in test_walks
        for test_node in test_walk
    )


class _Parts:
    """Imports and definitions, each after those that it needs. `where` they come from: a notebook, a script."""

    def __init__(self, names: dict[str, Any], where: str) -> None:
        self._names, self._where, self._seen = names, where, set[str]()
        self.imports: list[str] = []
        self.definitions: list[str] = []

    def add(self, name: str, value: Any) -> None:
        """Add the import or definition of `name`, once. Raises UsageError for a value that no source defines."""
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, types.ModuleType):
            self.imports.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            self._source(name, value)
        elif self._importable(value):
            self.imports.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        # Compiled patterns are the one kind of object that reward functions name all the time and whose repr is no
        # source.
        elif isinstance(value, re.Pattern):
            pattern = cast("re.Pattern[Any]", value)
            self.add("re", re)
            self.definitions.append(f"{name} = re.compile({pattern.pattern!r}, {pattern.flags})")
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}")
        else:
            correction = "put it and what needs it into a file, and import that"
            raise UsageError(
                f"{name!r} of the {self._where} is a {type(value).__name__}, which no source says: {correction}"
            )

    def _source(self, name: str, value: Any) -> None:
        if value.__qualname__ != name:
            raise UsageError(f"{name!r} of the {self._where} is {value.__qualname__!r} by another name: use one name")
        source_text = _source_of(value)
        if source_text is None:
            raise UsageError(f"{name!r} is defined interactively, and its source is not known: put it into a file")
        # The names that the source uses, followed one by one, instead of the whole notebook: its other cells train,
        # plot or read files, and none of that may happen in a worker. Pickling the function (cloudpickle) would carry
        # values along that no reader of the run's folder could see, and breaks between Python versions.
        for source_node in ast.walk(ast.parse(source_text)):
            if (
                isinstance(source_node, ast.Name)
                and source_node.id in self._names
                and not hasattr(builtins, source_node.id)
            ):
                self.add(source_node.id, self._names[source_node.id])
        self.definitions.append(source_text)

    @staticmethod
    def _importable(value: Any) -> bool:
        home_module = sys.modules.get(getattr(value, "__module__", None) or "")
        qualified_name = getattr(value, "__qualname__", "")
        return (
            isinstance(qualified_name, str)
            and qualified_name.isidentifier()
            and getattr(home_module, qualified_name, None) is value
        )


def _source_of(value: Any) -> str | None:
    """The source of a function or class with its decorators; None if nobody knows it. `inspect` knows that of no class
    whose module has no file, so the newest cell that defines it is looked for."""
    if not inspect.isclass(value) or getattr(sys.modules.get("__main__"), "__file__", None):
        try:
            return textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            return None
    for cell_name in reversed([cached_name for cached_name in linecache.cache if not Path(cached_name).is_file()]):
        cell_lines = linecache.getlines(cell_name)
        with suppress(SyntaxError):
            for statement in reversed(ast.parse("".join(cell_lines)).body):
                if isinstance(statement, ast.ClassDef) and statement.name == value.__name__:
                    first_line = min([statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)])
                    return "".join(cell_lines[first_line - 1 : statement.end_lineno])
    return None


def _is_plain(value: Any) -> bool:
    """Whether its repr is its source."""
    try:
        # Literals only, and not large ones: a table of a million rows that a function refers to belongs in a file, not
        # in the source of a module.
        return ast.literal_eval(repr(value)) == value and len(json.dumps(repr(value))) < 1 << 20
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


TRL_ID = "agentrl/TRL-v0"
"""The id of environments whose classes were written for TRL."""


Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file or `hf:NAME:SPLIT`; or rows, as a list or a data set of Hugging Face's `datasets`."""


Rewards = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]
"""Reward functions, or their references; one may stand alone."""


Tools = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]
"""Functions that the policy may call, or their references; one may stand alone."""


def document_of(
    out: Path,
    dataset: Rows,
    reward_funcs: Rewards,
    *,
    eval_dataset: Rows | None,
    user_sections: Mapping[str, Any],
    trl_class: str | None = None,
    tools: Tools = (),
) -> dict[str, Any]:
    """The sections `env`, `tasks` and `eval` laid under those of the user; files of rows stand beside `out`. With
    `trl_class`, the reference of an environment class written for TRL ("" if the user's section names it), the rows are
    its tasks, and the functions judge its episodes. With `tools` the policy may call these before it answers.

    Raises UsageError for rows that JSON cannot carry, for functions that another process cannot import, and for tools
    without type hints or a docstring."""
    reward_references = [
        listed_entry if isinstance(listed_entry, str) else reference_of(listed_entry, out)
        for listed_entry in _listed(reward_funcs)
    ]
    env_section = dict(cast("Mapping[str, Any]", user_sections.get("env", {})))
    env_kwargs: dict[str, Any] = dict(env_section.get("kwargs", {}))
    if trl_class is not None:
        class_kwargs = {"env": trl_class} if trl_class else {}
        env_kwargs = {
            **class_kwargs,
            **({"reward_funcs": reward_references} if reward_references else {}),
            **env_kwargs,
        }
        env_id = TRL_ID
    else:
        references = [_tool_reference(listed_entry, out) for listed_entry in _listed(tools)]
        env_kwargs = {"rewards": reward_references, **({"tools": references} if references else {}), **env_kwargs}
        env_id = TOOLS_ID if "tools" in env_kwargs else ID
    document = {**user_sections, "env": {**env_section, "id": env_id, "kwargs": env_kwargs}}
    if "tasks" not in user_sections:
        document["tasks"] = [{"rows": _file(dataset, out, "train")}]
    if eval_dataset is not None:
        held_out = _file(eval_dataset, out, "eval")
        evaluation = dict(cast("Mapping[str, Any]", user_sections.get("eval", {})))
        first_set: dict[str, Any] = {"name": "held_out", "kwargs": {"rows": held_out}, "first_seed": 0}
        if not isinstance(eval_dataset, str | Path):  # a file is counted when the run starts
            first_set["n"] = len(cast("Sequence[Any]", eval_dataset))
        document["eval"] = {**evaluation, "sets": [first_set, *evaluation.get("sets", [])]}
    return document


def _listed(functions: Rewards | Tools) -> Sequence[Callable[..., Any] | str]:
    return [functions] if isinstance(functions, str) or callable(functions) else functions


def _tool_reference(tool: Callable[..., Any] | str, out: Path) -> str:
    if isinstance(tool, str):
        return tool
    if inspect.isroutine(tool):
        FunctionTool(tool)  # refused here, not in the first worker
    return reference_of(tool, out)


def _file(rows: Rows, out: Path, kind: str) -> str:
    if isinstance(rows, str | Path):
        return str(rows) if str(rows).startswith("hf:") else str(Path(rows).resolve())
    rows_file = out.with_name(f"{out.name}.{kind}.jsonl")
    json_lines: list[str] = []
    for row_number, data_row in enumerate(rows):
        try:
            json_lines.append(json.dumps(dict(data_row), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"row {row_number} of the data set is nothing that JSON can carry: {error}") from error
    if not json_lines:
        raise UsageError("the data set has no rows: give one with at least one")
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    rows_file.write_text("\n".join(json_lines) + "\n", encoding="utf-8")
    return str(rows_file.resolve())


def write_run_file(document: Mapping[str, Any], file: Path) -> None:
    """The document as a run file. TOML has no null: what is None is left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dumped_models = {
        top_key: top_value.model_dump(mode="json")
        for top_key, top_value in document.items()
        if isinstance(top_value, BaseModel)
    }
    top_values = {
        top_key: top_value for top_key, top_value in {**document, **dumped_models}.items() if top_value is not None
    }
    plain_lines = [
        f"{top_key} = {_toml(top_value)}" for top_key, top_value in top_values.items() if not _is_table(top_value)
    ]
    table_lines: list[str] = []
    for top_key, top_value in top_values.items():
        if isinstance(top_value, dict):
            table_lines += ["", f"[{top_key}]", *_lines(cast("dict[str, Any]", top_value))]
        elif _is_table(top_value):
            for table_entry in cast("list[dict[str, Any]]", top_value):
                table_lines += ["", f"[[{top_key}]]", *_lines(table_entry)]
    file.write_text("\n".join([*plain_lines, *table_lines]) + "\n", encoding="utf-8")


def _is_table(value: Any) -> bool:
    list_items = cast("list[Any]", value)
    return isinstance(value, dict) or (isinstance(value, list) and bool(list_items) and isinstance(list_items[0], dict))


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [
        f"{json.dumps(table_key)} = {_toml(table_value)}"
        for table_key, table_value in table.items()
        if table_value is not None
    ]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inline_table = cast("dict[str, Any]", value)
        inner_text = ", ".join(
            f"{json.dumps(table_key)} = {_toml(nested_value)}"
            for table_key, nested_value in inline_table.items()
            if nested_value is not None
        )
        return f"{{ {inner_text} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(nested_value) for nested_value in cast('Sequence[Any]', value))}]"
    # TOML's texts are JSON's, but that it knows no pairs of surrogates, and no DEL as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
