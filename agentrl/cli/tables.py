"""Where commands print tables, and how they print JSON."""

from __future__ import annotations

import json
from typing import Any, cast

from rich.console import Console

_UNWRAPPED = 10_000  # columns


def console() -> Console:
    """Text for a terminal has its width; text for a file or a pipe is never wrapped."""
    of_terminal = Console()
    # A pipe has no width, and rich then takes 80 columns: `agentrl status | grep` would meet words that are cut in two.
    return of_terminal if of_terminal.is_terminal else Console(width=_UNWRAPPED, soft_wrap=True)


def print_line(text: str) -> None:
    """Print one line, whose words may be a model's or a server's: they set no colours and do not drive the terminal."""
    from agentrl.host.terminal_text import printable

    console().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def lines(value: Any) -> str:
    """A value of a report as a cell: what is in it, a line each; what is in that, beside one another."""
    if not value and isinstance(value, dict | list):
        return "none"
    if isinstance(value, dict):
        named_values = cast("dict[str, Any]", value).items()
        return "\n".join(
            f"{entry_name}: {lines(nested_value).replace(chr(10), ', ')}" for entry_name, nested_value in named_values
        )
    if isinstance(value, list):
        return "\n".join(lines(nested_value).replace("\n", ", ") for nested_value in cast("list[Any]", value))
    return value if isinstance(value, str) else json.dumps(value)


def print_json(document: Any) -> None:
    """One JSON value on standard output, paths as texts; a number that is not finite is null."""
    from agentrl.store.metrics import finite

    print(json.dumps(finite(document), indent=2, default=str))
