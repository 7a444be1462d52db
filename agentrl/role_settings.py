"""The `[[roles]]` of the run file: what trains each role of an environment.

Never knows the environment: `agentrl.runtime.trainer` compares names with its roles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import SerializeAsAny, model_validator

from agentrl.algos.algorithm import Algorithm
from agentrl.errors import ConfigError
from agentrl.settings import Section
from agentrl.train_settings import Train


class RoleTable(Section):
    """One role of the environment. Roles without a table are played and trained as `[algo]` and `[[tasks]]` say."""

    name: str  # the role, as the environment names it
    algo: SerializeAsAny[Algorithm] | None = None  # what trains it, as a table like [algo]; default: its task's
    adapter: bool = False  # train a LoRA adapter of its own (train.lora_rank); else it shares that of the other roles

    @model_validator(mode="before")
    @classmethod
    def _of_models(cls, table: Any) -> Any:
        if isinstance(table, dict) and "model" in table:
            hint = "a role trains no model of its own: adapter = true trains an adapter over that of the run, and"
            raise ValueError(f"{hint} [rollout.roles] gives the role to a model that does not learn")
        return cast("Any", table)


class WithRoles:
    """What the tables say together."""

    if TYPE_CHECKING:
        roles: list[RoleTable]

    @property
    def algo_by_role(self) -> dict[str, Algorithm]:
        """The algorithms of the roles that have their own, in every environment."""
        return {table.name: table.algo for table in self.roles if table.algo is not None}

    @property
    def adapted_roles(self) -> tuple[str, ...]:
        """The roles that have an adapter of their own."""
        return tuple(table.name for table in self.roles if table.adapter)


def check(tables: Sequence[RoleTable], frozen: Collection[str], *, train: Train, sync: str) -> None:
    """`frozen` roles are not trained. Raises ConfigError."""
    seen: set[str] = set()
    for at, table in enumerate(tables):
        if table.name in seen:
            raise ConfigError(f"roles.{at}.name", table.name, "another [[roles]] table has this name: join the two")
        seen.add(table.name)
        if table.algo is not None and table.name in frozen:
            hint = f"rollout.roles gives {table.name} to a policy that does not learn: leave one of the two out"
            raise ConfigError(f"roles.{at}.algo", table.algo.kind, hint)
        if table.adapter:
            _check_adapter(f"roles.{at}", table, frozen, train=train, sync=sync)


def _check_adapter(field: str, table: RoleTable, frozen: Collection[str], *, train: Train, sync: str) -> None:
    if table.name in frozen:
        hint = f"rollout.roles gives {table.name} to a policy that does not learn: leave one of the two out"
        raise ConfigError(f"{field}.adapter", True, hint)
    if not train.lora_rank:
        raise ConfigError(f"{field}.adapter", True, "say how large an adapter is: train.lora_rank = 16, for instance")
    if sync != "adapter":
        hint = f"{field}.adapter needs engines that hold several adapters: give 'auto'"
        raise ConfigError("engine.sync", sync, hint)
    if (ranks := train.parallel.ranks) > 1:
        raise ConfigError("train.parallel.ranks", ranks, f"{field}.adapter is trained by one rank: leave it out")
    if not re.fullmatch(r"\w[\w-]*", table.name):
        hint = "a folder and an adapter are named after it: letters, digits, _ and - only"
        raise ConfigError(f"{field}.name", table.name, hint)
