"""A small HTTP/1.1 server under trio, whose answers may come in parts: for gateways, and for the servers of tests.

Owns sockets, framing and the deadlines of peers that stand still; a handler gives the answers. A client that leaves
while its answer is made, or does not read it, ends that answer and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Protocol

import httptools
import trio

_READ_BYTES = 65_536
_BODY_BYTES = 32 << 20
_IDLE_S = 600.0  # a connection without a whole request is closed after so long
_WRITE_S = 60.0  # a client that takes nothing for so long has left
_STREAMED = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Parts(Protocol):
    """A body that comes in parts, and is closed once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def aclose(self) -> Awaitable[object]: ...


Answer = tuple[int, bytes | Parts]


class Cut(Exception):
    """The connection breaks here."""


class Handler(Protocol):
    """Gives a request's status and body. Raises Cut if the connection has to break."""

    async def answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes
    ) -> Answer: ...


async def listen(handler: Handler, listeners: list[trio.SocketListener]) -> None:
    """Serve for ever."""
    await trio.serve_listeners(partial(_connected, handler), listeners)


async def _connected(handler: Handler, stream: trio.SocketStream) -> None:
    """Answer one request after the other until the client disconnects, or the handler breaks off."""
    connection = _Connection(stream)
    async with stream:
        with suppress(Cut, httptools.HttpParserError, *_GONE):
            while await connection.read():
                await connection.answer(handler)


class _Connection:
    """One socket and the request being read from it; httptools calls `on_...`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._ahead = b""  # bytes of the next request, received while this one was answered

    async def read(self) -> bool:
        """Read the next request. Returns False if the client has disconnected. Raises trio.TooSlowError, and Cut for a
        body that is too large."""
        self._target, self._body, self._size, self._whole = b"", list[bytes](), 0, False
        self._headers: dict[str, str] = {}
        parser = httptools.HttpRequestParser(self)
        with trio.fail_after(_IDLE_S):
            while not self._whole:
                data = self._ahead or await self._stream.receive_some(_READ_BYTES)
                if not data:
                    return False
                self._ahead = b""
                parser.feed_data(data)
                if self._size > _BODY_BYTES:
                    raise Cut
        self._method = parser.get_method().decode()
        return True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        self._whole = True

    async def answer(self, handler: Handler) -> None:
        """Send the handler's answer. Raises Cut if it breaks off, or the client has disconnected."""
        whole = False

        async def watch() -> None:
            with suppress(*_GONE):
                self._ahead = await self._stream.receive_some(_READ_BYTES)
            if not self._ahead:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with suppress(Cut, httptools.HttpParserError, *_GONE):
                await self._answer(handler)
                whole = True
            nursery.cancel_scope.cancel()
        if not whole:
            raise Cut

    async def _answer(self, handler: Handler) -> None:
        url = httptools.parse_url(self._target)
        path, query = (url.path or b"/").decode("latin-1"), (url.query or b"").decode("latin-1")
        status, body = await handler.answer(self._method, path, query, self._headers, b"".join(self._body))
        head = f"HTTP/1.1 {status} Answer\r\n".encode()
        if isinstance(body, bytes):
            await self._send(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            return
        async with aclosing(body):
            await self._send(head + _STREAMED)
            async for part in body:
                await self._send(b"%x\r\n%s\r\n" % (len(part), part))
            await self._send(b"0\r\n\r\n")

    async def _send(self, data: bytes) -> None:
        with trio.fail_after(_WRITE_S):
            await self._stream.send_all(data)
