"""The children of one run: engine, workers, learner. Started, watched, restarted within a budget, ended together.
A child that hangs is killed and then counts as dead.

It owns processes and nothing else: no task, no token, no weight. A dead worker is simply started again (its leases
expire, its episodes go on from the journal); an engine comes back on its port with the store's current weights; a
learner goes on from its last checkpoint. A child whose error says that a restart would not help is not retried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import trio

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, DiskFull, RunFailed, StoreAway, StoreError, UsageError, WornOut
from agentrl.ports import free_port
from agentrl.records import WeightVersion
from agentrl.runtime import league
from agentrl.runtime.checkpoints import StartPoint, where_it_stands
from agentrl.runtime.ending import ENDS_THE_RUN
from agentrl.runtime.engines import Replica, Weights, WrongWeights, attach, current_weights
from agentrl.runtime.heartbeat import Pulse
from agentrl.runtime.launch import LOCAL, Launcher
from agentrl.runtime.models import given_model_dir
from agentrl.runtime.policies import ROLE_URLS
from agentrl.runtime.rundir import RunDir
from agentrl.runtime.supervise import Child, RestartBudget
from agentrl.runtime.watch import Watch
from agentrl.store.aside import Aside
from agentrl.store.roles import ControlStore, ReadStore

_DISK_S = 2.0  # until a child that found the disk full, or the database away, is started again
_PAUSES = (DiskFull.exit_code, StoreAway.exit_code)

_T = TypeVar("_T")
_PINNED = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # Huge pages for large blocks: each pass allocates its activations anew, and on a CPU the page faults cost the
    # learner one fifteenth of its time. Only glibc reads it.
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
}


@dataclass(slots=True)
class RunProcesses:
    """Everything runs in `nursery`; `stop` ends it all. One per supervisor, whose janitor finds them by `mark`."""

    run: RunDir
    config: RunConfig
    store: ReadStore
    writes: Aside[ControlStore]
    nursery: trio.Nursery
    mark: Mapping[str, str]
    launcher: Launcher = LOCAL
    restarts: dict[str, int] = field(default_factory=dict[str, int])
    _children: list[Child] = field(default_factory=list[Child])
    _watches: dict[str, Watch] = field(default_factory=dict[str, Watch])  # by child, or by the URL of an attached one
    _replicas: list[Replica] = field(default_factory=list[Replica])  # those that learn
    _own: dict[str, list[Replica]] = field(default_factory=dict[str, list[Replica]])  # by role with its own model
    _given: dict[str, Replica] = field(default_factory=dict[str, Replica])  # by the model that plays a role
    _away: set[str] = field(default_factory=set[str])  # children that are being started again
    _closing: bool = False

    async def start_engines(self, start: StartPoint) -> None:
        """Start (or attach to) the engines with the current weights, and write their URLs into the store."""

        def weights(role: str | None = None) -> Weights:
            found = current_weights(self.config, self.store, where_it_stands(start, self.run, self.store), role)
            return replace(found, past=league.folders(self.run)) if self.config.league_roles else found

        settings = self.config.engine
        for url in settings.urls:
            await attach(url, weights(), self.config)
            self.nursery.start_soon(self._watch(url, url, weights).run)
        await self._start_learning("engine", weights, self._replicas)
        for role in self.config.role_models:
            own = self._own[role] = list[Replica]()
            await self._start_learning(f"engine-role-{role}", partial(weights, role), own)
        await self._start_frozen()
        await self._name_engines()

    async def _start_learning(self, name: str, weights: Callable[[], Weights], replicas: list[Replica]) -> None:
        """The replicas of one policy that learns; those of each are on the same GPUs."""
        for index, gpus in enumerate([] if self.config.engine.urls else self._places()):
            replica = Replica(
                child=self._child(f"{name}-{index}", [], self.config.engine.threads),
                port=free_port(),
                scratch=self.run.scratch,
                config=self.config,
                weights=weights,
                gpus=gpus,
            )
            await self._serve(replica)
            replicas.append(replica)

    def _places(self) -> list[list[int]]:
        """The GPUs of each replica: those of the run file, or as many as Ray shows to its process."""
        cluster = self.config.cluster
        shown = [list(range(cluster.engine.gpus))] * self.config.engine.replicas
        return shown if cluster.on_ray else [list(own) for own in self.config.engine.places]

    async def _name_engines(self) -> None:
        """Write where the engines serve into the store: workers and learner follow it."""
        urls = [*self.config.engine.urls, *(replica.url for replica in self._replicas)]
        given = {policy: replica.url for policy, replica in self._given.items()}
        await self._set("engine_urls", json.dumps(urls))
        await self._set("given_urls", json.dumps(given))
        own = {role: [replica.url for replica in replicas] for role, replicas in self._own.items()}
        await self._set(ROLE_URLS, json.dumps(own))

    async def _start_frozen(self) -> None:
        """An engine for each model that plays a role and does not learn; no weights are ever pushed to it."""
        first = WeightVersion(version=0, step=0)  # belongs to no run: its samples are never trained
        for number, policy in enumerate(sorted(self.config.rollout.given_models())):
            weights = Weights(model=given_model_dir(self.config, policy), base=first, current=first)
            replica = Replica(
                child=self._child(f"engine-given-{number}", [], self.config.engine.threads),
                port=free_port(),
                scratch=self.run.scratch,
                config=self.config,
                weights=lambda weights=weights: weights,
            )
            await self._serve(replica, learns=False)
            self._given[policy] = replica

    async def _serve(self, replica: Replica, *, learns: bool = True) -> None:
        await replica.up()
        watch = self._watch(replica.child.name, replica.url, replica.weights if learns else None)

        async def again() -> None:
            before = replica.url
            await replica.again()
            if replica.url != before:
                watch.url = replica.url
                await self._name_engines()

        self.nursery.start_soon(self._keep, replica.child, again, watch)

    def _watch(self, name: str, url: str, weights: Callable[[], Weights] | None) -> Watch:
        watch = Watch(url=url, config=self.config, store=self.store, weights=weights, locks=self.run.locks)
        self._watches[name] = watch
        return watch

    def start_workers(self) -> None:
        silent_s, setting = self.config.rollout.hang_deadline_s, "rollout.liveness_deadline_s"
        for index in range(self.config.rollout.workers):
            name = f"worker-{index}"
            child = self._child(name, ["-m", "agentrl.runtime.child", "worker", str(self.run.path), str(index)], 1)
            pulse = self._pulse(child, silent_s, silent_s, (setting, setting))
            child.start()
            self.nursery.start_soon(self._keep, child, None, pulse, None, self._buried)

    def start_learner(self) -> trio.Event:
        """Start the learner; the event is set when all steps are done."""
        argv = ["-m", "agentrl.runtime.child", "learner", str(self.run.path)]
        settings = self.config.train
        child = self._child("learner", argv, settings.threads)
        names = ("train.progress_deadline_s", "train.liveness_deadline_s")
        pulse = self._pulse(child, settings.progress_deadline_s, settings.liveness_deadline_s, names)
        child.start()
        done = trio.Event()
        self.nursery.start_soon(self._keep, child, None, pulse, done)
        return done

    async def stop(self) -> None:
        """End every child, engines last, so that nobody sees a dead engine as a failure."""
        self._closing = True
        with trio.CancelScope(shield=True), suppress(StoreError):  # children are ended below in any case
            await self._set("phase", "stop")
        for group in ([c for c in self._children if not c.name.startswith("engine")], self._children):
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for child in group:
                        nursery.start_soon(child.stop)

    def pids(self) -> dict[str, int]:
        """Process ids by child name."""
        return {child.name: child.pid for child in self._children if child.pid is not None}

    @property
    def engines_start(self) -> bool:
        """Whether all engines of a policy that learns are restarting, so that none can sample for it."""
        own = [{replica.child.name for replica in replicas} for replicas in self._own.values()]
        learning = {name for name, watch in self._watches.items() if watch.weights is not None}
        return any(names and self._away.issuperset(names) for names in (learning.difference(*own), *own))

    @property
    def troubles(self) -> list[str]:
        """Why engines could not be given the current weights."""
        return [watch.trouble for watch in self._watches.values() if watch.trouble]

    # --- one child

    def _child(self, name: str, argv: list[str], threads: int) -> Child:
        env = {**_PINNED, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        child = Child(name, argv, self.run.logs, env, mark=self.mark, launcher=self.launcher)
        self._children.append(child)
        return child

    def _pulse(self, child: Child, silent_s: float, stopped_s: float, names: tuple[str, str]) -> Pulse:
        """Listen to the child's marks, in scratch, under these deadlines."""
        child.beat = self.run.scratch / "beats" / child.name
        start_s = self.config.engine.start_deadline_s
        return Pulse(process=child, start_s=start_s, silent_s=silent_s, stopped_s=stopped_s, names=names)

    async def _with_space(self, write: Callable[[ControlStore], _T]) -> _T:
        """Write once the disk has space for it."""
        while True:
            try:
                return await self.writes(write)
            except DiskFull:
                await trio.sleep(_DISK_S)

    async def _set(self, key: str, value: str) -> None:
        await self.writes(lambda store: store.set_meta(key, value))

    async def _buried(self, child: Child, budget: RestartBudget) -> bool:
        """Free the episodes of a dead worker. Returns whether one of them killed it: this spends none of its budget."""
        name, most = f"{child.name}.{child.pid}", self.config.rollout.max_deaths
        released = await self._with_space(lambda store: store.release_worker(name, max_deaths=most))
        for _ in released.quarantined:
            budget.forgive()  # gives back the earlier death, before the episode was known as its cause
        return released.foretold

    async def _keep(
        self,
        child: Child,
        again: Callable[[], Awaitable[None]] | None = None,
        watch: Watch | Pulse | None = None,
        done: trio.Event | None = None,
        died: Callable[[Child, RestartBudget], Awaitable[bool]] | None = None,
    ) -> None:
        """Wait for the child, under `watch`; restart it while its budget lasts, or set `done` when it ended well.
        `died` is called at each death; it returns whether something else is to blame."""
        budget = RestartBudget()
        while True:
            budget.well()
            async with trio.open_nursery() as nursery:
                if watch is not None:
                    nursery.start_soon(watch.run, child.kill)
                status = await child.wait()
                nursery.cancel_scope.cancel()
            if self._closing:
                return
            if status == 0 and done is not None:
                done.set()
                return
            why = child.failure(status)
            if status in (UsageError.exit_code, ENDS_THE_RUN):
                raise RunFailed(why)
            if status in _PAUSES:
                await trio.sleep(_DISK_S)  # the supervisor's own deadlines bound how often
            innocent = status in (WornOut.exit_code, *_PAUSES)
            if innocent or (died is not None and await died(child, budget)):
                self.restarts[child.name] = self.restarts.get(child.name, 0) + 1
                child.start()
                continue
            self._away.add(child.name)
            await self._mend(child, again, budget, why)
            self._away.remove(child.name)

    async def _mend(
        self, child: Child, again: Callable[[], Awaitable[None]] | None, budget: RestartBudget, why: str
    ) -> None:
        """Restart a child that ended; if it dies while it starts, try again as often as its budget allows."""
        while True:
            await budget.spend(why)
            if self._closing:
                return
            self.restarts[child.name] = self.restarts.get(child.name, 0) + 1
            if again is None:
                child.start()
                return
            try:
                await again()
                return
            except WrongWeights:
                raise
            except AgentRLError as error:
                why = str(error)
                await child.end()
