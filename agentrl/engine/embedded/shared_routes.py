"""HTTP that both dialects of the embedded engine share: bodies, refusals, and the routes that are alike in both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.engine.embedded.batching import Emission
from agentrl.engine.embedded.chat import Chat, ChatRequest, fresh
from agentrl.engine.embedded.engine import Engine, Generation
from agentrl.engine.embedded.requests import BadRequest, parse_object
from agentrl.errors import ModelError

_BODY_LIMIT = 32 << 20
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class SharedRoutes:
    """OpenAI's chats and list of models, health, and the name of the weight version."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        """The routes of these, for a dialect to add its own to."""
        return [
            Route("/v1/chat/completions", AsgiRoute(self._chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/update_weight_version", guard(self._name_version), methods=["POST"]),
        ]

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine
        try:
            if engine.chat is None:
                raise BadRequest("the model's folder has no chat template: ask /inference/v1/generate for tokens")
            document = parse_object(await read_body(receive))
            chat_request = engine.chat.parse(document, name=engine.name, length=engine.batcher.slots.length)
            generation = engine.accept(chat_request.generate)
        except BadRequest as error:
            await refusal(error)(scope, receive, send)
            return
        with generation.running(receive):
            if chat_request.stream:
                await _stream_chat(engine.chat, chat_request, generation, send)
            else:
                answer = engine.chat.answer(chat_request, await generation.whole(), generation.request.prompt_length)
                await JSONResponse(answer)(scope, receive, send)

    async def _models(self, _: HTTPRequest) -> Response:
        engine = self._engine
        base_model = {"id": engine.name, "object": "model", "max_model_len": engine.batcher.slots.length}
        loaded_adapters = [{"id": name, "object": "model", "parent": engine.name} for name in engine.adapters]
        return JSONResponse({"object": "list", "data": [base_model, *loaded_adapters]})

    async def _health(self, _: HTTPRequest) -> Response:
        return Response()

    async def _name_version(self, request: HTTPRequest) -> Response:
        self._engine.batcher.announce(version_in(await read_object(request), "new_version"))
        return JSONResponse({"success": True})


# starlette takes a bound method for a handler of its request objects, and an object with `__call__` for an ASGI
# application. The hot route is the latter: reading a body by hand spares the request and response objects of each
# turn.
class AsgiRoute:
    """Lets a bound method be a route's ASGI application, past starlette's request objects."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


async def begin_events(send: Send) -> None:
    """Send the status of an answer of server-sent events."""
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})


async def send_events(send: Send, text: bytes, *, last: bool) -> None:
    """Send some of its events."""
    await send({"type": "http.response.body", "body": text, "more_body": not last})


async def _stream_chat(chats: Chat, chat: ChatRequest, generation: Generation, send: Send) -> None:
    """Text as it comes; an answer that may have calls of tools at its end, when it can be read."""
    await begin_events(send)
    emissions, sent_text, is_first = list[Emission](), "", True
    async for emission in generation.emissions():
        emissions.append(emission)
        # All tokens again for each chunk, since a decoder may join the last character with new bytes: the text of a
        # suffix alone is not the suffix of the text. A chat's answer is short enough for that.
        whole_text = "" if chat.tools else chats.text([token for emission in emissions for token in emission.token_ids])
        new = fresh(whole_text, sent_text)
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if new or is_first or (chat.logprobs and emission.token_ids):
            await send_events(send, chats.event(chat, delta | ({"content": new} if new else {}), emission), last=False)
        sent_text, is_first = sent_text + new, False
    last_events = chats.last(chat, generation.joined(emissions), generation.request.prompt_length, sent_text)
    await send_events(send, last_events, last=True)


def guard(handler: Callable[[HTTPRequest], Awaitable[Response]]) -> Callable[[HTTPRequest], Awaitable[Response]]:
    """A handler that answers BadRequest and ModelError with status and text."""

    async def guarded(request: HTTPRequest) -> Response:
        try:
            return await handler(request)
        except (BadRequest, ModelError) as error:
            return refusal(error if isinstance(error, BadRequest) else BadRequest(str(error)))

    return guarded


def refusal(error: BadRequest) -> JSONResponse:
    """The error body that vLLM's server sends."""
    error_type = "NotFoundError" if error.status == HTTPStatus.NOT_FOUND else "BadRequestError"
    error_body = {"message": str(error), "type": error_type, "code": error.status}
    return JSONResponse({"error": error_body}, status_code=error.status)


async def read_body(receive: Receive) -> bytes:
    """The body of a request. Raises BadRequest if it is too large, or breaks off."""
    body_parts: list[bytes] = []
    received_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BadRequest("the connection was closed before the body ended")
        body_part = message.get("body", b"")
        received_bytes += len(body_part)
        if received_bytes > _BODY_LIMIT:
            raise BadRequest(f"the body is larger than {_BODY_LIMIT} bytes")
        body_parts.append(body_part)
        if not message.get("more_body", False):
            return b"".join(body_parts)


async def read_object(request: HTTPRequest) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises BadRequest."""
    return parse_object(await read_body(request.receive))


def version_in(document: dict[str, Any], field: str) -> int:
    """The weight version in a field. Raises BadRequest."""
    version_text = document.get(field)
    if not isinstance(version_text, str) or not version_text.isdecimal():
        raise BadRequest(f"{field} = {version_text!r}: must be a string of decimal digits")
    return int(version_text)


def adapter_in(document: dict[str, Any]) -> tuple[str, str]:
    """The name of an adapter to load, and the path of its folder. Raises BadRequest."""
    adapter_name, adapter_path = document.get("lora_name"), document.get("lora_path")
    if not isinstance(adapter_name, str) or not isinstance(adapter_path, str):
        raise BadRequest("lora_name and lora_path: a name and the path of a folder are required")
    return adapter_name, adapter_path
