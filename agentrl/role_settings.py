"""The `[[roles]]` of the run file: what trains each role of an environment.

Never knows the environment: `agentrl.runtime.trainer` compares names with its roles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import SerializeAsAny, model_validator

from agentrl.algos.algorithm import Algorithm
from agentrl.errors import ConfigError
from agentrl.settings import Section
from agentrl.train_settings import Train


class RoleTable(Section):
    """One role of the environment. Roles without a table are played and trained as `[algo]` and `[[tasks]]` say."""

    name: str  # the role, as the environment names it
    algo: SerializeAsAny[Algorithm] | None = None  # what trains it, as a table like [algo]; default: its task's
    plays: Literal["self", "league", "either"] = "self"  # "league": past selves; "either": these, or the policy
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

    @property
    def league_roles(self) -> dict[str, str]:
        """The roles that past selves play, and whether they always do ("league") or in some groups ("either")."""
        return {table.name: table.plays for table in self.roles if table.plays != "self"}


def check(tables: Sequence[RoleTable], frozen: Collection[str], *, train: Train, sync: str, share: float = 1.0) -> None:
    """`frozen` roles are not trained; past selves play in a `share` of the groups. Raises ConfigError."""
    seen: set[str] = set()
    for at, table in enumerate(tables):
        if table.name in seen:
            raise ConfigError(f"roles.{at}.name", table.name, "another [[roles]] table has this name: join the two")
        seen.add(table.name)
        if table.algo is not None and table.name in frozen:
            hint = f"rollout.roles gives {table.name} to a policy that does not learn: leave one of the two out"
            raise ConfigError(f"roles.{at}.algo", table.algo.kind, hint)
        if table.plays != "self":
            _check_league(f"roles.{at}", table, frozen, train=train, sync=sync, never_learns=share == 1.0)
        if table.adapter:
            _check_adapter(f"roles.{at}", table, frozen, train=train, sync=sync)
    either = [f"roles.{at}.plays" for at, table in enumerate(tables) if table.plays == "either"]
    if len(either) == 1:
        raise ConfigError(either[0], "either", "give it to two roles or more: each group draws one for the policy")


def _check_league(
    field: str, table: RoleTable, frozen: Collection[str], *, train: Train, sync: str, never_learns: bool
) -> None:
    if table.name in frozen:
        hint = f"rollout.roles gives {table.name} to another policy: leave one of the two out"
        raise ConfigError(f"{field}.plays", table.plays, hint)
    for name in ("algo", "adapter"):
        if table.plays == "league" and never_learns and (given := getattr(table, name)):
            hint = f"{field}.plays = 'league' gives the role to past selves, so it learns nothing: leave it out"
            raise ConfigError(f"{field}.{name}", given, hint)
    if not train.lora_rank:
        hint = "past selves are adapters beside each other: train one (train.lora_rank = 16, for instance)"
        raise ConfigError(f"{field}.plays", table.plays, hint)
    if sync != "adapter":
        hint = f"{field}.plays = {table.plays!r} needs engines that hold several adapters: give 'auto'"
        raise ConfigError("engine.sync", sync, hint)


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
