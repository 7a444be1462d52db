"""The passes of a step: groups become rows, rows become packed passes with all columns that their losses read, and the
ranks compute them.

    groups ─► rows (`rows`) ─► minibatches ─► packs of prefix trees ─► proximal log-probs, if several updates need them
           ─► advantages ─► a list of packs for each update (`prepared`) ─► forward and backward (`accumulate`)

Owns what is computed, in how many passes, and by which rank. Never updates weights.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm
from agentrl.config.algorithms import distinct
from agentrl.config.roles import LearnerSettings
from agentrl.learner.data.batch import GroupRows, StepOf, Undone, group_rows
from agentrl.learner.data.prefix_trees import Pack, PrefixTree
from agentrl.learner.data.rows import Row
from agentrl.learner.data.shares import weigh
from agentrl.learner.flops import Prices, operations, prices
from agentrl.learner.model.models import policy_of
from agentrl.learner.moe.routing_replay import Routed, prepared, pulled
from agentrl.learner.parallel.pass_schedule import Pass, divided, laid
from agentrl.learner.parallel.ranks import RankOrder
from agentrl.learner.rank_orders import Forward, ForwardBackward, ForwardRouting
from agentrl.learner.rank_worker import RankWorker
from agentrl.learner.step_report import StepTally
from agentrl.records import Group

T = TypeVar("T")


class StepPasses:
    """Makes the passes of steps, and has the ranks compute them. `worker` is that of rank 0, whose settings hold."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker, self._ranks = worker, worker.ranks

    @property
    def _settings(self) -> LearnerSettings:
        return self._worker.settings

    def rows(
        self,
        groups: Sequence[Group],
        step_of: StepOf,
        undone: Undone,
        max_lag: int | None,
        algo: Algorithm | None = None,
    ) -> list[GroupRows]:
        """The rows of a step's groups; `algo` takes the place of the settings' algorithms."""
        settings = self._settings
        # Cached for the step: the question goes to the lineage, and a step asks it for every span of every turn.
        is_abandoned = cache(undone)
        algorithms_by_role = settings.algo_by_role if algo is None else dict[str, Algorithm]()
        return [
            group_rows(
                taken_group,
                settings.algo_of(taken_group.task.env) if algo is None else algo,
                step_of=step_of,
                step_now=self._worker.step_index,
                max_lag=settings.buffer.max_lag if max_lag is None else max_lag,
                undone=is_abandoned,
                keeps_kv=settings.keeps_kv,
                quorum=settings.quorum,
                by_role=algorithms_by_role,
                policies=settings.own_roles,
            )
            for taken_group in groups
        ]

    def minibatches(self, ready: Sequence[GroupRows]) -> list[list[GroupRows]]:
        """The groups of a step that are not skipped, divided into updates; shuffled if there are several, the same way
        under the same seed."""
        ready = [ready_group for ready_group in ready if not ready_group.skipped]
        update_count = min(self._settings.train.minibatches, max(len(ready), 1))
        shuffled_groups = list(ready)
        if update_count > 1:
            # By seed and step, and not from a generator that lives on: a run that is resumed at this step divides it
            # in the same way.
            random.Random(f"{self._settings.seed}/{self._worker.step_index}").shuffle(shuffled_groups)
        # Strided, so that the updates differ by one group at most.
        return [shuffled_groups[update_index::update_count] for update_index in range(update_count)]

    def prepared(
        self, parts: Sequence[Sequence[GroupRows]], algorithms: Mapping[str, Algorithm], epochs: int = 1
    ) -> list[list[Pack]]:
        """The passes of each update, with all that their losses read."""
        updates = [
            prepared(update_packs, self._worker.routers_of, self._settings.routed_experts)
            for update_packs in self._packed(parts)
        ]
        self._worker.watch.lap("pack")
        updates = self._with_proximal(updates, every=len(updates) * epochs > 1)
        updates = self._with_advantages(updates, algorithms)
        self._worker.watch.lap("proximal")
        return updates

    def _packed(self, parts: Sequence[Sequence[GroupRows]]) -> list[list[Pack]]:
        """The passes of each update, without rows that cannot move the weights; if their algorithm looks ahead, without
        episodes that cannot."""

        def computed(rows: Sequence[Row]) -> list[Row]:
            moving_rows = {
                id(member_row): member_row.episode_id
                for member_row in rows
                if member_row.algo.matters(member_row.columns)
            }
            # An algorithm that looks ahead computes values over whole episodes: a row without an advantage of its own
            # is still a part of them.
            moving_episodes = set(moving_rows.values())
            return [
                member_row
                for member_row in rows
                if id(member_row) in moving_rows or (member_row.algo.ahead and member_row.episode_id in moving_episodes)
            ]

        @cache
        def priced(policy: str | None) -> Prices:
            return prices(self._worker.models.of(policy).module)

        def cost(tree: PrefixTree) -> float:
            """Operations of a tree; predicting nodes that rows share count for each row."""
            predictors = sum(len(member_row.place_S) + len(member_row.observed_O) for member_row in tree.rows)
            return priced(tree.rows[0].policy).of(len(tree.token_ids_N), predictors, tree.branches)

        token_budget, parallel_passes = self._settings.train.tokens_per_batch, self._at_once
        can_share = not any(policy_model.obstacle for policy_model in self._worker.models.policies())
        computed_rows = [[computed(rows_of_group) for rows_of_group in update_rows] for update_rows in weigh(parts)]
        return [
            laid(
                packed_rows,
                token_budget,
                parallel_passes,
                "cpu",
                cost=cost,
                shared=can_share,
                stems=self._worker.models.prompt_once,
            )
            for packed_rows in computed_rows
        ]

    def _with_proximal(self, updates: Sequence[Sequence[Pack]], *, every: bool) -> list[list[Pack]]:
        """The passes with the columns of `forward` before the first update: `every` pass, or those whose algorithm
        looks ahead."""
        selected_packs = [
            update_pack for update_packs in updates for update_pack in update_packs if every or update_pack.algo.ahead
        ]
        if not selected_packs:
            return [list(update_packs) for update_packs in updates]
        columns_by_pack = {
            id(selected_packs[pass_index]): pass_columns
            for pass_index, pass_columns in self._over_ranks(Forward, selected_packs).items()
        }
        return [
            [update_pack.having(columns_by_pack.get(id(update_pack), {})) for update_pack in update_packs]
            for update_packs in updates
        ]

    def _with_advantages(
        self, updates: Sequence[Sequence[Pack]], algorithms: Mapping[str, Algorithm]
    ) -> list[list[Pack]]:
        """The passes with the advantages that each algorithm computes over all its tokens of a step, by policy."""
        judged_packs = {id(update_pack): update_pack for update_packs in updates for update_pack in update_packs}
        for algorithm, policy_role in product(distinct(algorithms).values(), (None, *self._settings.own_roles)):
            algorithm_packs = [
                update_pack
                for update_packs in updates
                for update_pack in update_packs
                if update_pack.algo == algorithm and update_pack.policy == policy_role
            ]
            if not algorithm_packs:
                continue
            step_columns = {
                column_name: torch.cat([update_pack.columns[column_name] for update_pack in algorithm_packs])
                for column_name in algorithm_packs[0].columns
            }
            pass_sizes = [len(update_pack.target_K) for update_pack in algorithm_packs]
            advantages = {
                column_name: step_column.split(pass_sizes)
                for column_name, step_column in algorithm.advantages(step_columns).items()
            }
            for pass_index, update_pack in enumerate(algorithm_packs):
                judged_packs[id(update_pack)] = update_pack.having(
                    {column_name: pass_columns[pass_index] for column_name, pass_columns in advantages.items()}
                )
        return [[judged_packs[id(update_pack)] for update_pack in update_packs] for update_packs in updates]

    def accumulate(self, part: Sequence[Pack], tally: StepTally) -> tuple[set[str], Tensor]:
        """Forward and backward over some passes. Returns the models that they train, and their loss."""
        rank_worker = self._worker
        part = pulled(part, rank_worker.routers_of, self._settings.train.balance_weight, self._routing)
        pass_results = self._over_ranks(ForwardBackward, part)
        for pass_index, update_pack in enumerate(part):
            tally.add_pass(update_pack, pass_results[pass_index])
        update_loss = torch.stack([pass_results[pass_index].loss for pass_index in range(len(part))]).sum()
        trained_names = {
            policy_of(update_pack.policy) if model_name == "policy" else model_name
            for update_pack in part
            for model_name in update_pack.algo.trained(rank_worker.step_index)
        }
        return trained_names, update_loss

    def _routing(self, part: Sequence[Pack]) -> list[Routed]:
        """The routers' choices in these passes, computed without gradients."""
        routed_passes = self._over_ranks(ForwardRouting, part)
        return [routed_passes[pass_index] for pass_index in range(len(part))]

    @property
    def _at_once(self) -> int:
        """How many passes the ranks compute at the same time."""
        return self._ranks.size // self._ranks.team

    def _over_ranks(
        self, order: Callable[[list[Pass]], RankOrder[RankWorker, list[T]]], part: Sequence[Pack]
    ) -> dict[int, T]:
        """Divide passes over the ranks, and have each carry out an `order` for its share. Returns the result of each
        pass, by its place. The ranks of a team get the same share."""
        team_shares = divided(part, self._at_once, lambda pack: operations(self._worker.module_of(pack), pack))
        team_size = self._ranks.team
        rank_orders = [order(team_share) for team_share in team_shares for _ in range(team_size)]
        team_results = self._ranks.run(self._worker, rank_orders)[::team_size]
        return {
            scheduled.at: pass_result
            for team_share, share_results in zip(team_shares, team_results, strict=True)
            for scheduled, pass_result in zip(team_share, share_results, strict=True)
            if scheduled.counts
        }
