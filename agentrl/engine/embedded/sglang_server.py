"""The embedded engine in SGLang's dialect: its routes, requests and answers, on the same batcher and the same clock.

An update of weights takes effect between two passes, and running requests keep their tokens. `retract` also sends what
is sampled before it returns, so that a chunk has tokens of one version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.engine.embedded.batching import BatchRequest, Emission
from agentrl.engine.embedded.engine import PREFIX, Engine, Generation
from agentrl.engine.embedded.metrics_text import render
from agentrl.engine.embedded.requests import BadRequest, parse_object
from agentrl.engine.embedded.shared_routes import (
    AsgiRoute,
    SharedRoutes,
    adapter_in,
    begin_events,
    guard,
    read_body,
    read_object,
    send_events,
    version_in,
)
from agentrl.engine.sglang.sglang_dialect import METRICS
from agentrl.errors import ModelError, WeightSyncError
from agentrl.records import Json

_RENAMED = {"max_new_tokens": "max_tokens"}
_SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "n"}
# Clients send penalties of 0 with every request: a name that does nothing must not end it.
_SAMPLING_NOT_HERE = {"frequency_penalty", "presence_penalty", "logit_bias"}  # refused behind, unless they do nothing
_TEXT_ALONE = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}


class SGLangServer:
    """The routes of SGLang over an `Engine`; `app` is the ASGI application."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._loop = engine, engine.loop
        self._retractions = 0  # pauses so far that put requests back
        handlers = {
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_from_disk,
            "/load_lora_adapter": self._load_lora,
            "/unload_lora_adapter": self._unload_lora,
        }
        self.app = Starlette(
            routes=[
                Route("/generate", AsgiRoute(self._generate), methods=["POST"]),
                Route("/ready", self._ready),
                Route("/model_info", self._model_info),
                Route("/server_info", self._server_info),
                Route("/metrics", self._metrics),
                Route("/flush_cache", guard(self._flush_cache), methods=["GET", "POST"]),
                *(Route(route_path, guard(handler), methods=["POST"]) for route_path, handler in handlers.items()),
                *SharedRoutes(engine).routes(),
            ]
        )

    # --- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            document = parse_object(await read_body(receive))
        except BadRequest as error:
            await _error(str(error))(scope, receive, send)
            return
        is_stream = document.get("stream") is True
        try:
            generation = self._engine.accept(_as_vllm(document))
        except BadRequest as error:
            # SGLang begins the stream with status 200 before it validates, so a refusal comes as an event. A stand-in
            # that answered 400 would let a client pass its tests that cannot read the real server's refusals.
            if is_stream:  # a request is looked at once its stream has begun
                failure = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}
                await begin_events(send)
                await send_events(send, f"data: {json.dumps(failure)}\n\ndata: [DONE]\n\n".encode(), last=True)
            else:
                await _error(str(error))(scope, receive, send)
            return
        if is_stream:
            with generation.running(receive):
                await self._stream(generation, send)
            return
        request, score_fields = generation.request, dict[str, Json]()
        if document.get("return_logprob") and document.get("logprob_start_len") == 0:
            scored_tokens = zip([None, *generation.scores()], request.tokens[: request.prompt_length], strict=True)
            score_fields["input_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in scored_tokens]
        emission = Emission([], [], [], "length", [])
        # SGLang takes 0, to score a prompt alone. The batcher samples at least one token for each request, so nothing
        # is submitted then.
        if _parameters(document).get("max_new_tokens") != 0:
            with generation.running(receive):
                emission = await generation.whole()
        answer = self._event(request, emission, 0, generation.sampling_request.request_id, 0)
        answer["meta_info"] |= score_fields
        await JSONResponse(answer)(scope, receive, send)

    async def _stream(self, generation: Generation, send: Send) -> None:
        request = generation.request
        inner_sink, retractions_before, retractions = request.sink, self._retractions, list[int]()

        def sink(emission: Emission) -> None:
            retractions.append(self._retractions - retractions_before)  # when it was sampled, not when it leaves
            inner_sink(emission)

        request.sink = sink
        await begin_events(send)
        sent_tokens = 0
        async for emission in generation.emissions():
            event = self._event(request, emission, sent_tokens, request.id, retractions.pop(0))
            sent_tokens += len(emission.token_ids)
            ending = "data: [DONE]\n\n" if emission.finish else ""
            event_text = f"data: {json.dumps(event, separators=(',', ':'))}\n\n{ending}"
            await send_events(send, event_text.encode(), last=emission.finish is not None)

    def _event(self, request: BatchRequest, emission: Emission, sent: int, id: str, retractions: int) -> dict[str, Any]:
        """An event of a stream after `sent` tokens, or a whole answer. Like SGLang's, it states one version until the
        last, which states that of each token."""
        logprob_pairs = zip(emission.logprobs, emission.token_ids, strict=True)
        total_tokens = sent + len(emission.token_ids)
        meta_info: dict[str, Any] = {
            "id": id,
            "finish_reason": emission.finish and {"type": emission.finish},
            "prompt_tokens": request.prompt_length,
            "completion_tokens": total_tokens,
            "cached_tokens": max(request.cached, 0),
            "weight_version": str(emission.spans[-1].version if emission.spans else self._engine.batcher.version),
            "num_retractions": retractions,
            "output_token_logprobs": [[logprob, token_id, None] for logprob, token_id in logprob_pairs],
        }
        if emission.kept:
            meta_info["output_token_sampling_mask"] = emission.kept
            meta_info["output_token_sampling_logprobs"] = list(emission.logprobs)
        if emission.finish and total_tokens:
            spans = request.spans(0, total_tokens)
            meta_info["weight_versions"] = [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in spans
            ]
        return {"text": "", "output_ids": list(emission.token_ids), "meta_info": meta_info}

    async def _abort_request(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        if document.get("abort_all") is True:
            self._engine.batcher.abort_all()
        elif isinstance(request_id := document.get("rid"), str) and request_id:
            self._engine.batcher.abort_like(PREFIX + request_id)
        return Response()

    # --- what it is, how it does --------------------------------------------------------------------------------

    async def _ready(self, _: HTTPRequest) -> Response:
        return Response(status_code=503 if self._loop.paused else 200)

    async def _model_info(self, _: HTTPRequest) -> Response:
        engine = self._engine
        return JSONResponse({"model_path": engine.name, "weight_version": str(engine.batcher.version)})

    async def _server_info(self, _: HTTPRequest) -> Response:
        features = {"incremental_streaming_output": True, "enable_metrics": True, "enable_lora": True}
        return JSONResponse({"version": "agentrl-embedded", "model_path": self._engine.name, **features})

    async def _metrics(self, _: HTTPRequest) -> Response:
        metrics_text = render(self._engine.batcher, self._engine.histograms, self._engine.name)
        # Written with vLLM's names and renamed, so that a metric that is added once is there in both dialects.
        for sglang_name, vllm_name in METRICS.items():
            metrics_text = metrics_text.replace(vllm_name, sglang_name)
        return PlainTextResponse(metrics_text)

    # --- weights ------------------------------------------------------------------------------------------------

    async def _pause_generation(self, request: HTTPRequest) -> Response:
        pause_mode = (await read_object(request)).get("mode", "abort")
        if pause_mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode = {pause_mode!r}: must be abort, retract or in_place")
        batcher = self._engine.batcher
        self._loop.paused = True
        if pause_mode == "abort":
            batcher.abort_all()
        if pause_mode == "retract":
            # Before the cache is dropped: tokens that were sampled and not yet sent belong to the weights before the
            # pause, and a chunk of both versions could state one of them only.
            batcher.flush()
            batcher.forget()
            self._retractions += 1
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, _: HTTPRequest) -> Response:
        self._loop.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, _: HTTPRequest) -> Response:
        # SGLang refuses too, and answers 400: keys and values of running requests would vanish under them.
        if self._engine.batcher.busy and not self._loop.paused:
            return PlainTextResponse("requests are running or waiting: pause with retract first\n", 400)
        self._engine.batcher.forget()
        return PlainTextResponse("Cache flushed.\n")

    async def _update_from_disk(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        folder_path = document.get("model_path")
        if not isinstance(folder_path, str):
            raise BadRequest("model_path: the path of a folder with safetensors files is required")
        version, started_at = version_in(document, "weight_version"), time.perf_counter()
        try:
            await self._engine.updates.take_folder(folder_path, version)
        except (BadRequest, ModelError, OSError, WeightSyncError) as error:
            answer = {"success": False, "message": f"Failed to update weights: {error}", "num_paused_requests": 0}
            return JSONResponse(answer, 400)
        self._engine.histograms.weight_update.add(time.perf_counter() - started_at)
        # After the swap and before the answer, in one step of the loop: no pass runs in between that could serve an
        # old prefix.
        if document.get("flush_cache", True):
            self._engine.batcher.forget()
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _load_lora(self, request: HTTPRequest) -> Response:
        return await _changed(request, lambda document: self._engine.adapters.load(*adapter_in(document)))

    async def _unload_lora(self, request: HTTPRequest) -> Response:
        return await _changed(request, lambda document: self._engine.adapters.unload(str(document.get("lora_name"))))


def not_loaded(name: str) -> BadRequest:
    """The error for a model that is not served, in SGLang's words."""
    return BadRequest(f"The following requested LoRA adapters are not loaded: {name}")


async def _changed(request: HTTPRequest, change: Callable[[dict[str, Any]], None]) -> Response:
    """Change the adapters as a request says, and answer."""
    try:
        change(await read_object(request))
    except (BadRequest, ModelError) as error:
        error_message = str(error).replace("has already been loaded", "already exists")
        return JSONResponse({"success": False, "error_message": error_message}, 400)
    return JSONResponse({"success": True, "error_message": None})


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = document.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise BadRequest("sampling_params: must be an object")
    return cast("dict[str, Any]", parameters)


def _as_vllm(document: dict[str, Any]) -> bytes:
    """A request with the names that `parse_generate` reads. Raises BadRequest for what it has no name for."""
    params = dict[str, Any]()
    for setting_name, setting_value in _parameters(document).items():
        if setting_name in _TEXT_ALONE or setting_value is None:
            continue
        if setting_name not in _SAMPLING | _SAMPLING_NOT_HERE:
            raise BadRequest(f"sampling_params.{setting_name}: the embedded engine does not have it")
        params[_RENAMED.get(setting_name, setting_name)] = setting_value
    if params.get("max_tokens") == 0:  # the prompt alone is requested
        params["max_tokens"] = 1
    vllm_request: dict[str, Any] = {
        "token_ids": document.get("input_ids"),
        "sampling_params": params,
        "stream": document.get("stream") is True,
    }
    for sglang_name, vllm_name in (("rid", "request_id"), ("lora_path", "model")):
        if document.get(sglang_name) is not None:
            vllm_request[vllm_name] = document[sglang_name]
    return json.dumps(vllm_request).encode()


def _error(text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": 400}}, 400)
