"""Packages that are not installed with us: imported at their first use, named with their remedy where they are
missing."""

from __future__ import annotations

import importlib
from typing import Any

from agentrl.errors import UsageError


def require(module: str, *, what: str, package: str | None = None, command: str | None = None) -> Any:
    """The module, imported. Raises UsageError saying that `what` needs `package` and how to install it: by `command`,
    else by the package's own name."""
    try:
        return importlib.import_module(module)
    except ImportError as import_error:
        package = package or module.partition(".")[0]
        command = command or f"pip install {package}"
        raise UsageError(f"{what} needs the package {package!r}: {command} ({import_error})") from import_error
