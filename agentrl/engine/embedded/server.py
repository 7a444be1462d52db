"""The embedded engine's HTTP side: the subset of vLLM's API that the client uses, on one asyncio loop.

Owns connections, the order of admin calls and the metrics text (Prometheus' format, vLLM's names). The forward passes
run in the same loop between two looks at the sockets: one thread, so nothing contends for the interpreter. Only a
weight file is read on another, while the old weights go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission, ShownImages
from agentrl.engine.embedded.chat import Chat, ChatRequest, fresh
from agentrl.engine.embedded.lora import Adapter, read
from agentrl.engine.embedded.model import PackedWeights
from agentrl.engine.embedded.requests import (
    BadRequest,
    SamplingRequest,
    UnknownModel,
    answer_json,
    parse_generate,
    parse_object,
)
from agentrl.engine.weight_sync import object_store, uploads, weight_file
from agentrl.engine.weight_sync.weight_sources import Sources
from agentrl.errors import ModelError, WeightSyncError
from agentrl.host import free_memory, json_log
from agentrl.host.spare_cores import SpareCores
from agentrl.tokens import images

log = logging.getLogger(__name__)
_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """Counts of durations by upper bound, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """Count one duration, `weight` times."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += weight
        self.total_s += seconds * weight

    def render(self, name: str, labels: str) -> list[str]:
        """Prometheus' lines of this histogram."""
        lines = [f"# TYPE {name} histogram"]
        seen = 0
        for bound, count in zip([*map(str, _BOUNDS_S), "+Inf"], self.counts, strict=True):
            seen += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {seen}')
        return [*lines, f"{name}_sum{{{labels}}} {self.total_s}", f"{name}_count{{{labels}}} {seen}"]


@dataclass(slots=True)
class Histograms:
    """Durations as seen at the HTTP side."""

    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    weight_update: Histogram = field(default_factory=Histogram)

    def observe(self, emission: Emission, since_start_s: float, since_last_s: float, *, first: bool) -> None:
        """Note one chunk. Tokens leave in chunks, so the first token's time is that of the first chunk."""
        tokens = len(emission.token_ids)
        if first:
            self.first_token.add(since_start_s)
        if tokens:
            self.between_tokens.add(since_last_s / tokens, tokens)


def render(batcher: Batcher, histograms: Histograms, model: str) -> str:
    """The text of `/metrics`."""
    labels = f'model_name="{model}",engine="0"'
    counters = batcher.counters
    gauges = {
        "vllm:num_requests_running": len(batcher.running),
        "vllm:num_requests_waiting": len(batcher.waiting),
        "vllm:kv_cache_usage_perc": float(batcher.slots.busy.mean()),
    }
    totals = {
        "vllm:prefix_cache_queries_total": counters.prefix_queries,
        "vllm:prefix_cache_hits_total": counters.prefix_hits,
        "vllm:num_preemptions_total": 0,  # a running request's slot is never taken from it
        "vllm:prompt_tokens_total": counters.prompt,
        "vllm:generation_tokens_total": counters.generated,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", totals)):
        for name, value in values.items():
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value}"]
    running, waiting = (
        sorted({request.adapter.name for request in of if request.adapter is not None})
        for of in (batcher.running.values(), batcher.waiting)
    )
    names = f'running_lora_adapters="{",".join(running)}",waiting_lora_adapters="{",".join(waiting)}"'
    lines.append(f"vllm:lora_requests_info{{{names}}} {time.time()}")
    lines += histograms.first_token.render("vllm:time_to_first_token_seconds", labels)
    lines += histograms.between_tokens.render("vllm:inter_token_latency_seconds", labels)
    lines += histograms.weight_update.render("vllm:rl_weight_update_operation_duration_seconds", labels)
    return "\n".join(lines) + "\n"


_POLLS = 8  # looks at the sockets between two passes; a request needs several to be read, parsed and queued
_BODY_LIMIT = 32 << 20
PREFIX = "generate-tokens-"  # vLLM puts it before a request's id, and `/abort_requests` wants it there


