"""SGLang's dialect.

An update of weights puts running requests back into the queue (`retract`), which keeps their tokens, drops their keys
and values, and reads the results that were still under way: no token is then counted to weights that did not sample it
(`in_place` would count the pass in flight to the new ones). The prefix cache goes with it.

    pause (retract) ► update from disk, version, flush ► continue ───► served?
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

import trio

from agentrl.engine.dialect import EngineCalls, EngineDialect, WeightUpdate
from agentrl.engine.sglang import sglang_api
from agentrl.engine.sglang.sglang_api import SGLangParser
from agentrl.engine.vllm_api import parse_json, parse_version
from agentrl.errors import EngineError, EngineUnavailable, WeightSyncError
from agentrl.protocols import GenerateRequest
from agentrl.records import Json

_ALREADY_LOADED: Final = ("already exists", "already loaded")
"""SGLang's words for an adapter that it has; its answer has no code for it."""

METRICS = {
    # No counter of preemptions is among them: `Aimd` then goes by the queue and the cache.
    "sglang:num_running_reqs": "vllm:num_requests_running",
    "sglang:num_queue_reqs": "vllm:num_requests_waiting",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
    "sglang:prompt_tokens_total": "vllm:prompt_tokens_total",
    "sglang:generation_tokens_total": "vllm:generation_tokens_total",
}


class SGLangDialect(EngineDialect):
    """The `EngineDialect` of SGLang."""

    generate_path = "/generate"
    health_path = "/ready"  # /health samples a token, waits for a second, and hangs while the engine is paused

    def request_json(self, request: GenerateRequest) -> dict[str, Json]:
        return sglang_api.request_json(request)

    def parser(self, version: int, request: GenerateRequest, vocabulary: int | None) -> SGLangParser:
        return SGLangParser(version, request, vocabulary)

    def score_json(self, tokens: Sequence[int], model: str | None) -> dict[str, Json]:
        return sglang_api.score_json(tokens, model)

    def prompt_logprobs(self, document: Mapping[str, Json], tokens: Sequence[int]) -> tuple[float, ...]:
        return sglang_api.prompt_logprobs(document, tokens)

    def metric(self, name: str) -> str:
        return METRICS.get(name, name)

    async def look(self, engine: EngineCalls, *, deadline_s: float) -> None:
        await engine.call("GET", "/server_info", deadline_s=deadline_s)  # has the scheduler's own state

    async def paused(self, engine: EngineCalls, *, deadline_s: float) -> bool:
        try:
            await engine.call("GET", "/ready", deadline_s=deadline_s)
        except EngineUnavailable as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return True
        return False

    async def stated_version(self, engine: EngineCalls, *, deadline_s: float) -> int | None:
        answer = parse_json(await engine.call("GET", "/model_info", deadline_s=deadline_s))
        return parse_version(answer["weight_version"]) if "weight_version" in answer else None

    async def announce(self, engine: EngineCalls, version: int, *, deadline_s: float) -> None:
        body: dict[str, Json] = {"new_version": str(version), "abort_all_requests": False}
        await engine.call("POST", "/update_weight_version", json=body, deadline_s=deadline_s)

    async def resume(self, engine: EngineCalls, *, deadline_s: float) -> None:
        await engine.call("POST", "/continue_generation", json={}, deadline_s=deadline_s)

    async def take_weights(self, engine: EngineCalls, update: WeightUpdate, *, deadline_s: float) -> float:
        # Before the pause: links on a slow disk are no reason for the engine to stand still.
        weight_folder = await trio.to_thread.run_sync(folder_of, [str(info["path"]) for info in update.files])
        started_at = trio.current_time()
        # If this process dies after this call, the engine stays paused: it samples nothing, which is safe, and the
        # next push begins with a pause that changes nothing and ends with the continuation.
        await engine.call("POST", "/pause_generation", json={"mode": "retract"}, deadline_s=deadline_s)
        update_body: dict[str, Json] = {
            "model_path": str(weight_folder),
            "load_format": "auto",
            "weight_version": str(update.version),
            "abort_all_requests": False,
            "flush_cache": True,
        }
        await engine.call("POST", "/update_weights_from_disk", json=update_body, deadline_s=deadline_s)
        await self.resume(engine, deadline_s=deadline_s)
        return trio.current_time() - started_at

    async def load_adapter(self, engine: EngineCalls, name: str, place: str, digest: str, *, deadline_s: float) -> None:
        body: dict[str, Json] = {"lora_name": name, "lora_path": place}
        try:
            await engine.call("POST", "/load_lora_adapter", json=body, deadline_s=deadline_s)
        except EngineError as error:
            if not any(known_words in error.reason for known_words in _ALREADY_LOADED):
                raise

    async def unload_adapter(self, engine: EngineCalls, name: str, *, deadline_s: float) -> None:
        await engine.call("POST", "/unload_lora_adapter", json={"lora_name": name}, deadline_s=deadline_s)

    async def adapters_in_use(self, engine: EngineCalls, *, deadline_s: float) -> str:
        return ""  # it does not say; its unloading waits for the requests that use one


def folder_of(files: Sequence[str]) -> Path:
    """A folder that holds these weight files and no other: SGLang reads no single file. That of a model as it is, else
    one beside the first file, with links to them. Raises WeightSyncError."""
    paths = [Path(file) for file in files]
    if any("://" in file for file in files):
        raise WeightSyncError("SGLang reads weights from folders alone: leave engine.weights_url out")
    first_path = paths[0]
    try:
        if {path.resolve() for path in first_path.parent.glob("*.safetensors")} == {path.resolve() for path in paths}:
            return first_path.parent
        folder = first_path.with_name(f"{first_path.name}.folder")
        folder.mkdir(exist_ok=True)
        link_targets = {folder / path.with_suffix(".safetensors").name: path for path in paths}
        for link in folder.iterdir():
            if link not in link_targets or not link.samefile(link_targets[link]):  # of other weights at the same path
                link.unlink()
        for link, path in link_targets.items():
            with suppress(FileExistsError):  # another engine takes the same weights just now
                # A hard link, since it costs nothing and survives the learner's tidying of the file while the server
                # reads it; a symbolic link would end in nothing then.
                os.link(path, link)
        return folder
    except OSError as error:
        raise WeightSyncError(f"cannot make a folder of {str(first_path)!r} for SGLang: {error.strerror}") from error
