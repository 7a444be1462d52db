"""The learner: finished groups in, better weights and a report out.

Owns the order of a step and its schedule. Never knows the store, the engine, where groups come from, or what an
algorithm (`agentrl.algos.algorithm`) does with them. If environments or roles have algorithms of their own, each has
passes and advantages of its own; the gradients of all add up.

A step:

    groups ─► rows with what their algorithm prepares from their rewards (batch) ─► packs of prefix trees
           ─► `Forward` over all of them, if the algorithm looks ahead or there are several updates ─► advantages
           ─► per update: `ForwardBackward` of each pass, then `OptimizerStep`
           ─► StepReport

Its parts: `step_passes` makes the passes and divides them over the ranks; `rank_worker` is the work of one rank, which
the messages in `rank_orders` ask for; `learner_state` saves what outlives the process.

The proximal policy is the one at the start of the step. With one update per step (the default) it is the current one,
so its log-probs are those of the pass itself and the ratio is always 1; with several updates its log-probs are computed
before the first. Rows that cannot move the weights, as their algorithm says, are counted in the normalisation but not
computed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm
from agentrl.config.algorithms import distinct
from agentrl.config.roles import LearnerSettings
from agentrl.errors import RunFailed
from agentrl.learner.checkpoints.checkpoint import CheckpointState
from agentrl.learner.data.batch import GroupRows, StepOf, Undone
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.flops import use
from agentrl.learner.learner_state import LearnerState
from agentrl.learner.model import lora
from agentrl.learner.optimizers.optimizers import lr_of
from agentrl.learner.parallel.ranks import ALONE, Ranks
from agentrl.learner.rank_orders import (
    BuildWorker,
    EndStep,
    GatherAdapter,
    GatherWeights,
    HashWeights,
    OptimizerStep,
    ScoreTokens,
    TakeSettings,
    TakeSnapshot,
    on_every_rank,
)
from agentrl.learner.rank_worker import OwnLoss
from agentrl.learner.step_passes import StepPasses
from agentrl.learner.step_report import StepReport, StepTally, Stopwatch, summarise
from agentrl.learner.weight_export import WeightFile, WeightSnapshot, write_weights
from agentrl.records import Group


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The result of `Learner.accumulate`: groups with their rows and passes, whose gradients are at hand for the models
    of these `names`, and their `loss`."""

    groups: tuple[Group, ...]
    ready: tuple[GroupRows, ...]
    packs: tuple[Pack, ...]
    tally: StepTally
    names: frozenset[str]
    loss: float


class Diverged(RunFailed):
    """Too many updates in a row had a gradient that is not finite. The learner can be saved."""


