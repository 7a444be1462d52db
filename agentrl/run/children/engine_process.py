"""One engine replica under supervision: how its process is started, and when it serves the current weights.

It knows both kinds of engine and hides the difference: after `up` the replica answers at `url` and stamps its tokens
with the store's current version, also if it was restarted in the middle of a run. If weights go from memory to memory,
no file holds the current ones: the replica starts with those of the run's start, and the learner sends the current.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from agentrl.config import EngineSettings, RunConfig
from agentrl.engine import sleep
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import embedded_argv
from agentrl.engine.running_engine import ADAPTERS, vllm_server
from agentrl.engine.sglang import server_facts, server_launch
from agentrl.engine.vllm import launch as vllm
from agentrl.engine.vllm.capabilities import Need, needed, probe
from agentrl.engine.vllm.launch import check_arguments as check_vllm
from agentrl.engine.weight_sync import adapters, canary, object_store, weight_file
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.file_transport import push, update_info
from agentrl.engine.weight_sync.weight_lock import exclusive, name_of
from agentrl.errors import (
    CanaryMismatch,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    FilesUnseen,
    ModelError,
    RunFailed,
    WeightSyncError,
    WrongWeights,
)
from agentrl.host.janitor import OwnedFolder
from agentrl.models.resolve import model_dir
from agentrl.records import EngineKey, WeightVersion
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import LOCKS
from agentrl.run.start_point import StartPoint
from agentrl.run.weights.role_policies import file_of, objects_of
from agentrl.store import RunStore

_POLL_S = 0.05


def halts(config: RunConfig) -> bool:
    """Whether a paused engine is one whose pusher is at work, or vanished. One that sleeps is paused."""
    return config.transport.form == "file" or config.engine.colocated


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The weights that an engine has to serve: a model folder of version `base`, and the current version. If that is
    another version, `file` is its weight file (or the URL of its entry in `store`) or `adapter` its adapter folder over
    `model`. `canary` is the canary that the current version passed when it was sent. With `store`, an engine reads all
    files of weights from there."""

    model: Path
    base: WeightVersion
    current: WeightVersion
    file: Path | str | None = None
    adapter: Path | None = None
    canary: Canary | None = None
    past: Mapping[int, Path] = field(default_factory=dict[int, Path])  # adapters of past selves that play, by version
    store: object_store.ObjectFolder | None = None


def current_weights(config: RunConfig, store: RunStore, start: StartPoint, role: str | None = None) -> ServedWeights:
    """The store's current weights, in a run whose newest files on disk are those of `start`; the weights of `start` if
    all later ones are only in the learner's memory. Those of a `role` with a model of its own, or of all others. Raises
    RunFailed if its files are gone."""
    current = start.version if config.syncs_memory else store.versions.current_version()
    weights_path = store.versions.weights_path(current.version)
    weights_path = None if weights_path is None else file_of(weights_path, role)
    on_disk = weights_path if weights_path is not None and weights_path.exists() else None
    if on_disk is None and current.step != start.version.step:
        # Read again instead of locked: the learner deletes old weight files while engines start, and a lock between the
        # two would make each of its steps wait for the slowest start of an engine.
        if store.versions.current_version() != current:  # the learner has sent others since, and removed these
            return current_weights(config, store, start, role)
        raise RunFailed(f"the weights of version {current.version} are gone: go on with --resume")
    weight_canary = None
    if on_disk is not None:
        with suppress(FileNotFoundError):  # there was none, or the learner removes both
            weight_canary = Canary.read(canary.beside(on_disk))
    object_folder = objects_of(config.engine, config.name, store.meta, role)
    if not config.sends_adapters:
        base_version = current if on_disk is None else start.version  # versions of one step have the same weights
        model_folder = start.model_of(role, config)
        weight_source = (
            on_disk if on_disk is None or object_folder is None else object_folder.of_version(current.version)
        )
        return ServedWeights(
            model=model_folder,
            base=base_version,
            current=current,
            file=weight_source,
            canary=weight_canary,
            store=object_folder,
        )
    # An adapter's tokens carry its own version.
    first_version = WeightVersion(version=0, step=0) if current.step else current
    adapter = on_disk or start.adapter
    return ServedWeights(
        model=model_dir(config.model),
        base=first_version,
        current=current,
        adapter=adapter,
        canary=weight_canary,
        store=object_folder,
    )


