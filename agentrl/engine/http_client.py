"""HTTP/1.1 for httpx under trio, made for many running requests to few servers.

httpx's own pool looks at every connection on every request; here idle connections of an origin are a stack, and a
request takes the top one. Answers are parsed by httptools (llhttp): a turn comes in many small parts, and parsing is
what a client does most. Owns connections; never knows what a request means. Plain http only, over TCP or a Unix socket:
https goes to httpx's own transport. Every wait has the deadline that httpx's timeouts give it.

A server on a Unix socket has a URL as well: `unix:///run/engine-0.sock`, the path of the socket.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import httptools
import httpx
import trio

_READ_BYTES = 65_536
# Small, so that deadlines and leases are looked at between two batches; more than one, since each pass of the loop
# has its own cost.
_AT_ONCE = 32  # answers whose readers go on in one pass of the loop: its other tasks wait for their end
_HEAD_BYTES = 262_144
_FULL_S = 0.005  # until a socket whose queue of connections was full is tried again
Origin = tuple[str, int]
"""Host and port; the path of a Unix socket, and 0."""

T = TypeVar("T")
_FAILURES = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
_FRAMING = (b"content-length", b"transfer-encoding")


class TrioTransport(httpx.AsyncBaseTransport):
    """Hand it to `httpx.AsyncClient(transport=...)`. `keepalive_s` is how long an idle connection is trusted. Takes
    bodies of known length only, and no HEAD. With `socket`, all requests go to this Unix socket, whatever host they
    name.

    Raises httpx's errors: ConnectError, ConnectTimeout, ReadTimeout, RemoteProtocolError, …"""

    def __init__(self, *, keepalive_s: float = 60.0, socket: str | None = None) -> None:
        self._keepalive_s, self._socket = keepalive_s, socket
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._door = _Door()
        self._secure: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its response streams, and the connection comes back when the body has been read."""
        if request.url.scheme == "https":
            self._secure = self._secure or httpx.AsyncHTTPTransport()
            return await self._secure.handle_async_request(request)
        timeouts = cast("Mapping[str, float | None]", request.extensions.get("timeout", {}))
        stream = cast("httpx.AsyncByteStream", request.stream)
        request_bytes = head_of(request) + b"".join([part async for part in stream])
        origin = (request.url.host, request.url.port or 80) if self._socket is None else (self._socket, 0)
        # The newest idle connection, from the top of the stack: the older ones below grow old and are closed, so the
        # pool shrinks by itself after a burst.
        connection = self._take(origin) or await _connect(origin, timeouts.get("connect"), self._door)
        try:
            await connection.send(request_bytes, timeouts.get("write"))
            status, headers = await connection.read_head(timeouts.get("read"))
        # Cancellation too: a request that was sent and not answered would leave its answer to the next one on this
        # connection.
        except BaseException:
            connection.close()
            raise
        response_body = _Body(self, origin, connection, timeouts.get("read"))
        return httpx.Response(status, headers=headers, stream=response_body, extensions={"http_version": b"HTTP/1.1"})

    def _take(self, origin: Origin) -> _Connection | None:
        idle_connections = self._idle.get(origin)
        while idle_connections:
            connection = idle_connections.pop()
            # Checked before use, since a POST cannot be sent again blindly after it was lost: the server may have
            # begun to sample. `test_a_connection_that_the_server_closed_while_idle_is_replaced` has the race.
            if connection.alive() and trio.current_time() - connection.idle_since < self._keepalive_s:
                return connection
            connection.close()
        return None

    def give_back(self, origin: Origin, connection: _Connection) -> None:
        """Keep a connection whose response was read to its end; close it if the peer wants it closed."""
        if not connection.reusable():
            connection.close()
            return
        idle_connections = self._idle.setdefault(origin, deque())
        connection.idle_since = current_time = trio.current_time()
        idle_connections.append(connection)
        while idle_connections and current_time - idle_connections[0].idle_since >= self._keepalive_s:
            idle_connections.popleft().close()

    async def aclose(self) -> None:
        """Close all idle connections."""
        for idle_connections in self._idle.values():
            while idle_connections:
                idle_connections.pop().close()
        if self._secure is not None:
            await self._secure.aclose()


class _Door:
    """Lets so many tasks go on in one pass of the loop, and the others in the next passes, in their order. If thousands
    of turns get tokens at once, deadlines and leases are looked at in between."""

    def __init__(self) -> None:
        self._left, self._waiting, self._opens = _AT_ONCE, trio.lowlevel.ParkingLot(), False

    async def through(self) -> None:
        if self._left > 0:
            self._left -= 1
            return
        if not self._opens:
            self._opens = True
            # A system task, since the transport has no nursery of its own, and a turn whose nursery is cancelled must
            # not leave the others parked.
            trio.lowlevel.spawn_system_task(self._open)
        await self._waiting.park()

    async def _open(self) -> None:
        try:
            while self._waiting:
                self._waiting.unpark(count=_AT_ONCE)
                await trio.lowlevel.checkpoint()
        finally:
            self._opens, self._left = False, _AT_ONCE


class _Connection:
    """One socket with its HTTP state; the parser calls `on_...`. After any error it is closed, never reused."""

    def __init__(self, stream: trio.SocketStream, door: _Door) -> None:
        self._stream, self._door = stream, door
        # trio's own calls make a checkpoint each, which costs more than the system call. The plain socket is tried
        # first, and trio only waits where the kernel would block.
        self._socket = cast("socket.socket", cast("Any", stream.socket)._sock)  # which does not wait
        self._parser = httptools.HttpResponseParser(self)
        self._expect()
        self.idle_since = 0.0

    def _expect(self) -> None:
        """Be ready for the answer to a request."""
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""
        self._ended, self._kept = False, False

    async def send(self, data: bytes, timeout_s: float | None) -> None:
        try:
            # A request is small: the kernel mostly takes it at once. `read_head`, which comes next, is a checkpoint.
            sent_bytes = _at_once(self._socket.send, data) or 0
            if sent_bytes < len(data):
                with _within(timeout_s):
                    await self._stream.send_all(data[sent_bytes:])
        except trio.TooSlowError as error:
            raise httpx.WriteTimeout(str(error)) from error
        except _FAILURES as error:
            raise httpx.WriteError(str(error)) from error

    async def read_head(self, timeout_s: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        taken_bytes = 0
        while self._status is None:
            taken_bytes += await self._read(timeout_s)
            if taken_bytes > _HEAD_BYTES and self._status is None:
                raise httpx.RemoteProtocolError(f"the server's headers are longer than {_HEAD_BYTES} bytes")
        return self._status, self._headers

    async def read_data(self, timeout_s: float | None) -> bytes | None:
        """Some of the body; None at its end."""
        while not self._body and not self._ended:
            await self._read(timeout_s)
        body_bytes, self._body = self._body, b""
        return body_bytes or None

    async def _read(self, timeout_s: float | None) -> int:
        """Take what comes next; how many bytes it was."""
        try:
            with _within(timeout_s):
                received = None
                while received is None:  # a server takes its time: to wait first saves a vain look
                    await trio.lowlevel.wait_readable(self._socket)
                    # After the wait and before the read: at this point all readers that are ready stand in line, and
                    # the door lets them through in order.
                    await self._door.through()
                    received = _at_once(self._socket.recv, _READ_BYTES)
        except trio.TooSlowError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except _FAILURES as error:
            raise httpx.ReadError(str(error)) from error
        if not received:
            if self._status is None or any(name.lower() in _FRAMING for name, _ in self._headers):
                raise httpx.RemoteProtocolError("the server closed the connection before its answer's end")
            # Only without both headers that announce a length (RFC 9112, section 6.3): with one of them the end of
            # the connection is a torn answer, which is refused above.
            self._ended = True  # a body of unsaid length ends with its connection
        else:
            try:
                self._parser.feed_data(received)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                raise httpx.RemoteProtocolError(f"the server does not speak HTTP/1.1: {error}") from error
        return len(received)

    def on_message_begin(self) -> None:
        # An answer that nobody requested is left over from an earlier one, or another server's. Read as the next
        # answer it would give one turn the tokens of another.
        if self._ended:
            raise httpx.RemoteProtocolError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # the answer itself is yet to come
            self._headers = []
            return
        self._status = status
        # A server that failed may close the connection behind its answer without announcing it: uvicorn does.
        self._kept = status < 500 and self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self._ended = self._status is not None

    def alive(self) -> bool:
        """Whether the idle peer has neither closed the connection nor sent something unasked."""
        try:
            # A peek takes nothing away.
            # Data counts as dead too: an idle server has nothing to send, so a byte here belongs to no request of
            # ours.
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def over(self) -> bool:
        """Whether the whole answer was read."""
        return self._ended and not self._body

    def reusable(self) -> bool:
        if not (self._ended and self._kept):
            return False
        self._expect()
        return True

    def close(self) -> None:
        self._stream.socket.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as it comes. It is its own iterator: a reader that stops leaves nothing to finalize."""

    def __init__(
        self, transport: TrioTransport, origin: Origin, connection: _Connection, timeout_s: float | None
    ) -> None:
        self._transport, self._origin, self._timeout_s = transport, origin, timeout_s
        self._connection: _Connection | None = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        connection = self._connection
        if connection is None:
            raise StopAsyncIteration
        try:
            body_bytes = await connection.read_data(self._timeout_s)
        except BaseException:
            await self.aclose()
            raise
        if connection.over:
            self._connection = None
            self._transport.give_back(self._origin, connection)
        if body_bytes is None:
            raise StopAsyncIteration
        return body_bytes

    async def aclose(self) -> None:
        """A response that was not read to its end takes its connection with it: the server sees the client leave."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def _connect(origin: Origin, timeout_s: float | None, door: _Door) -> _Connection:
    try:
        with _within(timeout_s):
            socket_path, port = origin
            stream = await trio.open_tcp_stream(socket_path, port) if port else await _open_socket(socket_path)
            return _Connection(stream, door)
    except trio.TooSlowError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except _FAILURES as error:
        raise httpx.ConnectError(str(error)) from error


async def _open_socket(path: str) -> trio.SocketStream:
    """Connect to a Unix socket. If many do at once, its queue is full for a moment."""
    plain_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        plain_socket.setblocking(False)
        while True:
            try:
                plain_socket.connect(path)
            # Linux answers EAGAIN where the queue of a Unix socket is full, and gives no event for when there is
            # room: so it is tried again. TCP would wait by itself.
            except BlockingIOError:
                await trio.sleep(_FULL_S)
            else:
                return trio.SocketStream(trio.socket.from_stdlib_socket(plain_socket))
    except BaseException:
        plain_socket.close()
        raise


def socket_of(url: str) -> str | None:
    """The path of the Unix socket that a URL names; None of any other URL."""
    return url.removeprefix("unix://") if url.startswith("unix://") else None


def _within(timeout_s: float | None) -> AbstractContextManager[object]:
    """Without a timeout the caller's own deadline holds: a scope less on the hot path."""
    return nullcontext() if timeout_s is None else trio.fail_after(timeout_s)


def _at_once(call: Callable[[Any], T], argument: object) -> T | None:
    """Call a socket without waiting; None if it would wait."""
    try:
        return call(argument)
    except BlockingIOError:
        return None


def head_of(request: httpx.Request) -> bytes:
    """The request line and headers. Raises httpx.LocalProtocolError for what would not be read as sent."""
    headers = request.headers.raw
    request_line = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)
    head = b"".join([request_line, *[b"%s: %s\r\n" % header for header in headers], b"\r\n"])
    # A header value with a line end in it would be read as a header or a request of its own (request smuggling).
    # Counting over the whole head is one pass, where a look at each value costs more than the rest of this function.
    if head.count(b"\n") != len(headers) + 2 or head.count(b"\r") != len(headers) + 2 or b"\0" in head:
        raise httpx.LocalProtocolError("a header with a line end in it")
    if request.method == "HEAD" or "transfer-encoding" in request.headers:
        raise httpx.LocalProtocolError("only requests with bodies of known length, and no HEAD")
    return head
