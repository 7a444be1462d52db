"""Where commands print tables, and how they print JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

_UNWRAPPED = 10_000  # columns


def console() -> Console:
    """Text for a terminal has its width; text for a file or a pipe is never wrapped."""
    found = Console()
    return found if found.is_terminal else Console(width=_UNWRAPPED, soft_wrap=True)


def print_json(document: Any) -> None:
    """One JSON value on standard output, paths as texts; a number that is not finite is null."""
    from agentrl.store.metrics import finite

    print(json.dumps(finite(document), indent=2, default=str))
