"""The one place where `engine.sync` is read: which transport of the registry it names.

`agentrl.engine.weight_sync.transport` says what a transport is; here is what the rest of a run asks of its class. Never
imports one by itself.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast

from agentrl import registry
from agentrl.errors import ConfigError, UnknownIdError

Form = Literal["file", "adapter", "memory"]
"""How the learner gives a version away: a file of all weights, a folder with adapters, or a copy in its memory."""


class Transport(Protocol):
    """The class of a transport."""

    form: Form
    backend: str
    files: int
    serves_role_models: bool

    def check(self, engine: Any, train: Any, *, on_ray: bool) -> None: ...


def transport_of(name: str) -> Transport:
    """A transport of ours, or one that a package offers. Raises ConfigError."""
    try:
        return cast(Transport, registry.resolve("weight_transports", name))
    except UnknownIdError as registry_error:
        raise ConfigError("engine.sync", name, f"{registry_error}; or give 'auto'") from None


def chosen(sync: str, *, adapters: bool, objects: bool) -> str:
    """The name of the transport that `engine.sync` stands for: `auto` sends the adapter alone if engines hold
    `adapters`, else a file of all weights, or what changed if it goes through a store of `objects`."""
    if sync != "auto":
        return sync
    # Changes pay where bytes are dear. On one machine a whole file costs little, and to work out what has changed costs
    # a look at all weights.
    return "adapter" if adapters else "delta" if objects else "full"
