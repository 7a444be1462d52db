"""Any engine of a run as a child: made, watched over HTTP, brought back where it served.

It knows nothing of which engines a run has: see `learning_engines`, `frozen_engines` and `evaluation_engines`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, WrongWeights
from agentrl.host.ports import free_port
from agentrl.run.children.child_secrets import withheld_from_engine
from agentrl.run.children.engine_health import EngineWatch
from agentrl.run.children.engine_metrics import EngineMetrics
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.restart_loop import WatchedChild
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks

_SOCKET_BYTES = 103  # of a socket's path: 107 on Linux, 103 on macOS


@dataclass(slots=True, kw_only=True)
class WatchedEngines:
    """Makes the engines of a run, and has the watch over each. `publish` writes where engines serve into the store;
    `sockets` is a private folder, where they listen if all of the run is on this machine."""

    registry: ChildRegistry
    looks: Looks[RunStore]
    sockets: Path | None
    publish: Callable[[], Awaitable[None]]
    watches: dict[str, EngineWatch] = field(default_factory=dict[str, EngineWatch])
    """By the name of a child, or by the URL of an engine that the run attached to."""

    @property
    def run(self) -> RunDir:
        return self.registry.run

    @property
    def config(self) -> RunConfig:
        return self.registry.config

    def create(
        self,
        name: str,
        weights: Callable[[RunStore], ServedWeights],
        gpus: Sequence[int] = (),
        *,
        folder: Path | None = None,
    ) -> SupervisedEngine:
        """An engine that is not started yet. `folder` is the run's, if it reads weights from there."""
        thread_count, withheld = self.config.engine.fixed_threads, withheld_from_engine(self.config)
        return SupervisedEngine(
            child=self.registry.create(name, [], threads=thread_count, withheld=withheld),
            port=free_port(),
            socket=self._socket(name),
            scratch=self.run.scratch,
            folder=folder,
            config=self.config,
            weights=partial(self.looks, weights),
            gpus=gpus,
        )

    def _socket(self, name: str) -> Path | None:
        """Where an engine listens. The kernel takes 107 bytes of a path: a role's name may be too long."""
        if self.sockets is None or self.config.engine.kind == "sglang":  # which listens on TCP alone
            return None
        # A socket in a private folder instead of a TCP port, where all is on one machine: no other user of the machine
        # can connect to it, and no port can be taken between its choice and its use.
        socket_path = self.sockets / f"{name}.sock"
        short_name = hashlib.sha256(name.encode()).hexdigest()[:12]
        return socket_path if len(os.fsencode(socket_path)) <= _SOCKET_BYTES else self.sockets / f"{short_name}.sock"

    def watch(self, name: str, url: str, weights: Callable[[], Awaitable[ServedWeights]] | None) -> EngineWatch:
        """The watch over the engine at `url`. As `EngineWatch`."""
        engine_watch = EngineWatch(url=url, config=self.config, looks=self.looks, weights=weights, locks=self.run.locks)
        self.watches[name] = engine_watch
        return engine_watch

    def start_metrics(self) -> None:
        """Keep the engines' own figures in the run's folder from now on."""
        engine_metrics = EngineMetrics(self.watches, self.run.engine_figures)
        self.registry.start_task("engine metrics", engine_metrics.run)

    async def remove(self, engine: SupervisedEngine) -> None:
        """End the engine and forget it."""
        await self.registry.remove(engine.child)
        self.watches.pop(engine.child.name, None)

    @property
    def troubles(self) -> list[str]:
        """Why engines did not get the current weights."""
        return [engine_watch.trouble for engine_watch in self.watches.values() if engine_watch.trouble]


class WatchedEngine(WatchedChild):
    """An engine that serves. Nobody sends it weights later: each start gives it those that it has to serve."""

    def __init__(
        self,
        engine: SupervisedEngine,
        engines: WatchedEngines,
        weights: Callable[[], Awaitable[ServedWeights]] | None = None,
    ) -> None:
        super().__init__(engine.child, engines.registry)
        self.engine, self._engines = engine, engines
        self._health = engines.watch(engine.child.name, engine.url, weights)

    async def watch(self, lives: Callable[[], None]) -> None:
        await self._health.run(self.child.kill, lives)

    async def restart(self) -> None:
        url_before = self.engine.url
        await self.bring_up()
        if self.engine.url != url_before:  # it has another place in the cluster
            self._health.url = self.engine.url
            await self._engines.publish()

    async def bring_up(self) -> None:
        """Start the engine; return when it serves the weights that it has to serve."""
        await self.engine.up()

    def is_final(self, error: AgentRLError) -> bool:
        # The only error of an engine that no restart can cure: it would come up with the same wrong weights, and every
        # token that it samples until the next canary would be off-policy without anybody knowing (law 5).
        return isinstance(error, WrongWeights)
