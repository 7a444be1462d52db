"""HTTP/1.1 for httpx under trio, made for many running requests to few servers.

httpx's own pool looks at every connection on every request; here idle connections of an origin are a stack, and a
request takes the top one. Owns connections; never knows what is asked for. Plain http only: https goes to httpx's
own transport. Every wait has the deadline that httpx's timeouts give it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any, cast

import h11
import httpx
import trio

_READ_BYTES = 65_536
_Origin = tuple[str, int]


class TrioTransport(httpx.AsyncBaseTransport):
    """Hand it to `httpx.AsyncClient(transport=...)`. `keepalive_s` is how long an idle connection is trusted.

    Raises httpx's errors: ConnectError, ConnectTimeout, ReadTimeout, RemoteProtocolError, …"""

    def __init__(self, *, keepalive_s: float = 60.0) -> None:
        self._keepalive_s = keepalive_s
        self._idle: dict[_Origin, deque[_Connection]] = {}
        self._secure: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its response streams, and the connection comes back when the body has been read."""
        if request.url.scheme == "https":
            self._secure = self._secure or httpx.AsyncHTTPTransport()
            return await self._secure.handle_async_request(request)
        timeouts = cast("Mapping[str, float | None]", request.extensions.get("timeout", {}))
        origin = (request.url.host, request.url.port or 80)
        connection = self._take(origin) or await _connect(origin, timeouts.get("connect"))
        try:
            await connection.send(request, timeouts.get("write"))
            head = await connection.read_head(timeouts.get("read"))
        except BaseException:
            connection.close()
            raise
        body = _Body(self, origin, connection, timeouts.get("read"))
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=body,
            extensions={"http_version": b"HTTP/1.1"},
        )

    def _take(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.alive() and trio.current_time() - connection.idle_since < self._keepalive_s:
                return connection
            connection.close()
        return None

    def give_back(self, origin: _Origin, connection: _Connection) -> None:
        """Keep a connection whose response was read to its end; close it if the peer wants it closed."""
        if not connection.reusable():
            connection.close()
            return
        idle = self._idle.setdefault(origin, deque())
        connection.idle_since = now = trio.current_time()
        idle.append(connection)
        while idle and now - idle[0].idle_since >= self._keepalive_s:
            idle.popleft().close()

    async def aclose(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        if self._secure is not None:
            await self._secure.aclose()


class _Connection:
    """One socket with its HTTP state. After any error it is closed, never reused."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._state = h11.Connection(h11.CLIENT)
        self._trusted = True
        self.idle_since = 0.0

    async def send(self, request: httpx.Request, timeout_s: float | None) -> None:
        headers = request.headers.raw
        with _translated(httpx.WriteTimeout, httpx.WriteError):
            data = _wire(
                self._state,
                h11.Request(method=request.method.encode(), target=request.url.raw_path, headers=headers),
            )
            stream = cast("httpx.AsyncByteStream", request.stream)
            async for part in stream:
                data += _wire(self._state, h11.Data(part))
                if len(data) >= _READ_BYTES:
                    await self._write(data, timeout_s)
                    data = b""
            await self._write(data + _wire(self._state, h11.EndOfMessage()), timeout_s)

    async def _write(self, data: bytes, timeout_s: float | None) -> None:
        if timeout_s is None:  # the caller's own deadline holds; a scope less on the hot path
            await self._stream.send_all(data)
            return
        with trio.fail_after(timeout_s):
            await self._stream.send_all(data)

    async def read_head(self, timeout_s: float | None) -> h11.Response:
        while True:
            event = await self._next(timeout_s)
            if isinstance(event, h11.Response):
                # A server that failed may close the connection behind its answer without having said so: uvicorn does.
                self._trusted = event.status_code < 500
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError("the server closed the connection without an answer")

    async def read_data(self, timeout_s: float | None) -> bytes | None:
        """Some of the body; None at its end."""
        event = await self._next(timeout_s)
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def _next(self, timeout_s: float | None) -> Any:
        with _translated(httpx.ReadTimeout, httpx.ReadError):
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._read(timeout_s))
        return event

    async def _read(self, timeout_s: float | None) -> bytes:
        if timeout_s is None:
            return bytes(await self._stream.receive_some(_READ_BYTES))
        with trio.fail_after(timeout_s):
            return bytes(await self._stream.receive_some(_READ_BYTES))

    def alive(self) -> bool:
        """Whether the idle peer has neither closed the connection nor sent something unasked."""
        try:
            # trio's sockets do not wait when asked through the underlying one; a peek takes nothing away.
            self._raw().recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def reusable(self) -> bool:
        if not self._trusted or self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return True

    def close(self) -> None:
        self._stream.socket.close()

    def _raw(self) -> socket.socket:
        return cast("Any", self._stream.socket)._sock


class _Body(httpx.AsyncByteStream):
    def __init__(
        self, transport: TrioTransport, origin: _Origin, connection: _Connection, timeout_s: float | None
    ) -> None:
        self._transport, self._origin, self._timeout_s = transport, origin, timeout_s
        self._connection: _Connection | None = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts()

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        while self._connection is not None:
            try:
                data = await self._connection.read_data(self._timeout_s)
            except BaseException:
                await self.aclose()
                raise
            if data is None:
                connection, self._connection = self._connection, None
                self._transport.give_back(self._origin, connection)
            else:
                yield data

    async def aclose(self) -> None:
        """A response that was not read to its end takes its connection with it: the server sees the client leave."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def _connect(origin: _Origin, timeout_s: float | None) -> _Connection:
    with (
        _translated(httpx.ConnectTimeout, httpx.ConnectError),
        trio.fail_after(inf if timeout_s is None else timeout_s),
    ):
        return _Connection(await trio.open_tcp_stream(*origin))


def _wire(state: h11.Connection, event: h11.Request | h11.Data | h11.EndOfMessage) -> bytes:
    return state.send(event) or b""


@contextmanager
def _translated(timeout: type[httpx.TimeoutException], failure: type[httpx.NetworkError]) -> Generator[None]:
    try:
        yield
    except trio.TooSlowError as error:
        raise timeout(str(error)) from error
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise failure(str(error)) from error
    except h11.RemoteProtocolError as error:
        raise httpx.RemoteProtocolError(str(error)) from error
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error)) from error
