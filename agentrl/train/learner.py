"""The learner: finished groups in, better weights and a report out.

Owns the order of a step and its schedule. Never knows the store, the engine, where groups come from, or what an
algorithm (`agentrl.algos.algorithm`) does with them. If environments or roles have algorithms of their own, each has
passes and advantages of its own; the gradients of all add up.

A step:

    groups ─► rows with what their algorithm prepares from their rewards (samples) ─► packs of prefix trees (packing)
           ─► a pass over all of them, if the algorithm looks ahead or there are several updates ─► its advantages
           ─► per update: passes whose loss it gives add up gradients, clip, AdamW
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
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from agentrl.algorithms import distinct
from agentrl.algos.algorithm import Outputs
from agentrl.checkpoint_folders import newest
from agentrl.config import RunConfig
from agentrl.errors import RunFailed
from agentrl.records import Group
from agentrl.train import checkpoint, lora
from agentrl.train.checkpoint import CheckpointState
from agentrl.train.export import WeightFile, export_weights
from agentrl.train.hashes import hash_of
from agentrl.train.machine import use
from agentrl.train.models import Models
from agentrl.train.packing import Pack, packs
from agentrl.train.report import StepReport, Stopwatch, Tally, summarise
from agentrl.train.samples import GroupRows, Row, StepOf, Undone, group_rows, weigh

Passed = Callable[[Pack, Mapping[str, Tensor], Outputs], None]
"""Looks at a pass before its gradients: the pass, the columns of its tokens, and what the models say of them."""


class Diverged(RunFailed):
    """Too many updates in a row had a gradient that is not finite. The learner can be saved."""


class Learner:
    """Trains one policy. Invariants: `step_index` steps are in the weights; `trained` holds the ids of the episodes
    trained since the last checkpoint, step by step; between calls the model's gradients are empty. Whoever wants to
    look at passes sets `on_pass`; it must change nothing."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        device: torch.device | str = "cpu",
        *,
        reference_dir: Path | None = None,
        folder_of: Callable[[str], Path] = Path,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`model_dir` holds the policy to start from, `reference_dir` the reference of a KL term (default: the same;
        after a restart from a checkpoint, name the initial policy's). If an adapter is trained over that same folder,
        the reference is the model with its adapter off, and no second one is loaded. `folder_of` finds the folder of a
        model that the algorithm names. `progress` is called
        whenever a part of long work is done: a pass, an update, a file. Raises ModelError."""
        self.config, self.algorithms = config, distinct(config.algorithms)
        self._progress = progress
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.models = Models(config, model_dir, device, reference_dir=reference_dir, folder_of=folder_of)
        self.model, self.optimizer = self.models.policy, self.models.optimizers["policy"]
        self.step_index = 0
        self.checkpoint_step = 0
        self.trained: list[tuple[int, ...]] = []
        self.skipped_in_a_row = 0
        self.on_pass: Passed | None = None

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
        says whether a restart abandoned it. `max_lag` is the lag bound (default: `buffer.max_lag`).

        A step in which no row can move the weights leaves weights and optimizer as they are (`updated` is False), as
        does an update whose gradient is not finite. Raises Diverged, after the step, if too many of these came in a
        row."""
        watch = Stopwatch()
        abandoned, by_role = cache(undone), self.config.algo_by_role
        ready = [
            group_rows(
                group,
                self.config.algo_of(group.task.env),
                step_of=step_of,
                step_now=self.step_index,
                max_lag=self.config.buffer.max_lag if max_lag is None else max_lag,
                undone=abandoned,
                keeps_kv=not self.config.engine.recompute_kv,
                quorum=self.config.quorum,
                by_role=by_role,
            )
            for group in groups
        ]
        updates = self._lay(self._minibatches([one for one in ready if not one.skipped]))
        watch.lap("pack")
        updates = self._looked_ahead(updates, every=len(updates) * self.config.train.epochs > 1)
        updates = self._judged(updates)
        watch.lap("proximal")
        tally = Tally(self.algorithms)
        for _ in range(self.config.train.epochs):
            for part in updates:
                if part:
                    self._update(part, tally, watch)
        lr = self.optimizer.param_groups[0]["lr"]
        self.step_index += 1
        self.models.follow(self.step_index)
        self.trained.append(tuple(one.episode_id for group in groups for one in group.trajectories if one.scored))
        self._check_skipped()
        laid = [pack for part in updates for pack in part]
        used = use(
            self.model.module,
            tally.packs,
            self.model.device,
            seconds=sum(watch.seconds.values()),
            dtype=self.model.dtype,
            peak_tflops=self.config.train.peak_tflops,
        )
        return summarise(self.step_index, ready, laid, tally, lr=lr, use=used, seconds=watch.seconds)

    def _minibatches(self, ready: Sequence[GroupRows]) -> list[list[GroupRows]]:
        """The step's groups divided into updates; shuffled if there are several, the same way under the same seed."""
        n = min(self.config.train.minibatches, max(len(ready), 1))
        order = list(ready)
        if n > 1:
            random.Random(f"{self.config.seed}/{self.step_index}").shuffle(order)
        return [order[index::n] for index in range(n)]

    def _lay(self, parts: Sequence[Sequence[GroupRows]]) -> list[list[Pack]]:
        """The passes of each update, without rows that cannot move the weights; if their algorithm looks ahead, without
        episodes that cannot."""

        def kept(rows: Sequence[Row]) -> list[Row]:
            matter = {id(row): row.episode_id for row in rows if row.algo.matters(row.columns)}
            episodes = set(matter.values())
            return [row for row in rows if id(row) in matter or (row.algo.ahead and row.episode_id in episodes)]

        laid = [[kept(group) for group in part] for part in weigh(parts)]
        budget, model = self.config.train.tokens_per_batch, self.model
        return [packs(rows, budget, model.device, shared=not model.obstacle) for rows in laid]

    def _looked_ahead(self, updates: Sequence[Sequence[Pack]], *, every: bool) -> list[list[Pack]]:
        """The passes with what the models say of them before the first update: of `every` pass, or if its algorithm
        looks ahead."""

        def seen(pack: Pack) -> Pack:
            if not (every or pack.algo.ahead):
                return pack
            self._progress()
            return pack.having(self.models.ahead(pack))

        return [[seen(pack) for pack in part] for part in updates]

    def _judged(self, updates: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
        """The passes with what each algorithm says of all its tokens of the step."""
        judged = {id(pack): pack for part in updates for pack in part}
        for algo in self.algorithms.values():
            laid = [pack for part in updates for pack in part if pack.algo == algo]
            if not laid:
                continue
            columns = {name: torch.cat([pack.columns[name] for pack in laid]) for name in laid[0].columns}
            sizes = [len(pack.target_K) for pack in laid]
            found = {name: column.split(sizes) for name, column in algo.advantages(columns).items()}
            for at, pack in enumerate(laid):
                judged[id(pack)] = pack.having({name: of[at] for name, of in found.items()})
        return [[judged[id(pack)] for pack in part] for part in updates]

    def _update(self, part: Sequence[Pack], tally: Tally, watch: Stopwatch) -> None:
        """One optimizer update from the summed gradients of its passes."""
        loss = 0.0
        for pack in part:
            others = {} if "proximal" in pack.columns else self.models.others(pack)
            outputs = self.models.forward(pack, trained=pack.algo.trained(self.step_index))
            tokens = {"proximal": outputs.logprobs_K.detach(), **pack.columns, **others}
            if self.on_pass is not None:
                self.on_pass(pack, tokens, outputs)
            pack_loss = pack.algo.loss(tokens, outputs, self.step_index)
            tally.passed(pack, tokens, outputs, pack_loss)
            watch.lap("forward")
            self._progress()
            pack_loss.total.backward()
            watch.lap("backward")
            self._progress()
            loss += float(pack_loss.total.detach())
        trained = {name for pack in part for name in pack.algo.trained(self.step_index)}
        names = [name for name in self.models.optimizers if name in trained]
        norm = self.models.update(names, loss=loss, lr_share=self.config.train.lr_share(self.step_index + 1))
        tally.updated(loss, norm)
        self.skipped_in_a_row = 0 if norm is not None else self.skipped_in_a_row + 1
        watch.lap("optimizer")
        self._progress()

    def _check_skipped(self) -> None:
        most = self.config.train.max_skipped
        if self.skipped_in_a_row > most:
            raise Diverged(
                f"step {self.step_index}: the gradients of {self.skipped_in_a_row} updates in a row were not finite, "
                f"more than train.max_skipped = {most}, and no weight changed: lower train.lr in a new run"
            )

    # --- what outlives the process --------------------------------------------------------------------------------

    def export(self, path: Path, *, dtype: torch.dtype | None = None) -> WeightFile:
        """Write the weights for an engine: one safetensors file, whole or not at all. An adapter is merged into it."""
        return export_weights(self.model.module, path, dtype=dtype, metadata={"step": str(self.step_index)})

    def export_adapter(self, folder: Path) -> Path:
        """Write the adapter alone for an engine that has the weights below: a folder in PEFT's format."""
        return lora.save(self.model.module, folder)

    def score(self, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
        """Log-probs of `token_ids[1:]` under the current weights rounded to `dtype`, in nats at temperature 1, for the
        canary."""
        return self.model.score(token_ids, dtype)

    def hashes(self) -> dict[str, str]:
        """Of each trained tensor, by name: see `agentrl.train.hashes`."""
        return {name: hash_of(tensor) for name, tensor in self.models.tensors().items()}

    def save(self, root: Path) -> Path:
        """Write a checkpoint of this step under `root`; the episodes in `trained` are recorded in it, then forgotten.
        Where nothing was trained since the last one, that one is returned."""
        last = newest(root)
        if last is not None and self.checkpoint_step == self.step_index and not self.trained:
            return last
        state = CheckpointState(step=self.step_index, previous_step=self.checkpoint_step, episodes=tuple(self.trained))
        folder = checkpoint.save(
            root,
            state,
            module=self.model.module,
            model_folder=self.model.folder,
            optimizers=self.models.optimizers,
            parts=self.models.parts(),
            keep=self.config.train.keep_checkpoints,
            progress=self._progress,
        )
        self.checkpoint_step, self.trained = self.step_index, []
        return folder

    def load(self, folder: Path) -> CheckpointState:
        """Go on from a checkpoint: weights, critic, moving models, optimizers, random state, step. Frozen models stay
        as they are."""
        self.model.load_weights(folder)
        state = checkpoint.load(folder, self.models.optimizers, self.models.parts())
        self.step_index = self.checkpoint_step = state.step
        self.trained = []
        return state
