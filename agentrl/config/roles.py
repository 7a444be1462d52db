"""The `[[roles]]` of the run file, and the settings of a learner of one policy or several.

A role says what trains each role of an environment; `agentrl.run.trainer` compares names with the environment's roles.
`LearnerSettings` is the `[train]` table and what other tables say about the same step: `RunConfig.learner` makes it of
a run file; without one, a `Train` and an algorithm are enough.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import SerializeAsAny

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.grpo import GRPO
from agentrl.config.sections import BufferSettings, RewardSource, Section
from agentrl.config.train import Train
from agentrl.config.weight_sync import Transport
from agentrl.errors import ConfigError
from agentrl.records import POLICY


class RoleTable(Section):
    """One role of the environment. Roles without a table are played and trained as `[algo]` and `[[tasks]]` say."""

    name: str
    """Name of the role in the environment."""

    algo: SerializeAsAny[Algorithm] | None = None
    """Algorithm that trains the role, as a table like `[algo]`. Without it, the algorithm of its task."""

    plays: Literal["self", "league", "either"] = "self"
    """Player of the role: the policy ("self"), past selves of `[league]` ("league"), or either ("either"): each group
    draws one such role for the policy, and past selves play the others. Past selves need `train.lora_rank`."""

    adapter: bool = False
    """Trains a LoRA adapter of rank `train.lora_rank` for this role alone. With false, the role shares the others'
    weights, unless it has a `roles[].model`."""

    model: str | None = None
    """Model whose weights are all trained for this role alone, on engines of its own. Without it, the run's `model`."""


