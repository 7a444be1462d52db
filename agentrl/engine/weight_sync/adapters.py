"""LoRA adapters as weight versions: `policy-7` is version 7, `policy-7-judge` that of the role "judge" if it has its
own, `league-7` and `league-7-judge` the same ones kept for good as a past self. Loaded beside those that running
requests use, never over them (a reload in place reads the folder for each request, and leaves old keys and values in
the prefix cache). An engine elsewhere gets the bytes over HTTP (`inbox`), one on this machine reads the folder.

A request keeps the adapter it started with, so all its tokens have one version, and generation never pauses. Owns the
names, their loading and their retirement; the files are the learner's. No torch.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from agentrl.config import MAX_LORA_RANK, EngineSettings, Train
from agentrl.engine import sleep
from agentrl.engine.auth import folder_digest
from agentrl.engine.client import EngineClient
from agentrl.engine.http_client import socket_of
from agentrl.engine.vllm_api import parse_json, results
from agentrl.engine.weight_sync import uploads
from agentrl.engine.weight_sync.adapter_names import LEAGUE, POLICY, adapter_name, versions_in
from agentrl.engine.weight_sync.transport import Parcel, Place, PushReport, WeightTransport
from agentrl.errors import ConfigError, EngineError, EngineTimeout, EngineUnavailable, WeightSyncError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Json, VersionSpan

_CONFIG = "adapter_config.json"
_SENDER = secrets.token_hex(4)  # no other process sends a folder of the same name


Current = Callable[[], Awaitable[int | None]]
"""Says a version; None while there is none."""


def always(version: int | None) -> Current:
    """Says the same version for ever."""

    async def current() -> int | None:
        return version

    return current


class AdapterClient(EngineClient):
    """Samples from the adapter that `current` names at the start of each turn, and stamps its tokens with that version
    (an engine's own stamp is that of the weights below). `current` gives None while there is none yet."""

    def __init__(
        self,
        url: str,
        *,
        current: Current,
        **settings: Any,
    ) -> None:
        super().__init__(url, **settings)
        self._current = current

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `EngineClient.stream`. Raises EngineUnavailable if the engine lacks the adapter: it was restarted and
        waits to be refit, or was left behind by several versions."""
        is_past_self = request.version is not None
        # Once, at the turn's start: a request keeps its adapter, so all tokens of an attempt have one version however
        # long they take.
        version = request.version if is_past_self else await self._current()
        if version:  # 0 has the weights below
            request = replace(request, model=adapter_name(version, request.policy, kept=is_past_self))
        try:
            async with aclosing(super().stream(request)) as chunks:
                async for chunk in chunks:
                    # The server's own stamps are those of the base weights, which stay at one version for the whole
                    # run.
                    yield chunk if version is None else _stamped(chunk, version)
        except EngineError as error:
            # The engine lost the adapter, by a restart say; another replica may have it. A refusal fails the episode.
            if request.model is not None and error.status == HTTPStatus.NOT_FOUND:
                raise EngineUnavailable(f"{self.url} has no adapter {request.model!r}") from error
            raise

    async def score(
        self, token_ids: Sequence[int], *, deadline_s: float, model: str | None = None
    ) -> tuple[float, ...]:
        """See `EngineClient.score`; without a `model`, the current adapter scores."""
        current_version = await self._current()
        if model is None and current_version is not None:
            model = adapter_name(current_version)
        return await super().score(token_ids, deadline_s=deadline_s, model=model)

    async def served_version(self, *, deadline_s: float = 5.0) -> int:
        """The newest adapter it has, or the version of the weights below."""
        loaded_versions = await loaded(self, deadline_s=deadline_s)
        # An engine that restarted has no adapter, and answers with the version below: the router then holds it for
        # stale until it has been refitted (`test_an_engine_that_lost_its_adapter_is_stale_until_it_has_it_again`).
        return max(loaded_versions) if loaded_versions else await super().served_version(deadline_s=deadline_s)


async def load(
    engines: Sequence[EngineClient], folder: Path, version: int, *, kept: bool = False, deadline_s: float = 30.0
) -> PushReport:
    """Have every engine load the adapter in `folder` (PEFT's format) as `version`, all at once, while it generates. The
    adapter of a role lies in a folder of its name in there, and is loaded first: a version that an engine names is
    whole. `kept`: under the names of a past self.

    The folder must stay until the version is retired, for engines that read it. Each call has `deadline_s`. Raises
    WeightSyncError naming the engines that did not confirm; the call may be repeated."""
    folder = Path(await trio.Path(folder).resolve())
    try:
        adapter_files = [file for file in await trio.Path(folder).rglob("*") if await file.is_file()]
        total_bytes = sum([(await file.stat()).st_size for file in adapter_files])
    except OSError as error:
        raise WeightSyncError(f"cannot read adapter {str(folder)!r}: {error.strerror}") from error
    if not await trio.Path(folder).is_dir():
        raise WeightSyncError(f"cannot read adapter {str(folder)!r}: there is no such folder")
    role_names = sorted(
        file.parent.name for file in adapter_files if file.name == _CONFIG and file.parent != trio.Path(folder)
    )
    # None, the adapter of the policy itself, comes last: `loaded` takes its name for the sign that the version is
    # whole.
    role_folders = {adapter_name(version, role, kept=kept): folder / (role or "") for role in (*role_names, None)}
    digests = {adapter: await trio.to_thread.run_sync(folder_digest, place) for adapter, place in role_folders.items()}

    async def load_into(engine: EngineClient) -> None:
        for adapter, role_folder in role_folders.items():
            if is_near(engine.url):
                try:
                    await engine.dialect.load_adapter(
                        engine, adapter, str(role_folder), digests[adapter], deadline_s=deadline_s
                    )
                    continue
                except (EngineUnavailable, EngineTimeout):
                    raise
                except EngineError as error:  # perhaps it is in a container, or behind a tunnel
                    if not _unread(error):
                        raise
                    read_error = error
                engine_folder = await _send(engine, adapter, role_folder, deadline_s)
                if engine_folder is None:
                    raise read_error
            else:
                engine_folder = await _send(engine, adapter, role_folder, deadline_s) or str(role_folder)
            await engine.dialect.load_adapter(engine, adapter, engine_folder, digests[adapter], deadline_s=deadline_s)

    started_at = trio.current_time()
    await _everywhere(engines, load_into, f"load adapter {adapter_name(version)}")
    return PushReport(pause_s=0.0, total_s=trio.current_time() - started_at, bytes=total_bytes)


def is_near(url: str) -> bool:
    """Whether a server is on this machine, by its address: it reads our files, unless it is in a container."""
    if socket_of(url) is not None:
        return True
    hostname = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return hostname == "localhost"


def _unread(error: EngineError) -> bool:
    """Whether an engine says that it has, or reads, no such folder; vLLM leaves the path out of what it says."""
    return bool(re.search(r"No adapter found|No such file|cannot load", error.reason))


async def _send(engine: EngineClient, name: str, folder: Path, deadline_s: float) -> str | None:
    """Send the files of an adapter; returns where the engine has them, None if it takes none: it is no vLLM with our
    plugin. Raises WeightSyncError if they do not arrive whole."""
    receipt: dict[str, Any] = {}
    messages = uploads.messages(folder, f"{name}-{_SENDER}")
    while (message := await trio.to_thread.run_sync(next, messages, None)) is not None:
        rpc_body: dict[str, Json] = {"method": uploads.METHOD, "args": [message]}
        try:
            answer = await engine.call("POST", "/collective_rpc", json=rpc_body, deadline_s=deadline_s)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError:
            return None
        for receipt in results(answer):
            if "error" in receipt:
                raise WeightSyncError(f"it did not take the files of {name}: {receipt['error']}")
    if not isinstance(engine_folder := receipt.get("path"), str):
        raise WeightSyncError(f"it took the files of {name} and names no folder")
    return engine_folder


async def _unload(engine: EngineClient, name: str, place: str, deadline_s: float) -> None:
    """Unload an adapter, and remove its files if they came over HTTP."""
    await engine.dialect.unload_adapter(engine, name, deadline_s=deadline_s)
    if (drop_message := uploads.forgetting(place)) is not None:
        rpc_body: dict[str, Json] = {"method": uploads.METHOD, "args": [drop_message]}
        await engine.call("POST", "/collective_rpc", json=rpc_body, deadline_s=deadline_s)


async def retire(engines: Sequence[EngineClient], *, keep: Collection[int], deadline_s: float = 30.0) -> frozenset[int]:
    """Unload every version that is not in `keep` and that no request of an engine uses; returns those that some engine
    still has besides `keep`, whose folders must stay."""
    remaining_versions: set[int] = set()

    async def unload(engine: EngineClient) -> None:
        model_folders = await _places(engine, deadline_s)
        version_of = {model_name: version for model_name in model_folders for version in versions_in([model_name])}
        old_versions = frozenset(version_of.values()) - frozenset(keep)
        # Unloading an adapter under a running request would fail the request, or compute the rest of it with the
        # weights below.
        busy_versions = await in_use(engine, deadline_s=deadline_s) if old_versions else frozenset[int]()
        remaining_versions.update(old_versions & busy_versions)
        idle_versions = old_versions - busy_versions
        for model_name in sorted(name for name, version in version_of.items() if version in idle_versions):
            await _unload(engine, model_name, model_folders[model_name], deadline_s)

    await _everywhere(engines, unload, "unload old adapters")
    return frozenset(remaining_versions)


async def forget(engines: Sequence[EngineClient], version: int | None = None, *, deadline_s: float = 30.0) -> None:
    """Unload a past self; without `version` all of them, such as those of an earlier run."""
    version_pattern = r"\d+" if version is None else str(version)
    name_pattern = re.compile(f"{LEAGUE}-{version_pattern}(-.*)?")

    async def unload(engine: EngineClient) -> None:
        for model_name, engine_folder in (await _places(engine, deadline_s)).items():
            if name_pattern.fullmatch(model_name):
                await _unload(engine, model_name, engine_folder, deadline_s)

    await _everywhere(engines, unload, "unload past selves")


async def loaded(engine: EngineClient, *, deadline_s: float = 5.0) -> frozenset[int]:
    """The versions that an engine has adapters of."""
    model_folders = await _places(engine, deadline_s)
    return frozenset(version for version in versions_in(model_folders) if adapter_name(version) in model_folders)


async def _places(engine: EngineClient, deadline_s: float) -> dict[str, str]:
    """The names of an engine's models, and the folders that it has them from if it says so."""
    answer = parse_json(await engine.call("GET", "/v1/models", deadline_s=deadline_s))
    try:
        return {str(model_entry["id"]): str(model_entry.get("root")) for model_entry in answer["data"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"{engine.url} names its models in an unknown shape: {error!r}") from error


async def in_use(engine: EngineClient, *, deadline_s: float = 5.0) -> frozenset[int]:
    """The versions that running or waiting requests of an engine use, at its last look."""
    adapters_in_use = await engine.dialect.adapters_in_use(engine, deadline_s=deadline_s)
    # Roles' adapters are counted as their version: a version is retired as a whole, when no role's turn uses it any
    # more.
    return versions_in(re.findall(rf"{POLICY}-\d+", adapters_in_use))


def _stamped(chunk: Chunk, version: int) -> Chunk:
    token_count = len(chunk.token_ids)
    return replace(chunk, spans=(VersionSpan(version, 0, token_count),) if token_count else ())


async def _everywhere(
    engines: Sequence[EngineClient], call: Callable[[EngineClient], Awaitable[None]], what: str
) -> None:
    failures: list[str] = []

    async def named(engine: EngineClient) -> None:
        try:
            await call(engine)
        except EngineError as error:
            failures.append(f"{engine.url} did not {what}: {error}")

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(named, engine)
    if failures:
        raise WeightSyncError("; ".join(sorted(failures)))


class AdapterTransport(WeightTransport):
    """`adapter`: the folder of an adapter, loaded beside those in use."""

    form = "adapter"

    def __init__(self, place: Place) -> None:
        self._settings = place.engine

    @classmethod
    def check(cls, engine: EngineSettings, train: Train, *, on_ray: bool) -> None:
        if engine.sync == "adapter" and engine.kind == "embedded":
            raise ConfigError("engine.sync", "adapter", "the embedded engine takes whole files: give 'auto'")
        if engine.sync == "adapter" and engine.kind == "sglang" and engine.at_update != "leave":
            hint = "SGLang does not say which adapters its requests use: set engine.at_update = 'leave', or give 'auto'"
            raise ConfigError("engine.sync", "adapter", hint)
        if not train.lora_rank:
            raise ConfigError("engine.sync", "adapter", "no adapter is trained: give train.lora_rank = 16, or 'auto'")
        if train.lora_rank > MAX_LORA_RANK:
            hint = f"vLLM takes adapters of rank {MAX_LORA_RANK} at most; engine.sync = 'full' merges a larger one"
            raise ConfigError("train.lora_rank", train.lora_rank, hint)

    async def deliver(self, engines: Sequence[EngineClient], parcel: Parcel, base: Parcel | None) -> PushReport:
        deadline_s = self._settings.admin_deadline_s
        if self._settings.colocated:
            for engine in engines:
                await sleep.wake(engine, deadline_s=deadline_s)
        return await load(engines, parcel.path, parcel.version, deadline_s=deadline_s)

    async def retire(self, engines: Sequence[EngineClient], keep: Sequence[Parcel]) -> frozenset[int]:
        kept_versions = [parcel.version for parcel in keep]
        try:
            return await retire(engines, keep=kept_versions, deadline_s=self._settings.admin_deadline_s)
        except EngineError:
            # Not known is not "none": the caller then removes no folder. An engine that is away for a moment may come
            # back and read the folder of a running turn's adapter.
            return frozenset({-1})
