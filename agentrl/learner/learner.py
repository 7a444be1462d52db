"""The learner: finished groups in, better weights and a report out.

Owns the order of a step and its schedule. Never knows the store, the engine, where groups come from, or what an
algorithm (`agentrl.algos.algorithm`) does with them. If environments or roles have algorithms of their own, each has
passes and advantages of its own; the gradients of all add up.

A step:

    groups ─► rows with what their algorithm prepares from their rewards (batch) ─► packs of prefix trees
           ─► `forward` over all of them, if the algorithm looks ahead or there are several updates ─► advantages
           ─► per update: `forward_backward` of each pass, then `optimizer_step`
           ─► StepReport

The proximal policy is the one at the start of the step. With one update per step (the default) it is the current one,
so its log-probs are those of the pass itself and the ratio is always 1; with several updates its log-probs are computed
before the first. Rows that cannot move the weights, as their algorithm says, are counted in the normalisation but not
computed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm, Loss, Outputs
from agentrl.config.algorithms import distinct
from agentrl.config.roles import LearnerSettings
from agentrl.errors import ConfigError, RunFailed
from agentrl.learner.checkpoints import checkpoint, digests
from agentrl.learner.checkpoints.checkpoint import CheckpointState
from agentrl.learner.checkpoints.folders import newest, of_role
from agentrl.learner.data.batch import GroupRows, StepOf, Undone, group_rows
from agentrl.learner.data.device_copy import moved
from agentrl.learner.data.prefix_trees import Pack, PrefixTree
from agentrl.learner.data.rows import Row
from agentrl.learner.data.shares import weigh
from agentrl.learner.flops import Prices, operations, prices, use
from agentrl.learner.model import lora
from agentrl.learner.model.models import Models, policy_of
from agentrl.learner.moe.routers import Routers, listening
from agentrl.learner.moe.routing_replay import Routed, check, prepared, pulled, routed
from agentrl.learner.optimizers.optimizers import lr_of
from agentrl.learner.parallel import optimizer_state
from agentrl.learner.parallel.fsdp import whole
from agentrl.learner.parallel.pass_schedule import Pass, divided, laid
from agentrl.learner.parallel.ranks import ALONE, Ranks
from agentrl.learner.step_report import PassResult, StepReport, StepTally, Stopwatch, pass_result, summarise
from agentrl.learner.weight_export import WeightFile, WeightSnapshot, checkpoint_tensors, hash_of, take, write_weights
from agentrl.records import Group

S = TypeVar("S")
T = TypeVar("T")

PassHook = Callable[[Pack, Mapping[str, Tensor], Outputs], None]
"""Called in each pass between forward and backward: the pass, the columns of its tokens, the models' outputs."""


OwnLoss = Callable[[Mapping[str, Tensor], Outputs], Tensor]
"""The loss of one pass, a scalar, from the columns of its tokens and the models' outputs; those of all passes add
up."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What `Learner.accumulate` did: groups with their rows and passes, whose gradients are at hand for the models of
    these `names`, and their `loss`."""

    groups: tuple[Group, ...]
    ready: tuple[GroupRows, ...]
    packs: tuple[Pack, ...]
    tally: StepTally
    names: frozenset[str]
    loss: float


class Diverged(RunFailed):
    """Too many updates in a row had a gradient that is not finite. The learner can be saved."""