@dataclass(slots=True, kw_only=True)
class SupervisedEngine:
    """A supervised engine, on `gpus` if any are named. `weights` is called at every start."""

    child: Child
    port: int
    scratch: Path
    config: RunConfig
    weights: Callable[[], Awaitable[ServedWeights]]
    gpus: Sequence[int] = ()
    folder: Path | None = None  # the run's
    socket: Path | None = None  # where it serves, if all of the run is on this machine
    host: str = "127.0.0.1"  # else
    start_s: float = 0.0  # that its last start took

    @property
    def url(self) -> str:
        """URL at which the engine serves; started again on another node, it serves elsewhere."""
        return f"unix://{self.socket}" if self.socket is not None else f"http://{self.host}:{self.port}"

    async def up(self) -> None:
        """Start it and wait until it serves the current weights and, if these were sent before, computes with them.
        Raises RunFailed with its error or the end of its log, EngineError if it does not take the weights, WrongWeights
        if it computes with others."""
        await self._start()
        await fit(self.child.name, self.url, self.weights, self.config, self.scratch / LOCKS)

    async def join(self) -> None:
        """Start a new engine as `up` does, but retry until it has the weights and its canary proves them. No request
        reaches the engine yet, so it has time to get them while the learner makes newer ones. Raises EngineError if
        this does not succeed within `engine.mending_deadline_s`."""
        await self._start()
        deadline = trio.current_time() + self.config.engine.mending_deadline_s
        while True:
            try:
                if await fit(self.child.name, self.url, self.weights, self.config, self.scratch / LOCKS):
                    return
                last_error = EngineTimeout(f"{self.child.name}: its canary was not answered in time")
            except EngineError as error:
                last_error = error
            if self.child.poll() is not None or trio.current_time() > deadline:
                # The last error is kept and raised, not the one of the deadline: "no canary in time" says nothing about
                # an engine that refused the weights ten times.
                raise last_error
            await trio.sleep(_POLL_S)

    async def again(self) -> None:
        """Restart the engine as `up` does. If it does not get its weights here, its `EngineWatch` sends them later."""
        with suppress(EngineError):
            await self.up()

    async def _start(self) -> None:
        """Start it with the newest weights whose files stay in place while it reads them. On a GPU that it shares by
        turns it waits for the learner's to end."""
        settings, lock_name = self.config.engine, name_of(self.url, colocated=True)
        gpu_turn = exclusive(self.scratch / LOCKS, lock_name, deadline_s=settings.start_deadline_s)
        # On a GPU that engine and learner share by turns, a start loads weights into memory that the learner may be
        # using. It takes its turn like any other work, or the start and the step both fail for want of memory.
        async with gpu_turn if settings.colocated else nullcontext():
            await self._started()

    async def _started(self) -> None:
        if self.socket is None:
            self.host, self.port = await self.child.place(self.port)
        else:
            self.socket.unlink(missing_ok=True)  # of one that was killed
        start_weights, start_time_s = await self.weights(), trio.current_time()
        if self.config.engine.kind == "vllm":
            await self._start_vllm(start_weights)
        elif self.config.engine.kind == "sglang":
            await self._start_sglang(start_weights)
        else:
            await self._start_embedded(start_weights)
        self.start_s = trio.current_time() - start_time_s

    async def _start_embedded(self, weights: ServedWeights) -> None:
        ready_file = self.scratch / f"{self.child.name}.ready"
        # The file of an engine that was killed would say "ready" for its successor before it has loaded anything.
        ready_file.unlink(missing_ok=True)
        self.child.argv = embedded_argv(
            weights.model,
            self.config.engine,
            ready_file=ready_file,
            socket=self.socket,
            host=self.host,
            port=self.port,
            version=weights.base.version,
            max_context=self.config.rollout.max_context,
            weights_from=self._places(weights.model),
        )[1:]
        self.child.env = {"TMPDIR": str(self.scratch / "tmp")}
        if (engine_key := self.config.engine.key_of(self.url)) is not None:
            self.child.env |= engine_key.variables(signs=True)
        self.child.start()
        deadline_s = self.config.engine.start_deadline_s
        with trio.move_on_after(deadline_s):
            while not ready_file.exists():
                exit_status = self.child.poll()
                if exit_status is not None:
                    raise RunFailed(self.child.failure(exit_status))
                await trio.sleep(_POLL_S)
            return
        raise RunFailed(f"{self.child.name} was not ready within {deadline_s:g} s (engine.start_deadline_s)")

    def _places(self, model: Path) -> list[str]:
        """Return the places of the run's weights: its scratch and folder, the model that it began with, and its object
        store."""
        weight_places = [self.scratch, model, *([self.folder] if self.folder else [])]
        with suppress(ModelError):  # it has other files
            weight_places += [
                weights_part.resolve().parent for weights_part in weight_file.parts(model)
            ]  # the hub's cache names them by links
        object_store_url = self.config.engine.weights_url
        return [
            *map(str, weight_places),
            *([object_store_url] if object_store_url else []),
            *self.config.engine.weights_from,
        ]

    async def _start_vllm(self, weights: ServedWeights) -> None:
        settings, plugin_folder = self.config.engine, self.scratch / f"{self.child.name}-plugin"
        vllm_launch = server_of(self.config, weights.model, port=self.port, plugin_folder=plugin_folder, gpus=self.gpus)
        engine_key = self.config.engine.key_of(self.url)
        vllm_launch = replace(
            vllm_launch, host=self.host, socket=self.socket, **({} if engine_key is None else {"key": engine_key})
        )
        vllm_launch = replace(vllm_launch, weights_from=tuple(self._places(weights.model)))
        vllm_launch.prepare()
        self.child.python, self.child.argv, self.child.env = (
            str(vllm_launch.build.python),
            vllm_launch.argv(),
            vllm_launch.env(),
        )
        self.child.start()
        await vllm.ready(
            vllm_launch,
            version=weights.base.version,
            deadline_s=settings.start_deadline_s,
            ended=self._has_ended,
            log=self.child.log_path,
            say=self._say,
        )

    async def _start_sglang(self, weights: ServedWeights) -> None:
        config, engine_key = self.config, self.config.engine.key_of(self.url)
        sglang_launch = server_launch.SGLangLaunch(
            model=weights.model,
            host=self.host,
            port=self.port,
            build=server_launch.find_build(),
            key=EngineKey.fresh() if engine_key is None else engine_key,
            max_model_len=config.rollout.max_context,
            max_batch=config.engine.max_batch,
            dtype=config.engine.dtype,
            stream_tokens=config.engine.stream_tokens,
            threads=config.engine.fixed_threads,
            gpus=tuple(self.gpus),
            lora_rank=config.train.lora_rank if config.sends_adapters else 0,
            lora_targets=tuple(config.train.lora_targets),
            max_loras=adapters_at_once(config),
            arguments=config.engine.sglang,
        )
        self.child.python, self.child.argv, self.child.env = (
            str(sglang_launch.build.python),
            sglang_launch.argv(),
            sglang_launch.env(),
        )
        self.child.start()
        await server_launch.ready(
            sglang_launch,
            version=weights.base.version,
            deadline_s=config.engine.start_deadline_s,
            ended=self._has_ended,
            log=self.child.log_path,
            say=self._say,
        )

    def _has_ended(self) -> bool:
        return self.child.poll() is not None

    def _say(self, line: str) -> None:
        print(f"agentrl: {self.child.name}: {line}", file=sys.stderr, flush=True)


