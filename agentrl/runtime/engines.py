"""One engine replica under supervision: how its process is started, and when it serves the current weights.

It knows both kinds of engine and hides the difference: after `up` the replica answers at `url` and stamps its tokens
with the store's current version, also when it was started again in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.launch import embedded_argv
from agentrl.engine.vllm import launch as vllm
from agentrl.engine.vllm.probe import FOR_TRAINING, probe
from agentrl.engine.weights import push
from agentrl.errors import ModelError, RunFailed
from agentrl.records import WeightVersion
from agentrl.runtime.supervise import Child

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What an engine is to serve: a model folder that stands for version `base`, and the current version with the
    file that holds it, where that is another one."""

    model: Path
    base: WeightVersion
    current: WeightVersion
    file: Path | None


@dataclass(slots=True, kw_only=True)
class Replica:
    """A supervised engine. `weights` is asked at every start."""

    child: Child
    port: int
    scratch: Path
    settings: EngineSettings
    max_context: int
    weights: Callable[[], Weights]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def up(self) -> None:
        """Start it and wait until it serves the current weights. Raises RunFailed with what its log or error says."""
        if self.settings.kind == "vllm":
            await self._up_vllm(self.weights())
        else:
            await self._up_embedded(self.weights())

    async def _up_embedded(self, weights: Weights) -> None:
        ready_file = self.scratch / f"{self.child.name}.ready"
        ready_file.unlink(missing_ok=True)
        self.child.argv = embedded_argv(
            weights.model,
            self.settings,
            ready_file=ready_file,
            port=self.port,
            version=weights.current.version,
            weights=weights.file,
            max_context=self.max_context,
        )[1:]
        self.child.start()
        deadline_s = self.settings.start_deadline_s
        with trio.move_on_after(deadline_s):
            while not ready_file.exists():
                status = self.child.poll()
                if status is not None:
                    raise RunFailed(self.child.failure(status))
                await trio.sleep(_POLL_S)
            return
        raise RunFailed(f"{self.child.name} was not ready within {deadline_s:g} s (engine.start_deadline_s)")

    async def _up_vllm(self, weights: Weights) -> None:
        server = vllm.VLLMServer(
            model=weights.model,
            port=self.port,
            plugin_folder=self.scratch / f"{self.child.name}-plugin",
            build=vllm.find_build(),
            max_model_len=self.max_context,
            max_batch=self.settings.max_batch,
            dtype=self.settings.dtype,
            kv_cache_bytes=self.settings.kv_cache_mb << 20,
            stream_tokens=self.settings.stream_tokens,
            threads=self.settings.threads,
        )
        server.prepare()
        self.child.python, self.child.argv, self.child.env = str(server.build.python), server.argv(), server.env()
        self.child.start()
        await vllm.ready(
            server,
            version=weights.base.version,
            deadline_s=self.settings.start_deadline_s,
            ended=lambda: self.child.poll() is not None,
            log=self.child.log_path,
        )
        if weights.file is not None:
            await push([self.url], weights.file, weights.current.version, deadline_s=self.settings.admin_deadline_s)


async def attach(url: str, weights: Weights, settings: EngineSettings) -> None:
    """Make an engine that somebody else started serve the current weights. Raises UsageError for a vLLM server that
    lacks what training needs, with the flags that mend it; WeightSyncError if it does not take the weights."""
    if settings.kind == "vllm":
        client = EngineClient(url)
        try:
            (await probe(client)).require(FOR_TRAINING)
        finally:
            await client.aclose()
    await refit(url, weights, deadline_s=settings.admin_deadline_s)


async def refit(url: str, weights: Weights, *, deadline_s: float) -> None:
    """Push the current weights to one engine. Raises WeightSyncError if it does not confirm them."""
    file = weights.file or weights.model / "model.safetensors"
    if not file.is_file():
        raise ModelError(f"{weights.model} has no model.safetensors: save it as one file to attach engines by URL")
    await push([url], file, weights.current.version, deadline_s=deadline_s)
