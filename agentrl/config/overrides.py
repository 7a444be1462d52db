"""One typed setting, `section.key=value`, put into a parsed run file."""

from __future__ import annotations

import tomllib
from typing import Any, cast

from agentrl.config import algorithms
from agentrl.errors import ConfigError


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one dotted key of a parsed document in place: `train.lr=1e-4`, `env.kwargs.level="easy"`."""
    dotted_key, equals_sign, value_text = override.partition("=")
    if not equals_sign or not dotted_key.strip():
        raise ConfigError("--set", override, "write it as section.key=value")
    try:
        toml_value = tomllib.loads(f"value = {value_text}")["value"]
    # A bare word is no TOML, and nobody wants to type quotes within quotes in a shell.
    except tomllib.TOMLDecodeError:
        toml_value = value_text
    *sections, last_key = dotted_key.strip().split(".")
    if not sections and last_key == "engine" and isinstance(toml_value, str):
        sections, last_key = ["engine"], "kind"
    inner_table: dict[str, Any] = document
    for section_name in sections:
        next_table = inner_table.setdefault(section_name, {})
        if not isinstance(next_table, dict):
            raise ConfigError(dotted_key, value_text, f"{section_name!r} is a value, not a section")
        inner_table = cast("dict[str, Any]", next_table)
    # The run file's settings of another algorithm would be unknown keys of this one, so that no run file with an [algo]
    # table could be tried with a second algorithm from the command line.
    if (sections, last_key) == (["algo"], "kind"):
        algorithms.leave(inner_table, str(toml_value))
    inner_table[last_key] = toml_value
