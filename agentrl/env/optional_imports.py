"""Packages that are not installed with us: imported when asked for, named with their remedy where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from agentrl.errors import UsageError


def require(module: str, *, what: str, package: str | None = None) -> Any:
    """The module, imported. Raises UsageError saying that `what` needs `package` and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise UsageError(f"{what} needs the package {package!r}: pip install {package} ({error})") from error
