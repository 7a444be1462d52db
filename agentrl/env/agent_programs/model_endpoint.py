"""The API of a model as one agent program, or one recorded conversation, sees it: its HTTP requests and their answers.

A request is read and checked, waits in `OpenRequests` until somebody answers it, and is answered in the form of its
API. Owns the shape of requests and responses; never knows a socket, a program, an episode or a policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, cast

import trio
from trio.lowlevel import RunVar

from agentrl.env.agent_programs.model_apis import (
    OF_THE_RUN,
    AnthropicMessages,
    Api,
    ChatCompletions,
    Conversation,
    Reply,
    Responses,
    SamplingKeys,
    event_line,
)
from agentrl.env.agent_programs.open_requests import OpenRequests, Pending
from agentrl.env.agent_programs.request_checks import UnservedRequest
from agentrl.env.agent_programs.streamed_answer import StreamedAnswer
from agentrl.env.agent_programs.text_completions import TextCompletions
from agentrl.http.http_server import Typed
from agentrl.records import Json

MAX_BODY: Final = 64 << 20
"""The most bytes of a request's body, whatever an episode allows."""
_LEAST_BODY: Final = 4 << 20
_INLINE_BYTES: Final = 32 << 10  # a body so small takes a moment
_READERS: Final = 2  # threads in which a process reads large requests: more would take the loop's share of the CPU
_RETRIES: Final = "x-stainless-retry-count"  # OpenAI's and Anthropic's clients count in it

_readers: RunVar[trio.CapacityLimiter] = RunVar("agentrl_program_readers")


