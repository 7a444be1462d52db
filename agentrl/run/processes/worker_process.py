"""The rollout worker's process: puts together its store handle, engine client, renderer and environments."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl import config as configuration
from agentrl import notices, registry
from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.router import Fleet, Policies
from agentrl.engine.weight_sync.adapters import AdapterClient
from agentrl.errors import DiskFull, StoreAway, StoreError
from agentrl.host.clocks import HostClock
from agentrl.host.gc_pauses import collect_after_growth, spare_old_objects
from agentrl.host.janitor import watch_lifeline
from agentrl.models.resolve import model_dir, renderer_of, vocabulary
from agentrl.protocols import Engine, Rewarder
from agentrl.records import Json, WeightVersion
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.env_calls import make_env
from agentrl.rollout.opponents import Opponents
from agentrl.rollout.worker import Worker
from agentrl.run import reward_services
from agentrl.run.cluster.scaling import workers_of
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.processes.launcher import NODE_TMP
from agentrl.run.reporting import notice_counts
from agentrl.run.run_folder import RunDir
from agentrl.run.telemetry import Telemetry
from agentrl.run.weights.role_policies import urls_of
from agentrl.sandbox import shared_backend
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks, Newest
from agentrl.store.interfaces import RolloutStore
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import CHANGES, CONFIG, EVAL_URLS, FROZEN_URLS, PAUSED, PINNED

_REPORT_S = 5.0
_FOLLOW_S = 1.0  # between two looks at where the engines are
_AWAIT_S = 0.1  # the same before there are any
_SWITCH_S = 0.0005  # a busy loop lets the store's thread on so soon; by Python's 5 ms it wrote half as many turns


def serve(path: Path, index: int) -> None:
    """Run worker `index` of the run at `path` until the store says stop, SIGTERM comes or the owner is gone."""
    watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = RunDir.open(path)
    tempfile.tempdir = os.environ.get(NODE_TMP) or str(run.scratch / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    config = run.config()
    name = f"worker-{index}.{os.getpid()}"  # a lease belongs to one process of a worker
    spare_old_objects()
    sys.setswitchinterval(_SWITCH_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker tokenizes one text at a time
    trio.run(_serve, run, config, name, index, clock=HostClock())


async def _serve(run: RunDir, config: RunConfig, name: str, index: int) -> None:
    shared_backend.configure(config.sandbox.arguments())
    opened = RunStore.open(run.store_path, away_s=config.cluster.store_deadline_s)
    # A second handle that only reads: a look at the phase or at the current version must not queue behind a commit, and
    # must return at once if the database is away.
    reader = RunStore.read(run.store_path, away_s=0)
    store = JournalWriter(opened, reader, disk_wait_s=config.train.stall_deadline_s)  # then the run ends
    heartbeat = Heartbeat.of_process()
    heartbeat.mark_while(lambda: opened.waits)
    renderer, looks = renderer_of(config), Looks[RunStore](reader)
    fleet_view = await await_engines(config, looks, heartbeat)
    sight = RunView(config, looks, fleet_view)
    fleet = _fleet(sight, fleet_view, renderer)
    role_fleets = {role: _fleet(sight, fleet_view, renderer, role) for role in config.role_models}
    pinned = _pinned_fleet(sight, fleet_view, renderer)
    rewarder: Rewarder | None = registry.load_reference(config.env.reward) if config.env.reward else None
    context = RolloutContext(
        engine=Policies(fleet, role_fleets),
        renderer=renderer,
        store=store,
        settings=config.rollout,
        make_env=make_env,
        rewarder=rewarder,
        frozen=_frozen(config, fleet_view, renderer),
        pinned=pinned,
        adapted=config.own_roles,
        opponents=Opponents(settings=config.league, plays=config.league_roles, seed=config.seed),
        experts=config.engine.routed_experts is not False,
        eval_sampling=config.eval_sampling,
        artifacts=any(source.measure == "tests" for source in config.rewards),
    )
    worker = Worker(name, store, context, config.buffer.groups_ahead, sharing=len(fleet_view.workers))
    if fleet_view.paused:
        worker.pause(now=False)
    telemetry = Telemetry(opened, run.metrics, name)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heartbeat.beat)
            nursery.start_soon(collect_after_growth)
            nursery.start_soon(_end_on_sigterm, nursery.cancel_scope)
            for each_fleet in (fleet, *role_fleets.values(), *([] if pinned is None else [pinned])):
                nursery.start_soon(partial(each_fleet.control, start=_concurrency(config)))
            nursery.start_soon(report, fleet, telemetry, store, partial(_counts, worker))
            nursery.start_soon(_follow, sight, {None: fleet, **role_fleets}, pinned, context.frozen, worker, index)
            if index == 0:  # one worker scores for all: a source limits its concurrent calls
                nursery.start_soon(reward_services.serve, config, store)
            await worker.run()
            nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(2, shield=True):
            await _record_notices(store, last=True)
            for engine in (context.engine, *context.frozen.values(), *([] if pinned is None else [pinned])):
                await engine.aclose()
        # After the engines: closing writes what is still queued, and a turn that is cut off in the line above posts its
        # last tokens there.
        await store.aclose()
        telemetry.close()
        reader.close()
        opened.close()


@dataclass(frozen=True, slots=True)
class FleetView:
    """The run's rows that a worker follows: where the engines serve, by role with a model of its own (None: all
    others), by the model that plays a role, and those of evaluation during training; which workers there are; the
    version that new clients begin with; whether the run is paused (`PAUSED`); how often its settings changed."""

    urls: Mapping[str | None, list[str]]
    frozen_urls: Mapping[str, str]
    evaluating: list[str]
    workers: list[int]
    version: WeightVersion
    paused: Mapping[str, Any]
    changes: int


def known_of(config: RunConfig, store: RunStore) -> FleetView:
    """The fleet as the store records it now."""
    return FleetView(
        urls={role: urls_of(store.meta, role) for role in (None, *config.role_models)},
        frozen_urls=FROZEN_URLS.of(store.meta),
        evaluating=EVAL_URLS.of(store.meta),
        workers=workers_of(config, store.meta),
        version=store.versions.current_version(),
        paused=PAUSED.of(store.meta),
        changes=len(CHANGES.of(store.meta)),
    )


async def await_engines(config: RunConfig, looks: Looks[RunStore], heartbeat: Heartbeat) -> FleetView:
    """The fleet once its engines serve, with marks until then: this process starts beside them."""
    heartbeat.mark()
    while not await looks(lambda store: urls_of(store.meta, None)):
        await trio.sleep(_AWAIT_S)
        heartbeat.mark()
    return await looks(partial(known_of, config))


class RunView:
    """The run's state that turns need, read in the background while the worker's loop goes on."""

    def __init__(self, config: RunConfig, looks: Looks[RunStore], known: FleetView) -> None:
        self.config, self.looks, self._minted = config, looks, set[int]()
        self._current = Newest(lambda: looks(lambda store: store.versions.current_version()), known.version)

    async def fits(self, version: int) -> bool:
        """Whether a turn may begin with these weights: this run minted them, and they are not older than the
        current."""
        try:
            current = (await self._current()).version
            # Newer than current is fine if this run minted it: an engine may already serve what the learner has not
            # confirmed yet. A number that is unknown is another run's, and its tokens could not be journaled.
            return version == current or (
                version > current and await self.looks(lambda store: store.versions.knows_version(version))
            )
        except StoreError:  # the store cannot be read: a later call asks again
            return False

    async def knows(self, version: int) -> bool:
        """Whether this run minted a version, so that its tokens can be journaled. Any if the store is away: the journal
        waits for it."""
        if version not in self._minted:
            try:
                if not await self.looks(lambda store: store.versions.knows_version(version)):
                    return False
            # Not "unknown": a turn that is already sampled would be thrown away because a database restarts. The
            # journal waits for it, and refuses the turn then if the version really is unknown.
            except StoreAway:
                return True
            self._minted.add(version)
        return True

    async def pinned(self) -> int | None:
        """The version that evaluation during training measures now; None before the first."""
        return await self.looks(lambda store: PINNED.of(store.meta))

    async def is_pinned(self, version: int) -> bool:
        """Whether it is that version."""
        return version == await self.pinned()

    async def adapter(self) -> int | None:
        """The newest adapter that the learner confirmed; before the first step there is none."""
        current = await self._current()
        return current.version if current.step else None


async def _follow(
    sight: RunView,
    fleets: Mapping[str | None, Fleet],
    pinned: Fleet | None,
    frozen: Mapping[str, Engine],
    worker: Worker,
    index: int,
) -> None:
    """Follow engines that are started again on another host, share the episodes with workers that come and go, stand
    still while the run is paused, take changed settings, and leave if it wants this one no more. `fleets` are by
    role."""
    seen = 0  # a change may have come while this process started
    while True:
        await trio.sleep(_FOLLOW_S)
        # Everything here is looked at again in a second. An error would end all episodes of the worker for want of a
        # row that says nothing new.
        with suppress(StoreError):
            fleet_view = await sight.looks(partial(known_of, sight.config))
            for role, fleet in fleets.items():
                fleet.follow(fleet_view.urls[role], partial(_client, sight, fleet_view, role=role))
            if pinned is not None and fleet_view.evaluating:
                pinned.follow(fleet_view.evaluating, partial(_pinned_client, sight))
            for role, policy in sight.config.rollout.frozen_roles().items():
                other = frozen.get(role)
                if policy in fleet_view.frozen_urls and isinstance(other, Fleet):
                    other.follow([fleet_view.frozen_urls[policy]], partial(_frozen_client, sight.config))
            worker.sharing = len(fleet_view.workers)
            if fleet_view.changes != seen:
                config = configuration.from_json(await sight.looks(lambda store: CONFIG.of(store.meta)) or "{}")
                worker.retune(config.rollout, config.buffer.groups_ahead)
                seen = fleet_view.changes
            if fleet_view.paused:
                worker.pause(now=fleet_view.paused["now"])
            elif worker.paused:
                worker.go_on()
            if index not in fleet_view.workers:
                worker.leave()


def _counts(worker: Worker) -> Mapping[str, Json]:
    """How many episodes ended in this process, and how many of them infrastructure failed: by these, `agentrl health`
    distinguishes a bad host from a bad run."""
    return {"worker": worker.name, "host": socket.gethostname(), "ended": worker.ended, "failed": worker.failed}


async def report(
    fleet: Fleet,
    telemetry: Telemetry,
    store: RolloutStore,
    counts: Callable[[], Mapping[str, Json]] = dict[str, Json],
) -> None:
    """Record this worker's view of the fleet and its `counts` again and again; on a full disk, skip the record."""
    while True:
        await trio.sleep(_REPORT_S)
        with suppress(DiskFull):
            step, gauges = (await store.current_version()).step, {**fleet.gauges(), **counts()}
            await store.record("fleet", step, gauges)
            telemetry.append("fleet", step, gauges)
            await _record_notices(store)


