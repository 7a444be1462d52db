"""The children of one run: engine, workers, learner. Started, watched, restarted within a budget, ended together.
A child that hangs is killed and then counts as dead. Engines and workers also come and go while the run goes on.

It owns processes and nothing else: no task, no token, no weight. A dead worker is simply started again (its leases
expire, its episodes go on from the journal); an engine comes back on its port with the store's current weights; a
learner goes on from its last checkpoint. A child whose error says that a restart would not help is not retried.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from agentrl.config import RunConfig
from agentrl.config.gpu_placement import start_together
from agentrl.engine.client import EngineClient
from agentrl.engine.router.concurrency import RUNNING, WAITING
from agentrl.errors import AgentRLError, DiskFull, EngineError, RunFailed, StoreAway, StoreError, UsageError, WornOut
from agentrl.host.child_environment import NOTHING, Withheld
from agentrl.host.disk_space import no_space_on, wait_for_space
from agentrl.host.ports import free_port
from agentrl.models.resolve import given_model_dir
from agentrl.records import WeightVersion
from agentrl.run import league
from agentrl.run.cluster import scale_requests
from agentrl.run.cluster.scaling import Kind, NoRoom, Scaler, Size
from agentrl.run.evaluation import pinned
from agentrl.run.processes.engine_health import EngineWatch
from agentrl.run.processes.engine_metrics import EngineMetrics
from agentrl.run.processes.engine_process import (
    ServedWeights,
    SupervisedEngine,
    WrongWeights,
    attach,
    current_weights,
    fit,
)
from agentrl.run.processes.exit_status import ENDS_THE_RUN
from agentrl.run.processes.heartbeat import Pulse
from agentrl.run.processes.launcher import LOCAL, Launcher
from agentrl.run.processes.restart import Child, RestartBudget
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import StartPoint, where_it_stands
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks
from agentrl.store.run_values import ENGINE_URLS, EVAL_URLS, GIVEN_URLS, PHASE, RESTARTED, ROLE_URLS, WORKERS, Value

_TOLD = 50  # deaths that the store keeps, the last ones
_DISK_S = 2.0  # until a child that found the disk full, or the database away, is started again
_PAUSES = (DiskFull.exit_code, StoreAway.exit_code)
_LEFT_S = 3.0  # in which workers see that an engine leaves, and ask another
_STEPS = 4  # deadlines of a step: a worker that leaves has ended its own after so many
_POLL_S = 0.1
_PIN_S = 1.0  # until an engine of evaluation that is away is asked again
_SOCKET_BYTES = 103  # of a socket's path: 107 on Linux, 103 on macOS

_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of Hugging Face's: the models of roles are looked up there
_T = TypeVar("_T")
_PINNED = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # Huge pages for large blocks: each pass allocates its activations anew, and on a CPU the page faults cost the
    # learner one fifteenth of its time. Only glibc reads it.
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
}


@dataclass(slots=True)
class _Keeper:
    """The task that watches a child and starts it again."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class RunProcesses:
    """Everything runs in `nursery`; `stop` ends it all. One per supervisor, whose janitor finds them by `mark`."""

    run: RunDir
    config: RunConfig
    looks: Looks[RunStore]
    writes: Aside[RunStore]
    nursery: trio.Nursery
    mark: Mapping[str, str]
    launcher: Launcher = LOCAL
    size: Size | None = None  # to start with: that of the run file
    sockets: Path | None = None  # a private folder, where engines listen if all of the run is on this machine
    restarts: Counter[str] = field(default_factory=Counter[str])
    _children: list[Child] = field(default_factory=list[Child])
    _watches: dict[str, EngineWatch] = field(
        default_factory=dict[str, EngineWatch]
    )  # by child, or by the URL of an attached one
    _learning: dict[str | None, dict[int, SupervisedEngine]] = field(
        default_factory=dict[str | None, dict[int, SupervisedEngine]]
    )
    """By role with a model of its own (None: of all others), and by number; those of a number are on the same GPUs."""
    _workers: dict[int, Child] = field(default_factory=dict[int, Child])
    _start: StartPoint | None = None
    _given: dict[str, SupervisedEngine] = field(
        default_factory=dict[str, SupervisedEngine]
    )  # by the model that plays a role
    _evaluating: list[SupervisedEngine] = field(default_factory=list[SupervisedEngine])
    _away: set[str] = field(default_factory=set[str])  # children that are being started again
    _keepers: dict[str, _Keeper] = field(default_factory=dict[str, "_Keeper"])
    _closing: bool = False

    async def start_engines(self, start: StartPoint) -> None:
        """Start (or attach to) the engines with the current weights, and write their URLs into the store."""
        self._start = start
        weights = partial(self.looks, partial(self._weights, None))
        together = start_together(self.config.engine, on_ray=self.config.cluster.on_ray)
        for url in self.config.engine.urls:
            await attach(url, await weights(), self.config)
            self.nursery.start_soon(self._watch(url, url, weights).run)
        for role in self._policies:
            own = self._learning[role] = {index: self._replica(role, index) for index in range(self._size.engines)}
            at_once = trio.CapacityLimiter(max(1, len(own)) if together else 1)
            async with trio.open_nursery() as nursery:
                for replica in own.values():
                    nursery.start_soon(self._serve, replica, at_once)
        await self._start_frozen()
        await self._start_evaluating()
        await self._name_engines()
        self._start_keeper("engine metrics", EngineMetrics(self._watches, self.run.engine_figures).run)

    @property
    def _size(self) -> Size:
        return self.size or Size.of(self.config)

    @property
    def _policies(self) -> tuple[str | None, ...]:
        return (None, *self.config.role_models)

    def _weights(self, role: str | None, store: RunStore) -> ServedWeights:
        assert self._start is not None
        start = where_it_stands(self._start, self.run, store)
        found = current_weights(self.config, store, start, role)
        return replace(found, past=league.folders(self.run)) if self.config.league_roles else found

    def _replica(self, role: str | None, index: int) -> SupervisedEngine:
        """One of a policy that learns."""
        name = f"engine-{index}" if role is None else f"engine-role-{role}-{index}"
        return self._engine(name, partial(self._weights, role), self._gpus(index), folder=self.run.path)

    def _engine(
        self,
        name: str,
        weights: Callable[[RunStore], ServedWeights],
        gpus: Sequence[int] = (),
        *,
        folder: Path | None = None,
    ) -> SupervisedEngine:
        return SupervisedEngine(
            child=self._child(name, [], self.config.engine.fixed_threads),
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
        path = self.sockets / f"{name}.sock"
        short = hashlib.sha256(name.encode()).hexdigest()[:12]
        return path if len(os.fsencode(path)) <= _SOCKET_BYTES else self.sockets / f"{short}.sock"

    def _gpus(self, index: int) -> list[int]:
        """Those of the run file, or as many as Ray shows to its process."""
        cluster, named = self.config.cluster, self.config.engine.gpus
        if cluster.on_ray:
            return list(range(cluster.engine.gpus))
        return list(named[index]) if named else []

    async def _name_engines(self) -> None:
        """Write where the engines serve into the store: workers and learner follow it."""
        urls = {role: [replica.url for replica in own.values()] for role, own in self._learning.items()}
        given = {policy: replica.url for policy, replica in self._given.items()}
        own = [*self.config.engine.urls, *urls.pop(None, [])]
        by_role = {role: own for role, own in urls.items() if role is not None}
        await self._set(GIVEN_URLS, given)
        await self._set(EVAL_URLS, [replica.url for replica in self._evaluating])
        await self._set(ROLE_URLS, by_role)
        await self._set(ENGINE_URLS, own)  # last: learner and workers wait for these

    async def _start_frozen(self) -> None:
        """An engine for each model that plays a role and does not learn; no weights are ever pushed to it."""
        first = WeightVersion(version=0, step=0)  # belongs to no run: its samples are never trained
        for number, policy in enumerate(sorted(self.config.rollout.given_models())):
            weights = ServedWeights(model=given_model_dir(self.config, policy), base=first, current=first)
            replica = self._engine(f"engine-given-{number}", lambda _, weights=weights: weights)
            await replica.up()
            self._keep_serving(replica, learns=False)
            self._given[policy] = replica

    async def _start_evaluating(self) -> None:
        """The engines that measure during training alone: the learner sends them nothing."""
        for index in range(self.config.eval.engines):
            gpus = self.config.eval.gpus[index] if self.config.eval.gpus else ()
            name, folder = f"engine-eval-{index}", self.run.path
            replica = self._engine(name, lambda _: pinned.weights_of(self.run, self.config), gpus, folder=folder)
            await replica.up()
            self._keep_serving(replica, learns=False)
            self._evaluating.append(replica)

    async def pin(self, to: pinned.Pin) -> None:
        """Have the engines of evaluation serve these weights. Raises RunFailed if one does not take them within
        `engine.mending_deadline_s`."""
        weights = partial(self.looks, lambda _: pinned.weights_of(self.run, self.config, to))
        until = trio.current_time() + self.config.engine.mending_deadline_s
        for replica in self._evaluating:
            while True:
                try:
                    await fit(replica.child.name, replica.url, weights, self.config, self.run.locks)
                    break
                except EngineError as error:
                    if trio.current_time() > until:
                        within = f"within {self.config.engine.mending_deadline_s:g} s (engine.mending_deadline_s)"
                        what = f"{replica.child.name} did not take version {to.version.version} to measure it"
                        raise RunFailed(f"{what} {within}: {error}") from error
                    await trio.sleep(_PIN_S)

    async def _serve(self, replica: SupervisedEngine, at_once: trio.CapacityLimiter) -> None:
        async with at_once:
            await replica.up()
        self._keep_serving(replica)

    def _keep_serving(self, replica: SupervisedEngine, *, learns: bool = True) -> None:
        watch = self._watch(replica.child.name, replica.url, replica.weights if learns else None)

        async def again() -> None:
            before = replica.url
            await (replica.again() if learns else replica.up())  # nobody sends the latter its weights later
            if replica.url != before:
                watch.url = replica.url
                await self._name_engines()

        self._start_keeping(replica.child, again, watch)

    def _watch(self, name: str, url: str, weights: Callable[[], Awaitable[ServedWeights]] | None) -> EngineWatch:
        watch = EngineWatch(url=url, config=self.config, looks=self.looks, weights=weights, locks=self.run.locks)
        self._watches[name] = watch
        return watch

    async def start_workers(self) -> None:
        """Start the workers, which wait for the engines."""
        for index in range(self._size.workers):
            self._workers[index] = self._worker(index)
        await self._name_workers()
        for child in self._workers.values():
            self._keep_working(child)

    def follow_size(self) -> None:
        """From now on engines and workers come and go as it is asked for."""
        self._start_keeper("scaling", Scaler(self.config, self.looks, self, self._set).run)

    def _worker(self, index: int) -> Child:
        argv = ["-m", "agentrl.run.processes.child", "worker", str(self.run.path), str(index)]
        hashes = str(zlib.crc32(f"agentrl {self.config.seed}".encode()))  # one order of sets: members have one task
        return self._child(f"worker-{index}", argv, 1, {"PYTHONHASHSEED": hashes, **self._key(signs=False)})

    async def _name_workers(self) -> None:
        """Write which workers there are into the store: they share the episodes, and one that is not named leaves."""
        await self._set(WORKERS, sorted(self._workers))

    def _keep_working(self, child: Child) -> None:
        silent_s, setting = self.config.rollout.hang_deadline_s, "rollout.lease_s / 2"

        async def again() -> None:
            await self.launcher.reserve(child.name)
            child.start()

        pulse = self._pulse(child, silent_s, silent_s, (setting, setting))
        child.start()
        self._start_keeping(child, again, pulse, None, self._buried)

    def start_learner(self) -> trio.Event:
        """Start the learner; the event is set when all steps are done."""
        argv = ["-m", "agentrl.run.processes.child", "learner", str(self.run.path)]
        settings = self.config.train
        child = self._child("learner", argv, settings.threads, self._key(signs=True))
        names = ("train.progress_deadline_s", "train.liveness_deadline_s")
        pulse = self._pulse(child, settings.progress_deadline_s, settings.liveness_deadline_s, names)
        child.start()
        done = trio.Event()
        self._start_keeping(child, None, pulse, done)
        return done

    # --- engines and workers that come and go: `scaling.Elastic`

    def present(self, kind: Kind) -> set[int]:
        """Those that serve or work, or are being started again."""
        if kind == "worker":
            return set(self._workers)
        return set(self._learning[None]) if not self.config.engine.urls else set()

    async def join(self, kind: Kind, index: int) -> None:
        """Start one more. An engine has the current weights, and has passed the canary, before anybody asks it.

        Raises NoRoom if there is no place for it in time, or the error of its start; nothing of it is left then."""
        new: dict[str | None, SupervisedEngine] = {}
        if kind == "worker":
            child = self._worker(index)
            try:
                await self.launcher.reserve(child.name)
            except BaseException:
                await self._end(child)
                raise
            self._workers[index] = child
            await self._name_workers()
            self._keep_working(child)
            return
        try:
            for role in self._policies:
                new[role] = self._replica(role, index)
                await new[role].join()
        except BaseException:
            for replica in new.values():
                await self._end(replica.child)
            raise
        for role, replica in new.items():
            self._learning[role][index] = replica
            self._keep_serving(replica)
        await self._name_engines()

    async def leave(self, kind: Kind, index: int) -> None:
        """End one. Others have gone on with its turns or episodes, from the tokens they have."""
        if kind == "worker":
            child = self._workers.pop(index)
            await self._let_go(child.name)
            await self._name_workers()
            with trio.move_on_after(_STEPS * self.config.rollout.step_deadline_s):
                await child.wait()
            await self._end(child)
            await self._buried(child, RestartBudget())  # of one that did not hand them back
            return
        replicas = [own.pop(index) for own in self._learning.values()]
        await self._name_engines()
        for replica in replicas:
            await self._let_go(replica.child.name)
            await self._emptied(replica.url)
            await self._end(replica.child)

    async def _emptied(self, url: str) -> None:
        """Wait until nobody asks an engine any more."""
        await trio.sleep(_LEFT_S)
        engine = self.config.engine
        deadline_s = engine.admin_deadline_s
        async with aclosing(EngineClient(url, api_key=engine.key_of(url), kind=engine.kind)) as client:
            with trio.move_on_after(deadline_s), suppress(EngineError):
                busy = True
                while busy:
                    now = await client.metrics()
                    busy = bool(now.get(RUNNING) or now.get(WAITING))
                    await trio.sleep(_POLL_S)

    async def _let_go(self, name: str) -> None:
        """End the task of that name, if there is one."""
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.scope.cancel()
            await keeper.done.wait()
        self._away.discard(name)

    async def _end(self, child: Child) -> None:
        """End it, and give back its place."""
        with trio.CancelScope(shield=True):
            await child.stop()
            self.launcher.release(child.name)
        self._children.remove(child)
        self._watches.pop(child.name, None)

    async def stop(self) -> None:
        """End every child, engines last, so that nobody sees a dead engine as a failure."""
        self._closing = True
        with trio.CancelScope(shield=True):
            await self._let_go("scaling")  # nothing comes any more
        with trio.CancelScope(shield=True), suppress(StoreError):  # children are ended below in any case
            await self._set(PHASE, "stop")
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
        own = [{replica.child.name for replica in one.values()} for role, one in self._learning.items() if role]
        learning = {name for name, watch in self._watches.items() if watch.weights is not None}
        return any(names and self._away.issuperset(names) for names in (learning.difference(*own), *own))

    @property
    def engine_start_s(self) -> float:
        """The seconds that the slowest start of an engine took, of those that serve the policy."""
        return max((replica.start_s for replica in self._learning.get(None, {}).values()), default=0.0)

    @property
    def troubles(self) -> list[str]:
        """Why engines could not be given the current weights, and whether the disk is full."""
        found = [watch.trouble for watch in self._watches.values() if watch.trouble]
        return [*found, *filter(None, [no_space_on(self.run.path)])]

    # --- one child

    def _key(self, *, signs: bool) -> dict[str, str]:
        """The variables of a process that asks the run's own engines, and with `signs` changes them."""
        key = self.config.engine.own_key
        return {} if key is None else key.variables(signs=signs)

    def _child(self, name: str, argv: list[str], threads: int, own: Mapping[str, str] | None = None) -> Child:
        env = {**_PINNED, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **(own or {})}
        withheld = _withheld(name, self.config)
        child = Child(name, argv, self.run.logs, env, mark=self.mark, launcher=self.launcher, withheld=withheld)
        self._children.append(child)
        return child

    def _pulse(self, child: Child, silent_s: float, stopped_s: float, names: tuple[str, str]) -> Pulse:
        """Listen to the child's marks, in scratch, under these deadlines."""
        child.beat = self.run.scratch / "beats" / child.name
        start_s = self.config.engine.start_deadline_s
        return Pulse(process=child, start_s=start_s, silent_s=silent_s, stopped_s=stopped_s, names=names)

    async def _with_space(self, write: Callable[[RunStore], _T]) -> _T:
        """Write once the disk has space for it."""
        return await wait_for_space(lambda: self.writes(write), every_s=_DISK_S)

    async def _set(self, value: Value[_T], to: _T) -> None:
        await self.writes(lambda store: value.set(store, to))

    async def _buried(self, child: Child, budget: RestartBudget) -> bool:
        """Free the episodes of a dead worker. Returns whether one of them killed it: this spends none of its budget."""
        name = f"{child.name}.{child.pid}"
        released = await self._with_space(lambda store: store.deaths.release_worker(name))
        for _ in released.quarantined:
            budget.forgive()  # gives back the earlier death, before the episode was known as its cause
        return released.foretold

    def _start_keeping(
        self,
        child: Child,
        again: Callable[[], Awaitable[None]] | None,
        watch: EngineWatch | Pulse,
        done: trio.Event | None = None,
        died: Callable[[Child, RestartBudget], Awaitable[bool]] | None = None,
    ) -> None:
        self._start_keeper(child.name, partial(self._keep, child, again, watch, done, died))

    def _start_keeper(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        keeper = self._keepers[name] = _Keeper()

        async def keep() -> None:
            try:
                with keeper.scope:
                    await body()
            finally:
                keeper.done.set()

        self.nursery.start_soon(keep)

    async def _keep(
        self,
        child: Child,
        again: Callable[[], Awaitable[None]] | None = None,
        watch: EngineWatch | Pulse | None = None,
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
                if child.name == "learner" and status == WornOut.exit_code:
                    await self._reseat(child)
                else:
                    self.restarts[child.name] += 1
                    if not innocent:
                        self._tell_death(child, why)
                child.start()
                continue
            self._away.add(child.name)
            try:
                await self._mend(child, again, budget, why)
            except NoRoom:
                await self._lose(child)
                return
            finally:
                self._away.discard(child.name)

    def _tell_death(self, child: Child, why: str) -> None:
        """Say of a child that is started again why it died, in the terminal and to whoever looks at the run. The store
        hears it when it can, as a restart waits for nothing."""
        print(f"agentrl: {why}; it is started again", file=sys.stderr, flush=True)
        row = {"time_s": time.time(), "process": child.name, "why": why}
        told = partial(self._with_space, lambda store: RESTARTED.set(store, [*RESTARTED.of(store.meta), row][-_TOLD:]))
        self.nursery.start_soon(told)

    async def _reseat(self, learner: Child) -> None:
        """Find the learner a place for as many ranks as it is to have now; if there is none, for those that it had."""
        self.launcher.release(learner.name)
        try:
            await self.launcher.reserve(learner.name)
        except NoRoom as error:
            why = str(error)
            await self._with_space(lambda store: scale_requests.take_back(store, why))
            await self.launcher.reserve(learner.name)

    async def _mend(
        self, child: Child, again: Callable[[], Awaitable[None]] | None, budget: RestartBudget, why: str
    ) -> None:
        """Restart a child that ended; if it dies while it starts, try again as often as its budget allows."""
        while True:
            await budget.spend(why)
            if self._closing:
                return
            self.restarts[child.name] += 1
            self._tell_death(child, why)
            if again is None:
                child.start()
                return
            try:
                await again()
                return
            except AgentRLError as error:
                if isinstance(error, WrongWeights) or (isinstance(error, NoRoom) and self._spares(child)):
                    raise
                why = str(error)
                await child.end()

    def _spares(self, child: Child) -> bool:
        """Whether the run goes on without it: others of its kind are there, and it has no duty of its own."""
        engines = self._learning.get(None, {})
        engine = len(engines) > 1 and not self.config.role_models
        return any(
            child in ours and others
            for ours, others in (
                ([replica.child for replica in engines.values()], engine),
                ([own for index, own in self._workers.items() if index], True),
            )
        )

    async def _lose(self, child: Child) -> None:
        """Nothing has room for it any more: from now on it is one that is wanted and yet to come."""
        self._keepers.pop(child.name)
        self._workers = {index: own for index, own in self._workers.items() if own is not child}
        for own in self._learning.values():
            for index in [index for index, replica in own.items() if replica.child is child]:
                del own[index]
        await self._end(child)
        await self._name_engines()
        await self._name_workers()


def _withheld(name: str, config: RunConfig) -> Withheld:
    """The secrets that a child does not get. An engine needs neither database nor judges, the learner no judges; a
    worker runs the user's own code, which may need any."""
    if name.startswith("worker"):
        return NOTHING
    judges = frozenset(source.api_key_env for source in config.rewards if source.api_key_env)
    stored = config.engine.weights_url is not None  # its package has names of its own for its credentials
    needed = frozenset(config.engine.secret_env)
    if name == "learner":
        needed |= {config.engine.api_key_env or "", *_HUB}
    return Withheld(names=judges - needed, database=name != "learner", others=not stored, needed=needed)
