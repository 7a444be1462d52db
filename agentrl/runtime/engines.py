"""One engine replica under supervision: how its process is started, and when it serves the current weights.

It knows both kinds of engine and hides the difference: after `up` the replica answers at `url` and stamps its tokens
with the store's current version, also when it was started again in the middle of a run. Where weights go from memory to
memory no file holds the current ones: it comes up with those the run began with, and the learner sees that and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config import EngineSettings, RunConfig
from agentrl.engine import adapters, canary, weightfile
from agentrl.engine.canary import Canary
from agentrl.engine.client import EngineClient
from agentrl.engine.exclusive import exclusive
from agentrl.engine.launch import embedded_argv
from agentrl.engine.vllm import launch as vllm
from agentrl.engine.vllm.plugin import BACKEND
from agentrl.engine.vllm.probe import Need, needed, probe
from agentrl.engine.weights import push, update_info
from agentrl.errors import CanaryMismatch, EngineError, EngineTimeout, EngineUnavailable, RunFailed, WeightSyncError
from agentrl.records import WeightVersion
from agentrl.runtime.checkpoints import StartPoint
from agentrl.runtime.models import model_dir
from agentrl.runtime.rundir import LOCKS
from agentrl.runtime.supervise import Child
from agentrl.store import RunStore

_POLL_S = 0.05
PAUSES = ("full", "delta")
"""The ways of new weights (`RunConfig.sync`) on which a paused engine is one whose pusher is at work, or vanished."""

_ADAPTERS = 4  # versions that turns of one batch may have begun with


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What an engine is to serve: a model folder that stands for version `base`, and the current version with the
    weight file, or the folder of the adapter over `model`, that holds it where that is another one. `canary` is what
    was proved of the current version when it was sent."""

    model: Path
    base: WeightVersion
    current: WeightVersion
    file: Path | None = None
    adapter: Path | None = None
    canary: Canary | None = None


class WrongWeights(RunFailed):
    """An engine was started again and computes with other weights than it says: another start would not help."""


def current_weights(config: RunConfig, store: RunStore, start: StartPoint) -> Weights:
    """What the store calls current, in a run whose newest files on disk are those of `start`; `start` itself where what
    came after is in nothing but the learner's memory. Raises RunFailed if its files are gone."""
    current = start.version if config.syncs_memory else store.current_version()
    path = store.weights_path(current.version)
    found = path if path is not None and path.exists() else None
    if found is None and current.step != start.version.step:
        raise RunFailed(f"the weights of version {current.version} are gone: go on with --resume")
    kept = None if found is None else canary.beside(found)
    proof = Canary.read(kept) if kept is not None and kept.exists() else None
    if config.sync != "adapter":
        base = current if found is None else start.version  # versions of one step have the same weights
        return Weights(model=start.model, base=base, current=current, file=found, canary=proof)
    first = WeightVersion(version=0, step=0) if current.step else current  # an adapter's tokens carry its own version
    adapter = found or start.adapter
    return Weights(model=model_dir(config.model), base=first, current=current, adapter=adapter, canary=proof)


@dataclass(slots=True, kw_only=True)
class Replica:
    """A supervised engine, on `gpus` if any are named. `weights` is asked at every start."""

    child: Child
    port: int
    scratch: Path
    config: RunConfig
    weights: Callable[[], Weights]
    gpus: Sequence[int] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        """Start it and wait until it serves the current weights and, where they were sent before, computes with them.
        Raises RunFailed with what its log or error says, EngineError if it does not take the weights, WrongWeights if
        it computes with others."""
        await self._start()
        await fit(self.child.name, self.url, self.weights, self.config, self.scratch / LOCKS)

    async def again(self) -> None:
        """As `up`, of an engine that a `Watch` gives its weights if it does not get them here."""
        with suppress(EngineError):
            await self.up()

    async def _start(self) -> None:
        """With the newest weights that will stay where they are while it reads them."""
        weights = self.weights()
        if self.config.engine.kind == "vllm":
            await self._start_vllm(weights)
        else:
            await self._start_embedded(weights)

    async def _start_embedded(self, weights: Weights) -> None:
        ready_file = self.scratch / f"{self.child.name}.ready"
        ready_file.unlink(missing_ok=True)
        self.child.argv = embedded_argv(
            weights.model,
            self.config.engine,
            ready_file=ready_file,
            port=self.port,
            version=weights.base.version,
            max_context=self.config.rollout.max_context,
        )[1:]
        self.child.start()
        deadline_s = self.config.engine.start_deadline_s
        with trio.move_on_after(deadline_s):
            while not ready_file.exists():
                status = self.child.poll()
                if status is not None:
                    raise RunFailed(self.child.failure(status))
                await trio.sleep(_POLL_S)
            return
        raise RunFailed(f"{self.child.name} was not ready within {deadline_s:g} s (engine.start_deadline_s)")

    async def _start_vllm(self, weights: Weights) -> None:
        settings = self.config.engine
        server = vllm_server(
            weights.model,
            settings,
            port=self.port,
            plugin_folder=self.scratch / f"{self.child.name}-plugin",
            max_context=self.config.rollout.max_context,
            gpus=self.gpus,
            lora_rank=self.config.train.lora_rank if self.config.sync == "adapter" else 0,
            lora_targets=self.config.train.lora_targets,
        )
        server.prepare()
        self.child.python, self.child.argv, self.child.env = str(server.build.python), server.argv(), server.env()
        self.child.start()
        await vllm.ready(
            server,
            version=weights.base.version,
            deadline_s=settings.start_deadline_s,
            ended=lambda: self.child.poll() is not None,
            log=self.child.log_path,
        )