@dataclass(frozen=True, slots=True)
class Request:
    """`path` is what follows the registered key, with a leading slash; `content` is the body, not parsed."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """A JSON `body`, or the lines of server-sent `events`. `on_sent` is called once: with True if all of it was written
    to the client, with False if the client left before."""

    status: int = 200
    body: Json = None
    events: tuple[str, ...] | None = None
    on_sent: Callable[[bool], None] | None = None
    stream: StreamedAnswer | None = None
    """Takes the place of `events` where these are still to come."""


def parsed(content: bytes) -> Mapping[str, Json]:
    """A body as JSON, {} of an empty one. Raises UnservedRequest for what is no object, or no JSON: NaN and numbers
    beyond a double's range are none."""
    try:
        json_body: Any = json.loads(content or b"{}", parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UnservedRequest(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(json_body, dict):
        raise UnservedRequest("the body is not a JSON object")
    return cast("dict[str, Any]", json_body)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _finite(digits: str) -> float:
    parsed_number = float(digits)
    if math.isinf(parsed_number):
        raise ValueError(f"{digits[:20]} is out of range")
    return parsed_number


def body_bound(observation_bytes: int) -> int:
    """The most bytes of a request of an episode whose answers may have `observation_bytes` of text: as JSON, with
    tools and with pictures, which are named to the policy, it is larger than its text."""
    return min(MAX_BODY, max(_LEAST_BODY, 2 * observation_bytes))


def apis(sampling: SamplingKeys = OF_THE_RUN) -> dict[str, Api]:
    """All APIs by path, fresh for one episode."""
    kinds = (ChatCompletions, Responses, AnthropicMessages, TextCompletions)
    return {kind.path: kind(sampling) for kind in kinds}


Handler = Callable[[Request], Awaitable[Response]]


def answer_of(response: Response) -> tuple[int, Typed | StreamedAnswer]:
    """The response as the HTTP server takes it."""
    return written(response) if response.stream is None else (response.status, response.stream)


def written(response: Response) -> tuple[int, Typed]:
    """A response without a stream as the HTTP server takes it."""
    if response.events is None:
        typed_body = Typed("application/json", json.dumps(response.body).encode(), response.on_sent)
        return response.status, typed_body
    return response.status, Typed("text/event-stream", "".join(response.events).encode(), response.on_sent)


class RequestReader:
    """Reads request bodies, one at a time: large ones in a thread, so that others go on meanwhile, whoever wrote it."""

    def __init__(self) -> None:
        self._reading = trio.CapacityLimiter(1)

    async def read(self, api: Api, content: bytes) -> tuple[Mapping[str, Json], Conversation]:
        """A request's body, and the conversation that it asks for. Raises UnservedRequest."""

        def read() -> tuple[Mapping[str, Json], Conversation]:
            json_body = parsed(content)
            return json_body, api.read(json_body)

        if len(content) <= _INLINE_BYTES:
            return read()
        try:
            reader_limiter = _readers.get()
        except LookupError:
            reader_limiter = trio.CapacityLimiter(_READERS)
            _readers.set(reader_limiter)
        async with self._reading:
            return await trio.to_thread.run_sync(read, limiter=reader_limiter)


def is_retry(request: Request) -> bool:
    """Whether a client says that it has sent the request before."""
    return request.headers.get(_RETRIES, "0") != "0"


class ModelEndpoint:
    """The requests of one program, and their answers. `shares_box` says that the policy's own code may send some."""

    def __init__(self, *, shares_box: bool = False, served: Mapping[str, Api] | None = None) -> None:
        self.apis = apis() if served is None else served
        self.requests = OpenRequests(shares_box=shares_box)
        self.refusal: tuple[int, str] = (503, "the episode is over")
        """Status and text for the clients that still wait once the requests are closed."""
        self._reader = RequestReader()
        self._news = trio.Event()

    def announce(self) -> None:
        """Wake whoever waits for news: a request, a client that left, the end of the program."""
        self._news.set()

    async def news(self) -> None:
        """Wait for news."""
        self._news = trio.Event()
        await self._news.wait()

    async def handle(self, request: Request) -> Response:
        """Read a request and answer it."""
        if request.method == "GET" and request.path == "/v1/models":
            return Response(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
        api = self.apis.get(request.path)
        if api is None or request.method != "POST":
            return Response(404, {"error": {"message": f"{request.method} {request.path[:200]} is not served"}})
        try:
            body, conversation = await self._reader.read(api, request.content)
        except UnservedRequest as error:
            return Response(400, api.error(str(error)))
        return await self.answered(api, body, conversation, is_retry=is_retry(request))

    async def answered(
        self, api: Api, body: Mapping[str, Json], conversation: Conversation, *, is_retry: bool
    ) -> Response:
        """Wait for the answer to a conversation that was read."""
        pending = self.requests.open(api.path, conversation, trio.current_time(), is_retry=is_retry)
        if pending is None:
            return Response(429, api.error("too many requests of this episode wait for an answer"))
        self.announce()
        is_closed = False

        def close(delivered: bool) -> None:
            nonlocal is_closed
            if not is_closed:
                is_closed = True
                self.requests.leave(pending, trio.current_time(), delivered=delivered)
                self.announce()

        try:
            while not pending.answered.is_set():
                if body.get("stream") and pending.begun is not None:
                    return Response(200, stream=self._streamed(api, body, conversation, pending, close))
                await pending.moved.wait()
            for _ in range(2):  # a client that has left meanwhile is noticed in the loop's next turn
                await trio.lowlevel.checkpoint()
            if pending.reply is not None:
                api.remember(conversation, pending.reply)
                return replace(_response(api, pending.reply, body), on_sent=close)
        except BaseException:
            close(False)
            raise
        close(False)
        refusal_status, refusal_text = self.refusal
        return Response(refusal_status, api.error(refusal_text))

    def _streamed(
        self,
        api: Api,
        body: Mapping[str, Json],
        conversation: Conversation,
        pending: Pending,
        close: Callable[[bool], None],
    ) -> StreamedAnswer:
        return StreamedAnswer(
            api,
            pending,
            body,
            on_end=close,
            refusal=lambda: self.refusal[1],
            remember=partial(api.remember, conversation),
        )


def _response(api: Api, reply: Reply, body: Mapping[str, Json]) -> Response:
    if not body.get("stream"):
        return Response(200, api.write(reply, body))
    return Response(200, events=tuple(event_line(event_name, data) for event_name, data in api.events(reply, body)))
