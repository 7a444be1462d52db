"""vLLM's dialect, which the embedded engine speaks too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.engine import vllm_api
from agentrl.engine.dialect import EngineCalls, EngineDialect, WeightUpdate
from agentrl.engine.vllm import weight_calls
from agentrl.engine.vllm_api import ChunkParser, metric, parse_json, parse_version
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable
from agentrl.protocols import GenerateRequest
from agentrl.records import Json


class VLLMDialect(EngineDialect):
    """The `EngineDialect` of vLLM and of the embedded engine."""

    generate_path = "/inference/v1/generate"
    health_path = "/health"

    def request_json(self, request: GenerateRequest) -> dict[str, Json]:
        return vllm_api.request_json(request, stream=True)

    def parser(self, version: int, request: GenerateRequest, vocabulary: int | None) -> ChunkParser:
        return ChunkParser(version, request, vocabulary)

    def score_json(self, tokens: Sequence[int], model: str | None) -> dict[str, Json]:
        return vllm_api.score_json(tokens, model)

    def prompt_logprobs(self, document: Mapping[str, Json], tokens: Sequence[int]) -> tuple[float, ...]:
        return vllm_api.prompt_logprobs(document, tokens)

    def metric(self, name: str) -> str:
        return name

    async def look(self, engine: EngineCalls, *, deadline_s: float) -> None:
        await engine.call("GET", "/is_paused", deadline_s=deadline_s)

    async def paused(self, engine: EngineCalls, *, deadline_s: float) -> bool:
        return bool(parse_json(await engine.call("GET", "/is_paused", deadline_s=deadline_s)).get("is_paused"))

    async def stated_version(self, engine: EngineCalls, *, deadline_s: float) -> int | None:
        for api_path in ("/version", "/weight_info"):  # the embedded engine's way, vLLM's in development mode
            try:
                answer = parse_json(await engine.call("GET", api_path, deadline_s=deadline_s))
            except (EngineUnavailable, EngineTimeout):
                raise
            except EngineError:  # it lacks the path
                continue
            if "weight_version" in answer:
                return parse_version(answer["weight_version"])
        return None

    async def announce(self, engine: EngineCalls, version: int, *, deadline_s: float) -> None:
        body: dict[str, Json] = {"new_version": str(version)}
        await engine.call("POST", "/update_weight_version", json=body, deadline_s=deadline_s)

    async def resume(self, engine: EngineCalls, *, deadline_s: float) -> None:
        await engine.call("POST", "/resume", deadline_s=deadline_s)

    async def take_weights(self, engine: EngineCalls, update: WeightUpdate, *, deadline_s: float) -> float:
        return await weight_calls.take_weights(engine, update, deadline_s=deadline_s)

    async def load_adapter(self, engine: EngineCalls, name: str, place: str, digest: str, *, deadline_s: float) -> None:
        body: dict[str, Json] = {"lora_name": name, "lora_path": place, "sha256": digest}
        try:
            await engine.call("POST", "/v1/load_lora_adapter", json=body, deadline_s=deadline_s)
        except EngineError as error:
            # A push is repeated after a lost answer, so an adapter that is there already is a success.
            if "already been loaded" not in error.reason:  # vLLM has no code for it
                raise

    async def unload_adapter(self, engine: EngineCalls, name: str, *, deadline_s: float) -> None:
        await engine.call("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, deadline_s=deadline_s)

    async def adapters_in_use(self, engine: EngineCalls, *, deadline_s: float) -> str:
        newest_use, newest_labels = 0.0, ""
        for line in (await engine.call("GET", "/metrics", deadline_s=deadline_s)).decode(errors="replace").splitlines():
            # Each set of adapters that was ever in use has a line of its own, whose value is when it last was.
            if line.startswith("vllm:lora_requests_info{"):
                labels, used_at = metric(line)
                # Lines of sets that are no longer used stay in the metrics for good; only the newest is the present.
                if used_at >= newest_use:
                    newest_use, newest_labels = used_at, labels
        return newest_labels