class Learner:
    """Trains one policy, and those of roles with their own. Invariants: `step_index` steps are in the weights;
    `trained` holds the ids of the episodes trained since the last checkpoint, step by step; between calls the models'
    gradients are empty. `on_pass`, if set, is called in each pass; it must change nothing."""

    def __init__(
        self,
        settings: LearnerSettings,
        model_dir: Path,
        device: torch.device | str = "cpu",
        *,
        reference_dir: Path | None = None,
        folder_of: Callable[[str], Path] = Path,
        progress: Callable[[], None] = lambda: None,
        may_save: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`model_dir` holds the policy to start from, `reference_dir` the reference of a KL term (default: the same;
        after a restart from a checkpoint, name the initial policy's). If an adapter is trained over that same folder,
        the reference is the model with its adapter off, and no second one is loaded. `folder_of` finds the folder of a
        model that an algorithm or a role names. `progress` is called
        whenever a part of long work is done: a pass, an update, a file; `may_save` before a checkpoint appears, and
        raises if it must not. `ranks` share the work: this learner is that of
        rank 0, and they make their own. Raises ModelError."""
        self.settings, self.algorithms = settings, distinct(settings.algorithms)
        self._progress, self._may_save, self.ranks = progress, may_save, ranks
        torch.set_num_threads(settings.train.threads)
        torch.manual_seed(settings.seed)
        with ranks.building(settings, model_dir, reference_dir, folder_of):
            self.models = Models(
                settings, model_dir, device, reference_dir=reference_dir, folder_of=folder_of, ranks=ranks
            )
            check(settings.train, self.models.policies(), routed=settings.routed_experts)
        self.model, self.optimizer = self.models.policy, self.models.optimizers["policy"]
        self.step_index = 0
        self.checkpoint_step = 0
        self.trained: list[tuple[int, ...]] = []
        self.skipped_in_a_row = 0
        self._watch = Stopwatch()
        self.on_pass: PassHook | None = None
        self._own_loss: OwnLoss | None = None  # of the passes under way, in the place of their algorithm's

    # --- one step -----------------------------------------------------------------------------------------------

    def step(
        self,
        groups: Sequence[Group],
        *,
        step_of: StepOf,
        undone: Undone = lambda _: False,
        max_lag: int | None = None,
    ) -> StepReport:
        """Train on `groups` once and count the step. `step_of` maps a weight version to its optimizer step, `undone`
        says whether a restart abandoned it. `max_lag` is the lag bound (default: that of the settings).

        A step in which no row can move the weights leaves weights and optimizer as they are (`updated` is False), as
        does an update whose gradient is not finite. Raises Diverged, after the step, if too many of these came in a
        row."""
        self._watch = Stopwatch()
        ready = self._rows(groups, step_of, undone, max_lag)
        parts, epochs = self._minibatches([one for one in ready if not one.skipped]), self.settings.train.epochs
        updates = self._prepared(parts, self.algorithms, epochs)
        tally = StepTally(self.algorithms)
        for _ in range(epochs):
            for part in updates:
                if part:
                    self._update(part, tally)
        return self._ended_step(groups, ready, [pack for part in updates for pack in part], tally)

    def accumulate(
        self,
        groups: Sequence[Group],
        *,
        step_of: StepOf,
        undone: Undone = lambda _: False,
        max_lag: int | None = None,
        algo: Algorithm | None = None,
        own_loss: OwnLoss | None = None,
    ) -> Accumulated:
        """The first half of a step with one update: forward and backward over `groups`, gradients add up until
        `finish_step`. The weights of the tokens sum to 1 in each call. `algo` takes the place of the settings' one, and
        needs no other models; `own_loss` that of its loss. Raises ConfigError for a loss that is no scalar with a
        gradient."""
        self._watch = Stopwatch()
        algorithms = {**self.algorithms, "algo": self.settings.algo if algo is None else algo}
        ready = self._rows(groups, step_of, undone, max_lag, algo)
        (part,) = self._prepared([[one for one in ready if not one.skipped]], algorithms)
        tally = StepTally(algorithms)
        self._own_loss = own_loss
        try:
            names, loss = self._accumulated(part, tally) if part else (set[str](), torch.zeros(()))
            read = float(loss)
        except BaseException:  # between calls there are no gradients of half a batch
            self.models.zero_grad()
            raise
        finally:
            self._own_loss = None
        return Accumulated(tuple(groups), tuple(ready), tuple(part), tally, frozenset(names), read)

    def finish_step(self, parts: Sequence[Accumulated]) -> StepReport:
        """The second half: an optimizer step from the gradients of all `parts`, which is counted. Returns and raises as
        `step` does."""
        tally, names = parts[0].tally, {name for one in parts for name in one.names}
        for one in parts[1:]:
            tally.merge(one.tally)
        if names:
            self._optimizer_step(names, torch.tensor(sum(one.loss for one in parts), dtype=torch.float64), tally)
        ready = [rows for one in parts for rows in one.ready]
        groups = [group for one in parts for group in one.groups]
        return self._ended_step(groups, ready, [pack for one in parts for pack in one.packs], tally)

    def retune(self, settings: LearnerSettings) -> None:
        """Go on with the rates and bounds of `settings`, from the next step on. Models, algorithms and batches must be
        those of before: see `agentrl.config.changes.IN_FLIGHT`."""
        self._on_every_rank(self.take_settings, settings)

    def _rows(
        self,
        groups: Sequence[Group],
        step_of: StepOf,
        undone: Undone,
        max_lag: int | None,
        algo: Algorithm | None = None,
    ) -> list[GroupRows]:
        """The rows of a step's groups; `algo` takes the place of the settings' algorithms."""
        abandoned, by_role = cache(undone), self.settings.algo_by_role if algo is None else dict[str, Algorithm]()
        return [
            group_rows(
                group,
                self.settings.algo_of(group.task.env) if algo is None else algo,
                step_of=step_of,
                step_now=self.step_index,
                max_lag=self.settings.buffer.max_lag if max_lag is None else max_lag,
                undone=abandoned,
                keeps_kv=self.settings.keeps_kv,
                quorum=self.settings.quorum,
                by_role=by_role,
                policies=self.settings.own_roles,
            )
            for group in groups
        ]

    def _ended_step(
        self, groups: Sequence[Group], ready: Sequence[GroupRows], passes: Sequence[Pack], tally: StepTally
    ) -> StepReport:
        """Count a step whose updates are made."""
        lr, watch, tally = lr_of(self.optimizer), self._watch, tally.on_host()
        self._on_every_rank(self.end_step, None)
        self.trained.append(tuple(one.episode_id for group in groups for one in group.trajectories if one.scored))
        self._check_skipped()
        used = use(
            self._module,
            tally.packs,
            self.model.device,
            seconds=self.ranks.size * sum(watch.seconds.values()),
            dtype=self.model.dtype,
            peak_tflops=self.settings.train.peak_tflops,
        )
        return summarise(
            self.step_index,
            ready,
            passes,
            tally,
            lr=lr,
            use=used,
            seconds=watch.seconds,
            replays=self.settings.routed_experts and self.settings.train.routing_replay != "off",
        )

    def _minibatches(self, ready: Sequence[GroupRows]) -> list[list[GroupRows]]:
        """The step's groups divided into updates; shuffled if there are several, the same way under the same seed."""
        n = min(self.settings.train.minibatches, max(len(ready), 1))
        order = list(ready)
        if n > 1:
            random.Random(f"{self.settings.seed}/{self.step_index}").shuffle(order)
        return [order[index::n] for index in range(n)]

    def _prepared(
        self, parts: Sequence[Sequence[GroupRows]], algorithms: Mapping[str, Algorithm], epochs: int = 1
    ) -> list[list[Pack]]:
        """The passes of each update, with all that their losses read."""
        updates = [prepared(part, self._routers, self.settings.train.routing_replay) for part in self._packed(parts)]
        self._watch.lap("pack")
        updates = self._with_proximal(updates, every=len(updates) * epochs > 1)
        updates = self._with_advantages(updates, algorithms)
        self._watch.lap("proximal")
        return updates

    def _packed(self, parts: Sequence[Sequence[GroupRows]]) -> list[list[Pack]]:
        """The passes of each update, without rows that cannot move the weights; if their algorithm looks ahead, without
        episodes that cannot."""

        def computed(rows: Sequence[Row]) -> list[Row]:
            matter = {id(row): row.episode_id for row in rows if row.algo.matters(row.columns)}
            episodes = set(matter.values())
            return [row for row in rows if id(row) in matter or (row.algo.ahead and row.episode_id in episodes)]

        @cache
        def priced(policy: str | None) -> Prices:
            return prices(self.models.of(policy).module)

        def cost(tree: PrefixTree) -> float:
            """Of the nodes that predict, those that rows share count for each."""
            predictors = sum(len(row.place_S) + len(row.observed_O) for row in tree.rows)
            return priced(tree.rows[0].policy).of(len(tree.token_ids_N), predictors, tree.branches)

        budget, size = self.settings.train.tokens_per_batch, self._at_once
        shared = not any(model.obstacle for model in self.models.policies())
        computed_rows = [[computed(group) for group in part] for part in weigh(parts)]
        return [
            laid(rows, budget, size, "cpu", cost=cost, shared=shared, stems=self.models.prompt_once)
            for rows in computed_rows
        ]

    def _with_proximal(self, updates: Sequence[Sequence[Pack]], *, every: bool) -> list[list[Pack]]:
        """The passes with the columns of `forward` before the first update: `every` pass, or those whose algorithm
        looks ahead."""
        wanted = [pack for part in updates for pack in part if every or pack.algo.ahead]
        if not wanted:
            return [list(part) for part in updates]
        columns = {id(wanted[at]): found for at, found in self._over_ranks(self.forward, wanted).items()}
        return [[pack.having(columns.get(id(pack), {})) for pack in part] for part in updates]

    def _with_advantages(
        self, updates: Sequence[Sequence[Pack]], algorithms: Mapping[str, Algorithm]
    ) -> list[list[Pack]]:
        """The passes with the advantages that each algorithm computes over all its tokens of a step, by policy."""
        judged = {id(pack): pack for part in updates for pack in part}
        for algo, policy in product(distinct(algorithms).values(), (None, *self.settings.own_roles)):
            laid = [pack for part in updates for pack in part if pack.algo == algo and pack.policy == policy]
            if not laid:
                continue
            columns = {name: torch.cat([pack.columns[name] for pack in laid]) for name in laid[0].columns}
            sizes = [len(pack.target_K) for pack in laid]
            found = {name: column.split(sizes) for name, column in algo.advantages(columns).items()}
            for at, pack in enumerate(laid):
                judged[id(pack)] = pack.having({name: of[at] for name, of in found.items()})
        return [[judged[id(pack)] for pack in part] for part in updates]

    def _update(self, part: Sequence[Pack], tally: StepTally) -> None:
        """Forward and backward over the passes of an update, then an optimizer step."""
        names, loss = self._accumulated(part, tally)
        self._optimizer_step(names, loss, tally)

    def _accumulated(self, part: Sequence[Pack], tally: StepTally) -> tuple[set[str], Tensor]:
        """Forward and backward over some passes. Returns the models that they train, and their loss."""
        part = pulled(part, self._routers, self.settings.train.balance_weight, self._routing)
        found = self._over_ranks(self.forward_backward, part)
        for at, pack in enumerate(part):
            tally.add_pass(pack, found[at])
        loss = torch.stack([found[at].loss for at in range(len(part))]).sum()
        names = {
            policy_of(pack.policy) if name == "policy" else name
            for pack in part
            for name in pack.algo.trained(self.step_index)
        }
        return names, loss

    def _optimizer_step(self, names: Collection[str], loss: Tensor, tally: StepTally) -> None:
        """An optimizer step of the named models from the gradients at hand."""
        ordered = [name for name in self.models.optimizers if name in names]
        norm = self._on_every_rank(self.optimizer_step, (ordered, loss))
        tally.add_update(loss, norm)
        self.skipped_in_a_row = 0 if norm is not None else self.skipped_in_a_row + 1

    # --- the work of one rank: rank 0 calls these methods on all ranks, which meet in collectives --------------------

    def _on_every_rank(self, work: Callable[[S], T], given: S) -> T:
        """Every rank does the same. Returns the result of rank 0."""
        return self.ranks.run(work, [given] * self.ranks.size)[0]

    def _over_ranks(self, work: Callable[[list[Pass]], list[T]], part: Sequence[Pack]) -> dict[int, T]:
        """Divide passes over the ranks and do `work` on each share. Returns the result of each pass, by its place. The
        ranks of a team get the same share."""
        shares = divided(part, self._at_once, lambda pack: operations(self._module(pack), pack))
        together = self.ranks.team
        found = self.ranks.run(work, [share for share in shares for _ in range(together)])[::together]
        each = ((one, is_) for share, of in zip(shares, found, strict=True) for one, is_ in zip(share, of, strict=True))
        return {one.at: is_ for one, is_ in each if one.counts}

    @property
    def _at_once(self) -> int:
        """How many passes the ranks compute at the same time."""
        return self.ranks.size // self.ranks.team

    def _module(self, pack: Pack) -> Any:
        """The module of this batch's policy."""
        return self.models.of(pack.policy).module

    def _routers(self, pack: Pack) -> Routers | None:
        return self.models.of(pack.policy).routers

    def _routing(self, part: Sequence[Pack]) -> list[Routed]:
        """The routers' choices in these passes, computed without gradients."""
        found = self._over_ranks(self.forward_routing, part)
        return [found[at] for at in range(len(part))]

    def _on_device(self, one: Pass) -> Pack:
        without = replace(one.pack, branches=())  # a layout reads these on the host
        return replace(moved(without, self.model.device), branches=one.pack.branches)

    def _sent(self, found: T) -> T:
        """What this rank tells rank 0; if there is no other one, it stays where it is until somebody reads it."""
        return found if self.ranks.size == 1 else moved(found, "cpu")

    def _passes(self, share: Sequence[Pass], part: str) -> Iterator[tuple[Pass, Pack]]:
        """The passes on this rank's device, grouped by shared prompt; the prompt's own backward pass comes after its
        group. The time goes to `part` of the step."""
        for _, own in groupby(share, lambda one: (one.pack.policy, one.pack.stem)):
            with self.models.stem():
                yield from ((one, self._on_device(one)) for one in own)
            self._watch.lap(part)
            self._progress()

    def forward(self, share: list[Pass]) -> list[dict[str, Tensor]]:
        """Forward without gradients: the columns of each pass under the current weights."""
        found: list[dict[str, Tensor]] = []
        for _, pack in self._passes(share, "proximal"):
            self._progress()
            found.append(self.models.columns(pack))
        return moved(found, "cpu")

    @torch.no_grad()
    def forward_routing(self, share: list[Pass]) -> list[Routed]:
        """Forward without gradients: the routers' choices in each pass under the current weights."""
        found: list[Routed] = []
        for _, pack in self._passes(share, "forward"):
            with listening(self._routers(pack)) as heard:
                self.models.forward(pack, trained=())
            assert heard is not None, "only passes of mixtures"
            found.append(routed(heard))
            self._progress()
        return moved(found, "cpu")

    def forward_backward(self, share: list[Pass]) -> list[PassResult]:
        """Forward and backward; accumulate gradients."""
        found: list[PassResult] = []
        for one, pack in self._passes(share, "backward"):
            others = {} if "proximal" in pack.columns else self.models.others(pack)
            trained = pack.algo.trained(self.step_index)
            with listening(self._routers(pack)) as heard:
                outputs = self.models.forward(pack, trained=trained)
            tokens = {"proximal": outputs.logprobs_K.detach(), **pack.columns, **others}
            if self.on_pass is not None:
                self.on_pass(pack, tokens, outputs)
            if self._own_loss is None:
                loss = pack.algo.loss(tokens, outputs, self.step_index)
            else:
                loss = _own(self._own_loss, tokens, outputs)
            if heard is not None and pack.routes and pack.routes.pull_ME is not None and "policy" in trained:
                loss = replace(loss, total=loss.total + heard.pulled(pack.routes.pull_ME))
            found.append(pass_result(tokens, outputs, loss, heard))
            self._watch.lap("forward")
            self._progress()
            # The loss is a sum over passes, and gradients are one over ranks: who shares a pass has a part of its loss.
            (loss.total * (1 / self.ranks.team if one.counts else 0)).backward()
            self._watch.lap("backward")
            self._progress()
        return self._sent(found)

    def optimizer_step(self, given: tuple[Sequence[str], Tensor]) -> float | None:
        """Update the named models from the accumulated gradients, given their loss: see `Models.optimizer_step`."""
        names, loss = given
        norm = self.models.optimizer_step(names, loss=loss, lr_share=self.settings.train.lr_share(self.step_index + 1))
        self._watch.lap("optimizer")
        self._progress()
        return norm

    def take_settings(self, settings: LearnerSettings) -> None:
        """See `retune`."""
        self.settings = settings
        self.models.retune(settings)

    def end_step(self, _: None) -> None:
        """Count the step and let moving models follow."""
        self.step_index += 1
        self.models.follow(self.step_index)

    def gather_weights(self, given: tuple[torch.dtype | None, str | None]) -> dict[str, Tensor]:
        """See `checkpoint_tensors`; other ranks than 0 return nothing."""
        dtype, role = given
        return checkpoint_tensors(self.models.of(role).module, dtype)

    def gather_adapter(self, _: None) -> dict[str, Tensor]:
        """See `lora.tensors_of`; other ranks than 0 return nothing."""
        found = lora.tensors_of(self.model.module)
        return found if self.ranks.rank == 0 else {}

    def score_tokens(self, given: tuple[Sequence[int], torch.dtype, str | None]) -> tuple[float, ...]:
        token_ids, dtype, role = given
        if self.settings.adapted_roles:
            lora.activate(self.model.module, role)
        return self.models.of(role).score(token_ids, dtype)

    def hash_weights(self, _: None) -> dict[str, str]:
        found = {name: whole(tensor.detach(), name) for name, tensor in self.models.tensors().items()}
        return {name: hash_of(tensor) for name, tensor in found.items()} if self.ranks.rank == 0 else {}

    def take_snapshot(self, dtype: torch.dtype) -> WeightSnapshot | None:
        return take(self.model.module, dtype)

    def save_part(self, given: tuple[Path, CheckpointState]) -> Path | None:
        """Rank 0 writes the checkpoint. Other ranks send their shards of models and begin to write their own files."""
        draft, state = given
        if self.ranks.rank == 0:
            return self._write(draft, state, None, self._progress)
        parts = self.models.parts()
        self._begin(draft, checkpoint.contents(self.model.module, self.models.optimizers, parts, self.models.own))
        return None

    def copy_part(self, draft: Path) -> list[tuple[str, Any]]:
        """See `checkpoint.copied`. Other ranks than 0 begin to write their own files, and return nothing."""
        found = checkpoint.copied(self.model.module, self.models.optimizers, self.models.parts(), self.models.own)
        if self.ranks.rank == 0:
            return found
        self._begin(draft, found)
        return []

    def _begin(self, draft: Path, found: Iterable[tuple[str, Any]]) -> None:
        for name, one in found:
            if name == checkpoint.SHARDS:
                write = partial(optimizer_state.write, draft / name, self.ranks.rank, one)
                self.ranks.beside(draft.name, write)

    def _write(
        self, draft: Path, state: CheckpointState, found: list[tuple[str, Any]] | None, progress: Callable[[], None]
    ) -> Path:
        return checkpoint.save(
            draft,
            state,
            module=self.model.module,
            model_folder=self.model.folder,
            optimizers=self.models.optimizers,
            parts=self.models.parts(),
            own=self.models.own,
            found=found,
            keep=self.settings.train.keep_checkpoints,
            ranks=self.ranks.size,
            settle=partial(self.ranks.settle, draft.name, progress),
            progress=progress,
            may_appear=self._may_save,
        )

    def load_part(self, folder: Path) -> CheckpointState:
        self.model.load_weights(folder)
        for role, model in self.models.own.items():
            model.load_weights(of_role(folder, role))
        state = checkpoint.load(folder, self.models.optimizers, self.models.parts())
        self.step_index = self.checkpoint_step = state.step
        self.trained = []
        return state

    def _check_skipped(self) -> None:
        most = self.settings.train.max_skipped
        if self.skipped_in_a_row > most:
            raise Diverged(
                f"step {self.step_index}: the gradients of {self.skipped_in_a_row} updates in a row were not finite, "
                f"more than train.max_skipped = {most}, and no weight changed: lower train.lr in a new run"
            )

    # --- what outlives the process --------------------------------------------------------------------------------

    def export(self, path: Path, *, dtype: torch.dtype | None = None, role: str | None = None) -> WeightFile:
        """Write the weights for an engine: one safetensors file, whole or not at all. An adapter is merged into it.
        Those of a `role` with its own model, or of all others."""
        found = self._on_every_rank(self.gather_weights, (dtype, role))
        return write_weights(found, path, dtype=dtype, metadata={"step": str(self.step_index)})

    def export_adapter(self, folder: Path) -> Path:
        """Write the adapters alone for an engine that has the weights below: a folder in PEFT's format."""
        return lora.write(self.model.module, self._on_every_rank(self.gather_adapter, None), folder, read_back=False)

    def snapshot(self, dtype: torch.dtype) -> WeightSnapshot:
        """A copy of the weights that a sender reads: see `agentrl.learner.weight_export`."""
        found = self._on_every_rank(self.take_snapshot, dtype)
        assert found is not None, "rank 0 gets it"
        return found

    def score(
        self, token_ids: Sequence[int], dtype: torch.dtype = torch.float32, *, role: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs of `token_ids[1:]` under the current weights rounded to `dtype`, in nats at temperature 1, for the
        canary; those of a `role` with its own adapter or model, or of all others."""
        return self._on_every_rank(self.score_tokens, (token_ids, dtype, role))

    def hashes(self) -> dict[str, str]:
        """Of each trained tensor, by name: see `agentrl.learner.weight_export`."""
        return self._on_every_rank(self.hash_weights, None)

    def save(self, root: Path) -> Path:
        """Write a checkpoint of this step under `root`; the episodes in `trained` are recorded in it, then forgotten.
        Where nothing was trained since the last one, that one is returned."""
        last = newest(root)
        if last is not None and self.checkpoint_step == self.step_index and not self.trained:
            return last
        folder = self._on_every_rank(self.save_part, (self._draft(root), self._state()))
        assert folder is not None, "rank 0 writes it"
        self.checkpoint_step, self.trained = self.step_index, []
        return folder

    def copy(self, root: Path) -> Callable[[Callable[[], None]], Path] | None:
        """Copy the state of this step to host memory; None if there is no room for it. The call that is returned writes
        it as a checkpoint under `root`, as `save` does, on any thread and while the learner goes on; it is given what
        to call after every file, and it is called once, before there is another checkpoint. The episodes in `trained`
        are recorded in it, and forgotten: if it is not written, the learner has to go on from the one before."""
        if checkpoint.size_bytes(self.model.module, self.models.optimizers, self.models.own) > checkpoint.free_bytes():
            return None
        draft = self._draft(root)
        write = partial(self._write, draft, self._state(), self._on_every_rank(self.copy_part, draft))
        self.checkpoint_step, self.trained = self.step_index, []
        return write

    def _draft(self, root: Path) -> Path:
        over = self.ranks.size > 1
        return checkpoint.begin(root, self.step_index, shards=over, may_appear=self._may_save)

    def _state(self) -> CheckpointState:
        return CheckpointState(step=self.step_index, previous_step=self.checkpoint_step, episodes=tuple(self.trained))

    def load(self, folder: Path) -> CheckpointState:
        """Go on from a checkpoint: weights, critic, moving models, optimizers, random state, step. Frozen models stay
        as they are. Raises ModelError if a file of it does not hold the bytes that were written."""
        digests.check(folder, self._progress)
        return self._on_every_rank(self.load_part, folder)


def _own(function: OwnLoss, tokens: Mapping[str, Tensor], outputs: Outputs) -> Loss:
    """The loss of somebody's function. Raises ConfigError for what is none."""
    total = cast("object", function(tokens, outputs))
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        kind = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError("loss", kind, "give a scalar tensor that depends on outputs.logprobs_K, such as a sum")
    return Loss(total=total, clipped_K=torch.zeros_like(outputs.logprobs_K, dtype=torch.bool))