class EngineServer:
    """One model served over HTTP, which takes weights from `sources`. `drive` runs passes until cancelled; `app` is the
    ASGI application."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        name: str,
        sources: Sources,
        chat: Chat | None = None,
        spare: SpareCores | None = None,
    ) -> None:
        """With `spare`, a pass has as many threads as it tells."""
        self._batcher, self._name, self._chats, self._spare = batcher, name, chat, spare
        self._sources, self._inbox = sources, uploads.Inbox(uploads.new_place())
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._paused = False
        self._asleep, self._awake = set[str](), asyncio.Event()  # what of it sleeps; whether nothing does
        self._awake.set()
        self._updating = False
        self._staged: dict[str, torch.Tensor] = {}
        self._packed: PackedWeights | None = None  # what is staged, once all of it is there
        self._base: tuple[str, weight_file.Bytes] | None = None  # of the last weights from a store: deltas change it
        self._serial = 0
        self._adapters: dict[str, Adapter] = {}
        self._adapters_read = 0
        self._histograms = Histograms()
        self.app = Starlette(routes=self.routes())

    def routes(self) -> list[Route]:
        """The routes that the server answers."""
        return [
            Route("/inference/v1/generate", AsgiRoute(self._generate), methods=["POST"]),
            Route("/v1/chat/completions", AsgiRoute(self._chat), methods=["POST"]),
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/abort_requests", self._guard(self._abort), methods=["POST"]),
            Route("/pause", self._guard(self._pause), methods=["POST"]),
            Route("/resume", self._guard(self._resume), methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/sleep", self._guard(self._sleep), methods=["POST"]),
            Route("/wake_up", self._guard(self._wake_up), methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            Route("/init_weight_transfer_engine", self._guard(self._init), methods=["POST"]),
            Route("/start_weight_update", self._guard(self._start), methods=["POST"]),
            Route("/update_weights", self._guard(self._update), methods=["POST"]),
            Route("/finish_weight_update", self._guard(self._finish), methods=["POST"]),
            Route("/update_weight_version", self._guard(self._name_version), methods=["POST"]),
            Route("/collective_rpc", self._guard(self._receive), methods=["POST"]),
            Route("/v1/load_lora_adapter", self._guard(self._load_adapter), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._guard(self._unload_adapter), methods=["POST"]),
        ]

    async def drive(self) -> None:
        """Run forward passes while there is work."""
        while True:
            if self._paused or not self._batcher.busy:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self._idle.clear()
            if self._spare is not None and (threads := self._spare.threads()) != torch.get_num_threads():
                torch.set_num_threads(threads)
            self._batcher.step()
            for _ in range(_POLLS):
                await asyncio.sleep(0)

    # --- generation ---------------------------------------------------------------------------------------------

    def _accept(self, body: bytes) -> tuple[SamplingRequest, BatchRequest, asyncio.Queue[Emission]]:
        """A request for tokens that was checked, and the queue that they will come to. Raises BadRequest."""
        batcher = self._batcher
        self._serial += 1
        sampling_request = parse_generate(
            body,
            vocab=batcher.model.architecture.vocab,
            length=batcher.slots.length,
            default_id=f"unnamed-{self._serial}",
            vision=batcher.model.architecture.vision,
        )
        if batcher.knows(PREFIX + sampling_request.request_id):
            raise BadRequest(f"request_id: {sampling_request.request_id!r} is already running")
        if sampling_request.sampling.stop and batcher.decode is None:
            raise BadRequest("sampling_params.stop: the model's folder has no tokenizer.json to read text with")
        adapter, emissions = self._adapter_of(sampling_request), asyncio.Queue[Emission]()
        request = BatchRequest(
            id=PREFIX + sampling_request.request_id,
            tokens=[id if id < images.FIRST else images.FIRST - 1 - id for id in sampling_request.token_ids],
            sampling=sampling_request.sampling,
            sink=emissions.put_nowait,
            adapter=adapter,
            shown=self._shown(sampling_request),
        )
        return sampling_request, request, emissions

    def _shown(self, asked: SamplingRequest) -> ShownImages | None:
        """The images of a request. Raises BadRequest for one that cannot be decoded."""
        model = self._batcher.model
        if not asked.images or model.architecture.vision is None or model.tower is None:
            return None
        for image in asked.images.values():
            try:
                model.tower.try_decoding(image)
            except ValueError as error:
                raise BadRequest(f"images: {error}") from None
        return ShownImages(asked.token_ids, asked.images, model.architecture.vision)

    @contextmanager
    def _running(self, request: BatchRequest, receive: Receive) -> Generator[None]:
        """Compute a request, until its client has left."""
        self._batcher.submit(request)
        self._wake.set()
        gone = asyncio.ensure_future(receive())  # resolves when the client has left
        gone.add_done_callback(lambda done: done.cancelled() or self._batcher.abort(request.id))
        try:
            yield
        finally:
            gone.cancel()
            with json_log.about(request=request.id.removeprefix(PREFIX)):
                log.info("%d tokens, after a prompt of %d", request.sampled, request.prompt_length)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sampling_request, request, emissions = self._accept(await read_body(receive))
        except BadRequest as error:
            await _refusal(error)(scope, receive, send)
            return
        with self._running(request, receive):
            if sampling_request.stream:
                await self._stream(request, sampling_request.request_id, emissions, send)
            else:
                await self._whole(request, sampling_request, emissions, send)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._chats is None:
                raise BadRequest("the model's folder has no chat template: ask /inference/v1/generate for tokens")
            document = parse_object(await read_body(receive))
            chat = self._chats.parse(document, name=self._name, length=self._batcher.slots.length)
            _, request, emissions = self._accept(chat.generate)
        except BadRequest as error:
            await _refusal(error)(scope, receive, send)
            return
        with self._running(request, receive):
            if chat.stream:
                await self._stream_chat(self._chats, chat, request, emissions, send)
            else:
                emission = await self._all(request, emissions)
                answer = self._chats.answer(chat, emission, request.prompt_length)
                await JSONResponse(answer)(scope, receive, send)

    async def _stream_chat(
        self, chats: Chat, chat: ChatRequest, request: BatchRequest, emissions: asyncio.Queue[Emission], send: Send
    ) -> None:
        """Text as it comes; an answer that may have calls of tools at its end, when it can be read."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        parts, sent, first = list[Emission](), "", True
        while not parts or parts[-1].finish is None:
            parts.append(await emissions.get())
            text = "" if chat.tools else chats.text([token for part in parts for token in part.token_ids])
            new = fresh(text, sent)
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if new or first or (chat.logprobs and parts[-1].token_ids):
                body = chats.event(chat, delta | ({"content": new} if new else {}), parts[-1])
                await send({"type": "http.response.body", "body": body, "more_body": True})
            sent, first = sent + new, False
        body = chats.last(chat, _joined(request, parts), request.prompt_length, sent)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _all(self, request: BatchRequest, emissions: asyncio.Queue[Emission]) -> Emission:
        """The whole of a generation, once it has ended."""
        started = time.perf_counter()
        parts = [await emissions.get()]
        while parts[-1].finish is None:
            parts.append(await emissions.get())
        emission, elapsed = _joined(request, parts), time.perf_counter() - started
        self._histograms.observe(emission, elapsed, elapsed, first=True)
        return emission

    async def _stream(self, request: BatchRequest, id: str, emissions: asyncio.Queue[Emission], send: Send) -> None:
        started = last = time.perf_counter()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        while True:
            emission = await emissions.get()
            now = time.perf_counter()
            self._histograms.observe(emission, now - started, now - last, first=last is started)
            last = now
            text = f"data: {answer_json(id, emission, request.prompt_length, max(request.cached, 0))}\n\n"
            if emission.finish:
                text += "data: [DONE]\n\n"
            more = emission.finish is None
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            if not more:
                return

    async def _whole(
        self, request: BatchRequest, asked: SamplingRequest, emissions: asyncio.Queue[Emission], send: Send
    ) -> None:
        scored: list[dict[str, dict[str, float]] | None] | None = None
        if asked.score:
            await self._awake.wait()
            ids = request.tokens[: request.prompt_length]
            scores = self._batcher.score(ids, request.adapter)
            pairs = zip(ids[1:], scores, strict=True)
            scored = [None, *({str(id): {"logprob": logprob}} for id, logprob in pairs)]
        emission = await self._all(request, emissions)
        cached = max(request.cached, 0)
        body = answer_json(asked.request_id, emission, request.prompt_length, cached, scored).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _abort(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        ids = cast("list[Any]", document.get("request_ids", []))
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest("request_ids: must be a list of strings")
        for id in ids:
            self._batcher.abort(id)
        return JSONResponse({"status": "ok"})

    # --- what it is, how it does --------------------------------------------------------------------------------

    async def _health(self, _: HTTPRequest) -> Response:
        return Response()

    async def _models(self, _: HTTPRequest) -> Response:
        model = {"id": self._name, "object": "model", "max_model_len": self._batcher.slots.length}
        loaded = [{"id": name, "object": "model", "parent": self._name} for name in self._adapters]
        return JSONResponse({"object": "list", "data": [model, *loaded]})

    async def _version(self, _: HTTPRequest) -> Response:
        return JSONResponse({"version": "agentrl-embedded", "weight_version": str(self._batcher.version)})

    async def _metrics(self, _: HTTPRequest) -> Response:
        return PlainTextResponse(render(self._batcher, self._histograms, self._name))

    # --- weights ------------------------------------------------------------------------------------------------

    async def _pause(self, request: HTTPRequest) -> Response:
        mode = request.query_params.get("mode", "abort")
        clear = request.query_params.get("clear_cache", "true").lower() in ("true", "1")
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode = {mode!r}: must be abort, wait or keep")
        if mode == "abort":
            self._batcher.abort_all()
        if mode == "wait" and not self._paused:
            await self._idle.wait()
        self._paused = True
        if clear:
            self._batcher.forget()
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: HTTPRequest) -> Response:
        if self._asleep:
            raise BadRequest(f"the engine sleeps ({', '.join(sorted(self._asleep))}): call /wake_up")
        self._paused = False
        self._wake.set()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, _: HTTPRequest) -> Response:
        return JSONResponse({"is_paused": self._paused})

    async def _sleep(self, request: HTTPRequest) -> Response:
        """Put the engine to sleep at one of vLLM's levels: level 1 drops keys and values and leaves the weights in host
        memory, where they are here anyway; level 2 drops the weights too."""
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise BadRequest(f"level = {level!r}: must be 1 or 2")
        await self._pause(request)
        self._awake.clear()
        self._asleep = {"weights", "kv_cache"}
        self._batcher.rest(weights=level == "2")
        self._give_back()
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: HTTPRequest) -> Response:
        """Without tags, or with the last one of them, the engine goes on; not before it has weights."""
        tags = request.query_params.getlist("tags") or ["weights", "kv_cache"]
        asleep = self._asleep - set(tags)
        if not asleep and not self._batcher.model.loaded:
            raise BadRequest("sleep level 2 dropped the weights: wake the tag weights, and send an update first")
        if "kv_cache" in self._asleep - asleep:
            self._batcher.wake()
        self._asleep = asleep
        if not asleep:
            self._awake.set()
            await self._resume(request)
        return JSONResponse({"status": "sleeping" if asleep else "awake", "tags": tags})

    async def _is_sleeping(self, _: HTTPRequest) -> Response:
        sleeping = bool(self._asleep) or self._paused  # vLLM counts a pause as level 0
        return JSONResponse({"is_sleeping": sleeping, "asleep": sorted(self._asleep)})

    async def _init(self, _: HTTPRequest) -> Response:
        return JSONResponse({"message": "Weight transfer initialized", "reads_ahead": True})

    async def _start(self, _: HTTPRequest) -> Response:
        self._updating, self._staged, self._packed = True, {}, None
        return JSONResponse({"message": "Weight update started"})

    async def _update(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        info: Any = document.get("update_info")
        if not self._updating:
            raise BadRequest("no update has been started: call /start_weight_update first")
        fields = cast("dict[str, Any]", info if isinstance(info, dict) else {})
        path, digest, deadline_s = fields.get("path"), fields.get("sha256"), fields.get("deadline_s", 30.0)
        if not isinstance(path, str):
            raise BadRequest("update_info.path: the path of a safetensors file is required")
        if not isinstance(digest, str):
            raise BadRequest("update_info.sha256: the SHA-256 of that file is required")
        started, staged = time.perf_counter(), self._staged  # of this update: a later start drops it
        try:
            if object_store.is_url(path):
                data = await asyncio.to_thread(self._sources.fetch, path, digest, self._base, deadline_s)
                self._base = (digest, data)
            else:
                data = await asyncio.to_thread(self._sources.read, path, digest)
            staged |= await asyncio.to_thread(tensors, data, path)
            packed = await asyncio.to_thread(self._pack, staged)
            if staged is self._staged:
                self._packed = packed
        except WeightSyncError as error:
            raise BadRequest(f"update_info.path: {error}") from None
        self._histograms.weight_update.add(time.perf_counter() - started)
        return JSONResponse({"message": "Weights updated"})

    async def _finish(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        if not self._updating:
            raise BadRequest("no update has been started: call /start_weight_update first")
        text = document.get("weight_version")
        if not isinstance(text, str) or not text.isdecimal():
            raise BadRequest(f"weight_version = {text!r}: must be a string of decimal digits")
        if not self._paused:
            raise BadRequest("the engine is running: call /pause before new weights are taken")
        if self._packed is None:
            self._batcher.load(self._staged, int(text))
        else:
            self._batcher.take(self._packed, int(text))
        self._updating, self._staged, self._packed = False, {}, None
        self._give_back()
        return JSONResponse({"message": "Weight update finished"})

    def _pack(self, staged: dict[str, torch.Tensor]) -> PackedWeights | None:
        """These weights, packed while the old ones go on, so that the pause is a swap. None as long as some are missing
        or wrong, which is said at the end."""
        with suppress(ModelError):
            return self._batcher.model.pack(staged)
        return None

    def _give_back(self) -> None:
        """Let the system have the memory of weights that are gone, beside whatever comes next."""
        asyncio.get_running_loop().run_in_executor(None, free_memory.give_back)

    async def _name_version(self, request: HTTPRequest) -> Response:
        text = (await read_object(request)).get("new_version")
        if not isinstance(text, str) or not text.isdecimal():
            raise BadRequest(f"new_version = {text!r}: must be a string of decimal digits")
        self._batcher.announce(int(text))
        return JSONResponse({"success": True})

    # --- adapters -----------------------------------------------------------------------------------------------

    def _adapter_of(self, asked: SamplingRequest) -> Adapter | None:
        if asked.model is None or asked.model == self._name:
            return None
        if (adapter := self._adapters.get(asked.model)) is None:
            raise UnknownModel(f"The model `{asked.model}` does not exist.")
        return adapter

    async def _receive(self, request: HTTPRequest) -> Response:
        match await read_object(request):
            case {"method": uploads.METHOD, "args": [str(message)]}:
                return JSONResponse({"results": [await asyncio.to_thread(self._inbox.receive, message)]})
            case other:
                raise BadRequest(f"method = {other.get('method')!r}: the embedded engine has {uploads.METHOD!r} alone")

    async def _load_adapter(self, request: HTTPRequest) -> Response:
        document = await read_object(request)
        name, path = document.get("lora_name"), document.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str):
            raise BadRequest("lora_name and lora_path: a name and the path of a folder are required")
        if name in self._adapters:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._adapters_read += 1
        architecture = self._batcher.model.architecture
        came = self._inbox.holds(path)

        def file(name: str) -> bytes:
            if not came:
                return self._sources.adapter(path, name)
            with self._inbox.open(path, name) as opened:
                return opened.read()

        try:
            adapter = read(Path(path), architecture, name=name, key=-self._adapters_read, file=file)
        except WeightSyncError as error:
            raise BadRequest(str(error)) from None
        finally:
            if came:
                self._inbox.remove(path)  # it came for this, and nobody reads it again
        self._adapters[name] = adapter
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: HTTPRequest) -> Response:
        name = (await read_object(request)).get("lora_name")
        if self._adapters.pop(str(name), None) is None:
            raise BadRequest(f"The lora adapter '{name}' cannot be found.")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _guard(self, handler: Callable[[HTTPRequest], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def guarded(request: HTTPRequest) -> Response:
            try:
                return await handler(request)
            except (BadRequest, ModelError) as error:
                return _refusal(error if isinstance(error, BadRequest) else BadRequest(str(error)))

        return guarded


class AsgiRoute:
    """Lets a bound method be a route's ASGI application, past starlette's request objects."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


def _joined(request: BatchRequest, parts: Sequence[Emission]) -> Emission:
    """All parts of a generation as one."""
    return Emission(
        [token for part in parts for token in part.token_ids],
        [logprob for part in parts for logprob in part.logprobs],
        request.spans(0, request.sampled),
        parts[-1].finish,
        [ids for part in parts for ids in part.kept],
    )


EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BadRequest("the connection was closed before the body ended")
        part = message.get("body", b"")
        size += len(part)
        if size > _BODY_LIMIT:
            raise BadRequest(f"the body is larger than {_BODY_LIMIT} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_object(request: HTTPRequest) -> dict[str, Any]:
    return parse_object(await read_body(request.receive))


def tensors(data: weight_file.Bytes, path: str) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor.float() for name, tensor in load_bytes(data.tobytes()).items()}
    except SafetensorError as error:
        raise BadRequest(f"update_info.path: {path!r} is not a safetensors file: {error}") from None


def _refusal(error: BadRequest) -> JSONResponse:
    """The error body that vLLM's server sends."""
    kind = "NotFoundError" if error.status == HTTPStatus.NOT_FOUND else "BadRequestError"
    body = {"message": str(error), "type": kind, "code": error.status}
    return JSONResponse({"error": body}, status_code=error.status)
