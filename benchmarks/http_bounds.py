"""What the bounds on HTTP cost the embedded engine: its server with them and without, in one run.

    python benchmarks/http_bounds.py [--rounds 9 --batches 25]

Both sides are uvicorn with httptools in a process of its own, with the same application, which only answers; one has
`agentrl.engine.embedded.bounded_protocol`, as the engine has it. A raw client keeps sixteen connections and sends the
same bytes on all of them at once, to one side and then to the other. Rounds of the sides alternate, and each begins
with the other side. The table has the server's CPU time a request, median of the rounds with the lowest and the
highest, and the median of the differences between the two sides of a round: CPU time means something on a machine that
others use too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SIDES = ("without", "with bounds")
AT_ONCE = 16
_READY_S = 120.0
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Shape:
    """A request of so many bytes, and an answer streamed in so many pieces."""

    name: str
    body: int
    pieces: int

    @property
    def request(self) -> bytes:
        head = f"POST /{self.pieces} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {'k' * 43}\r\naccept: text/event-stream\r\nuser-agent: python-httpx\r\n"
        return f"{head}content-length: {self.body}\r\n\r\n".encode() + b"7" * self.body


SHAPES = (
    Shape("a small question, an answer in one piece", 64, 1),
    Shape("a turn: a prompt of 4 KB, 32 tokens streamed", 4_096, 32),
    Shape("a long prompt of 256 KB, one piece", 262_144, 1),
)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and streams as many pieces as the path says."""
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    pieces = int(scope["path"][1:])
    for at in range(pieces):
        piece = b'data: {"token_ids": [17], "logprobs": [-0.25], "text": " a"}\n\n'
        await send({"type": "http.response.body", "body": piece, "more_body": at + 1 < pieces})


def serve(bounded: bool, control: Connection) -> None:
    """A server in this process: sends its port, then its CPU time so far whenever it is asked."""
    import asyncio
    import threading
    from functools import partial

    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from agentrl.engine.embedded.bounded_protocol import BoundedProtocol
    from agentrl.http.bounds import Connections, ServerBounds

    bounds = ServerBounds()
    protocol: Any = HttpToolsProtocol
    if bounded:
        protocol = partial(BoundedProtocol, connections=Connections(bounds), bounds=bounds)
    settings: dict[str, Any] = {"access_log": False, "log_level": "warning", "lifespan": "off", "loop": "asyncio"}
    settings["timeout_keep_alive"] = 600
    server = uvicorn.Server(uvicorn.Config(application, http=protocol, **settings))
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        control.send(listening.getsockname()[1])
        with suppress(EOFError):  # the client is gone
            while control.recv():
                control.send(time.process_time())
        server.should_exit = True

    threading.Thread(target=answer, daemon=True).start()
    asyncio.run(server.serve(sockets=[listening]))


@dataclass
class Side:
    """A server, seen from the client."""

    control: Connection
    clients: list[socket.socket]

    def cpu_us(self, shape: Shape, batches: int) -> float:
        """The server's CPU time a request."""
        began = self._cpu_s()
        for _ in range(batches):
            for client in self.clients:
                client.sendall(shape.request)
            for client in self.clients:
                _read(client)
        return (self._cpu_s() - began) / (batches * len(self.clients)) * 1e6

    def _cpu_s(self) -> float:
        self.control.send(True)
        return self.control.recv()


def _read(client: socket.socket) -> None:
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        more = client.recv(65_536)
        if not more:
            raise SystemExit(f"the server closed the connection after {data[-200:]!r}")
        data += more
    if not data.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server refused: {data[:200]!r}")


@contextmanager
def started(bounded: bool) -> Iterator[Side]:
    """A server, and connections to it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(bounded, there), daemon=True)
    process.start()
    if not here.poll(_READY_S):
        raise SystemExit(f"no server within {_READY_S:g} s")
    address = "127.0.0.1", here.recv()
    with ExitStack() as stack:
        connect = socket.create_connection
        yield Side(here, [stack.enter_context(connect(address, timeout=_ANSWER_S)) for _ in range(AT_ONCE)])
    here.send(False)
    process.join(10)
    process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=25)
    given = parser.parse_args()
    print(f"| request | {', µs | '.join(SIDES)}, µs | difference, µs |\n| --- | --- | --- | --- |")
    with started(False) as plain, started(True) as bounded:
        sides = dict(zip(SIDES, (plain, bounded), strict=True))
        for shape in SHAPES:
            for side in sides.values():
                side.cpu_us(shape, max(1, given.batches // 4))  # warm
            rounds: list[dict[str, float]] = []
            for at in range(given.rounds):
                order = SIDES if at % 2 else SIDES[::-1]
                rounds.append({name: sides[name].cpu_us(shape, given.batches) for name in order})
            cells = [_cell([one[name] for one in rounds]) for name in SIDES]
            extra = [one[SIDES[1]] - one[SIDES[0]] for one in rounds]
            print(f"| {shape.name} | {' | '.join(cells)} | {_cell(extra)} |", flush=True)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
