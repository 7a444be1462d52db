"""All children of one run together: engines, workers and the learner, started in order and ended together.

It owns processes and nothing else: no task, no token, no weight. Each kind has a file of its own beside this one; what
they share is the loop (`kept`) and the registry of processes (`registry`). Here is what concerns several kinds: the
order of the start, where engines serve, and the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.errors import StoreError
from agentrl.host.disk_space import no_space_on
from agentrl.run.children.engine import WatchedEngines
from agentrl.run.children.evaluation_engines import EvaluationEngines
from agentrl.run.children.frozen_engines import FrozenEngines
from agentrl.run.children.learner import WatchedLearner
from agentrl.run.children.learning_engines import LearningEngines
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.workers import Workers
from agentrl.run.cluster.scaling import Kind, Scaler, Size
from agentrl.run.evaluation.pinned import Pin
from agentrl.run.processes.launcher import LOCAL, Launcher
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import StartPoint
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks
from agentrl.store.run_values import ENGINE_URLS, EVAL_URLS, FROZEN_URLS, PHASE, ROLE_URLS

_SCALING = "scaling"


@dataclass(slots=True)
class RunChildren:
    """The children of a supervisor, whose janitor finds them by `mark`. Everything runs in `nursery`; `stop` ends it
    all. `size` is the number of children to start with, by default that of the run file; `sockets` is a private folder,
    where engines listen if all of the run is on this machine."""

    run: RunDir
    config: RunConfig
    looks: Looks[RunStore]
    writes: Aside[RunStore]
    nursery: trio.Nursery
    mark: Mapping[str, str]
    launcher: Launcher = LOCAL
    size: Size | None = None
    sockets: Path | None = None
    registry: ChildRegistry = field(init=False)
    engines: WatchedEngines = field(init=False)
    learning: LearningEngines = field(init=False)
    frozen: FrozenEngines = field(init=False)
    evaluation: EvaluationEngines = field(init=False)
    workers: Workers = field(init=False)
    _engines_serve: bool = False  # since all of the start do

    def __post_init__(self) -> None:
        self.registry = ChildRegistry(
            run=self.run,
            config=self.config,
            writes=self.writes,
            nursery=self.nursery,
            mark=self.mark,
            launcher=self.launcher,
        )
        self.engines = WatchedEngines(
            registry=self.registry, looks=self.looks, sockets=self.sockets, publish=self._publish_urls
        )
        self.learning = LearningEngines(self.engines)
        self.frozen, self.evaluation = FrozenEngines(self.engines), EvaluationEngines(self.engines)
        self.workers = Workers(self.registry)

    # --- the start

    async def start_engines(self, start: StartPoint) -> None:
        """Start (or attach to) the engines with the current weights, and write their URLs into the store."""
        # One kind after the other: engines of two kinds may share a GPU, and each measures at its start how much of it
        # is free.
        await self.learning.start(start, self._size_at_start.engines)
        await self.frozen.start()
        await self.evaluation.start()
        self._engines_serve = True
        await self._publish_urls()
        self.engines.start_metrics()

    async def start_workers(self) -> None:
        """Start the workers, which wait for the engines."""
        await self.workers.start(self._size_at_start.workers)

    def start_learner(self) -> trio.Event:
        """Start the learner; the event is set when all steps are done."""
        learner = WatchedLearner(self.registry)
        learner.start()
        return learner.done

    def follow_size(self) -> None:
        """From now on engines and workers come and go as it is requested."""
        scaler = Scaler(self.config, self.looks, self, self.registry.publish)
        self.registry.start_task(_SCALING, scaler.run)

    @property
    def _size_at_start(self) -> Size:
        return self.size or Size.of(self.config)

    async def _publish_urls(self) -> None:
        """Write where the engines serve into the store: workers and learner follow it.

        Nothing is written before all engines of the start serve. Workers and the learner begin at the first URLs that
        they see; if an engine moved, or one was dropped, while others still started, they would ask engines that do not
        answer, and would not know of those that play a role."""
        if not self._engines_serve:
            return
        urls_by_role = self.learning.urls()
        await self.registry.publish(FROZEN_URLS, self.frozen.urls())
        await self.registry.publish(EVAL_URLS, self.evaluation.urls())
        await self.registry.publish(
            ROLE_URLS, {role: role_urls for role, role_urls in urls_by_role.items() if role is not None}
        )
        await self.registry.publish(ENGINE_URLS, urls_by_role[None])  # last: learner and workers wait for these

    # --- engines and workers that come and go: `scaling.Elastic`

    def present(self, kind: Kind) -> set[int]:
        """The numbers of those that serve or work, or are being restarted."""
        return self._scaled(kind).present()

    async def join(self, kind: Kind, index: int) -> None:
        """Start one more. Raises NoRoom if there is no place for it in time, or the error of its start; then nothing of
        it is left."""
        await self._scaled(kind).join(index)

    async def leave(self, kind: Kind, index: int) -> None:
        """End one. Others have gone on with its turns or episodes, from the tokens they have."""
        await self._scaled(kind).leave(index)

    def _scaled(self, kind: Kind) -> LearningEngines | Workers:
        return self.workers if kind == "worker" else self.learning

    async def pin(self, to: Pin) -> None:
        """Have the engines of evaluation serve these weights. Raises as `EvaluationEngines.pin`."""
        await self.evaluation.pin(to)

    # --- what the supervisor sees

    def pids(self) -> dict[str, int]:
        """Process ids by child name."""
        return self.registry.pids()

    @property
    def restarts(self) -> Counter[str]:
        """How often each child was started again, by name."""
        return self.registry.restarts

    @property
    def engines_are_restarting(self) -> bool:
        """True if all engines of some policy that learns are being restarted, so that none can sample for it."""
        return self.learning.are_restarting

    @property
    def engine_start_s(self) -> float:
        """The seconds that the slowest start of an engine took, of those that serve the policy."""
        return self.learning.start_s

    @property
    def troubles(self) -> list[str]:
        """Why engines did not get the current weights, and whether the disk is full."""
        return [*self.engines.troubles, *filter(None, [no_space_on(self.run.path)])]

    # --- the end

    async def stop(self) -> None:
        """End every child, engines last, so that nobody sees a dead engine as a failure."""
        # Before anything is ended: the loops that keep children read it, and would otherwise bring back what is being
        # ended here.
        self.registry.is_closing = True
        with trio.CancelScope(shield=True):
            await self.registry.cancel_task(_SCALING)  # nothing comes any more
        with trio.CancelScope(shield=True), suppress(StoreError):  # children are ended below in any case
            await self.registry.publish(PHASE, "stop")
        await self.registry.stop()
