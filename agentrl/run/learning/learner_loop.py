"""The training loop: take a batch, step, push the weights, write a checkpoint. One trio program.

    loop          take ──► step ──► settle push ──► row, alarms ──► start push ──► start checkpoint ──► take ──► step
    torch thread            ███                        hash            ██                 █                       ███
    push (job)       ░░░░░░░░░░░░░░░                                     ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
    checkpoint (job)                                                                       ░░░░░░░░░░░░░░░░░░░░░░░░░

    who waits      for whom                                            why
    take           workers: a batch of scored groups, episodes at      law 5; the wait is measured as idle time
                   the lag bound; a run that is paused
    step           its batch; on a shared GPU also the push before     the engines sleep while the learner computes
    start push     the push before                                     engines get versions in their order
    push           an engine that takes the weights                    workers sample on with the version before (law 6)
    start          the checkpoint before                               an episode counts as trained once it is durable
    checkpoint
    checkpoint     the push of its step                                the push's canary detects wrong weights

An error of a job reaches the loop when it settles the job, so a step under way is finished and can be saved. Owns the
order of these calls; each of them is a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.errors import RunFailed, StoreError
from agentrl.learner.learner import Diverged, Learner
from agentrl.run.alarms import LagBound, advice
from agentrl.run.learning.background import TorchThread
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.step_records import StepRecords
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.take_batches import BatchTaker
from agentrl.run.learning.weight_push import WeightPush
from agentrl.run.weights.gpu_turns import Turns
from agentrl.store.run_values import ENGINE_URLS
from agentrl.store.versions import Versions

_WAIT_S = 0.25  # the longest wait for engines before the next sign of life


@dataclass(kw_only=True)
class LearnerLoop:
    """Trains `learner` on the thread `torch` for the run at `path`. The step of the weights is `learner.step_index`; at
    most one push and one checkpoint are under way. `turns` are those on a GPU that engines share."""

    path: Path
    learner: Learner
    torch: TorchThread
    batches: BatchTaker
    pushes: WeightPush
    checkpoints: CheckpointWriter
    records: StepRecords
    calls: StoreCalls
    versions: Versions
    bound: LagBound
    mark: Callable[[], None]
    turns: Turns | None = None

    async def run(self) -> None:
        """Train to the last step. Raises RunFailed; if the engines failed, or the gradients, saves a checkpoint first.
        Raises LeaseLost if another learner leads by now: it removes what this one writes, so nothing here failed."""
        try:
            await self._train_and_save()
        except StoreError:
            raise
        except Exception:
            # Asked after a failure, as whatever failed may be the other learner's doing: it removes files that are
            # being written here.
            await self.calls(lambda store: store.lineage.still_leads())
            raise

    async def _train_and_save(self) -> None:
        try:
            await self._train()
        except (NotDelivered, Diverged) as error:
            await self.checkpoints.settle()
            if self.turns is not None:
                await self.turns.give_up()
            await self.checkpoints.save_what_is_trained()
            if isinstance(error, NotDelivered):
                raise
            setting_text = f"train.max_skipped={2 * max(1, self.learner.settings.train.max_skipped)}"
            correction = f"this one is saved and goes on with agentrl train --resume {self.path} --set {setting_text}"
            raise RunFailed(f"{error}; {correction}") from error
        finally:  # whatever ended the loop, its jobs are not cut off in the middle
            await self.pushes.end()
            await self.checkpoints.end()

    async def _train(self) -> None:
        await self._send_first_weights()
        self.records.begin()
        sent_version, learner = None, self.learner
        while step_batch := await self.batches.take(learner.step_index + 1):
            idle_s, max_lag = step_batch.idle_s + await self._take_gpu(), self.bound.now
            step_began_s = trio.current_time()
            self.mark()
            step_of, is_undone = self.versions.step_of, self.versions.is_undone
            train_step = partial(learner.step, step_batch.groups, step_of=step_of, undone=is_undone, max_lag=max_lag)
            step_report = await self.torch.run(train_step)
            busy_s = trio.current_time() - step_began_s
            self.batches.worked(busy_s)
            idle_s += await self.pushes.settle()
            step_row, step_alarms = await self.records.row(
                step_report, step_batch, idle_s=idle_s, busy_s=busy_s, max_lag=max_lag
            )
            await self.records.follow(step_report.step, step_alarms, await self.torch.run(learner.hashes))
            sent_version = await self.pushes.start(step_row)
            self.mark()
            stop_alarms = [alarm for alarm in step_alarms if alarm.action == "stop"]
            if stop_alarms or self.checkpoints.is_due(learner.step_index):
                await self.checkpoints.start(sent_version)
            if stop_alarms:
                await self._settle()
                raise RunFailed(f"step {learner.step_index}: {advice(stop_alarms, self.path)}")
        if sent_version is not None and learner.trained:
            await self.checkpoints.start(sent_version)
        await self._settle()

    async def _send_first_weights(self) -> None:
        """Wait for engines, which may have started with the learner, and give them weights if they have others."""
        self.mark()
        while not await self.calls(lambda store: ENGINE_URLS.of(store.meta)):
            await self.calls.wait_for_work(_WAIT_S)
            self.mark()
        current_version = await self.calls(lambda store: store.versions.current_version())
        # After a rollback the engines serve versions that were undone: a new version is newer than these.
        if current_version.step != self.learner.step_index or await self.pushes.is_behind(current_version.version):
            await self._take_gpu()
            await self.pushes.start({})

    async def _take_gpu(self) -> float:
        """Have the engines leave a GPU that the learner shares. Returns the wait for the push before, in seconds."""
        if self.turns is None:
            return 0.0
        push_wait_s = await self.pushes.settle()
        await self.turns.begin(self.pushes.urls)
        self.mark()
        return push_wait_s

    async def _settle(self) -> None:
        await self.pushes.settle()
        await self.checkpoints.settle()
