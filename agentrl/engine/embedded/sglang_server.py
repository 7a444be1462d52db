"""The embedded engine in SGLang's dialect: its routes, requests and answers, on the same batcher and the same clock.

Owns what differs from `server.py`. An update of weights is as there: between two passes, and running requests keep
their tokens. `retract` also sends what is sampled before it returns, so that a chunk has tokens of one version.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.engine.embedded.batching import BatchRequest, Emission
from agentrl.engine.embedded.lora import Adapter
from agentrl.engine.embedded.model import PackedWeights
from agentrl.engine.embedded.requests import BadRequest, SamplingRequest, parse_object
from agentrl.engine.embedded.server import (
    EVENT_STREAM,
    PREFIX,
    AsgiRoute,
    EngineServer,
    read_body,
    read_object,
    render,
    tensors,
)
from agentrl.engine.sglang.sglang_dialect import METRICS
from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError, WeightSyncError
from agentrl.records import Json

_RENAMED = {"max_new_tokens": "max_tokens"}
_SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "n"}
_SAMPLING_NOT_HERE = {"frequency_penalty", "presence_penalty", "logit_bias"}  # refused behind, unless they do nothing
_TEXT_ALONE = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}


class SGLangServer(EngineServer):
    """An `EngineServer` for clients that speak SGLang's dialect."""

    _retractions = 0  # pauses so far that put requests back

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/generate", AsgiRoute(self._generate_sglang), methods=post),
            Route("/v1/chat/completions", AsgiRoute(self._chat), methods=post),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/model_info", self._model_info),
            Route("/server_info", self._server_info),
            Route("/metrics", self._sglang_metrics),
            Route("/abort_request", self._guard(self._abort_request), methods=post),
            Route("/pause_generation", self._guard(self._pause_generation), methods=post),
            Route("/continue_generation", self._guard(self._continue_generation), methods=post),
            Route("/flush_cache", self._guard(self._flush_cache), methods=["GET", "POST"]),
            Route("/update_weights_from_disk", self._guard(self._update_from_disk), methods=post),
            Route("/update_weight_version", self._guard(self._name_version), methods=post),
            Route("/load_lora_adapter", self._guard(self._load_lora), methods=post),
            Route("/unload_lora_adapter", self._guard(self._unload_lora), methods=post),
        ]

    # --- generation ---------------------------------------------------------------------------------------------

    async def _generate_sglang(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            document = parse_object(await read_body(receive))
        except BadRequest as error:
            await _error(str(error))(scope, receive, send)
            return
        stream = document.get("stream") is True
        try:
            sampling_request, request, emissions = self._accept(_as_vllm(document))
        except BadRequest as error:
            if stream:  # a request is looked at once its stream has begun
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                failed = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}
                body = f"data: {json.dumps(failed)}\n\ndata: [DONE]\n\n".encode()
                await send({"type": "http.response.body", "body": body})
            else:
                await _error(str(error))(scope, receive, send)
            return
        if stream:
            with self._running(request, receive):
                await self._stream_sglang(request, emissions, send)
            return
        meta: dict[str, Json] = {}
        if document.get("return_logprob") and document.get("logprob_start_len") == 0:
            ids = request.tokens[: request.prompt_length]
            scores = self._batcher.score(ids, request.adapter)
            meta["input_token_logprobs"] = [
                [logprob, id, None] for logprob, id in zip([None, *scores], ids, strict=True)
            ]
        emission = Emission([], [], [], "length", [])
        if _parameters(document).get("max_new_tokens") != 0:
            with self._running(request, receive):
                emission = await self._all(request, emissions)
        answer = self._event(request, emission, 0, sampling_request.request_id, 0)
        answer["meta_info"] |= meta
        await JSONResponse(answer)(scope, receive, send)

    async def _stream_sglang(self, request: BatchRequest, emissions: asyncio.Queue[Emission], send: Send) -> None:
        started = last = time.perf_counter()
        put, began, retractions = request.sink, self._retractions, list[int]()

        def sink(emission: Emission) -> None:
            retractions.append(self._retractions - began)  # when it was sampled, not when it leaves
            put(emission)

        request.sink = sink
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        sent = 0
        while True:
            emission = await emissions.get()
            now = time.perf_counter()
            self._histograms.observe(emission, now - started, now - last, first=last is started)
            last = now
            event = self._event(request, emission, sent, request.id, retractions.pop(0))
            sent += len(emission.token_ids)
            text = f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
            text += "data: [DONE]\n\n" if emission.finish else ""
            more = emission.finish is None
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            if not more:
                return

    def _event(self, request: BatchRequest, emission: Emission, sent: int, id: str, retractions: int) -> dict[str, Any]:
        """An event of a stream after `sent` tokens, or a whole answer. Like SGLang's, it states one version until the
        last, which states that of each token."""
        pairs = zip(emission.logprobs, emission.token_ids, strict=True)
        total = sent + len(emission.token_ids)
        meta: dict[str, Any] = {
            "id": id,
            "finish_reason": emission.finish and {"type": emission.finish},
            "prompt_tokens": request.prompt_length,
            "completion_tokens": total,
            "cached_tokens": max(request.cached, 0),
            "weight_version": str(emission.spans[-1].version if emission.spans else self._batcher.version),
            "num_retractions": retractions,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        if emission.kept:
            meta["output_token_sampling_mask"] = emission.kept
            meta["output_token_sampling_logprobs"] = list(emission.logprobs)
        if emission.finish and total:
            spans = request.spans(0, total)
            meta["weight_versions"] = [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in spans
            ]
        return {"text": "", "output_ids": list(emission.token_ids), "meta_info": meta}

    async def _abort_request(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        if document.get("abort_all") is True:
            self._batcher.abort_all()
        elif isinstance(rid := document.get("rid"), str) and rid:
            self._batcher.abort_like(PREFIX + rid)
        return Response()

    def _adapter_of(self, asked: SamplingRequest) -> Adapter | None:
        try:
            return super()._adapter_of(asked)
        except BadRequest:
            raise BadRequest(f"The following requested LoRA adapters are not loaded: {asked.model}") from None

    # --- what it is, how it does --------------------------------------------------------------------------------

    async def _ready(self, _: HTTPRequest) -> Response:
        return Response(status_code=503 if self._paused else 200)

    async def _model_info(self, _: HTTPRequest) -> Response:
        return JSONResponse({"model_path": self._name, "weight_version": str(self._batcher.version)})

    async def _server_info(self, _: HTTPRequest) -> Response:
        has = {"incremental_streaming_output": True, "enable_metrics": True, "enable_lora": True}
        return JSONResponse({"version": "agentrl-embedded", "model_path": self._name, **has})

    async def _sglang_metrics(self, _: HTTPRequest) -> Response:
        text = render(self._batcher, self._histograms, self._name)
        for theirs, ours in METRICS.items():
            text = text.replace(ours, theirs)
        return PlainTextResponse(text)

    # --- weights ------------------------------------------------------------------------------------------------

    async def _pause_generation(self, request: HTTPRequest) -> Response:
        mode = (await read_object(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode = {mode!r}: must be abort, retract or in_place")
        self._paused = True
        if mode == "abort":
            self._batcher.abort_all()
        if mode == "retract":
            self._batcher.flush()
            self._batcher.forget()
            self._retractions += 1
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, _: HTTPRequest) -> Response:
        self._paused = False
        self._wake.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, _: HTTPRequest) -> Response:
        if self._batcher.busy and not self._paused:
            return PlainTextResponse("requests are running or waiting: pause with retract first\n", 400)
        self._batcher.forget()
        return PlainTextResponse("Cache flushed.\n")

    async def _update_from_disk(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        path, version = document.get("model_path"), document.get("weight_version")
        if not isinstance(path, str):
            raise BadRequest("model_path: the path of a folder with safetensors files is required")
        if not isinstance(version, str) or not version.isdecimal():
            raise BadRequest(f"weight_version = {version!r}: must be a string of decimal digits")
        started = time.perf_counter()
        try:
            packed = await asyncio.to_thread(self._read_folder, path)
            self._batcher.take(packed, int(version))
            self._give_back()
        except (BadRequest, ModelError, OSError, WeightSyncError) as error:
            answer = {"success": False, "message": f"Failed to update weights: {error}", "num_paused_requests": 0}
            return JSONResponse(answer, 400)
        self._histograms.weight_update.add(time.perf_counter() - started)
        if document.get("flush_cache", True):
            self._batcher.forget()
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    def _read_folder(self, path: str) -> PackedWeights:
        """All tensors of a folder's files. Raises WeightSyncError, ModelError, BadRequest or OSError."""
        names = sorted(file.name for file in Path(path).glob("*.safetensors"))
        if not names:
            raise BadRequest(f"model_path: {path!r} has no safetensors files")
        weights: dict[str, torch.Tensor] = {}
        for name in names:
            with self._sources.open(f"{path}/{name}") as file:
                weights |= tensors(weight_file.mapped(file), path)
        return self._batcher.model.pack(weights)

    async def _load_lora(self, request: HTTPRequest) -> Response:
        return await self._lora(self._load_adapter, request)

    async def _unload_lora(self, request: HTTPRequest) -> Response:
        return await self._lora(self._unload_adapter, request)

    async def _lora(self, change: Any, request: HTTPRequest) -> Response:
        try:
            await change(request)
        except (BadRequest, ModelError) as error:
            text = str(error).replace("has already been loaded", "already exists")
            return JSONResponse({"success": False, "error_message": text}, 400)
        return JSONResponse({"success": True, "error_message": None})


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = document.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise BadRequest("sampling_params: must be an object")
    return cast("dict[str, Any]", parameters)


def _as_vllm(document: dict[str, Any]) -> bytes:
    """A request with the names that `parse_generate` reads. Raises BadRequest for what it has no name for."""
    params = dict[str, Any]()
    for name, value in _parameters(document).items():
        if name in _TEXT_ALONE or value is None:
            continue
        if name not in _SAMPLING | _SAMPLING_NOT_HERE:
            raise BadRequest(f"sampling_params.{name}: the embedded engine does not have it")
        params[_RENAMED.get(name, name)] = value
    if params.get("max_tokens") == 0:  # the prompt alone is asked for
        params["max_tokens"] = 1
    body: dict[str, Any] = {
        "token_ids": document.get("input_ids"),
        "sampling_params": params,
        "stream": document.get("stream") is True,
    }
    for theirs, ours in (("rid", "request_id"), ("lora_path", "model")):
        if document.get(theirs) is not None:
            body[ours] = document[theirs]
    return json.dumps(body).encode()


def _error(text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": 400}}, 400)
