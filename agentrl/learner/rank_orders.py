"""Orders of rank 0 to the ranks, itself included: one class for each order, whose fields are its arguments.

An order is pickled and carried out by the `RankWorker` of each rank at the same time. Orders of the same kind go to all
ranks, since the ranks meet in collectives. `agentrl.learner.parallel.ranks` sends them, and knows no kind of order.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentrl.config.roles import LearnerSettings
from agentrl.learner.checkpoints import checkpoint
from agentrl.learner.checkpoints.checkpoint import CheckpointState
from agentrl.learner.checkpoints.folders import of_role
from agentrl.learner.model import lora
from agentrl.learner.moe.routing_replay import Routed
from agentrl.learner.parallel import optimizer_state
from agentrl.learner.parallel.fsdp import whole
from agentrl.learner.parallel.pass_schedule import Pass
from agentrl.learner.parallel.ranks import RankOrder, Ranks
from agentrl.learner.rank_worker import RankWorker
from agentrl.learner.step_report import PassResult
from agentrl.learner.weight_export import WeightSnapshot, checkpoint_tensors, hash_of, take

T = TypeVar("T")


def on_every_rank(worker: RankWorker, order: RankOrder[RankWorker, T]) -> T:
    """Have every rank carry out the same order; `worker` is that of rank 0. Returns the result of rank 0."""
    return worker.ranks.run(worker, [order] * worker.ranks.size)[0]


@dataclass(frozen=True, slots=True)
class BuildWorker:
    """Make the worker of a rank. The fields are arguments of `Learner`."""

    settings: LearnerSettings
    model_dir: Path
    reference_dir: Path | None
    folder_of: Callable[[str], Path]

    def build(
        self, device: torch.device | str, ranks: Ranks, progress: Callable[[], None] = lambda: None
    ) -> RankWorker:
        """The worker of the rank that `ranks` says, on its device. Raises ModelError."""
        return RankWorker(
            self.settings,
            self.model_dir,
            device,
            reference_dir=self.reference_dir,
            folder_of=self.folder_of,
            progress=progress,
            ranks=ranks,
        )


# --- a step


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute columns of passes without gradients, one dictionary for each pass."""

    passes: Sequence[Pass]

    def run(self, worker: RankWorker) -> list[dict[str, Tensor]]:
        return worker.forward(self.passes)


@dataclass(frozen=True, slots=True)
class ForwardRouting:
    """Compute the routers' choices in passes without gradients."""

    passes: Sequence[Pass]

    def run(self, worker: RankWorker) -> list[Routed]:
        return worker.forward_routing(self.passes)


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Accumulate the gradients of passes."""

    passes: Sequence[Pass]

    def run(self, worker: RankWorker) -> list[PassResult]:
        return worker.forward_backward(self.passes)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the models of these `names`, in this order, from the accumulated gradients of `loss`. The result is the
    norm of the gradient; None if it was not finite, and no weight changed."""

    names: Sequence[str]
    loss: Tensor

    def run(self, worker: RankWorker) -> float | None:
        return worker.optimizer_step(self.names, self.loss)


@dataclass(frozen=True, slots=True)
class TakeSettings:
    """Go on with other rates and bounds."""

    settings: LearnerSettings

    def run(self, worker: RankWorker) -> None:
        worker.take_settings(self.settings)


@dataclass(frozen=True, slots=True)
class EndStep:
    """Count the step."""

    def run(self, worker: RankWorker) -> None:
        worker.end_step()


# --- what others get of the weights


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Gather the weights of a role's model: see `checkpoint_tensors`. Other ranks than 0 return nothing."""

    dtype: torch.dtype | None
    role: str | None

    def run(self, worker: RankWorker) -> dict[str, Tensor]:
        return checkpoint_tensors(worker.models.of(self.role).module, self.dtype)


@dataclass(frozen=True, slots=True)
class GatherAdapter:
    """Gather the adapters: see `lora.tensors_of`. Other ranks than 0 return nothing."""

    def run(self, worker: RankWorker) -> dict[str, Tensor]:
        adapter_tensors = lora.tensors_of(worker.model.module)
        return adapter_tensors if worker.ranks.rank == 0 else {}


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Copy the weights in this dtype. Other ranks than 0 return nothing."""

    dtype: torch.dtype

    def run(self, worker: RankWorker) -> WeightSnapshot | None:
        return take(worker.model.module, self.dtype)


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Compute the log-probs of tokens under a role's weights rounded to `dtype`."""

    token_ids: Sequence[int]
    dtype: torch.dtype
    role: str | None

    def run(self, worker: RankWorker) -> tuple[float, ...]:
        if worker.settings.adapted_roles:
            lora.activate(worker.model.module, self.role)
        return worker.models.of(self.role).score(self.token_ids, self.dtype)


@dataclass(frozen=True, slots=True)
class HashWeights:
    """Hash each trained tensor, by name. Other ranks than 0 return nothing."""

    def run(self, worker: RankWorker) -> dict[str, str]:
        trained_tensors = {
            tensor_name: whole(trained_tensor.detach(), tensor_name)
            for tensor_name, trained_tensor in worker.models.tensors().items()
        }
        return (
            {tensor_name: hash_of(trained_tensor) for tensor_name, trained_tensor in trained_tensors.items()}
            if worker.ranks.rank == 0
            else {}
        )


# --- checkpoints


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write a checkpoint into `draft`: rank 0 by its `write`, which no other rank has. The others send rank 0 their
    shards of models, and begin to write their own files. The result of rank 0 is the checkpoint's folder."""

    draft: Path
    write: Callable[[], Path] | None = None

    def run(self, worker: RankWorker) -> Path | None:
        if self.write is not None:
            return self.write()
        models = worker.models
        _begin_files(
            worker, self.draft, checkpoint.contents(worker.model.module, models.optimizers, models.parts(), models.own)
        )
        return None


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy the state to host memory: see `checkpoint.copied`. Other ranks than 0 begin to write their own files into
    `draft`, and return nothing."""

    draft: Path

    def run(self, worker: RankWorker) -> list[tuple[str, Any]]:
        models = worker.models
        copied_entries = checkpoint.copied(worker.model.module, models.optimizers, models.parts(), models.own)
        if worker.ranks.rank == 0:
            return copied_entries
        _begin_files(worker, self.draft, copied_entries)
        return []


@dataclass(frozen=True, slots=True)
class LoadState:
    """Go on from the checkpoint in `folder`."""

    folder: Path

    def run(self, worker: RankWorker) -> CheckpointState:
        worker.model.load_weights(self.folder)
        for role_name, role_model in worker.models.own.items():
            role_model.load_weights(of_role(self.folder, role_name))
        checkpoint_state = checkpoint.load(self.folder, worker.models.optimizers, worker.models.parts())
        worker.step_index = checkpoint_state.step
        return checkpoint_state


def _begin_files(worker: RankWorker, draft: Path, contents: Iterable[tuple[str, Any]]) -> None:
    for entry_name, entry_content in contents:
        if entry_name == checkpoint.SHARDS:
            write_shard = partial(optimizer_state.write, draft / entry_name, worker.ranks.rank, entry_content)
            worker.ranks.beside(draft.name, write_shard)