class WithRoles:
    """Properties of all `[[roles]]` tables together."""

    if TYPE_CHECKING:
        model: str
        roles: list[RoleTable]

        @property
        def algorithms(self) -> Mapping[str, Algorithm]: ...

    @property
    def algo_by_role(self) -> dict[str, Algorithm]:
        """The algorithms of the roles that have their own, in every environment."""
        return {role_table.name: role_table.algo for role_table in self.roles if role_table.algo is not None}

    @property
    def adapted_roles(self) -> tuple[str, ...]:
        """The roles that have an adapter of their own."""
        return tuple(role_table.name for role_table in self.roles if role_table.adapter)

    @property
    def role_models(self) -> dict[str, str]:
        """The models of the roles that train one of their own."""
        return {role_table.name: role_table.model for role_table in self.roles if role_table.model is not None}

    def model_of(self, role: str | None) -> str:
        """Return the model that a role begins with; for None, the model of the roles that share one."""
        return self.model if role is None else self.role_models[role]

    @property
    def own_roles(self) -> tuple[str, ...]:
        """The roles that have a policy of their own: an adapter or a model."""
        return tuple(role_table.name for role_table in self.roles if role_table.adapter or role_table.model is not None)

    def algorithms_of(self, role: str | None) -> Mapping[str, Algorithm]:
        """Return the algorithms that may train the model of a role with its own, or for None the model of all others,
        by the field that names them."""
        table_by_field = {f"roles.{table_index}.algo": role_table for table_index, role_table in enumerate(self.roles)}
        tables_of = {
            field_name: table_by_field[field_name] for field_name in self.algorithms if field_name in table_by_field
        }
        own_fields = [field_name for field_name, role_table in tables_of.items() if role_table.name == role]
        shared_fields = [
            field_name
            for field_name in self.algorithms
            if field_name not in tables_of or (not role and not tables_of[field_name].model)
        ]
        return {field_name: self.algorithms[field_name] for field_name in own_fields or shared_fields}

    @property
    def league_roles(self) -> dict[str, str]:
        """The roles that past selves play, and whether they always do ("league") or in some groups ("either")."""
        return {role_table.name: role_table.plays for role_table in self.roles if role_table.plays != "self"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """How weights travel to a run's engines (`engine.sync`, and the transport that it names), the URLs of those that it
    attaches to, and whether Ray places the rest."""

    sync: str
    transport: Transport
    urls: list[str]
    on_ray: bool

    def check_adapters(self, hint: str) -> None:
        """Raises ConfigError if they do not hold several adapters."""
        if self.transport.form != "adapter":
            raise ConfigError("engine.sync", self.sync, hint)


def check(
    tables: Sequence[RoleTable], frozen: Collection[str], *, train: Train, engines: Engines, share: float = 1.0
) -> None:
    """`frozen` roles are not trained; past selves play in a `share` of the groups. Raises ConfigError."""
    seen_names: set[str] = set()
    for table_index, role_table in enumerate(tables):
        if role_table.name in seen_names:
            raise ConfigError(
                f"roles.{table_index}.name", role_table.name, "another [[roles]] table has this name: join the two"
            )
        seen_names.add(role_table.name)
        if role_table.algo is not None and role_table.name in frozen:
            hint = f"rollout.roles gives {role_table.name} to a policy that does not learn: leave one of the two out"
            raise ConfigError(f"roles.{table_index}.algo", role_table.algo.kind, hint)
        if role_table.plays != "self":
            _check_league(
                f"roles.{table_index}", role_table, frozen, train=train, engines=engines, never_learns=share == 1.0
            )
        if role_table.adapter:
            _check_adapter(f"roles.{table_index}", role_table, frozen, train=train, engines=engines)
    either_fields = [
        f"roles.{table_index}.plays" for table_index, role_table in enumerate(tables) if role_table.plays == "either"
    ]
    if len(either_fields) == 1:
        raise ConfigError(
            either_fields[0], "either", "give it to two roles or more: each group draws one for the policy"
        )


def _check_league(
    field: str, table: RoleTable, frozen: Collection[str], *, train: Train, engines: Engines, never_learns: bool
) -> None:
    if table.name in frozen:
        hint = f"rollout.roles gives {table.name} to another policy: leave one of the two out"
        raise ConfigError(f"{field}.plays", table.plays, hint)
    for setting_name in ("algo", "adapter"):
        if table.plays == "league" and never_learns and (setting_value := getattr(table, setting_name)):
            hint = f"{field}.plays = 'league' gives the role to past selves, so it learns nothing: leave it out"
            raise ConfigError(f"{field}.{setting_name}", setting_value, hint)
    if not train.lora_rank:
        hint = "past selves are adapters beside each other: train one (train.lora_rank = 16, for instance)"
        raise ConfigError(f"{field}.plays", table.plays, hint)
    engines.check_adapters(f"{field}.plays = {table.plays!r} needs engines that hold several adapters: give 'auto'")


def _check_adapter(field: str, table: RoleTable, frozen: Collection[str], *, train: Train, engines: Engines) -> None:
    if table.name in frozen:
        hint = f"rollout.roles gives {table.name} to a policy that does not learn: leave one of the two out"
        raise ConfigError(f"{field}.adapter", True, hint)
    if not train.lora_rank:
        raise ConfigError(f"{field}.adapter", True, "say how large an adapter is: train.lora_rank = 16, for instance")
    engines.check_adapters(f"{field}.adapter needs engines that hold several adapters: give 'auto'")
    if (rank_count := train.parallel.ranks) > 1:
        raise ConfigError("train.parallel.ranks", rank_count, f"{field}.adapter is trained by one rank: leave it out")
    _check_name(field, table)


def _check_name(field: str, table: RoleTable) -> None:
    if not re.fullmatch(r"\w[\w-]*", table.name):
        hint = "a folder and an adapter are named after it: letters, digits, _ and - only"
        raise ConfigError(f"{field}.name", table.name, hint)


def check_models(
    config: WithRoles,
    frozen: Collection[str],
    *,
    train: Train,
    engines: Engines,
    rewards: Sequence[RewardSource],
) -> None:
    """Raises ConfigError for what a run cannot have beside roles that train a model of their own."""
    for table_index, role_table in enumerate(config.roles):
        if role_table.model is None:
            continue
        model_field = f"roles.{table_index}.model"
        _check_name(f"roles.{table_index}", role_table)
        if role_table.name in frozen:
            hint = f"rollout.roles gives {role_table.name} to a policy that does not learn: leave one of the two out"
            raise ConfigError(model_field, role_table.model, hint)
        _check_beside(model_field, config, train=train)
        if not engines.transport.serves_role_models:
            raise ConfigError(
                "engine.sync", engines.sync, f"the weights of {model_field} travel as whole files: give 'auto'"
            )
        if engines.urls:
            hint = f"the run starts the engines of {model_field} itself: leave it out and give engine.replicas"
            raise ConfigError("engine.urls", engines.urls, hint)
        if engines.on_ray:
            raise ConfigError("cluster.launcher", "ray", f"Ray places no engines for {model_field}: give 'local'")
        for algo_field, role_algorithm in config.algorithms_of(role_table.name).items():
            if role_algorithm.slots.critic == "shared":
                hint = f"it is on the trunk of the run's model, and {role_table.name} has another model: give 'own'"
                raise ConfigError(f"{algo_field}.critic", "shared", hint)
        if any(reward_source.kind == "teacher" and reward_source.url == "policy" for reward_source in rewards):
            hint = f"{model_field} makes two policies, of which none teaches both: give the URL of a server"
            raise ConfigError("rewards.url", "policy", hint)


def _check_beside(field: str, config: WithRoles, *, train: Train) -> None:
    """`field` trains all weights, by one rank."""
    for table_index, role_table in enumerate(config.roles):
        for setting_name in ("adapter", "plays"):
            if (setting_value := getattr(role_table, setting_name)) not in (False, "self"):
                hint = f"it is of adapters, and {field} trains all weights: leave one of the two out"
                raise ConfigError(f"roles.{table_index}.{setting_name}", setting_value, hint)
    if train.lora_rank:
        hint = f"{field} trains all weights of every model: leave it out, or give the role adapter = true for its model"
        raise ConfigError("train.lora_rank", train.lora_rank, hint)
    if train.parallel.ranks > 1:
        raise ConfigError("train.parallel.ranks", train.parallel.ranks, f"{field} is trained by one rank: leave it out")


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(WithRoles):
    """Settings that a learner needs before its first step. Plain data: it is sent to the other ranks."""

    model: str = ""  # as the run file names it; the learner gets a folder
    train: Train = field(default_factory=Train)
    algo: Algorithm = field(default_factory=GRPO)  # of environments and roles without their own
    algo_by_env: Mapping[str, Algorithm] = field(default_factory=dict[str, Algorithm])
    roles: list[RoleTable] = field(default_factory=list[RoleTable])
    named: Mapping[str, Algorithm] | None = None  # those that train something, by field; default: `algo` alone
    seed: int = 0  # decides the weights of a fresh adapter, and the order of minibatches
    temperature: float = 1.0  # of sampling: `rollout.temperature`
    buffer: BufferSettings = field(default_factory=BufferSettings)  # its lag bound holds for a step without its own
    quorum: int | None = None  # how many members close a group: `RunConfig.quorum`
    keeps_kv: bool = True  # running requests keep keys and values of older weights: `engine.at_update`
    routed_experts: bool | Literal["required"] = False  # rows name the experts of their tokens: `engine.routed_experts`

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithms that train something, by the field that names them."""
        return {"algo": self.algo} if self.named is None else self.named

    def algo_of(self, env: str, role: str = POLICY) -> Algorithm:
        """Return the algorithm that trains a role in the tasks of an environment."""
        algorithm_by_role = self.algo_by_role
        return algorithm_by_role[role] if role in algorithm_by_role else self.algo_by_env.get(env, self.algo)
