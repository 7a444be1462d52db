"""State that outlives a learner's process: checkpoints of models, optimizers, the step and the trained episodes.

Owns when episodes count as saved. `agentrl.learner.checkpoints` owns the files.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.host.platform_checks import free_memory_bytes
from agentrl.learner.checkpoints import checkpoint, digests
from agentrl.learner.checkpoints.checkpoint import CheckpointState
from agentrl.learner.checkpoints.folders import newest
from agentrl.learner.rank_orders import CopyState, LoadState, SaveState, on_every_rank
from agentrl.learner.rank_worker import RankWorker


class LearnerState:
    """The state of the learner whose rank 0 is `worker`. `trained` holds the ids of the episodes trained since the last
    checkpoint, step by step; `checkpoint_step` is the step of that one. `may_save` is called before a checkpoint
    appears, and raises if it must not."""

    def __init__(self, worker: RankWorker, may_save: Callable[[], None]) -> None:
        self._worker, self._may_save = worker, may_save
        self.checkpoint_step = 0
        self.trained: list[tuple[int, ...]] = []

    def save(self, root: Path) -> Path:
        """See `Learner.save`."""
        last_checkpoint = newest(root)
        if last_checkpoint is not None and self.checkpoint_step == self._worker.step_index and not self.trained:
            return last_checkpoint
        # The draft is made on rank 0 before any order goes out: the others write into it, and a folder that cannot be
        # made should end nothing but this call.
        draft_folder, ranks = self._draft(root), self._worker.ranks
        write_files = partial(self._write, draft_folder, self._state(), None, self._worker.progress)
        save_orders = [SaveState(draft_folder, write_files), *[SaveState(draft_folder)] * (ranks.size - 1)]
        checkpoint_folder = ranks.run(self._worker, save_orders)[0]
        assert checkpoint_folder is not None, "rank 0 writes it"
        self._forget_trained()
        return checkpoint_folder

    def copy(self, root: Path) -> Callable[[Callable[[], None]], Path] | None:
        """See `Learner.copy`."""
        models = self._worker.models
        if checkpoint.size_bytes(self._worker.model.module, models.optimizers, models.own) > free_memory_bytes():
            return None
        draft_folder = self._draft(root)
        write_files = partial(
            self._write, draft_folder, self._state(), on_every_rank(self._worker, CopyState(draft_folder))
        )
        # With the copy, and not when it is written: the steps that follow collect their own. If the write fails, the
        # run ends and goes on from the checkpoint before, which the store agrees with.
        self._forget_trained()
        return write_files

    def load(self, folder: Path) -> CheckpointState:
        """See `Learner.load`."""
        # Before any rank reads a byte, and on rank 0 alone: one damaged file would otherwise end half of the ranks in
        # the middle of loading.
        digests.check(folder, self._worker.progress)
        checkpoint_state = on_every_rank(self._worker, LoadState(folder))
        self._forget_trained()
        return checkpoint_state

    def _forget_trained(self) -> None:
        self.checkpoint_step, self.trained = self._worker.step_index, []

    def _draft(self, root: Path) -> Path:
        over_ranks = self._worker.ranks.size > 1
        return checkpoint.begin(root, self._worker.step_index, shards=over_ranks, may_appear=self._may_save)

    def _state(self) -> CheckpointState:
        step_index, previous_step = self._worker.step_index, self.checkpoint_step
        return CheckpointState(step=step_index, previous_step=previous_step, episodes=tuple(self.trained))

    def _write(
        self, draft: Path, state: CheckpointState, copied: list[tuple[str, Any]] | None, progress: Callable[[], None]
    ) -> Path:
        """Write the files of rank 0, from a copy or from the models, and let the folder appear. `progress` is called
        after each file, also after one of another rank."""
        models, policy_model, ranks = self._worker.models, self._worker.model, self._worker.ranks
        return checkpoint.save(
            draft,
            state,
            module=policy_model.module,
            model_folder=policy_model.folder,
            optimizers=models.optimizers,
            parts=models.parts(),
            own=models.own,
            entries=copied,
            keep=self._worker.settings.train.keep_checkpoints,
            ranks=ranks.size,
            settle=partial(ranks.settle, draft.name, progress),
            progress=progress,
            may_appear=self._may_save,
        )