async def _record_notices(store: RolloutStore, *, last: bool = False) -> None:
    """Hand the notices of this process to the run. They are counts: a store that is away or full gets them later."""
    if taken := notices.OF_PROCESS.take_new(last=last):
        try:
            await store.record(notice_counts.KIND, (await store.current_version()).step, notice_counts.as_row(taken))
        except StoreError:
            notices.OF_PROCESS.put_back(taken)


def _fleet(sight: RunView, known: FleetView, renderer: Renderer, role: str | None = None) -> Fleet:
    """The engines of a role with a model of its own, or of all others."""
    clients = [_client(sight, known, url, role=role) for url in known.urls[role]]
    engine = sight.config.engine
    return Fleet.configured(
        clients, engine, decode=renderer.decode, fits=sight.fits, knows=sight.knows, preempt=engine.at_update == "leave"
    )


def _client(sight: RunView, known: FleetView, url: str, *, role: str | None = None) -> EngineClient:
    """Speaks to one engine. If only adapters are sent, a turn begins with the newest one that the learner confirmed."""
    config, version = sight.config, known.version.version
    engine, tokens = config.engine, vocabulary(model_dir(config.model_of(role)))
    options: dict[str, Any] = {"api_key": engine.key_of(url), "kind": engine.kind, "vocabulary": tokens}
    if config.sends_adapters:
        return AdapterClient(url, current=sight.adapter, **options)
    return EngineClient(url, version=version, **options)


