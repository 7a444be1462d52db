"""Boxes in which the policy's commands run, closed by default. Knows nothing of episodes, rewards or tools.

A backend makes boxes (`protocols.SandboxBackend`); which ones there are, the registry knows (kind `sandboxes`).
"""

from __future__ import annotations

from typing import Any, cast

from agentrl import registry
from agentrl.protocols import SandboxBackend

__all__ = ["backend"]


def backend(name: str, **kwargs: Any) -> SandboxBackend:
    """The backend of a registry id (`bubblewrap`, `docker`, `local-unsafe`) or reference `module:attribute`.

    Keyword arguments go to its constructor. Raises UnknownIdError, and SandboxUnavailable where the machine lacks it
    (some backends find that out only in `create`)."""
    return cast(SandboxBackend, registry.resolve("sandboxes", name)(**kwargs))
