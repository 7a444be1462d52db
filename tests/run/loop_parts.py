"""The learner's loop with parts that need neither process nor engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from agentrl.config import RunConfig
from agentrl.errors import matters
from agentrl.records import Group, WeightVersion
from agentrl.run.alarms import LagBound
from agentrl.run.learning.background import TorchThread
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.learner_loop import LearnerLoop
from agentrl.run.learning.step_records import StepRecords
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.take_batches import Batch

_T = TypeVar("_T")


class InlineTorch(TorchThread):
    """Makes each call in the task of its caller."""

    def __init__(self) -> None: ...

    async def run(self, call: Callable[[], _T]) -> _T:
        return call()


class InlineCalls(StoreCalls):
    """Calls a store in the task of their caller. `wait` is what a wait for work does."""

    def __init__(self, store: Any, wait: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint) -> None:
        super().__init__(store, lambda: None, deadline_s=0.0, inline=True)
        self._wait = wait

    async def wait_for_work(self, timeout_s: float) -> None:
        await self._wait()


class FakePushes:
    """Pushes that are over at once; `fails` may raise when the loop settles one. `rows` are those of the steps."""

    def __init__(self, step: Callable[[], int], fails: Callable[[], None] = lambda: None, *, behind: bool) -> None:
        self._step, self._fails, self._behind = step, fails, behind
        self.rows, self.steps, self.under_way = list[dict[str, Any]](), list[int](), None
        self.checked = list[int]()

    async def start(self, row: dict[str, Any]) -> WeightVersion:
        self.steps.append(self._step())
        self.rows += [row] if row else []
        return WeightVersion(version=10, step=self._step())

    async def settle(self) -> float:
        self._fails()
        return 0.0

    async def is_behind(self, version: int) -> bool:
        self.checked.append(version)
        return self._behind

    async def end(self) -> None: ...


class FakeBatches:
    """A batch for each of `steps` steps, at once."""

    def __init__(self, steps: int, groups: Callable[[], Sequence[Group]]) -> None:
        self._steps, self._groups = steps, groups

    async def take(self, step: int) -> Batch | None:
        if step > self._steps:
            return None
        return Batch(groups=self._groups(), idle_s=0.0, held_s=0.0, paused_s=0.0)

    def worked(self, busy_s: float) -> None: ...


class LoopScene:
    """A loop over `learner` and `store`, in virtual time. `groups` are those of each step."""

    def __init__(self, folder: Path, learner: Any, store: Any) -> None:
        self.folder, self.learner, self.store = folder, learner, store
        self.torch: TorchThread = TorchThread()
        self.clock = MockClock(autojump_threshold=0)
        self.bound = LagBound(full=4, now=4)
        self.groups: Callable[[], Sequence[Group]] = list
        self.deliver: Callable[[], None] = lambda: None
        self.mark: Callable[[], None] = lambda: None
        self.wait: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
        self.behind, self.path, self.writer = False, folder, CheckpointWriter
        self.pushes: FakePushes

    def run(self, config: RunConfig) -> None:
        """Train to the last step. Raises as a learner's process does."""
        try:
            trio.run(self._main, config, clock=self.clock)
        except BaseExceptionGroup as group:
            raise matters(group) from None

    async def _main(self, config: RunConfig) -> None:
        calls, settings = InlineCalls(self.store, self.wait), SimpleNamespace(config=config, changed=_nothing_changed)
        self.pushes = FakePushes(lambda: self.learner.step_index, lambda: self.deliver(), behind=self.behind)
        async with trio.open_nursery() as nursery:
            checkpoints = self.writer(
                self.learner,
                self.folder,
                self.pushes,  # type: ignore[arg-type]
                calls,
                self.torch,
                nursery,
                lambda: self.mark(),
                train=config.train,
                buffer=config.buffer,
            )
            loop = LearnerLoop(
                path=self.path,
                learner=self.learner,
                torch=self.torch,
                batches=FakeBatches(config.train.steps, lambda: self.groups()),  # type: ignore[arg-type]
                pushes=self.pushes,  # type: ignore[arg-type]
                checkpoints=checkpoints,
                records=StepRecords(calls, settings, self.bound),  # type: ignore[arg-type]
                calls=calls,
                versions=self.store.versions,
                bound=self.bound,
                mark=lambda: self.mark(),
            )
            await loop.run()


async def _nothing_changed() -> dict[str, Any]:
    return {}
