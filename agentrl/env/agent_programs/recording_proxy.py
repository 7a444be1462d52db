"""A small HTTP server on the loopback address, for agent programs that know only a model's HTTP API.

One per trio loop, shared by its episodes and closed with the last of them. It reads JSON and writes answers; sockets
and bounds are those of `agentrl.http.http_server`. It does not know what requests mean: whoever registered the first
part of a path, which nobody else can guess, handles them. A request to another path is refused before its body is read.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import trio
from trio.lowlevel import RunVar

from agentrl.http.bounds import ServerBounds
from agentrl.http.http_server import Typed, listen
from agentrl.records import Json

MAX_BODY: Final = 64 << 20

_servers: RunVar[_Server] = RunVar("agentrl_program_server")


@dataclass(frozen=True, slots=True)
class Request:
    """`path` is what follows the registered key, with a leading slash; `body` the parsed JSON, {} if there was none."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Response:
    """A JSON `body`, or server-sent `events` as (name, data): an empty name writes no event line."""

    status: int = 200
    body: Json = None
    events: tuple[tuple[str, str], ...] | None = None


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class _Server:
    port: int
    scope: trio.CancelScope
    closed: trio.Event = field(default_factory=trio.Event)
    handlers: dict[str, Handler] = field(default_factory=dict[str, Handler])

    def refuses(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Typed] | None:
        """As `listening.Refuses`: a key that nobody has registered."""
        if _split(path)[0] in self.handlers:
            return None
        return _written(Response(404, {"error": {"message": "no such episode", "type": "not_found"}}))

    async def answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, Typed]:
        """As `listening.Handler`."""
        key, rest = _split(path)
        handler = self.handlers.get(key)
        if handler is None:
            return _written(Response(503, {"error": {"message": "the episode is over", "type": "server_error"}}))
        body = _parsed(content)
        if body is None:
            error = {"message": "the body is not a JSON object", "type": "invalid_request_error"}
            return _written(Response(400, {"error": error}))
        try:
            response = await handler(Request(method, rest, headers, body))
        except Exception as error:  # a connection's boundary: whatever it was, the program is answered and told
            response = Response(500, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})
        return _written(response)


async def register(key: str, handler: Handler) -> str:
    """Have requests to `http://127.0.0.1:PORT/KEY/…` answered by `handler`; the address up to the key.

    The server starts with the first key of a trio loop."""
    try:
        server = _servers.get()
    except LookupError:
        server = None
    if server is None or server.scope.cancel_called:
        server = await _start()
        _servers.set(server)
    server.handlers[key] = handler
    return f"http://127.0.0.1:{server.port}/{key}"


async def unregister(key: str) -> None:
    """Forget a key; the server closes with the last one."""
    try:
        server = _servers.get()
    except LookupError:
        return
    server.handlers.pop(key, None)
    if not server.handlers and not server.scope.cancel_called:
        server.scope.cancel()
        with trio.move_on_after(5, shield=True):
            await server.closed.wait()


async def _start() -> _Server:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = _Server(port=listeners[0].socket.getsockname()[1], scope=trio.CancelScope())

    async def serve() -> None:
        with server.scope:
            await listen(server, listeners, bounds=ServerBounds(body_bytes=MAX_BODY), refuses=server.refuses)
        for listener in listeners:
            with trio.CancelScope(shield=True):
                await listener.aclose()
        server.closed.set()

    trio.lowlevel.spawn_system_task(serve, name="agentrl program server")
    return server


def _split(path: str) -> tuple[str, str]:
    """The key that a path begins with, and what follows."""
    key, _, rest = path.removeprefix("/").partition("/")
    return key, f"/{rest}"


def _parsed(data: bytes) -> Mapping[str, Json] | None:
    try:
        body: Any = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def _written(response: Response) -> tuple[int, Typed]:
    if response.events is None:
        return response.status, Typed("application/json", json.dumps(response.body).encode())
    lines = (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n" for name, text in response.events)
    return response.status, Typed("text/event-stream", "".join(lines).encode())
