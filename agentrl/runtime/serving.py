"""An engine by itself: started, announced, ended with its owner. Other runs attach to it by its URL.

It has only the weights of the model's folder; a run that attaches sends its own. The engine never outlives this
process, however that ends.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.launch import launch_embedded
from agentrl.engine.sources import everyday
from agentrl.engine.vllm import launch as vllm
from agentrl.errors import EngineUnavailable
from agentrl.owner import owned_folder
from agentrl.runtime.engines import vllm_server

_PATIENCE_S = 8.0  # time for a vLLM server to shut down in order after its owner died


def serve(
    model: Path,
    settings: EngineSettings,
    *,
    host: str,
    port: int,
    max_context: int,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    kept_sets: bool = False,
) -> None:
    """Serve `model` until SIGINT or SIGTERM; `port` 0 takes a free one. Prints the URL on its own line when the
    engine answers. Raises UsageError or RunFailed if it does not start, EngineUnavailable if it ends by itself."""

    async def main() -> int | None:
        status = None
        async with running_engine(
            model,
            settings,
            host=host,
            port=port,
            max_context=max_context,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
        ) as (url, process):
            print(url, flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_on_signal, nursery.cancel_scope)
                status = await process.wait()
                nursery.cancel_scope.cancel()
        return status

    with suppress(KeyboardInterrupt):  # Ctrl-C while it starts
        status = trio.run(main)
        if status is not None:
            raise EngineUnavailable(f"the engine ended by itself with exit status {status}")


@asynccontextmanager
async def running_engine(
    model: Path,
    settings: EngineSettings,
    *,
    host: str,
    port: int,
    max_context: int,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    max_loras: int | None = None,
    kept_sets: bool = False,
) -> AsyncGenerator[tuple[str, trio.Process]]:
    """One engine for as long as the block runs, with its URL and process; a vLLM holds `max_loras` adapters at once.
    Raises UsageError or RunFailed if it does not start."""
    if settings.kind == "embedded":
        async with launch_embedded(model, settings, host=host, port=port, max_context=max_context) as engine:
            yield engine.url, engine.process
        return
    async with owned_folder(patience_s=_PATIENCE_S) as owner:
        (gpus,) = settings.places
        server = vllm_server(
            model,
            settings,
            port=port,
            plugin_folder=owner.path,
            max_context=max_context,
            gpus=gpus,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
            **({} if max_loras is None else {"max_loras": max_loras}),
        )
        server = replace(server, host=host, weights_from=(*everyday(), *settings.weights_from))
        server = server if port else server.on_free_port()
        descriptor, name = tempfile.mkstemp(prefix=f"agentrl-vllm-{server.port}-", suffix=".log")
        os.close(descriptor)
        log = Path(name)
        print(f"starting vLLM {server.build.version}; its log is {log}", flush=True)
        async with vllm.running(server, log=log, deadline_s=settings.start_deadline_s, mark=owner.mark) as process:
            yield server.url, process


async def end_on_signal(scope: trio.CancelScope) -> None:
    """Cancel `scope` at SIGINT or SIGTERM."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
