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
        abandoned, by_role = cache(undone), settings.algo_by_role if algo is None else dict[str, Algorithm]()
        return [
            group_rows(
                group,
                settings.algo_of(group.task.env) if algo is None else algo,
                step_of=step_of,
                step_now=self._worker.step_index,
                max_lag=settings.buffer.max_lag if max_lag is None else max_lag,
                undone=abandoned,
                keeps_kv=settings.keeps_kv,
                quorum=settings.quorum,
                by_role=by_role,
                policies=settings.own_roles,
            )
            for group in groups
        ]

    def minibatches(self, ready: Sequence[GroupRows]) -> list[list[GroupRows]]:
        """The groups of a step that are not skipped, divided into updates; shuffled if there are several, the same way
        under the same seed."""
        ready = [group for group in ready if not group.skipped]
        n = min(self._settings.train.minibatches, max(len(ready), 1))
        order = list(ready)
        if n > 1:
            # By seed and step, and not from a generator that lives on: a run that is resumed at this step divides it
            # in the same way.
            random.Random(f"{self._settings.seed}/{self._worker.step_index}").shuffle(order)
        # Strided, so that the updates differ by one group at most.
        return [order[index::n] for index in range(n)]

    def prepared(
        self, parts: Sequence[Sequence[GroupRows]], algorithms: Mapping[str, Algorithm], epochs: int = 1
    ) -> list[list[Pack]]:
        """The passes of each update, with all that their losses read."""
        updates = [
            prepared(part, self._worker.routers_of, self._settings.routed_experts) for part in self._packed(parts)
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
            matter = {id(row): row.episode_id for row in rows if row.algo.matters(row.columns)}
            # An algorithm that looks ahead computes values over whole episodes: a row without an advantage of its own
            # is still a part of them.
            episodes = set(matter.values())
            return [row for row in rows if id(row) in matter or (row.algo.ahead and row.episode_id in episodes)]

        @cache
        def priced(policy: str | None) -> Prices:
            return prices(self._worker.models.of(policy).module)

        def cost(tree: PrefixTree) -> float:
            """Operations of a tree; predicting nodes that rows share count for each row."""
            predictors = sum(len(row.place_S) + len(row.observed_O) for row in tree.rows)
            return priced(tree.rows[0].policy).of(len(tree.token_ids_N), predictors, tree.branches)

        budget, size = self._settings.train.tokens_per_batch, self._at_once
        shared = not any(model.obstacle for model in self._worker.models.policies())
        computed_rows = [[computed(group) for group in part] for part in weigh(parts)]
        return [
            laid(rows, budget, size, "cpu", cost=cost, shared=shared, stems=self._worker.models.prompt_once)
            for rows in computed_rows
        ]

    def _with_proximal(self, updates: Sequence[Sequence[Pack]], *, every: bool) -> list[list[Pack]]:
        """The passes with the columns of `forward` before the first update: `every` pass, or those whose algorithm
        looks ahead."""
        selected = [pack for part in updates for pack in part if every or pack.algo.ahead]
        if not selected:
            return [list(part) for part in updates]
        columns = {id(selected[place]): computed for place, computed in self._over_ranks(Forward, selected).items()}
        return [[pack.having(columns.get(id(pack), {})) for pack in part] for part in updates]

    def _with_advantages(
        self, updates: Sequence[Sequence[Pack]], algorithms: Mapping[str, Algorithm]
    ) -> list[list[Pack]]:
        """The passes with the advantages that each algorithm computes over all its tokens of a step, by policy."""
        judged = {id(pack): pack for part in updates for pack in part}
        for algo, policy in product(distinct(algorithms).values(), (None, *self._settings.own_roles)):
            laid = [pack for part in updates for pack in part if pack.algo == algo and pack.policy == policy]
            if not laid:
                continue
            columns = {name: torch.cat([pack.columns[name] for pack in laid]) for name in laid[0].columns}
            sizes = [len(pack.target_K) for pack in laid]
            advantages = {name: column.split(sizes) for name, column in algo.advantages(columns).items()}
            for place, pack in enumerate(laid):
                judged[id(pack)] = pack.having({name: of[place] for name, of in advantages.items()})
        return [[judged[id(pack)] for pack in part] for part in updates]

    def accumulate(self, part: Sequence[Pack], tally: StepTally) -> tuple[set[str], Tensor]:
        """Forward and backward over some passes. Returns the models that they train, and their loss."""
        worker = self._worker
        part = pulled(part, worker.routers_of, self._settings.train.balance_weight, self._routing)
        results = self._over_ranks(ForwardBackward, part)
        for place, pack in enumerate(part):
            tally.add_pass(pack, results[place])
        loss = torch.stack([results[place].loss for place in range(len(part))]).sum()
        names = {
            policy_of(pack.policy) if name == "policy" else name
            for pack in part
            for name in pack.algo.trained(worker.step_index)
        }
        return names, loss

    def _routing(self, part: Sequence[Pack]) -> list[Routed]:
        """The routers' choices in these passes, computed without gradients."""
        results = self._over_ranks(ForwardRouting, part)
        return [results[place] for place in range(len(part))]

    @property
    def _at_once(self) -> int:
        """How many passes the ranks compute at the same time."""
        return self._ranks.size // self._ranks.team

    def _over_ranks(
        self, order: Callable[[list[Pass]], RankOrder[RankWorker, list[T]]], part: Sequence[Pack]
    ) -> dict[int, T]:
        """Divide passes over the ranks, and have each carry out an `order` for its share. Returns the result of each
        pass, by its place. The ranks of a team get the same share."""
        shares = divided(part, self._at_once, lambda pack: operations(self._worker.module_of(pack), pack))
        team = self._ranks.team
        orders = [order(share) for share in shares for _ in range(team)]
        results = self._ranks.run(self._worker, orders)[::team]
        return {
            scheduled.at: result
            for share, of_share in zip(shares, results, strict=True)
            for scheduled, result in zip(share, of_share, strict=True)
            if scheduled.counts
        }
