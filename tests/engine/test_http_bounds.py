"""What a hostile client may cost: bytes that it sends, places that it takes, time that it wastes."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl.http.bounds import ConnectionPlace, Connections, Reader, RequestRefused, ServerBounds
from agentrl.http.http_server import Answer, listen

SMALL = ServerBounds(
    connections=16, head_bytes=2_000, url_bytes=500, body_bytes=10_000, head_s=30, body_s=60, idle_s=600
)
CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@each_case(
    ("start", "piece", "status"),
    [
        (b"GET /", b"x" * 100, 414),
        (b"GET / HTTP/1.1\r\nx: ", b"x" * 100, 431),
        (b"GET / HTTP/1.1\r\n", b"x", 431),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n", 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 10001\r\n\r\n", b"", 413),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n", b"", 400),
        (CHUNKED, b"64\r\n" + b"x" * 100 + b"\r\n", 413),
        (CHUNKED + b"1;", b"x" * 100, 431),
        (CHUNKED + b"0\r\n", b"x: y\r\n", 431),
        (CHUNKED + b"0\r\nx: ", b"x" * 100, 431),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"", 400),
        (b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"", 400),
        (b"\x16\x03\x01", b"", 400),
    ],
)
def test_a_request_is_refused_as_soon_as_it_is_too_much(start: bytes, piece: bytes, status: int) -> None:
    reader, sent = Reader(SMALL), 0
    with pytest.raises(RequestRefused) as refused:
        reader.feed(start)
        while sent < 100_000:
            reader.feed(piece)
            sent += len(piece)
    assert refused.value.status == status
    assert sent <= {413: 10_600, 414: 700}.get(status, 2_200)


def test_what_is_within_the_bounds_is_read_in_whatever_pieces_it_comes() -> None:
    body = bytes(range(256)) * 39
    head = b"POST /a?b=c HTTP/1.1\r\nX-A: 1\r\ncontent-length: %d\r\n\r\n" % len(body)
    whole, rng = head + body, random.Random(0)
    for _ in range(50):
        reader, at = Reader(SMALL), 0
        while at < len(whole):
            step = rng.choice([1, 7, 300, 5_000])
            reader.feed(whole[at : at + step])
            at += step
        assert (reader.method, reader.target, reader.headers["x-a"]) == ("POST", b"/a?b=c", "1")
        assert reader.content == body and reader.whole and reader.keeps_open


def test_the_oldest_idle_connection_of_the_fullest_peer_makes_room() -> None:
    connections, closed = Connections(SMALL), list[str]()

    def enter(host: str, name: str) -> ConnectionPlace | None:
        return connections.enter((host, 1), lambda: closed.append(name))

    mine = enter("10.0.0.1", "mine")
    assert mine is not None
    theirs = [enter("10.0.0.2", f"theirs {n}") for n in range(12)]  # three quarters of 16
    assert all(theirs) and not closed
    assert enter("10.0.0.2", "more") is not None and closed == ["theirs 0"]
    for host in ("10.0.0.3", "10.0.0.4", "10.0.0.5"):
        assert enter(host, host) is not None
    assert closed == ["theirs 0"], "there are 16 places"
    for place in theirs[1:]:
        assert place is not None
        connections.works(place)
    assert enter("10.0.0.2", "too much") is not None and closed[1:] == ["more"]
    assert enter("10.0.0.2", "again") is not None and closed[2:] == ["too much"]
    assert enter("10.0.0.6", "new") is not None and closed[3:] == ["again"]
    connections.works(mine)
    connections.waits(mine)
    assert "mine" not in closed


def test_a_network_of_ipv6_is_one_peer_and_who_works_is_never_closed() -> None:
    connections, closed = Connections(SMALL), list[int]()
    places = [connections.enter((f"2001:db8::{n:x}", 1, 0, 0), lambda n=n: closed.append(n)) for n in range(12)]
    for place in places:
        assert place is not None
        connections.works(place)
    assert connections.enter(("2001:db8::ffff", 1, 0, 0), lambda: None) is None and not closed
    assert connections.enter(("2001:db8:0:1::1", 1, 0, 0), lambda: None) is not None


class Echo:
    """Answers with the size of what it was given."""

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        if path == "/raise":
            raise RuntimeError("of one request")
        return 200, str(len(content)).encode()


def refuses(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes] | None:
    return (401, b"no") if path == "/locked" else None


@asynccontextmanager
async def served(bounds: ServerBounds) -> AsyncGenerator[int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: listen(Echo(), [listener], bounds=bounds, refuses=refuses))
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def ask(port: int, request: bytes) -> bytes:
    """All that a server answers until it closes, or has answered whole."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    got = b""
    with trio.fail_after(30):
        async with stream:
            await stream.send_all(request)
            while data := await stream.receive_some(65_536):
                got += data
                if got.endswith(b"\r\n\r\n0"):
                    break
    return got


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_idle_and_half_connections_do_not_starve_a_server() -> None:
    async with served(SMALL) as port, AsyncExitStack() as stack:
        for number in range(200):
            stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
            if number % 2:
                await stream.send_all(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx")
        assert await ask(port, HEALTH) == b"HTTP/1.1 200 Answer\r\ncontent-length: 1\r\n\r\n0"


@each_case(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 5_000_000, 431),
        (b"GET /" + b"x" * 5_000_000, 414),
        (b"POST / HTTP/1.1\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 500_000, 413),
        (b"POST /locked HTTP/1.1\r\ncontent-length: 9000\r\n\r\n", 401),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 400),
        (b"HELO x\r\n", 400),
    ],
)
async def test_who_sends_too_much_is_told_and_the_others_are_served(request_: bytes, status: int) -> None:
    async with served(SMALL) as port:
        try:
            got = await ask(port, request_)
        except trio.BrokenResourceError:  # it is still sending
            got = b""
        assert got.startswith(f"HTTP/1.1 {status} ".encode()) or (not got and len(request_) > 1 << 20)
        if got and status != 401:
            assert json.loads(got.rpartition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert await ask(port, b"GET /raise HTTP/1.1\r\n\r\n") == b""
        assert (await ask(port, HEALTH)).endswith(b"\r\n\r\n0")


async def test_a_client_that_wants_the_connection_closed_has_it_closed() -> None:
    async with served(SMALL) as port:
        got = await ask(port, b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nab")
        assert got == b"HTTP/1.1 200 Answer\r\nconnection: close\r\ncontent-length: 1\r\n\r\n2"


@pytest.mark.parametrize(
    ("sent", "left_s"), [(b"", 600), (b"GET /", 30), (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx", 60)]
)
async def test_a_connection_that_owes_a_request_is_closed_in_time(
    sent: bytes, left_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """However often it sends one byte more."""
    autojump_clock.autojump_threshold = 0.05  # real sockets carry what is said
    async with served(SMALL) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        started = trio.current_time()
        async with stream:
            await stream.send_all(sent)

            async def drip() -> None:
                while sent:
                    await trio.sleep(10)
                    await stream.send_all(b"x")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(drip)
                with suppress(trio.BrokenResourceError):
                    assert await stream.receive_some() == b""
                nursery.cancel_scope.cancel()
        assert left_s <= trio.current_time() - started <= left_s + 11
