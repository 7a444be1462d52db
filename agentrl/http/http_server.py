"""A small HTTP/1.1 server under trio, whose answers may come in parts: for the training server, for programs that
want a model's API, and for the servers of tests.

Owns sockets, framing and the deadlines of peers that stand still; a handler gives the answers, `bounds` says what
a client may cost. A client that leaves while its answer is made, or does not read it, ends that answer alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import httptools
import trio

from agentrl.http.bounds import ConnectionPlace, Connections, Reader, RequestRefused, ServerBounds

_READ_BYTES = 65_536
_WRITE_S = 60.0  # a client that takes nothing for so long has left
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 20  # of a client that is still sending what was refused
_STREAMED = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)

_log = logging.getLogger(__name__)


class BodyParts(Protocol):
    """A body that comes in parts, and is closed once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def aclose(self) -> Awaitable[object]: ...


@dataclass(frozen=True, slots=True)
class Typed:
    """A body with its content type. `on_sent` is called once: with True if all of it was written to the client's
    socket, with False if the client left before."""

    type: str
    data: bytes
    on_sent: Callable[[bool], None] | None = None


Answer = tuple[int, bytes | Typed | BodyParts]


class Cut(Exception):
    """The connection breaks here."""


class Handler(Protocol):
    """Gives a request's status and body. Raises Cut if the connection has to break."""

    async def answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes
    ) -> Answer: ...


Refuses = Callable[[str, str, Mapping[str, str]], tuple[int, bytes | Typed] | None]
"""The answer to a request, by its method, path and headers, whose body is not even read; None to read it."""


async def listen(
    handler: Handler,
    listeners: list[trio.SocketListener],
    *,
    bounds: ServerBounds = ServerBounds(),  # noqa: B008 - it is frozen
    refuses: Refuses | None = None,
    body_bytes: Callable[[str], int] | None = None,
) -> None:
    """Serve for ever. `body_bytes` gives the most bytes of a body by the path of its request, if some paths have a
    smaller bound than `bounds`."""
    server = _Server(handler, bounds, refuses, Connections(bounds), body_bytes)
    await trio.serve_listeners(partial(_connected, server), listeners)


@dataclass(frozen=True, slots=True)
class _Server:
    handler: Handler
    bounds: ServerBounds
    refuses: Refuses | None
    connections: Connections
    body_bytes: Callable[[str], int] | None


async def _connected(server: _Server, stream: trio.SocketStream) -> None:
    """Answer one request after the other until the client disconnects, or the handler breaks off. The trouble of one
    connection is its own."""
    try:
        peer_address = stream.socket.getpeername()
    except OSError:  # it has left already
        peer_address = ()
    # The scope is what `close` of a place cancels: whoever makes room for another ends this task from outside,
    # whatever it waits for.
    with trio.CancelScope() as connection_scope:
        connection_place = server.connections.enter(peer_address, connection_scope.cancel)
        if connection_place is None:
            # Without an answer: to send a status takes a place of its own for as long as the client does not read it.
            await trio.aclose_forcefully(stream)
            return
        try:
            async with stream:
                # Clients leave in the middle of everything; that is ordinary and not worth a line in the log.
                with suppress(Cut, httptools.HttpParserError, *_GONE):
                    connection = _Connection(server, stream, connection_place)
                    while await connection.read():
                        await connection.answer()
        # Raised further, it would end the nursery of `serve_listeners`, and with it every other connection.
        except Exception:
            _log.exception("a connection was ended")
        finally:
            server.connections.leave(connection_place)