def _pinned_fleet(sight: RunView, known: FleetView, renderer: Renderer) -> Fleet | None:
    """The engines of evaluation during training, if it has its own. Tokens of another version than the pinned one are
    refused."""
    if not known.evaluating:
        return None
    clients = [_pinned_client(sight, url) for url in known.evaluating]
    engine, fits = sight.config.engine, sight.is_pinned
    return Fleet.configured(clients, engine, decode=renderer.decode, fits=fits, knows=fits)


def _pinned_client(sight: RunView, url: str) -> EngineClient:
    config = sight.config
    tokens = vocabulary(model_dir(config.model))
    options: dict[str, Any] = {"api_key": config.engine.key_of(url), "kind": config.engine.kind, "vocabulary": tokens}
    return (
        AdapterClient(url, current=sight.pinned, **options) if config.sends_adapters else EngineClient(url, **options)
    )


def _concurrency(config: RunConfig) -> Aimd | None:
    """The limit of a worker's requests at one server on a GPU: first the server's batch, at most all of the run."""
    if config.engine.kind == "embedded":
        return None
    most = config.rollout.max_running  # others may leave: then this worker has their share
    return Aimd(limit=min(most, config.engine.max_batch), ceiling=most)


def _frozen(config: RunConfig, known: FleetView, renderer: Renderer) -> dict[str, Engine]:
    """An engine for each role that the learning policy does not play."""
    key = config.rollout.roles_key()

    def engine(policy: str) -> EngineClient:
        return (
            _frozen_client(config, known.frozen_urls[policy])
            if policy in known.frozen_urls
            else EngineClient(policy, api_key=key)
        )

    return {
        role: Fleet.configured([engine(policy)], config.engine, decode=renderer.decode)
        for role, policy in config.rollout.frozen_roles().items()
    }


def _frozen_client(config: RunConfig, url: str) -> EngineClient:
    """Speaks to an engine that the run started for a model that does not learn."""
    return EngineClient(url, api_key=config.engine.key_of(url), kind=config.engine.kind)


async def _end_on_sigterm(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
