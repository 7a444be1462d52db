"""The embedded engine in vLLM's dialect: the subset of its HTTP API that the client uses."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.engine.embedded.engine import Engine, Generation
from agentrl.engine.embedded.metrics_text import render
from agentrl.engine.embedded.requests import BadRequest, answer_json
from agentrl.engine.embedded.shared_routes import (
    AsgiRoute,
    SharedRoutes,
    adapter_in,
    begin_events,
    guard,
    read_body,
    read_object,
    refusal,
    send_events,
    version_in,
)
from agentrl.engine.weight_sync import uploads


class VllmServer:
    """The routes of vLLM over an `Engine`; `app` is the ASGI application."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._loop = engine, engine.loop
        handlers = {
            "/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/collective_rpc": self._receive,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", AsgiRoute(self._generate), methods=["POST"]),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/is_paused", self._is_paused),
                Route("/is_sleeping", self._is_sleeping),
                *(Route(route_path, guard(handler), methods=["POST"]) for route_path, handler in handlers.items()),
                *SharedRoutes(engine).routes(),
            ]
        )

    # --- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            generation = self._engine.accept(await read_body(receive))
        except BadRequest as error:
            await refusal(error)(scope, receive, send)
            return
        with generation.running(receive):
            if generation.sampling_request.stream:
                await self._stream(generation, send)
            else:
                await self._whole(generation, send)

    async def _stream(self, generation: Generation, send: Send) -> None:
        request = generation.request
        await begin_events(send)
        async for emission in generation.emissions():
            answer = answer_json(
                generation.sampling_request.request_id, emission, request.prompt_length, max(request.cached, 0)
            )
            ending = "data: [DONE]\n\n" if emission.finish else ""
            await send_events(send, f"data: {answer}\n\n{ending}".encode(), last=emission.finish is not None)

    async def _whole(self, generation: Generation, send: Send) -> None:
        request = generation.request
        prompt_logprobs: list[dict[str, dict[str, float]] | None] | None = None
        if generation.sampling_request.score:
            # A canary may ask while the learner has the memory: the weights that it asks for are not there before the
            # engine wakes.
            await self._loop.awake.wait()
            scored_pairs = zip(request.tokens[1 : request.prompt_length], generation.scores(), strict=True)
            prompt_logprobs = [None, *({str(token_id): {"logprob": logprob}} for token_id, logprob in scored_pairs)]
        emission = await generation.whole()
        cached_tokens = max(request.cached, 0)
        answer_body = answer_json(
            generation.sampling_request.request_id, emission, request.prompt_length, cached_tokens, prompt_logprobs
        ).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer_body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer_body})

    async def _abort(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        request_ids = cast("list[Any]", document.get("request_ids", []))
        if not isinstance(request_ids, list) or not all(isinstance(request_id, str) for request_id in request_ids):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest("request_ids: must be a list of strings")
        for request_id in request_ids:
            self._engine.batcher.abort(request_id)
        return JSONResponse({"status": "ok"})

    async def _version(self, _: HTTPRequest) -> Response:
        return JSONResponse({"version": "agentrl-embedded", "weight_version": str(self._engine.batcher.version)})

    async def _metrics(self, _: HTTPRequest) -> Response:
        return PlainTextResponse(render(self._engine.batcher, self._engine.histograms, self._engine.name))

    # --- pause and sleep ----------------------------------------------------------------------------------------

    async def _pause(self, request: HTTPRequest) -> Response:
        pause_mode = request.query_params.get("mode", "abort")
        clears_cache = request.query_params.get("clear_cache", "true").lower() in ("true", "1")
        if pause_mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode = {pause_mode!r}: must be abort, wait or keep")
        # The default, as in vLLM, although nobody here wants it: a client that forgets the mode must see what it
        # would see there.
        if pause_mode == "abort":
            self._engine.batcher.abort_all()
        if pause_mode == "wait":
            await self._loop.wait_until_idle()
        self._loop.paused = True
        if clears_cache:
            self._engine.batcher.forget()
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: HTTPRequest) -> Response:
        self._loop.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, _: HTTPRequest) -> Response:
        return JSONResponse({"is_paused": self._loop.paused})

    async def _sleep(self, request: HTTPRequest) -> Response:
        """Put the engine to sleep at one of vLLM's levels: level 1 drops keys and values and leaves the weights in host
        memory, where they are here anyway; level 2 drops the weights too."""
        sleep_level = request.query_params.get("level", "1")
        if sleep_level not in ("1", "2"):
            raise BadRequest(f"level = {sleep_level!r}: must be 1 or 2")
        await self._pause(request)
        self._loop.sleep(drop_weights=sleep_level == "2")
        return JSONResponse({"status": "sleeping", "level": int(sleep_level)})

    async def _wake_up(self, request: HTTPRequest) -> Response:
        woken_parts = request.query_params.getlist("tags") or ["weights", "kv_cache"]
        self._loop.wake(woken_parts)
        return JSONResponse({"status": "sleeping" if self._loop.asleep else "awake", "tags": woken_parts})

    async def _is_sleeping(self, _: HTTPRequest) -> Response:
        sleeping_parts = sorted(self._loop.asleep)
        # vLLM counts a pause as level 0.
        return JSONResponse({"is_sleeping": bool(sleeping_parts) or self._loop.paused, "asleep": sleeping_parts})

    # --- weights and adapters -----------------------------------------------------------------------------------

    async def _init(self, _: HTTPRequest) -> Response:
        return JSONResponse({"message": "Weight transfer initialized", "reads_ahead": True})

    async def _start(self, _: HTTPRequest) -> Response:
        self._engine.updates.start()
        return JSONResponse({"message": "Weight update started"})

    async def _update(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        update_info: Any = document.get("update_info")
        fields = cast("dict[str, Any]", update_info if isinstance(update_info, dict) else {})
        weight_path, digest, deadline_s = fields.get("path"), fields.get("sha256"), fields.get("deadline_s", 30.0)
        if not isinstance(weight_path, str):
            raise BadRequest("update_info.path: the path of a safetensors file is required")
        if not isinstance(digest, str):
            raise BadRequest("update_info.sha256: the SHA-256 of that file is required")
        started_at = time.perf_counter()
        await self._engine.updates.stage(weight_path, digest, deadline_s)
        self._engine.histograms.weight_update.add(time.perf_counter() - started_at)
        return JSONResponse({"message": "Weights updated"})

    async def _finish(self, request: HTTPRequest) -> Response:
        weight_version = version_in(await read_object(request), "weight_version")
        if not self._loop.paused:
            raise BadRequest("the engine is running: call /pause before new weights are taken")
        # One step of the loop, with nothing awaited in it: between the swap and the version no pass can run (law 1).
        self._engine.updates.finish(weight_version)
        return JSONResponse({"message": "Weight update finished"})

    async def _receive(self, request: HTTPRequest) -> Response:
        match await read_object(request):
            case {"method": uploads.METHOD, "args": [str(message)]}:
                # On a thread, since it writes megabytes to a disk while other requests sample.
                receipt = await asyncio.to_thread(self._engine.adapters.inbox.receive, message)
                return JSONResponse({"results": [receipt]})
            case other:
                raise BadRequest(f"method = {other.get('method')!r}: the embedded engine has {uploads.METHOD!r} alone")

    async def _load_adapter(self, request: HTTPRequest) -> Response:
        adapter_name, adapter_path = adapter_in(await read_object(request))
        self._engine.adapters.load(adapter_name, adapter_path)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter_name}' added successfully.")

    async def _unload_adapter(self, request: HTTPRequest) -> Response:
        adapter_name = str((await read_object(request)).get("lora_name"))
        self._engine.adapters.unload(adapter_name)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter_name}' removed successfully.")
