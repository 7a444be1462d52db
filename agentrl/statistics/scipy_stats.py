"""Import `scipy.stats`, or raise one line that names the command to install it."""

from __future__ import annotations

import importlib
from typing import Any

from agentrl.errors import UsageError
from agentrl.host.installation import install_command


def scipy_stats() -> Any:
    """Return the module `scipy.stats`, which takes a second to import. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise UsageError(f"comparing needs scipy ({error}): {install_command('compare')}") from error