async def fit(
    name: str,
    url: str,
    weights: Callable[[], Awaitable[ServedWeights]],
    config: RunConfig,
    locks: Path,
    fits: Callable[[int], Awaitable[bool]] | None = None,
    *,
    fresh: bool = False,
) -> bool:
    """Give a running engine the current weights, unless the version that it serves `fits` (default: the current or a
    newer one) and it is not paused; then check the canary. `weights` is called, and its files are read, while nobody
    else sends to the engine. Returns as `prove`. Raises as `attach`, and WrongWeights."""
    deadline_s, engine_key = config.engine.admin_deadline_s, config.engine.key_of(url)
    async with exclusive(locks, name_of(url, colocated=config.engine.colocated), deadline_s=deadline_s):
        newest_weights = await weights()
        client = EngineClient(url, api_key=engine_key, kind=config.engine.kind)
        if config.sends_adapters:
            client = adapters.AdapterClient(
                url, current=adapters.always(None), api_key=engine_key, kind=config.engine.kind
            )
        async with aclosing(client):
            # Everything from here to the canary happens under the engine's lock: otherwise the learner may push the
            # next version between the look and the push, and this would put the older one on top of it.
            served_version = await client.served_version(deadline_s=deadline_s)
            is_paused = halts(config) and await client.paused(deadline_s=deadline_s)  # its pusher has died
        if is_paused or not (
            served_version >= newest_weights.current.version if fits is None else await fits(served_version)
        ):
            await attach(url, newest_weights, config, fresh=fresh)
        return await prove(name, url, newest_weights, config)


