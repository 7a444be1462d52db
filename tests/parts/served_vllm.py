"""A fake server on a socket: for tests whose clients are processes, or open their own connections.

`agentrl.http.http_server` serves; the fake gives the answers. It runs under trio (`listening`) or in a thread
(`in_thread`); both end with their block, even in the middle of an answer.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import trio

from agentrl.http.http_server import listen
from tests.parts.vllm_server import FakeVLLM

_T = TypeVar("_T")


@asynccontextmanager
async def listening(fake: FakeVLLM, *, port: int = 0) -> AsyncGenerator[str, None]:
    """Serve on 127.0.0.1; yields the URL and sets it as the fake's `url`."""
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    fake.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen, fake, [listener])
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
