"""A learner of your own loop: gradients from groups of trajectories, an optimizer step, weights for a fleet.

Owns the weight files on their way to a fleet; they are removed with this process. Never knows an engine.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from agentrl.algos.algorithm import Algorithm, Slots
from agentrl.blocks.buffer import Batch
from agentrl.blocks.publishing import Weights
from agentrl.config import BufferSettings, Train, algorithms
from agentrl.config.roles import LearnerSettings
from agentrl.config.sections import read_section
from agentrl.engine.weight_sync.canary import Dtype
from agentrl.errors import ConfigError, UsageError
from agentrl.host.janitor import OwnedFolder
from agentrl.host.with_block import Closing
from agentrl.learner.build_learner import build_learner
from agentrl.learner.learner import Accumulated
from agentrl.learner.rank_worker import OwnLoss
from agentrl.learner.step_report import StepReport
from agentrl.learner.weight_proof import proof_of
from agentrl.models.resolve import model_dir
from agentrl.records import Group, GroupState, Trajectory

Rows = Batch | Sequence[Group] | Sequence[Sequence[Trajectory]]
"""What a learner trains on: a buffer's batch, groups, or the trajectories of each group."""


class Learner(Closing):
    """Trains one policy. Calls compute in the calling thread (in a trio program give them a thread of their own).

    learner = Learner("agentrl/tiny-coder", train={"lr": 1e-3})
    learner.forward_backward(buffer.take())
    report = learner.step()
    """

    def __init__(
        self,
        model: str | Path,
        *,
        algo: Algorithm | Mapping[str, Any] | str = "grpo",
        train: Train | Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        max_lag: int = 4,
        seed: int = 0,
    ) -> None:
        """`algo` is an algorithm, its kind, or the keys of the run file's table `[algo]`. It defines the advantages,
        the models besides the policy, and the loss, unless you pass a loss of your own to `forward_backward`. `train`
        has the settings of `[train]`. `temperature` is the one that the tokens were sampled with. `max_lag` is the lag
        bound of rows that come from no buffer.

        Raises ConfigError for a bad setting, ModelError for a model that is not there."""
        train_settings = read_section(Train, train, "train")
        if train_settings.parallel.ranks > 1:
            hint = "a loop of your own has one rank: leave it out, or use agentrl.Trainer"
            raise ConfigError("train.parallel.ranks", train_settings.parallel.ranks, hint)
        algo_table = {"kind": algo} if isinstance(algo, str) else algo
        algo_fields = algo_table if isinstance(algo_table, Algorithm) else dict(algo_table)
        algorithm = cast("Algorithm", algorithms.read(algo_fields, "algo"))
        self.folder = model_dir(str(model))
        self._inner = build_learner(
            LearnerSettings(
                model=str(model),
                train=train_settings,
                algo=algorithm,
                seed=seed,
                temperature=temperature,
                buffer=read_section(BufferSettings, {"max_lag": max_lag}, "buffer"),
            ),
            self.folder,
            folder_of=model_dir,
        )
        self._versions: dict[int, int] = {0: 0}  # the step of each version that was published
        self._pending: list[Accumulated] = []
        self._scratch: OwnedFolder | None = None

    @property
    def step_index(self) -> int:
        """How many optimizer steps are in the weights."""
        return self._inner.step_index

    def forward_backward(self, rows: Rows, loss: Algorithm | OwnLoss | None = None) -> float:
        """Forward and backward over `rows`; gradients add up until `step`. Returns the loss.

        `loss` is another algorithm that needs no other models, or a function of yours: `(tokens, outputs) -> scalar
        tensor`. It is called for each packed pass, with the columns of its tokens ([K] each: `advantage`, `behaviour`,
        `proximal`, `lag`, `weight`, see `agentrl.algos.algorithm`) and `outputs.logprobs_K` with gradients; the losses
        of all passes add up, and the `weight`s to 1. Tokens older than the lag bound are not among them, nor those of
        rows that cannot move the weights by the learner's algorithm (with GRPO: without advantage).

        Raises ConfigError for a loss that is no scalar with a gradient, UsageError for tokens of a weight version whose
        step nobody knows."""
        batch = self._batch(rows)
        # Trained under another step's number, the ages of its tokens would be wrong by as many steps, and the lag bound
        # would let through what it has to refuse (law 2).
        if batch.step != self.step_index + 1:
            hint = f"the learner makes step {self.step_index + 1}: call step() once for each take, or load a checkpoint"
            raise UsageError(f"the batch was taken for step {batch.step}: {hint}")
        if isinstance(loss, Algorithm) and loss.slots not in (Slots(), self._inner.settings.algo.slots):
            hint = "it needs models that the learner did not load: give it as Learner(algo=...)"
            raise ConfigError("loss", loss.kind, hint)
        accumulated = self._inner.accumulate(
            batch.groups,
            step_of=batch.step_of,
            undone=batch.undone,
            max_lag=batch.max_lag,
            algo=loss if isinstance(loss, Algorithm) else None,
            own_loss=None if isinstance(loss, Algorithm) else loss,
        )
        self._pending.append(accumulated)
        return accumulated.loss

    def step(self) -> StepReport:
        """An optimizer step from the gradients at hand. Its report has what a run records of a step; where a gradient
        is not finite, or no row had an advantage, no weight changes (`report.updated` is False). Raises UsageError
        without a `forward_backward` before, RunFailed if too many gradients in a row were not finite."""
        if not self._pending:
            raise UsageError("step() has no gradients: call forward_backward(rows) before")
        accumulations, self._pending = self._pending, []
        return self._inner.finish_step(accumulations)

    def weights(self, dtype: Dtype = "float32") -> Weights:
        """The current weights for `publish`, in the dtype of the fleet's engines (`fleet.dtype`), with what proves on
        an engine that it has them. Good until the next but one."""
        if self._scratch is None:
            self._scratch = OwnedFolder()
            (self._scratch.path / "weights").mkdir()
        # A new name each time: an engine may still be reading the file before.
        weight_path = self._scratch.path / "weights" / f"{time.time_ns()}.safetensors"
        weight_file = self._inner.export(weight_path, dtype=getattr(torch, dtype))
        train_settings = self._inner.settings.train
        # Version 0 until `publish` numbers it.
        weight_proof = proof_of(self._inner, weight_file.fingerprints, version=0, dtype=dtype, train=train_settings)
        return Weights(
            step=self.step_index,
            path=weight_file.path,
            sha256=weight_file.sha256,
            proof=weight_proof,
            published=self._versions.__setitem__,
        )

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of this step below `folder`: weights as any engine can serve them, optimizer, random
        state. Returns its folder, for `load` and `Buffer.checkpoint`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        return self._inner.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint that `save` wrote. Raises UsageError for a folder that is none."""
        if not Path(folder).is_dir():
            raise UsageError(f"there is no checkpoint in {str(folder)!r}: give a folder that Learner.save returned")
        # Gradients of the weights that are about to be replaced: added to those of a checkpoint, they would push from a
        # place where the weights no longer are.
        self._pending = []
        self._inner.load(Path(folder))

    def close(self) -> None:
        """Remove the weight files."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _batch(self, rows: Rows) -> Batch:
        """Rows as a batch; those without one are of versions that this learner published."""
        if isinstance(rows, Batch):
            return rows
        groups = tuple(
            group_row if isinstance(group_row, Group) else _group(group_number, group_row)
            for group_number, group_row in enumerate(rows, 1)
        )

        def step_of(version: int) -> int:
            if version not in self._versions:
                hint = "take the rows from the buffer that it was published with"
                raise UsageError(f"this learner published no weight version {version}: {hint}")
            return self._versions[version]

        lag_bound = self._inner.settings.buffer.max_lag
        return Batch(groups, self.step_index + 1, lag_bound, step_of, lambda _: False)


def _group(number: int, members: Iterable[Trajectory]) -> Group:
    """Trajectories of one task as a group. Raises UsageError for none."""
    trajectories = tuple(members)
    if not trajectories:
        raise UsageError(f"group {number} has no trajectories: give the members of one task")
    return Group(
        id=number,
        task=trajectories[0].task,
        state=GroupState.SCORED,
        size=len(trajectories),
        trajectories=trajectories,
        left_out=(),
    )
