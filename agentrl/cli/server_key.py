"""The API key of a server that a command looks at."""

from __future__ import annotations

import os

from agentrl.errors import UsageError

USUAL_VARIABLE = "OPENAI_API_KEY"


def server_key(variable: str | None) -> str | None:
    """The key in the variable that the user names, else in the usual one; None without one. Raises UsageError for a
    named variable that is not set: the server would refuse every request, and not say why."""
    api_key = os.environ.get(variable or USUAL_VARIABLE)
    if variable is not None and not api_key:
        raise UsageError(f"--key-variable {variable}: it is not set here; export it, or leave the option out")
    return api_key
