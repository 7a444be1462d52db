"""When a checkpoint is written, and how it becomes durable beside the next steps.

    start    settle the one before ─► torch: copy the state to memory ─► a job ────────────────► settle
    the job                              wait for the push of this step ─► write the folder ─► the store's row

The episodes of a checkpoint count as trained once it is durable (law 2), so a kill in between costs the steps since the
one before. If there is no room for a copy, or past selves are to join from the folder, the next step waits for the
folder. Never knows what is in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from agentrl.config import Train
from agentrl.config.sections import BufferSettings
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.learner.checkpoints.folders import complete, step_of
from agentrl.learner.learner import Learner
from agentrl.records import WeightVersion
from agentrl.run.league import League
from agentrl.run.learning.background import Job, TorchThread
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.weight_push import WeightPush

_EVERY_S = 600.0
"""Between two checkpoints at most, however long steps are: what a dead learner loses. Steps go on beside a write, so
that one in ten minutes costs little even where it takes minutes; `train.checkpoint_every` asks for more."""
_KEEP_SAMPLE = 0.02
"""Share of the groups older than `buffer.keep_steps` that keep their tokens: some episodes of a run's whole course can
still be read then, for a fiftieth of the disk. Who wants more keeps more steps."""


# Why a checkpoint is written beside the next steps, and what it has to wait for.
#
# Weights and optimizers are written, digested and synced, and in that time a learner could train nothing. So the state
# is copied to host memory between two steps, on torch's thread, and a job writes the copy. Without room for a copy the
# step waits: slower, and otherwise the same.
#
# One write is under way at most. A checkpoint lists the episodes that were trained since the one before, so with two at
# once the later could become durable and the earlier fail, and the episodes of the earlier would be in no list (law 2).
#
# A job waits for the push of its step, because the canary of the push is what shows that the engines compute the same
# as the learner. If it reports wrong weights, nothing is written, and the checkpoint before stays the newest. A push
# that no engine took is another thing: nothing is wrong with the weights, so what was learned is saved.
#
# The order at the end is folder, then store. The other way round a kill would leave episodes that count as trained, and
# weights that do not exist. A folder without a row only lacks the row, which `start_point` adds.
#
# The price is memory for the copy, and the steps that a kill costs: those since the last durable checkpoint, which is
# the one before while a write is under way.
#
# `tests/run/test_learner.py` runs steps beside a write that is held up, lets a write fail, and has both kinds of failed
# pushes; `tests/run/test_retrain.py` kills the learner between folder and row.
class CheckpointWriter:
    """Writes checkpoints of `learner` below `root`. Live settings may set `train`, which says how often. `buffer` says
    how many steps' tokens the store keeps behind a checkpoint."""

    def __init__(
        self,
        learner: Learner,
        root: Path,
        pushes: WeightPush,
        calls: StoreCalls,
        torch: TorchThread,
        nursery: trio.Nursery,
        mark: Callable[[], None],
        *,
        train: Train,
        buffer: BufferSettings,
        league: League | None = None,
    ) -> None:
        self._learner, self._root, self._pushes, self._calls, self._torch = learner, root, pushes, calls, torch
        self._nursery, self._mark, self.train, self._buffer, self._league = nursery, mark, train, buffer, league
        self._saved_at = trio.current_time()
        self._under_way: Job | None = None
        self._is_awaited = False

    def is_due(self, step: int) -> bool:
        """Whether to save now, so that a dead learner loses no more steps or time than the settings allow."""
        if self._joins_league(step) or step % self.train.checkpoint_every == 0:
            return True
        return trio.current_time() - self._saved_at >= _EVERY_S

    async def start(self, version: WeightVersion) -> None:
        """Save the state of this step, whose weights are `version`, once the checkpoint before is durable."""
        await self.settle()
        write_copy = None
        if self._league is None:
            write_copy = await self._torch.run(lambda: self._learner.copy(self._root))
            self._mark()
        if write_copy is not None:
            self._under_way = Job(self._nursery, partial(self._write, version, write_copy, self._pushes.under_way))
        else:
            await self._pushes.settle()
            await self._record(version, await self._save())
        # From the copy on, and not from the end of its write: later steps are not in it, and may be lost.
        self._saved_at = trio.current_time()

    async def settle(self) -> None:
        """Wait until the checkpoint under way is durable and recorded. Raises its error."""
        write_job, self._under_way = self._under_way, None
        if write_job is not None:
            # While the learner computes, only its steps are signs of life: a write would hide a step that hangs.
            self._is_awaited = True
            await write_job.wait()
            self._is_awaited = False
            await write_job.result()

    async def end(self) -> None:
        """Wait for the checkpoint under way, whatever becomes of it: what it saved counts."""
        if self._under_way is not None:
            self._is_awaited = True
            await self._under_way.wait()

    async def save_what_is_trained(self) -> None:
        """Write a checkpoint of a learner that ends; `start_point` makes it known to the store."""
        if self._learner.trained:
            await self._save()

    async def _save(self) -> Path:
        return await self._torch.run(lambda: self._learner.save(self._root))

    async def _write(
        self, version: WeightVersion, write: Callable[[Callable[[], None]], Path], push: Job | None
    ) -> None:
        """Write a copy, unless its push finds that engines compute with other weights: then the learner ends, as it
        settles, and the checkpoint before stays the newest."""
        if push is not None:
            await push.wait()
        if push is None or push.error is None or isinstance(push.error, NotDelivered):
            await self._record(version, await trio.to_thread.run_sync(write, self._has_progressed))

    def _has_progressed(self) -> None:
        """A part was written: a sign of life of a learner that waits for it, and none of one that computes."""
        if self._is_awaited:
            self._mark()

    async def _record(self, version: WeightVersion, folder: Path) -> None:
        """Folder first, then the store: `start_point` repairs a kill in between."""
        keep_steps = self._buffer.keep_steps
        await self._calls(lambda store: store.lineage.checkpoint(version.step, version, folder))
        if self._league is not None and self._joins_league(version.step):
            await trio.to_thread.run_sync(self._league.join, version, folder)
        # A newest checkpoint that is damaged is set aside, and the run trains the steps since an older one again.
        checkpoint_folders = await trio.to_thread.run_sync(complete, self._root)
        oldest_step = min([version.step, *map(step_of, checkpoint_folders)])
        await self._calls(
            lambda store: store.lineage.retain(oldest_step, keep_steps=keep_steps, keep_sample=_KEEP_SAMPLE)
        )

    def _joins_league(self, step: int) -> bool:
        return self._league is not None and self._league.is_due(step)
