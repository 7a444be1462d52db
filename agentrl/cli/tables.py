"""Where commands print tables."""

from __future__ import annotations

from rich.console import Console

_UNWRAPPED = 10_000  # columns


def console() -> Console:
    """Text for a terminal has its width; text for a file or a pipe is never wrapped."""
    found = Console()
    return found if found.is_terminal else Console(width=_UNWRAPPED, soft_wrap=True)
