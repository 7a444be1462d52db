"""Boxes in which the policy's commands run, closed by default. Knows nothing of episodes, rewards or tools.

A backend makes boxes (`protocols.SandboxBackend`); which ones there are, the registry knows (kind `sandboxes`).
"""

from __future__ import annotations

from typing import Any, cast

from agentrl import registry
from agentrl.errors import ConfigError, UsageError
from agentrl.protocols import SandboxBackend

__all__ = ["backend", "known_backend"]


def backend(name: str, **kwargs: Any) -> SandboxBackend:
    """The backend of a registry id (`bubblewrap`, `docker`, `local-unsafe`) or reference `module:attribute`.

    Keyword arguments go to its constructor. Raises UnknownIdError, and SandboxUnavailable where the machine lacks it
    (some backends find that out only in `create`)."""
    return cast(SandboxBackend, registry.resolve("sandboxes", name)(**kwargs))


def known_backend(name: str, field: str = "sandbox") -> str:
    """Return the registry id or reference of a backend unchanged. Raises ConfigError, which names the setting `field`,
    for one that no package offers.

    For environments, where they are made: a box is opened only by the first reset, in a worker, hours into a queue."""
    if name in registry.ids("sandboxes"):
        return name  # not imported: a run may be planned where the backend's own packages are missing
    try:
        registry.resolve("sandboxes", name)
    except UsageError as error:
        raise ConfigError(field, name, str(error)) from error
    return name
