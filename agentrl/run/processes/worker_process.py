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
    run_folder = RunDir.open(path)
    tempfile.tempdir = os.environ.get(NODE_TMP) or str(run_folder.scratch / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    run_config = run_folder.config()
    worker_name = f"worker-{index}.{os.getpid()}"  # a lease belongs to one process of a worker
    spare_old_objects()
    sys.setswitchinterval(_SWITCH_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker tokenizes one text at a time
    trio.run(_serve, run_folder, run_config, worker_name, index, clock=HostClock())


async def _serve(run: RunDir, config: RunConfig, name: str, index: int) -> None:
    shared_backend.configure(config.sandbox.arguments())
    written_store = RunStore.open(run.store_path, away_s=config.cluster.store_deadline_s)
    # A second handle that only reads: a look at the phase or at the current version must not queue behind a commit, and
    # must return at once if the database is away.
    read_store = RunStore.read(run.store_path, away_s=0)
    journal = JournalWriter(written_store, read_store, disk_wait_s=config.train.stall_deadline_s)  # then the run ends
    heartbeat = Heartbeat.of_process()
    heartbeat.mark_while(lambda: written_store.waits)
    renderer, store_looks = renderer_of(config), Looks[RunStore](read_store)
    fleet_view = await await_engines(config, store_looks, heartbeat)
    run_view = RunView(config, store_looks, fleet_view)
    main_fleet = _fleet(run_view, fleet_view, renderer)
    role_fleets = {role_name: _fleet(run_view, fleet_view, renderer, role_name) for role_name in config.role_models}
    pinned_fleet = _pinned_fleet(run_view, fleet_view, renderer)
    rewarder: Rewarder | None = registry.load_reference(config.env.reward) if config.env.reward else None
    rollout_context = RolloutContext(
        engine=Policies(main_fleet, role_fleets),
        renderer=renderer,
        store=journal,
        settings=config.rollout,
        make_env=make_env,
        rewarder=rewarder,
        frozen=_frozen(config, fleet_view, renderer),
        pinned=pinned_fleet,
        adapted=config.own_roles,
        opponents=Opponents(settings=config.league, plays=config.league_roles, seed=config.seed),
        experts=config.engine.routed_experts is not False,
        eval_sampling=config.eval_sampling,
        artifacts=any(reward_source.reads_work for reward_source in config.rewards),
    )
    rollout_worker = Worker(name, journal, rollout_context, config.buffer.groups_ahead, sharing=len(fleet_view.workers))
    if fleet_view.paused:
        rollout_worker.pause(now=False)
    telemetry = Telemetry(written_store, run.metrics, name)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heartbeat.beat)
            nursery.start_soon(collect_after_growth)
            nursery.start_soon(_end_on_sigterm, nursery.cancel_scope)
            for each_fleet in (main_fleet, *role_fleets.values(), *([] if pinned_fleet is None else [pinned_fleet])):
                nursery.start_soon(partial(each_fleet.control, start=_concurrency(config)))
            nursery.start_soon(report, main_fleet, telemetry, journal, partial(_counts, rollout_worker))
            nursery.start_soon(
                _follow,
                run_view,
                {None: main_fleet, **role_fleets},
                pinned_fleet,
                rollout_context.frozen,
                rollout_worker,
                index,
            )
            if index == 0:  # one worker scores for all: a source limits its concurrent calls
                nursery.start_soon(reward_services.serve, config, journal)
            await rollout_worker.run()
            nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(2, shield=True):
            await _record_notices(journal, last=True)
            for closed_engine in (
                rollout_context.engine,
                *rollout_context.frozen.values(),
                *([] if pinned_fleet is None else [pinned_fleet]),
            ):
                await closed_engine.aclose()
        # After the engines: closing writes what is still queued, and a turn that is cut off in the line above posts its
        # last tokens there.
        await journal.aclose()
        telemetry.close()
        read_store.close()
        written_store.close()


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
        urls={role_name: urls_of(store.meta, role_name) for role_name in (None, *config.role_models)},
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
            current_version = (await self._current()).version
            # Newer than current is fine if this run minted it: an engine may already serve what the learner has not
            # confirmed yet. A number that is unknown is another run's, and its tokens could not be journaled.
            return version == current_version or (
                version > current_version and await self.looks(lambda store: store.versions.knows_version(version))
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
        current_version = await self._current()
        return current_version.version if current_version.step else None


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
    seen_changes = 0  # a change may have come while this process started
    while True:
        await trio.sleep(_FOLLOW_S)
        # Everything here is looked at again in a second. An error would end all episodes of the worker for want of a
        # row that says nothing new.
        with suppress(StoreError):
            fleet_view = await sight.looks(partial(known_of, sight.config))
            for role_name, role_fleet in fleets.items():
                role_fleet.follow(fleet_view.urls[role_name], partial(_client, sight, fleet_view, role=role_name))
            if pinned is not None and fleet_view.evaluating:
                pinned.follow(fleet_view.evaluating, partial(_pinned_client, sight))
            for role_name, policy in sight.config.rollout.frozen_roles().items():
                frozen_engine = frozen.get(role_name)
                if policy in fleet_view.frozen_urls and isinstance(frozen_engine, Fleet):
                    frozen_engine.follow([fleet_view.frozen_urls[policy]], partial(_frozen_client, sight.config))
            worker.sharing = len(fleet_view.workers)
            if fleet_view.changes != seen_changes:
                new_config = configuration.from_json(await sight.looks(lambda store: CONFIG.of(store.meta)) or "{}")
                worker.retune(new_config.rollout, new_config.buffer.groups_ahead)
                seen_changes = fleet_view.changes
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
            current_step, fleet_gauges = (await store.current_version()).step, {**fleet.gauges(), **counts()}
            await store.record("fleet", current_step, fleet_gauges)
            telemetry.append("fleet", current_step, fleet_gauges)
            await _record_notices(store)


async def _record_notices(store: RolloutStore, *, last: bool = False) -> None:
    """Hand the notices of this process to the run. They are counts: a store that is away or full gets them later."""
    if new_notices := notices.OF_PROCESS.take_new(last=last):
        try:
            await store.record(
                notice_counts.KIND, (await store.current_version()).step, notice_counts.as_row(new_notices)
            )
        except StoreError:
            notices.OF_PROCESS.put_back(new_notices)


def _fleet(sight: RunView, known: FleetView, renderer: Renderer, role: str | None = None) -> Fleet:
    """The engines of a role with a model of its own, or of all others."""
    engine_clients = [_client(sight, known, engine_url, role=role) for engine_url in known.urls[role]]
    engine_settings = sight.config.engine
    return Fleet.configured(
        engine_clients,
        engine_settings,
        decode=renderer.decode,
        fits=sight.fits,
        knows=sight.knows,
        preempt=engine_settings.at_update == "leave",
    )


def _client(sight: RunView, known: FleetView, url: str, *, role: str | None = None) -> EngineClient:
    """Speaks to one engine. If only adapters are sent, a turn begins with the newest one that the learner confirmed."""
    run_config, current_version = sight.config, known.version.version
    engine_settings, known_tokens = run_config.engine, vocabulary(model_dir(run_config.model_of(role)))
    client_options: dict[str, Any] = {
        "api_key": engine_settings.key_of(url),
        "kind": engine_settings.kind,
        "vocabulary": known_tokens,
    }
    if run_config.sends_adapters:
        return AdapterClient(url, current=sight.adapter, **client_options)
    return EngineClient(url, version=current_version, **client_options)


def _pinned_fleet(sight: RunView, known: FleetView, renderer: Renderer) -> Fleet | None:
    """The engines of evaluation during training, if it has its own. Tokens of another version than the pinned one are
    refused."""
    if not known.evaluating:
        return None
    engine_clients = [_pinned_client(sight, engine_url) for engine_url in known.evaluating]
    engine_settings, is_pinned = sight.config.engine, sight.is_pinned
    return Fleet.configured(engine_clients, engine_settings, decode=renderer.decode, fits=is_pinned, knows=is_pinned)


def _pinned_client(sight: RunView, url: str) -> EngineClient:
    run_config = sight.config
    known_tokens = vocabulary(model_dir(run_config.model))
    client_options: dict[str, Any] = {
        "api_key": run_config.engine.key_of(url),
        "kind": run_config.engine.kind,
        "vocabulary": known_tokens,
    }
    return (
        AdapterClient(url, current=sight.pinned, **client_options)
        if run_config.sends_adapters
        else EngineClient(url, **client_options)
    )


def _concurrency(config: RunConfig) -> Aimd | None:
    """The limit of a worker's requests at one server on a GPU: first the server's batch, at most all of the run."""
    if config.engine.kind == "embedded":
        return None
    run_limit = config.rollout.max_running  # others may leave: then this worker has their share
    return Aimd(limit=min(run_limit, config.engine.max_batch), ceiling=run_limit)


def _frozen(config: RunConfig, known: FleetView, renderer: Renderer) -> dict[str, Engine]:
    """An engine for each role that the learning policy does not play."""
    roles_key = config.rollout.roles_key()

    def engine(policy: str) -> EngineClient:
        return (
            _frozen_client(config, known.frozen_urls[policy])
            if policy in known.frozen_urls
            else EngineClient(policy, api_key=roles_key)
        )

    return {
        role_name: Fleet.configured([engine(policy)], config.engine, decode=renderer.decode)
        for role_name, policy in config.rollout.frozen_roles().items()
    }


def _frozen_client(config: RunConfig, url: str) -> EngineClient:
    """Speaks to an engine that the run started for a model that does not learn."""
    return EngineClient(url, api_key=config.engine.key_of(url), kind=config.engine.kind)


async def _end_on_sigterm(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
