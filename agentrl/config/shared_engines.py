"""A fleet of engines that several runs share: its tenants, and what a run says that is one of them."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from agentrl.config.sections import Count, Section
from agentrl.errors import ConfigError
from agentrl.records import EngineKey

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class Tenant(Section):
    """A run's place at a shared fleet: one run at a time. Its numbers are of each engine."""

    name: TenantName  # in the URL that the run attaches to
    key_env: str | None = None  # the environment variable with its key; default: a new key, printed at the start
    open: bool = False  # without a key: everybody who reaches the gateway is this tenant
    weight: Annotated[float, Field(ge=0.1, le=100)] = 1.0  # of its share of the tokens, beside the others' weights
    max_running: Count | None = None  # requests that the engine computes for it at once; default: all its places
    max_queued_tokens: Count = 4_000_000  # of requests that wait; one more is answered 429, and its run asks again
    max_adapters: Count = 16  # that it may have loaded

    @property
    def variable(self) -> str:
        """The environment variable that its run takes the key from."""
        return self.key_env or f"AGENTRL_KEY_{self.name.upper().replace('-', '_')}"

    def key(self) -> EngineKey | None:
        """The key that its requests carry, a new one if the file names none; None if it is open. Raises ConfigError if
        the variable that should hold it is not set."""
        if self.open and self.key_env is not None:
            raise ConfigError("tenants.open", True, "it has a key (key_env): leave one out")
        if self.open:
            return None
        if self.key_env is None:
            return EngineKey.of(EngineKey.fresh().value)
        if not (key := os.environ.get(self.key_env)):
            raise ConfigError("tenants.key_env", self.key_env, "this environment variable is not set: export it")
        return EngineKey.of(key)


def check(shared: bool, urls: list[str], sync: str, lora_rank: int) -> None:
    """Raises ConfigError for a run at a shared fleet that would change its weights."""
    if not shared:
        return
    if not urls:
        raise ConfigError("engine.shared", True, "give the fleet's URLs for its tenant: engine.urls")
    if sync != "auto":
        raise ConfigError("engine.sync", sync, "at a shared fleet only adapters travel: leave it out")
    if not lora_rank:
        hint = "the weights of a shared fleet stay as they are, and an adapter is trained: give its rank, such as 16"
        raise ConfigError("train.lora_rank", lora_rank, hint)