class _Connection:
    """One socket and the request being read from it."""

    def __init__(self, server: _Server, stream: trio.SocketStream, place: ConnectionPlace) -> None:
        self._server, self._stream, self._place = server, stream, place
        self._ahead = b""  # bytes of the next request, received while this one was answered
        self._request = Reader(server.bounds)

    async def read(self) -> bool:
        """Read the next request. Returns False if the client has disconnected. Raises trio.TooSlowError, and Cut for a
        request that was refused."""
        bounds, request = self._server.bounds, Reader(self._server.bounds)
        self._request, has_begun = request, False
        try:
            # One scope whose deadline moves, not a time limit for each read: a client that sends a byte a minute
            # would meet such a limit for ever.
            # `tests/engine/test_http_bounds.py::test_a_connection_that_owes_a_request_is_closed_in_time`.
            with trio.fail_after(bounds.idle_s) as read_scope:
                while True:
                    received_bytes = self._ahead or await self._stream.receive_some(_READ_BYTES)
                    if not received_bytes:
                        return False
                    self._ahead, had_head = b"", request.head
                    request.feed(received_bytes)
                    # As soon as the head is there: a body of 32 MiB that will be refused for its token should not be
                    # read first.
                    if request.head and not had_head:
                        await self._admit(request)
                    if request.whole:
                        break
                    # The deadline moves twice, at the first byte and where the head ends, and at no other byte.
                    if not has_begun or request.head != had_head:
                        has_begun, moved_s = True, trio.current_time()
                        read_scope.deadline = moved_s + (bounds.body_s if request.head else bounds.head_s)
        except RequestRefused as refused:
            error_body = {"message": str(refused), "type": "Error", "code": refused.status}
            await self._refuse(refused.status, Typed("application/json", json.dumps({"error": error_body}).encode()))
        self._server.connections.works(self._place)
        return True

    async def _admit(self, request: Reader) -> None:
        """Check the head of a request before its body is read. Raises Cut if the server refuses it, RequestRefused if
        the body is too large."""
        if self._server.refuses is not None:
            early_refusal = self._server.refuses(request.method, _url(request.target)[0], request.headers)
            if early_refusal is not None:
                await self._refuse(*early_refusal)
        if self._server.body_bytes is not None:
            request.bound_body(self._server.body_bytes(_url(request.target)[0]))
        if not request.whole and request.headers.get("expect", "").lower() == "100-continue":
            # A client that asks so (curl for bodies above a megabyte) sends nothing until it hears this, or waits a
            # second each time.
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _refuse(self, status: int, body: bytes | Typed) -> None:
        """Answer, and break off. What the client is still sending is thrown away for a moment: a socket that is closed
        with bytes unread takes the answer back."""
        await self._send_whole(status, body, last=True)
        # First our half is closed, then the client's bytes are read: a close with unread data in the receive buffer
        # makes the kernel send RST, on which the client discards what it has received and reports a broken pipe
        # instead of the reason. Bounded in time and bytes, or a client that never stops would hold the connection.
        await self._stream.send_eof()
        unread_bytes = _LINGER_BYTES
        with trio.move_on_after(_LINGER_S):
            while unread_bytes > 0 and (received_bytes := await self._stream.receive_some(_READ_BYTES)):
                unread_bytes -= len(received_bytes)
        raise Cut

    async def answer(self) -> None:
        """Send the handler's answer. Raises Cut if the connection cannot take another request: the answer broke off,
        the client has disconnected, or its request does not keep the connection open."""
        is_complete = False

        async def watch() -> None:
            with suppress(*_GONE):
                # The only way to notice over TCP that a client has left is to read. An answer that takes minutes is
                # then cancelled, with the tokens that an engine would have sampled for nobody. If bytes come instead,
                # they are the beginning of the next request.
                self._ahead = await self._stream.receive_some(_READ_BYTES)
            if not self._ahead:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with suppress(Cut, httptools.HttpParserError, *_GONE):
                await self._answer()
                is_complete = True
            nursery.cancel_scope.cancel()
        if not is_complete or not self._request.keeps_open:
            raise Cut
        self._server.connections.waits(self._place)

    async def _answer(self) -> None:
        request = self._request
        url_path, url_query = _url(request.target)
        pending_answer = self._server.handler.answer(
            request.method, url_path, url_query, request.headers, request.content
        )
        status_code, answer_body = await pending_answer
        if isinstance(answer_body, bytes | Typed):
            is_sent = False
            try:
                await self._send_whole(status_code, answer_body, last=not request.keeps_open)
                is_sent = True
            finally:
                if isinstance(answer_body, Typed) and answer_body.on_sent is not None:
                    # In `finally`, so exactly once whatever happens: the server's owner counts on one of the two.
                    # True means that the socket took all of it; more cannot be known without an answer of the client.
                    answer_body.on_sent(is_sent)
            return
        # The generator is closed here and now when the client leaves, not when the garbage collector comes by: it
        # holds a request at an engine.
        async with aclosing(answer_body):
            await self._send(_head(status_code) + _STREAMED)
            async for body_part in answer_body:
                await self._send(b"%x\r\n%s\r\n" % (len(body_part), body_part))
            await self._send(b"0\r\n\r\n")

    async def _send_whole(self, status: int, body: bytes | Typed, *, last: bool) -> None:
        head_bytes = _head(status)
        body_bytes = body.data if isinstance(body, Typed) else body
        if isinstance(body, Typed):
            head_bytes += f"content-type: {body.type}\r\n".encode()
        if last:
            head_bytes += b"connection: close\r\n"
        await self._send(b"%scontent-length: %d\r\n\r\n%s" % (head_bytes, len(body_bytes), body_bytes))

    async def _send(self, data: bytes) -> None:
        # For each piece, so a long answer may take as long as it needs as long as the client goes on reading.
        with trio.fail_after(_WRITE_S):
            await self._stream.send_all(data)


def _url(target: bytes) -> tuple[str, str]:
    """The path and the query of a request."""
    parsed_url = httptools.parse_url(target)
    return (parsed_url.path or b"/").decode("latin-1"), (parsed_url.query or b"").decode("latin-1")


def _head(status: int) -> bytes:
    return f"HTTP/1.1 {status} Answer\r\n".encode()
