"""The engines of the policies that learn: those that workers sample from and the learner sends weights to.

They come and go while the run goes on. The engines of somebody else that the run attached to are watched here too;
nobody restarts those.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from agentrl.config.gpu_placement import start_together
from agentrl.engine.client import EngineClient
from agentrl.engine.router.concurrency import RUNNING, WAITING
from agentrl.errors import AgentRLError, EngineError
from agentrl.run import league
from agentrl.run.children.engine import WatchedEngine, WatchedEngines
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine, attach, current_weights
from agentrl.run.cluster.scaling import NoRoom
from agentrl.run.start_point import StartPoint, where_it_stands
from agentrl.store import RunStore

_WITHDRAWN_S = 3.0  # in which workers see that an engine leaves, and ask another
_POLL_S = 0.1


@dataclass(slots=True)
class LearningEngines:
    """The engines by role with a model of its own (None: all others) and by number; engines of one number share their
    GPUs."""

    engines: WatchedEngines
    by_role: dict[str | None, dict[int, SupervisedEngine]] = field(
        default_factory=dict[str | None, dict[int, SupervisedEngine]]
    )
    _start_point: StartPoint | None = None

    async def start(self, start: StartPoint, count: int) -> None:
        """Attach to the engines of somebody else, and start `count` of each policy; return when all serve the current
        weights. Engines start beside each other unless they share a GPU."""
        self._start_point = start
        config = self.engines.config
        read_weights = partial(self.engines.looks, partial(self._weights, None))
        for engine_url in config.engine.urls:
            await attach(engine_url, await read_weights(), config)
            self.engines.registry.nursery.start_soon(self.engines.watch(engine_url, engine_url, read_weights).run)
        # Starting side by side saves minutes with many replicas. Engines that share a GPU start in turn: each measures
        # the free memory at its start to size its cache, and two that do so at once both count the same gigabytes.
        starts_together = start_together(config.engine, on_ray=config.cluster.on_ray)
        for role in (None, *config.role_models):
            role_engines = self.by_role[role] = {number: self._create(role, number) for number in range(count)}
            limiter = trio.CapacityLimiter(max(1, count) if starts_together else 1)
            async with trio.open_nursery() as nursery:
                for engine in role_engines.values():
                    nursery.start_soon(self._serve, engine, limiter)

    async def _serve(self, engine: SupervisedEngine, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            await engine.up()
        self._keep(engine)

    def _keep(self, engine: SupervisedEngine) -> None:
        LearningEngine(engine, self).start_keeping()

    def _create(self, role: str | None, number: int) -> SupervisedEngine:
        engine_name = f"engine-{number}" if role is None else f"engine-role-{role}-{number}"
        run_path = self.engines.run.path
        return self.engines.create(engine_name, partial(self._weights, role), self._gpus(number), folder=run_path)

    def _weights(self, role: str | None, store: RunStore) -> ServedWeights:
        assert self._start_point is not None
        run_folder, config = self.engines.run, self.engines.config
        weights = current_weights(config, store, where_it_stands(self._start_point, run_folder, store), role)
        return replace(weights, past=league.folders(run_folder)) if config.league_roles else weights

    def _gpus(self, number: int) -> list[int]:
        """The GPUs that the run file names, or as many as Ray shows to the engine's process."""
        config = self.engines.config
        if config.cluster.on_ray:
            return list(range(config.cluster.engine.gpus))
        return list(config.engine.gpus[number]) if config.engine.gpus else []

    def urls(self) -> Mapping[str | None, list[str]]:
        """Where the engines of each policy serve, those of somebody else first."""
        urls_by_role = {
            role: [engine.url for engine in role_engines.values()] for role, role_engines in self.by_role.items()
        }
        return urls_by_role | {None: [*self.engines.config.engine.urls, *urls_by_role.get(None, [])]}

    def present(self) -> set[int]:
        """The numbers of engines that serve or are being restarted; none of somebody else's."""
        return set(self.by_role[None]) if not self.engines.config.engine.urls else set()

    async def join(self, number: int) -> None:
        """Start one more engine of each policy. It has the current weights, and has passed the canary, before anybody
        asks it. Raises NoRoom if there is no place for it in time, or the error of its start; nothing of it is left
        then."""
        created: dict[str | None, SupervisedEngine] = {}
        try:
            # All or none: an engine of one policy without its counterpart of the other would leave turns of that role
            # without a place to go, and the number of engines would differ by role.
            for role in self.by_role:
                created[role] = self._create(role, number)
                await created[role].join()
        except BaseException:
            for engine in created.values():
                await self.engines.remove(engine)
            raise
        for role, engine in created.items():
            self.by_role[role][number] = engine
            self._keep(engine)
        await self.engines.publish()

    async def leave(self, number: int) -> None:
        """End the engines of that number, once others have gone on with their turns from the tokens they have."""
        # First the addresses go, then the wait until nobody asks, then the end. Ended first, every turn under way there
        # would fail over as after a crash; it does no harm (its tokens are kept) and costs each a prefill elsewhere.
        leaving_engines = [role_engines.pop(number) for role_engines in self.by_role.values()]
        await self.engines.publish()
        for engine in leaving_engines:
            await self.engines.registry.cancel_task(engine.child.name)
            await self._wait_until_idle(engine.url)
            await self.engines.remove(engine)

    async def _wait_until_idle(self, url: str) -> None:
        """Wait until nobody asks the engine any more, or its deadline passed."""
        # Workers learn of new addresses within about a second. An engine that is idle right now may still get a request
        # from one that has not looked yet.
        await trio.sleep(_WITHDRAWN_S)
        settings = self.engines.config.engine
        async with aclosing(EngineClient(url, api_key=settings.key_of(url), kind=settings.kind)) as client:
            with trio.move_on_after(settings.admin_deadline_s), suppress(EngineError):
                is_busy = True
                while is_busy:
                    gauges = await client.metrics()
                    is_busy = bool(gauges.get(RUNNING) or gauges.get(WAITING))
                    await trio.sleep(_POLL_S)

    @property
    def can_spare_one(self) -> bool:
        """True if the run goes on without one engine: there is one policy, and others serve it."""
        return not self.engines.config.role_models and len(self.by_role[None]) > 1

    async def drop(self, engine: SupervisedEngine) -> None:
        """Remove an engine of the only policy, for which there is no room."""
        role_engines = self.by_role[None]
        self.by_role[None] = {
            number: other_engine for number, other_engine in role_engines.items() if other_engine is not engine
        }
        await self.engines.remove(engine)
        await self.engines.publish()

    @property
    def are_restarting(self) -> bool:
        """True if all engines of some policy are being restarted, so that none can sample for it."""
        attached_urls = set(self.engines.config.engine.urls)
        names_by_role = {
            role: {engine.child.name for engine in role_engines.values()} for role, role_engines in self.by_role.items()
        }
        names_by_role[None] = names_by_role.get(None, set()) | attached_urls
        return any(
            engine_names and self.engines.registry.restarting.issuperset(engine_names)
            for engine_names in names_by_role.values()
        )

    @property
    def start_s(self) -> float:
        """The seconds that the slowest start of an engine took, of those without a role of their own."""
        return max((engine.start_s for engine in self.by_role.get(None, {}).values()), default=0.0)


class LearningEngine(WatchedEngine):
    """An engine of a policy that learns. If a restart cannot give it the current weights, its watch sends them later;
    it is dropped where the cluster has no room for it and another one serves."""

    def __init__(self, engine: SupervisedEngine, group: LearningEngines) -> None:
        super().__init__(engine, group.engines, engine.weights)
        self._group = group

    async def bring_up(self) -> None:
        await self.engine.again()

    def is_final(self, error: AgentRLError) -> bool:
        return super().is_final(error) or (isinstance(error, NoRoom) and self._group.can_spare_one)

    async def drop(self) -> None:
        await self._group.drop(self.engine)
