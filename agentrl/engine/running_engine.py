"""One engine by itself, of either kind, for as long as a block runs.

`agentrl serve`, the engines that runs share and `agentrl.blocks.EngineFleet` start theirs here; the supervisor of a run
has `vllm_server` from here, and keeps its engines alive itself. The engine never outlives this process.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
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
from agentrl.errors import ConfigError, ModelError, UsageError
from agentrl.host.janitor import owned_folder
from agentrl.records import EngineKey

_PATIENCE_S = 8.0  # time for a vLLM server to shut down in order after its owner died
# A batch's turns may have begun under the newest version and the few before it; vLLM holds room for each in advance,
# so that more costs memory whether it is used or not.
ADAPTERS = 4  # versions with which the turns of one batch may have begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where an engine listens, and what it asks for: a Unix socket that only this user can reach, or `host` and `port`
    (0: a free one) with `key`; without a key everybody there may use and change it."""

    host: str | None = None
    port: int = 0
    key: EngineKey | None = None


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
    if settings.kind == "sglang":
        hint = "a run starts SGLang's servers (agentrl train); else start them and attach: EngineFleet.attach"
        raise ConfigError("engine.kind", "sglang", hint)
    if door.host is not None and door.port:
        check_free(door.host, door.port)
    async with owned_folder(patience_s=_PATIENCE_S) as engine_folder:
        (gpu_numbers,) = settings.places
        server = vllm_server(
            model,
            settings,
            port=door.port,
            plugin_folder=engine_folder.path,
            max_context=max_context,
            gpus=gpu_numbers,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
            **({} if max_loras is None else {"max_loras": max_loras}),
        )
        server = replace(
            server,
            name=name or server.name,
            tool_parser=PARSERS.get(tool_format(model) or ""),
            open=door.key is None,
        )
        server = replace(server, weights_from=(*everyday(), *settings.weights_from))
        server = server if door.key is None else replace(server, key=door.key)
        if door.host is None:
            server = replace(server, socket=engine_folder.path / "engine.sock")
        else:
            server = replace(server, host=door.host)
            server = server if door.port else server.on_free_port()
        # Outside of the owned folder, which goes with this process: after a failed start the log is what remains to
        # be read.
        descriptor, log_path = tempfile.mkstemp(prefix="agentrl-vllm-", suffix=".log")
        os.close(descriptor)
        print(f"starting vLLM {server.build.version}; its log is {log_path}", flush=True)
        async with vllm.running(
            server, log=Path(log_path), deadline_s=settings.start_deadline_s, mark=engine_folder.mark, say=_say
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
    call_format = get_format(tool_format(model) or "json")
    return f"{type(call_format).__module__}:{type(call_format).__name__}"


def check_free(host: str, port: int) -> None:
    """Raises UsageError if an address is taken: before vLLM is imported, which takes a minute."""
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(address_family) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((host, port))
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


def _say(line: str) -> None:
    print(line, flush=True)


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
    max_loras: int = ADAPTERS,
    kept_sets: bool = False,
) -> vllm.VLLMServer:
    """A vLLM server with all options that training needs. Raises UsageError if vLLM is not installed."""
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
        threads=settings.fixed_threads,
        gpus=tuple(gpus),
        lora_rank=lora_rank,
        lora_targets=tuple(lora_targets),
        max_loras=max_loras,
        routed_experts=settings.routed_experts is not False,
        kept_sets=kept_sets,
        sleeps=settings.colocated,
        weight_backend=settings.weight_backend,
        arguments=settings.vllm,
    )