async def prove(
    name: str, url: str, weights: ServedWeights, config: RunConfig, *, after: str = "was started again"
) -> bool:
    """Repeat the canary of the current version on an engine. Raises WrongWeights, which says `after` what, if the
    engine does not pass it.

    If the learner has sent the next version meanwhile, or the engine has died again, nothing is proved here: another
    part of the run takes care of it, and the result is False."""
    if weights.canary is None:
        return True
    current_version, engine_key = weights.current.version, config.engine.key_of(url)
    client = EngineClient(url, api_key=engine_key, kind=config.engine.kind)
    if weights.adapter is not None:
        client = adapters.AdapterClient(
            url, current=adapters.always(current_version), api_key=engine_key, kind=config.engine.kind
        )
    file_update = update_info(weights.file) if isinstance(weights.file, Path) else None
    deadline_s = config.engine.admin_deadline_s
    async with aclosing(client):
        with suppress(WeightSyncError, EngineUnavailable, EngineTimeout):
            try:
                tolerance = canary.allowed(weights.canary.dtype, config.engine)
                await canary.check(
                    [client], weights.canary, update_info=file_update, tolerance=tolerance, deadline_s=deadline_s
                )
                return True
            except CanaryMismatch as error:
                # A mismatch counts only if the engine still has the version that was probed: the learner may have
                # replaced it while the canary ran, and then the comparison was of two versions.
                if await client.served_version(deadline_s=deadline_s) == current_version:
                    raise WrongWeights(f"{name} {after}: {error}") from error
    return False


def server_of(
    config: RunConfig, model: Path, *, port: int, plugin_folder: Path, gpus: Sequence[int]
) -> vllm.VLLMServer:
    """A vLLM server for a run. Raises as `vllm_server`."""
    return vllm_server(
        model,
        config.engine,
        port=port,
        plugin_folder=plugin_folder,
        max_context=config.rollout.max_context,
        gpus=gpus,
        lora_rank=config.train.lora_rank if config.sends_adapters else 0,
        lora_targets=config.train.lora_targets,
        max_loras=adapters_at_once(config),
        kept_sets=config.rollout.sampling.cuts,
    )


def adapters_at_once(config: RunConfig) -> int:
    """How many adapters an engine of the run holds at once."""
    return ADAPTERS * (1 + len(config.adapted_roles) + bool(config.league_roles))


def check_arguments(config: RunConfig) -> None:
    """Have vLLM check `[engine.vllm]`, which takes as long as importing it. Raises as `check_vllm`."""
    if not config.engine.vllm:
        return
    with closing(OwnedFolder(prefer_memory=False)) as owned_folder:
        vllm_launch = server_of(
            config, model_dir(config.model), port=1, plugin_folder=owned_folder.path, gpus=config.engine.places[0]
        )
        check_vllm(vllm_launch)


