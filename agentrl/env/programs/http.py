"""A small HTTP server on the loopback address, for agent programs that know only a model's HTTP API.

One per trio loop, shared by its episodes and closed with the last of them. It parses requests and writes answers.
It does not know their meaning: whoever registered the first part of a path handles its requests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import h11
import trio
from trio.lowlevel import RunVar

from agentrl.records import Json

MAX_BODY: Final = 64 << 20
IDLE_S: Final = 600.0
"""A connection without a request is closed after so long."""

log = logging.getLogger(__name__)
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

    async def connected(stream: trio.SocketStream) -> None:
        await _connection(server, stream)

    async def serve() -> None:
        with server.scope:
            await trio.serve_listeners(connected, listeners)
        for listener in listeners:
            with trio.CancelScope(shield=True):
                await listener.aclose()
        server.closed.set()

    trio.lowlevel.spawn_system_task(serve, name="agentrl program server")
    return server


async def _connection(server: _Server, stream: trio.SocketStream) -> None:
    """Answer the requests of one connection until it closes; its own trouble ends it and nothing else."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_BODY)
    try:
        while True:
            with trio.move_on_after(IDLE_S):
                request = await _read(connection, stream)
                if request is None:
                    return
                response = await _answer(server, request)
                await _write(connection, stream, response)
                if connection.our_state is not h11.DONE:
                    return
                connection.start_next_cycle()
                continue
            return
    except (h11.ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError):
        return
    except Exception:  # a connection's boundary: whatever it was, other episodes are served on
        log.exception("a connection of an agent program was ended")
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)


async def _read(connection: h11.Connection, stream: trio.SocketStream) -> Request | None:
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                await stream.send_all(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            connection.receive_data(await stream.receive_some(65_536))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise h11.RemoteProtocolError("the body is too large")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            break
        else:
            return None
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.headers}
    path = head.target.decode("latin-1").partition("?")[0]
    return Request(head.method.decode("ascii"), path, headers, _parsed(body))


def _parsed(data: bytearray) -> Mapping[str, Json]:
    try:
        body: Any = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        body = None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {"invalid": True}


async def _answer(server: _Server, request: Request) -> Response:
    _, _, rest = request.path.partition("/")
    key, _, path = rest.partition("/")
    handler = server.handlers.get(key)
    if handler is None:
        return Response(404, {"error": {"message": "no such episode", "type": "not_found"}})
    if "invalid" in request.body:
        return Response(400, {"error": {"message": "the body is not a JSON object", "type": "invalid_request_error"}})
    try:
        return await handler(Request(request.method, f"/{path}", request.headers, request.body))
    except Exception as error:  # a connection's boundary: whatever it was, the program is answered and told
        return Response(500, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})


async def _write(connection: h11.Connection, stream: trio.SocketStream, response: Response) -> None:
    if response.events is None:
        data = json.dumps(response.body).encode()
        kind = b"application/json"
    else:
        lines = (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n" for name, text in response.events)
        data, kind = "".join(lines).encode(), b"text/event-stream"
    head = h11.Response(
        status_code=response.status,
        headers=[(b"content-type", kind), (b"content-length", str(len(data)).encode())],
    )
    for event in (head, h11.Data(data=data), h11.EndOfMessage()):
        await stream.send_all(connection.send(event) or b"")