async def fit(
    name: str,
    url: str,
    weights: Callable[[], Weights],
    config: RunConfig,
    locks: Path,
    fits: Callable[[int], bool] | None = None,
    *,
    fresh: bool = False,
) -> None:
    """Give a running engine the current weights and prove them, unless what it serves `fits` (default: they, or newer
    ones) and it is not paused. `weights` is asked, and read, while nobody else gives it any. Raises as `attach`, and
    WrongWeights."""
    deadline_s, key = config.engine.admin_deadline_s, config.engine.api_key()
    async with exclusive(locks, url, deadline_s=deadline_s):
        found = weights()
        client = EngineClient(url, api_key=key)
        if config.sync == "adapter":
            client = adapters.AdapterClient(url, current=lambda: None, api_key=key)
        async with aclosing(client):
            served = await client.served_version(deadline_s=deadline_s)
            halted = config.sync in PAUSES and await client.paused(deadline_s=deadline_s)  # by one who vanished
        if halted or not (served >= found.current.version if fits is None else fits(served)):
            await attach(url, found, config, fresh=fresh)
        await prove(name, url, found, config)


async def prove(name: str, url: str, weights: Weights, config: RunConfig) -> None:
    """The canary that the version passed when it was sent, on an engine that was given it once more. Raises
    WrongWeights if the engine is not its equal.

    The learner may have sent the next version meanwhile, or the engine have died again: then somebody else sees to it,
    and nothing is proved here."""
    if weights.canary is None:
        return
    version, key = weights.current.version, config.engine.api_key()
    client = EngineClient(url, api_key=key)
    if weights.adapter is not None:
        client = adapters.AdapterClient(url, current=lambda: version, api_key=key)
    info = None if weights.file is None else update_info(weights.file)
    deadline_s = config.engine.admin_deadline_s
    async with aclosing(client):
        with suppress(WeightSyncError, EngineUnavailable, EngineTimeout):
            try:
                await canary.check([client], weights.canary, update_info=info, deadline_s=deadline_s)
            except CanaryMismatch as error:
                if await client.served_version(deadline_s=deadline_s) == version:
                    raise WrongWeights(f"{name} was started again: {error}") from error


def vllm_server(
    model: Path,
    settings: EngineSettings,
    *,
    port: int,
    plugin_folder: Path,
    max_context: int,
    gpus: Sequence[int] = (),
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
) -> vllm.VLLMServer:
    """A vLLM server with all that training needs. Raises UsageError where there is no vLLM."""
    return vllm.VLLMServer(
        model=model,
        port=port,
        plugin_folder=plugin_folder,
        build=vllm.find_build(untested=settings.untested_vllm),
        max_model_len=max_context,
        max_batch=settings.max_batch,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_mb << 20,
        stream_tokens=settings.stream_tokens,
        threads=settings.threads,
        gpus=tuple(gpus),
        lora_rank=lora_rank,
        lora_targets=tuple(lora_targets),
        max_loras=_ADAPTERS,
        routed_experts=settings.routed_experts,
        weight_backend=settings.sync if settings.sync in ("nccl", "ipc") else BACKEND,
    )


async def attach(url: str, weights: Weights, config: RunConfig, *, fresh: bool = True) -> None:
    """Make a running engine serve the current weights. One that is not `fresh` is the run's already, and lacks the
    current version alone. Raises UsageError for a vLLM server that lacks what training needs, with the flags that mend
    it; WeightSyncError if it does not take the weights.

    From memory the learner has to send them: until then the engine is paused, at a version that no run has."""
    settings, adapters_alone = config.engine, config.sync == "adapter"
    deadline_s = settings.admin_deadline_s
    async with aclosing(EngineClient(url, api_key=settings.api_key())) as client:
        if settings.kind == "vllm" and fresh:
            experts = {Need.ROUTED_EXPERTS} if settings.routed_experts else set[Need]()
            (await probe(client, untested=settings.untested_vllm)).require(
                needed(config.sync) | experts,
                dtype=settings.dtype,
                context=config.rollout.max_context,
                lora_rank=config.train.lora_rank,
            )
        if config.syncs_memory:
            await client.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"}, deadline_s=deadline_s)
            await vllm.announce(client, 0)
            return
        if adapters_alone and fresh:
            await adapters.retire([client], keep=(), deadline_s=deadline_s)  # those of a run before this one
        if fresh or not adapters_alone:
            below = weights.base if adapters_alone else weights.current
            whole = [weights.file] if weights.file is not None else weightfile.parts(weights.model)
            await push([client], whole, below.version, deadline_s=deadline_s)
        if weights.adapter is not None:
            await _load_adapter(client, weights, settings)


async def _load_adapter(client: EngineClient, weights: Weights, settings: EngineSettings) -> None:
    assert weights.adapter is not None
    version = weights.current.version
    await adapters.load([client], weights.adapter, version, deadline_s=settings.admin_deadline_s)
