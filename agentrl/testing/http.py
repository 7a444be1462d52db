"""A fake server on a socket: for tests whose clients are processes, or open their own connections.

Owns the socket and HTTP/1.1's framing; the fake gives the answers. It runs under trio (`listening`) or in a thread
(`in_thread`); both end with their block, even in the middle of an answer.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import httptools
import trio

from agentrl.testing.vllm_server import Cut, FakeVLLM

_T = TypeVar("_T")
_READ_BYTES = 65_536
_STREAMED = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def listening(fake: FakeVLLM, *, port: int = 0) -> AsyncGenerator[str, None]:
    """Serve on 127.0.0.1; yields the URL and sets it as the fake's `url`."""
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    fake.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, partial(_connection, fake), [listener]))
        yield fake.url
        nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class InThread:
    """A server in a thread: `do` changes the fake there, between two steps of the server."""

    url: str
    _token: trio.lowlevel.TrioToken

    def do(self, change: Callable[[], _T]) -> _T:
        """Run `change` in the server's thread: `served.do(fake.restart)`."""
        return trio.from_thread.run_sync(change, trio_token=self._token)


@contextmanager
def in_thread(fake: FakeVLLM, *, port: int = 0) -> Generator[InThread]:
    """Serve in its own thread, for code that does not use trio."""
    started: SimpleQueue[tuple[InThread, Callable[[], None]] | BaseException] = SimpleQueue()

    async def serve() -> None:
        with trio.CancelScope() as scope:
            async with listening(fake, port=port) as url:
                started.put((InThread(url, trio.lowlevel.current_trio_token()), scope.cancel))
                await trio.sleep_forever()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as error:  # passed on to the thread that waits, which raises it
            started.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun = started.get()
    if isinstance(begun, BaseException):
        raise begun
    served, stop = begun
    try:
        yield served
    finally:
        served.do(stop)
        thread.join()


async def _connection(fake: FakeVLLM, stream: trio.SocketStream) -> None:
    """Answer one request after the other until the client disconnects, or the fake breaks off."""
    connection = _Connection(stream)
    async with stream:
        with suppress(Cut, trio.BrokenResourceError, trio.ClosedResourceError, httptools.HttpParserError):
            while await connection.read() and not fake.down:
                await connection.answer(fake)


class _Connection:
    """One socket and the request being read from it; httptools calls `on_...`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._ahead = b""  # bytes of the next request, received while this one was answered

    async def read(self) -> bool:
        """Read the next request. Returns False if the client has disconnected."""
        self._target, self._body, self._whole = b"", b"", False
        self._headers: dict[str, str] = {}
        parser = httptools.HttpRequestParser(self)
        while not self._whole:
            data = self._ahead or await self._stream.receive_some(_READ_BYTES)
            if not data:
                return False
            self._ahead = b""
            parser.feed_data(data)
        self._method = parser.get_method().decode()
        return True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._whole = True

    async def answer(self, fake: FakeVLLM) -> None:
        """Send the fake's answer. Raises Cut if the fake breaks off, or the client has disconnected."""
        whole = False

        async def watch() -> None:
            self._ahead = await self._stream.receive_some(_READ_BYTES)
            if not self._ahead:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with suppress(Cut, trio.BrokenResourceError):
                await self._send(fake)
                whole = True
            nursery.cancel_scope.cancel()
        if not whole:
            raise Cut

    async def _send(self, fake: FakeVLLM) -> None:
        url = httptools.parse_url(self._target)
        path, query = url.path.decode(), (url.query or b"").decode()
        status, body = await fake.answer(self._method, path, query, self._headers, self._body)
        head = f"HTTP/1.1 {status} Fake\r\n".encode()
        if isinstance(body, bytes):
            await self._stream.send_all(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            return
        async with aclosing(body):
            await self._stream.send_all(head + _STREAMED)
            async for part in body:
                await self._stream.send_all(b"%x\r\n%s\r\n" % (len(part), part))
            await self._stream.send_all(b"0\r\n\r\n")
