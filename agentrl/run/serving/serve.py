"""An engine by itself: started, announced, ended with its owner. Other runs attach to it by its URL.

It has only the weights of the model's folder; a run that attaches sends its own. The engine never outlives this
process, however that ends. It asks for a key, unless it is told not to.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.vllm import launch as vllm
from agentrl.engine.vllm.launch import PARSERS
from agentrl.engine.weight_sync.weight_sources import everyday
from agentrl.env.tools.parsers import get_format
from agentrl.errors import EngineUnavailable, ModelError, UsageError
from agentrl.host.janitor import owned_folder
from agentrl.records import EngineKey
from agentrl.run.processes.engine_process import vllm_server

_PATIENCE_S = 8.0  # time for a vLLM server to shut down in order after its owner died
_KEY = "AGENTRL_SERVE_KEY"  # the variable that the printed lines name for a key that was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where an engine listens, and what it asks for: a Unix socket that only this user can reach, or `host` and `port`
    (0: a free one) with `key`; without a key everybody there may use and change it."""

    host: str | None = None
    port: int = 0
    key: EngineKey | None = None


def key_of(variable: str | None, *, none: bool) -> EngineKey | None:
    """The key of `agentrl serve`: that of an environment variable, a new one, or `none`. Raises UsageError if the
    variable is not set."""
    if none and variable is not None:
        raise UsageError("--no-key and --api-key-env: give one of them")
    if none:
        return None
    if variable is None:
        return EngineKey.of(EngineKey.fresh().value)
    if not (value := os.environ.get(variable)):
        raise UsageError(f"--api-key-env {variable}: this environment variable is not set: export it")
    return EngineKey.of(value)


def serve(
    model: Path,
    settings: EngineSettings,
    *,
    door: Door,
    name: str,
    max_context: int,
    key_variable: str | None = None,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    kept_sets: bool = False,
) -> None:
    """Serve `model` by the name `name` until SIGINT or SIGTERM. When the engine answers, prints how to use it, and last
    its URL on a line of its own. `key_variable` has the key, if it was not made here. Raises UsageError or RunFailed if
    it does not start, EngineUnavailable if it ends by itself."""

    async def main() -> int | None:
        status = None
        async with running_engine(
            model,
            settings,
            door=door,
            name=name,
            max_context=max_context,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
        ) as (url, process):
            for line in _announced(url, settings.kind, name, door.key, key_variable):
                print(line, flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_on_signal, nursery.cancel_scope)
                status = await process.wait()
                nursery.cancel_scope.cancel()
        return status

    with suppress(KeyboardInterrupt):  # Ctrl-C while it starts
        status = trio.run(main)
        if status is not None:
            raise EngineUnavailable(f"the engine ended by itself with exit status {status}")


def _announced(url: str, kind: str, name: str, key: EngineKey | None, variable: str | None) -> list[str]:
    made = key is not None and variable is None
    named = variable or _KEY
    attach = "" if key is None else f" --set engine.api_key_env={named}"
    ask = "" if key is None else f" --key-variable {named}"
    return [
        f"model: {name}",
        *([f"key: export {named}={key.value}"] if key is not None and made else []),
        *(["key: none; everybody who reaches this address may use the engine and change it"] if key is None else []),
        f"a run: agentrl train RUN.toml --set engine.kind={kind} --set 'engine.urls=[\"{url}\"]'{attach}",
        f"a test: agentrl eval --endpoint {url} --model {name} --env agentrl/Calculator-v0{ask}",
        url,
    ]


@asynccontextmanager
async def running_engine(
    model: Path,
    settings: EngineSettings,
    *,
    door: Door,
    max_context: int,
    name: str | None = None,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    max_loras: int | None = None,
    kept_sets: bool = False,
) -> AsyncGenerator[tuple[str, trio.Process]]:
    """One engine for as long as the block runs, with its URL and process; a vLLM holds `max_loras` adapters at once.
    Raises UsageError or RunFailed if it does not start."""
    if settings.kind == "embedded":
        async with launch_embedded(
            model,
            settings,
            host=door.host,
            port=door.port,
            key=door.key,
            name=name,
            tool_parser=_tool_parser(model),
            max_context=max_context,
        ) as engine:
            yield engine.url, engine.process
        return
    if door.host is not None and door.port:
        check_free(door.host, door.port)
    async with owned_folder(patience_s=_PATIENCE_S) as owner:
        (gpus,) = settings.places
        server = vllm_server(
            model,
            settings,
            port=door.port,
            plugin_folder=owner.path,
            max_context=max_context,
            gpus=gpus,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
            **({} if max_loras is None else {"max_loras": max_loras}),
        )
        server = replace(
            server, name=name or server.name, tool_parser=PARSERS.get(tool_format(model) or ""), open=door.key is None
        )
        server = replace(server, weights_from=(*everyday(), *settings.weights_from))
        server = server if door.key is None else replace(server, key=door.key)
        if door.host is None:
            server = replace(server, socket=owner.path / "engine.sock", open=False)
        else:
            server = replace(server, host=door.host)
            server = server if door.port else server.on_free_port()
        descriptor, log = tempfile.mkstemp(prefix="agentrl-vllm-", suffix=".log")
        os.close(descriptor)
        print(f"starting vLLM {server.build.version}; its log is {log}", flush=True)
        async with vllm.running(
            server, log=Path(log), deadline_s=settings.start_deadline_s, mark=owner.mark, say=_say
        ) as process:
            yield server.url, process


def tool_format(model: Path) -> str | None:
    """The dialect in which a model's chat template writes calls of tools; None if it has no template, or no dialect
    reads what it writes."""
    try:
        return Renderer(model).tool_format
    except ModelError:
        return None


def _tool_parser(model: Path) -> str:
    """How the embedded engine reads a model's calls of tools: as its template writes them, else by a text format."""
    form = get_format(tool_format(model) or "json")
    return f"{type(form).__module__}:{type(form).__name__}"


def check_free(host: str, port: int) -> None:
    """Raises UsageError if an address is taken: before vLLM is imported, which takes a minute."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


def _say(line: str) -> None:
    print(line, flush=True)


async def end_on_signal(scope: trio.CancelScope) -> None:
    """Cancel `scope` at SIGINT or SIGTERM."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
