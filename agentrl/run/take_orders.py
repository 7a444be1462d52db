"""The order in which a run's learner takes groups, by its settings. Owns the names of the orders."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from agentrl import registry
from agentrl.algos.algorithm import Algorithm
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, UnknownIdError
from agentrl.store import Freshest, Oldest, Prioritised, Returns, TakeOrder, Windowed

_WINDOW = 0.3  # of order windowed: the share of groups that it takes from, as in MiniMax Forge


def take_order(config: RunConfig) -> TakeOrder:
    """The order that `buffer.order` names: one of ours, or what the registered id or reference makes when called
    without arguments. Raises ConfigError for an unknown name."""
    match config.buffer.order:
        case "oldest":
            return Oldest()
        case "windowed":
            return Windowed(_WINDOW)
        case "freshest":
            return Freshest()
        case "prioritised":
            return Prioritised(seed=config.seed)
        case id:
            try:
                return cast(TakeOrder, registry.resolve("orders", id)())
            except UnknownIdError:
                correction = (
                    "give oldest, windowed, freshest, prioritised, a registered order, or the module:Class of yours"
                )
                raise ConfigError("buffer.order", id, correction) from None


def returns_of(config: RunConfig) -> Returns:
    """How the run computes returns, for each environment and role as its algorithm judges it."""
    role_algos = config.algo_by_role
    past_roles = [
        role_name
        for role_name, played_by in config.league_roles.items()
        if played_by == "league" and config.league.share == 1.0
    ]

    def made(algo: Algorithm) -> Returns:
        return Returns(
            process_weight=algo.process_weight,
            discount=algo.turn_discount,
            frozen=frozenset({*config.rollout.frozen_roles(), *past_roles}),
            quorum=config.quorum,
            # Skipping is only sound if equal returns leave nothing to learn, for every algorithm that judges a role:
            # one that distils a teacher learns from groups without any spread.
            skips=all(judging_algo.judges_returns for judging_algo in (algo, *role_algos.values())),
            by_role=tuple(
                (role_name, judging_algo.process_weight, judging_algo.turn_discount)
                for role_name, judging_algo in role_algos.items()
            ),
        )

    returns_by_env = {
        task_table.id or config.env.id: made(task_table.algo)
        for task_table in config.tasks
        if task_table.algo is not None
    }
    return replace(made(config.algo), by_env=tuple(returns_by_env.items()))