class Learner:
    """Trains one policy, and those of roles with their own. `worker` is that of rank 0: it has the models, and counts
    the steps. Between calls the models' gradients are empty, but after `accumulate`."""

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
        model that an algorithm or a role names. `progress` is called whenever a part of long work is done: a pass, an
        update, a file; `may_save` before a checkpoint appears, and raises if it must not. `ranks` share the work: the
        worker of this learner is that of rank 0, and the others make their own. Raises ModelError."""
        build_order = BuildWorker(settings, model_dir, reference_dir, folder_of)
        # All ranks build at the same time, each from the same order: to load one after the other would take as many
        # times as long, and collectives inside loading would wait for ever.
        with ranks.building(build_order):
            self.worker = build_order.build(device, ranks, progress)
        self.algorithms, self.ranks, self.models = distinct(settings.algorithms), ranks, self.worker.models
        self.model, self.optimizer = self.models.policy, self.models.optimizers["policy"]
        self.state = LearnerState(self.worker, may_save)
        self.skipped_in_a_row = 0
        self._passes = StepPasses(self.worker)

    @property
    def settings(self) -> LearnerSettings:
        """The settings that hold now: see `retune`."""
        return self.worker.settings

    @property
    def step_index(self) -> int:
        """The number of optimizer steps that are in the weights."""
        return self.worker.step_index

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """The ids of the episodes trained since the last checkpoint, step by step."""
        return self.state.trained

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
        self.worker.watch = Stopwatch()
        ready_groups = self._passes.rows(groups, step_of, undone, max_lag)
        epoch_count = self.settings.train.epochs
        # Before the first update: the proximal log-probs, and advantages that need them, are those of the policy at
        # the start of the step, for all minibatches and epochs alike.
        updates = self._passes.prepared(self._passes.minibatches(ready_groups), self.algorithms, epoch_count)
        step_tally = StepTally(self.algorithms)
        for _ in range(epoch_count):
            for update_packs in updates:
                if update_packs:
                    trained_names, update_loss = self._passes.accumulate(update_packs, step_tally)
                    self._optimizer_step(trained_names, update_loss, step_tally)
        step_packs = [update_pack for update_packs in updates for update_pack in update_packs]
        return self._ended_step(groups, ready_groups, step_packs, step_tally)

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
        self.worker.watch = Stopwatch()
        algorithms = {**self.algorithms, "algo": self.settings.algo if algo is None else algo}
        ready_groups = self._passes.rows(groups, step_of, undone, max_lag, algo)
        (update_packs,) = self._passes.prepared(
            [[group_rows for group_rows in ready_groups if not group_rows.skipped]], algorithms
        )
        step_tally = StepTally(algorithms)
        self.worker.own_loss = own_loss
        try:
            trained_names, update_loss = set[str](), torch.zeros(())
            if update_packs:
                trained_names, update_loss = self._passes.accumulate(update_packs, step_tally)
            # Waits for the device here, inside the `try`: an error of a kernel is raised where its gradients are
            # still dropped.
            loss_value = float(update_loss)
        except BaseException:  # between calls there are no gradients of half a batch
            self.models.zero_grad()
            raise
        finally:
            self.worker.own_loss = None
        return Accumulated(
            tuple(groups), tuple(ready_groups), tuple(update_packs), step_tally, frozenset(trained_names), loss_value
        )

    def finish_step(self, parts: Sequence[Accumulated]) -> StepReport:
        """The second half: an optimizer step from the gradients of all `parts`, which is counted. Returns and raises as
        `step` does."""
        step_tally = parts[0].tally
        trained_names = {model_name for accumulated in parts for model_name in accumulated.names}
        for accumulated in parts[1:]:
            step_tally.merge(accumulated.tally)
        if trained_names:
            total_loss = torch.tensor(sum(accumulated.loss for accumulated in parts), dtype=torch.float64)
            self._optimizer_step(trained_names, total_loss, step_tally)
        ready_groups = [group_rows for accumulated in parts for group_rows in accumulated.ready]
        trained_groups = [trained_group for accumulated in parts for trained_group in accumulated.groups]
        update_packs = [update_pack for accumulated in parts for update_pack in accumulated.packs]
        return self._ended_step(trained_groups, ready_groups, update_packs, step_tally)

    def retune(self, settings: LearnerSettings) -> None:
        """Go on with the rates and bounds of `settings`, from the next step on. Models, algorithms and batches must be
        those of before: see `agentrl.config.changes.IN_FLIGHT`."""
        on_every_rank(self.worker, TakeSettings(settings))

    def _ended_step(
        self, groups: Sequence[Group], ready: Sequence[GroupRows], passes: Sequence[Pack], tally: StepTally
    ) -> StepReport:
        """Count a step whose updates are made."""
        learning_rate, stopwatch, tally = lr_of(self.optimizer), self.worker.watch, tally.on_host()
        # Counted also if nothing was trained: the store knows groups as taken by a step, and two steps of one number
        # could not be told apart at a restart (law 2).
        on_every_rank(self.worker, EndStep())
        self.state.trained.append(
            tuple(
                trajectory.episode_id
                for taken_group in groups
                for trajectory in taken_group.trajectories
                if trajectory.scored
            )
        )
        # Last, when the step is counted and its episodes are noted: whoever catches `Diverged` can still save a
        # checkpoint that agrees with the store.
        self._check_skipped()
        device_use = use(
            self.worker.module_of,
            tally.packs,
            self.model.device,
            seconds=self.ranks.size * sum(stopwatch.seconds.values()),
            dtype=self.model.dtype,
        )
        return summarise(
            self.step_index,
            ready,
            passes,
            tally,
            lr=learning_rate,
            use=device_use,
            seconds=stopwatch.seconds,
            replays=self.settings.routed_experts is not False,
        )

    def _optimizer_step(self, names: Collection[str], loss: Tensor, tally: StepTally) -> None:
        """An optimizer step of the named models from the gradients at hand."""
        ordered_names = [model_name for model_name in self.models.optimizers if model_name in names]
        gradient_norm = on_every_rank(self.worker, OptimizerStep(ordered_names, loss))
        tally.add_update(loss, gradient_norm)
        # In a row, and not in total: a bad batch comes now and then, while weights that are lost give nothing else.
        self.skipped_in_a_row = 0 if gradient_norm is not None else self.skipped_in_a_row + 1

    def _check_skipped(self) -> None:
        skipped_limit = self.settings.train.max_skipped
        if self.skipped_in_a_row > skipped_limit:
            raise Diverged(
                f"step {self.step_index}: the gradients of {self.skipped_in_a_row} updates in a row were not finite, "
                f"more than train.max_skipped = {skipped_limit}, and no weight changed: lower train.lr in a new run"
            )

    # --- what outlives the process --------------------------------------------------------------------------------

    def export(self, path: Path, *, dtype: torch.dtype | None = None, role: str | None = None) -> WeightFile:
        """Write the weights for an engine: one safetensors file, whole or not at all. An adapter is merged into it.
        Those of a `role` with its own model, or of all others."""
        weight_tensors = on_every_rank(self.worker, GatherWeights(dtype, role))
        return write_weights(weight_tensors, path, dtype=dtype, metadata={"step": str(self.step_index)})

    def export_adapter(self, folder: Path) -> Path:
        """Write the adapters alone for an engine that has the weights below: a folder in PEFT's format."""
        return lora.write(self.model.module, on_every_rank(self.worker, GatherAdapter()), folder, read_back=False)

    def snapshot(self, dtype: torch.dtype) -> WeightSnapshot:
        """A copy of the weights that a sender reads: see `agentrl.learner.weight_export`."""
        snapshot = on_every_rank(self.worker, TakeSnapshot(dtype))
        assert snapshot is not None, "rank 0 gets it"
        return snapshot

    def score(
        self, token_ids: Sequence[int], dtype: torch.dtype = torch.float32, *, role: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs of `token_ids[1:]` under the current weights rounded to `dtype`, in nats at temperature 1, for the
        canary; those of a `role` with its own adapter or model, or of all others."""
        return on_every_rank(self.worker, ScoreTokens(token_ids, dtype, role))

    def hashes(self) -> dict[str, str]:
        """Hash each trained tensor, by name: see `agentrl.learner.weight_export`."""
        return on_every_rank(self.worker, HashWeights())

    def save(self, root: Path) -> Path:
        """Write a checkpoint of this step under `root`; the episodes in `trained` are recorded in it, then forgotten.
        Where nothing was trained since the last one, that one is returned."""
        return self.state.save(root)

    def copy(self, root: Path) -> Callable[[Callable[[], None]], Path] | None:
        """Copy the state of this step to host memory; None if there is no room for it. The call that is returned writes
        it as a checkpoint under `root`, as `save` does, on any thread and while the learner goes on; its argument is
        called after every file. Call it once, before there is another checkpoint. The episodes in `trained` are
        recorded in it, and forgotten: if it is not written, the learner has to go on from the one before."""
        return self.state.copy(root)

    def load(self, folder: Path) -> CheckpointState:
        """Go on from a checkpoint: weights, critic, moving models, optimizers, random state, step. Frozen models stay
        as they are. Raises ModelError if a file of it does not hold the bytes that were written."""
        return self.state.load(folder)