async def attach(url: str, weights: ServedWeights, config: RunConfig, *, fresh: bool = True) -> None:
    """Make a running engine serve the current weights. An engine that is not `fresh` belongs to the run already and
    lacks only the current version. Raises UsageError for a vLLM server that lacks features that training needs, with
    the flags to add; WeightSyncError if it does not take the weights.

    If weights go from memory, the learner sends them: until then the engine is paused, at a version that no run has."""
    settings, adapters_alone = config.engine, config.sends_adapters
    deadline_s = settings.admin_deadline_s
    async with aclosing(EngineClient(url, api_key=settings.key_of(url), kind=settings.kind)) as client:
        if settings.kind == "vllm" and fresh:
            optional_features = {
                Need.ROUTED_EXPERTS: settings.routed_experts is not False,
                Need.KEPT_SETS: config.rollout.sampling.cuts,
            }
            needed_features = needed(config.transport)
            (await probe(client, untested=settings.untested_vllm)).require(
                needed_features | {feature for feature, is_needed in optional_features.items() if is_needed},
                dtype=settings.dtype,
                context=config.rollout.max_context,
                lora_rank=config.train.lora_rank,
            )
        if settings.kind == "sglang" and fresh:
            await server_facts.require(client, context=config.rollout.max_context, adapters=adapters_alone)
        if config.syncs_memory:
            await client.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"}, deadline_s=deadline_s)
            await client.dialect.announce(client, 0, deadline_s=deadline_s)
            return
        if adapters_alone and settings.colocated:
            await sleep.wake(client, deadline_s=deadline_s)
        if adapters_alone and fresh:
            await adapters.retire([client], keep=(), deadline_s=deadline_s)  # adapters of an earlier run
            await adapters.forget([client], deadline_s=deadline_s)
        if fresh or not adapters_alone:
            base_version = weights.base if adapters_alone else weights.current
            await _push_whole(client, weights, base_version.version, config)
        # Before the current one, which says that all are there.
        for past_version, adapter_folder in weights.past.items():
            await adapters.load([client], adapter_folder, past_version, kept=True, deadline_s=deadline_s)
        if weights.adapter is not None:
            await _load_adapter(client, weights, settings)


async def _push_whole(client: EngineClient, weights: ServedWeights, version: int, config: RunConfig) -> None:
    """Give an engine all weights of a version, from the store if there is one. An engine elsewhere that gets adapters,
    and sees neither a store nor our disk, keeps the weights it was started with, below them: the canary of the first
    adapter compares them with the learner's."""
    settings, object_folder = config.engine, weights.store
    deadline_s, is_staged = settings.admin_deadline_s, settings.kind == "vllm"
    is_asleep = settings.colocated or await _sleeps(client, deadline_s)
    pushed_files: list[Path | str] = [weights.file] if weights.file is not None else [*weight_file.parts(weights.model)]
    if object_folder is not None:
        offered_files = [
            pushed_file
            if isinstance(pushed_file, str)
            else await trio.to_thread.run_sync(object_folder.offer, pushed_file)
            for pushed_file in pushed_files
        ]
        await push(
            [client],
            offered_files,
            version,
            keep_base=True,
            stage=is_staged,
            second=False,
            asleep=is_asleep,
            deadline_s=deadline_s,
        )
        return
    try:
        await push(
            [client], pushed_files, version, stage=is_staged, second=False, asleep=is_asleep, deadline_s=deadline_s
        )
    except FilesUnseen:
        if not config.sends_adapters or not settings.canary:
            raise
        await client.dialect.announce(client, version, deadline_s=deadline_s)


async def _sleeps(client: EngineClient, deadline_s: float) -> bool:
    """Whether somebody put it to sleep. False if it cannot say."""
    try:
        return await sleep.sleeps(client, deadline_s=deadline_s)
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:
        return False


async def go_on(client: EngineClient, *, deadline_s: float) -> None:
    """Have an engine that was paused, or put to sleep, go on with the weights it has. Raises EngineError if its sleep
    dropped them."""
    if await _sleeps(client, deadline_s):
        await sleep.wake(client, deadline_s=deadline_s)
    else:
        await client.dialect.resume(client, deadline_s=deadline_s)


async def _load_adapter(client: EngineClient, weights: ServedWeights, settings: EngineSettings) -> None:
    assert weights.adapter is not None
    adapter_version = weights.current.version
    await adapters.load([client], weights.adapter, adapter_version, deadline_s=settings.admin_deadline_s)
