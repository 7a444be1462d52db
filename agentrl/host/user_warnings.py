"""Warnings to the user of agentrl: one line on stderr, without a path and a line of our source.

They stay warnings of Python, so that whoever embeds agentrl may filter them or make them errors.
"""

from __future__ import annotations

import sys
import warnings
from typing import TextIO


class AgentRLWarning(UserWarning):
    """A state that a user should know of, and that stops nothing."""


def warn(message: str) -> None:
    """Show a message once for each text and caller."""
    warnings.warn(message, AgentRLWarning, stacklevel=2)


_show_other = warnings.showwarning


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, AgentRLWarning):
        print(f"agentrl: warning: {message}", file=file or sys.stderr, flush=True)
    else:
        _show_other(message, category, filename, lineno, file, line)


def show_as_lines() -> None:
    """Let this process show our warnings as lines. Those of other packages stay as they are."""
    global _show_other
    if warnings.showwarning is not _show:
        _show_other, warnings.showwarning = warnings.showwarning, _show
