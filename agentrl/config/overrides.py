"""One typed setting, `section.key=value`, put into a parsed run file."""

from __future__ import annotations

import tomllib
from typing import Any, cast

from agentrl.config import algorithms
from agentrl.errors import ConfigError


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one dotted key of a parsed document in place: `train.lr=1e-4`, `env.kwargs.level="easy"`."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError("--set", override, "write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # A bare word is no TOML, and nobody wants to type quotes within quotes in a shell.
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    if not sections and last == "engine" and isinstance(value, str):
        sections, last = ["engine"], "kind"
    table: dict[str, Any] = document
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(key, text, f"{section!r} is a value, not a section")
        table = cast("dict[str, Any]", inner)
    # The run file's settings of another algorithm would be unknown keys of this one, so that no run file with an [algo]
    # table could be tried with a second algorithm from the command line.
    if (sections, last) == (["algo"], "kind"):
        algorithms.leave(table, str(value))
    table[last] = value
