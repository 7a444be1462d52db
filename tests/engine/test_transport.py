"""The transport against a scripted server on a real socket: connections kept, deadlines, httpx's errors."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
from each_case import each_case

from agentrl.engine.http_client import TrioTransport, _Connection, _Door, socket_of

Handler = Callable[[trio.SocketStream, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def read_request(stream: trio.SocketStream) -> bytes | None:
    """One request with its content-length body; None when the client closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some()
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += await stream.receive_some()
    return body


async def echo_ok(stream: trio.SocketStream, _: int) -> None:
    while await read_request(stream) is not None:
        await stream.send_all(OK)


async def unsaid_length() -> AsyncIterator[bytes]:
    yield b"a body in parts"


def pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    """The two ends of a connection."""
    one, other = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair())
    return one, other


@asynccontextmanager
async def serving(handler: Handler, **settings: float) -> AsyncIterator[tuple[httpx.AsyncClient, list[int]]]:
    """A client of a server that runs `handler(stream, number)` for each connection; the list counts them."""
    connections: list[int] = []

    async def accept(stream: trio.SocketStream) -> None:
        connections.append(len(connections))
        async with stream:
            await handler(stream, connections[-1])

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, accept, listeners)
        port = listeners[0].socket.getsockname()[1]
        transport = TrioTransport(**settings)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, connections
        nursery.cancel_scope.cancel()


async def test_requests_in_turn_share_one_connection() -> None:
    async with serving(echo_ok) as (client, connections):
        for _ in range(5):
            assert (await client.post("/", content=b"x" * 100_000)).text == "ok"
        assert len(connections) == 1


async def test_requests_at_once_take_a_connection_each_and_keep_them() -> None:
    arrived, release = 0, trio.Event()

    async def together(stream: trio.SocketStream, _: int) -> None:
        nonlocal arrived
        while await read_request(stream) is not None:
            arrived += 1
            if arrived == 3:
                release.set()
            await release.wait()
            await stream.send_all(OK)

    async with serving(together) as (client, connections):
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(client.get, "/")
        assert len(connections) == 3


async def test_answers_that_come_at_once_do_not_hold_the_loop_up_at_once() -> None:
    door, passes, went_on = _Door(), 0, list[int]()
    pairs = [pair() for _ in range(200)]

    async def read(stream: trio.SocketStream) -> None:
        assert (await _Connection(stream, door).read_head(None))[0] == 200
        went_on.append(passes)

    for _, peer in pairs:
        await peer.send_all(OK)
    async with trio.open_nursery() as nursery:
        for ours, _ in pairs:
            nursery.start_soon(read, ours)
        while len(went_on) < len(pairs):
            passes += 1
            await trio.lowlevel.checkpoint()
    for one in (one for both in pairs for one in both):
        one.socket.close()
    most = 64  # those of two passes, as a pass has no order
    assert max(Counter(went_on).values()) <= most, "other tasks of the loop run in between"


async def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    closed = trio.Event()

    async def once(stream: trio.SocketStream, number: int) -> None:
        await read_request(stream)
        await stream.send_all(OK)
        if number == 0:
            await stream.aclose()
            closed.set()

    async with serving(once) as (client, connections):
        assert (await client.get("/")).status_code == 200
        await closed.wait()
        assert (await client.get("/")).status_code == 200
        assert len(connections) == 2


async def test_a_connection_is_not_kept_after_an_answer_of_failure() -> None:
    """uvicorn answers 500 without `connection: close` and closes behind it: the next request would race with that."""

    async def failing(stream: trio.SocketStream, number: int) -> None:
        while await read_request(stream) is not None:
            await stream.send_all(OK.replace(b"200 OK", b"500 Oh") if number == 0 else OK)

    async with serving(failing) as (client, connections):
        assert [(await client.get("/")).status_code for _ in range(3)] == [500, 200, 200]
        assert len(connections) == 2


async def test_an_idle_connection_is_trusted_only_so_long() -> None:
    async with serving(echo_ok, keepalive_s=0.0) as (client, connections):
        await client.get("/")
        await client.get("/")
        assert len(connections) == 2


async def test_a_body_streams_while_it_is_sent_and_leaving_it_closes_the_connection() -> None:
    left = trio.Event()

    async def chunks(stream: trio.SocketStream, _: int) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        assert await stream.receive_some() == b""  # the client has left; nothing ended the body
        left.set()

    async with serving(chunks) as (client, connections):
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"one"
        with trio.fail_after(60):
            await left.wait()
        assert len(connections) == 1


@each_case(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"NONSENSE\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, httpx.RemoteProtocolError),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", httpx.RemoteProtocolError),
        (OK + OK, httpx.RemoteProtocolError),  # the second would be taken for the answer to the next request
    ],
)
async def test_a_broken_answer_raises_httpx_errors(answer: bytes, error: type[Exception]) -> None:
    async def broken(stream: trio.SocketStream, _: int) -> None:
        await read_request(stream)
        await stream.send_all(answer)

    async with serving(broken) as (client, _):
        with pytest.raises(error):
            await client.get("/")


@each_case(
    ("answer", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nok", False),  # its end is the connection's
        (OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), False),
        (OK.replace(b"1.1", b"1.0"), False),
        (b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", True),
    ],
)
async def test_answers_end_where_they_say_and_connections_are_kept_where_they_may_be(answer: bytes, kept: bool) -> None:
    async def answering(stream: trio.SocketStream, _: int) -> None:
        while await read_request(stream) is not None:
            await stream.send_all(answer)
            if not kept:
                return

    async with serving(answering) as (client, connections):
        for _ in range(2):
            response = await client.get("/")
            assert response.text == "ok" and "x" not in response.headers
        assert len(connections) == (1 if kept else 2)


async def test_an_answer_reads_the_same_however_it_is_cut() -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx: y\r\n\r\n3\r\none\r\n4\r\n two\r\n0\r\n\r\n"

    async def rest(peer: trio.SocketStream, part: bytes) -> None:
        await trio.testing.wait_all_tasks_blocked()  # the first part was read
        await peer.send_all(part)

    for at in range(1, len(answer)):
        ours, peer = pair()
        connection, body = _Connection(ours, _Door()), b""
        await peer.send_all(answer[:at])
        async with ours, peer, trio.open_nursery() as nursery:
            nursery.start_soon(rest, peer, answer[at:])
            status, headers = await connection.read_head(None)
            while data := await connection.read_data(None):
                body += data
            assert (status, headers[1]) == (200, (b"x", b"y"))
            assert body == b"one two" and connection.reusable()


@each_case(
    ("method", "given"),
    [
        ("POST", {"headers": {"x": "a\r\nhost: elsewhere"}}),
        ("POST", {"headers": {"x": "a\n b"}}),
        ("HEAD", {}),
        ("POST", {"content": unsaid_length()}),
    ],
)
async def test_what_would_not_be_read_as_meant_is_not_sent(method: str, given: dict[str, object]) -> None:
    async with serving(echo_ok) as (client, _):
        with pytest.raises(httpx.LocalProtocolError):
            await client.request(method, "/", **given)  # pyright: ignore[reportArgumentType]
        assert (await client.get("/")).text == "ok"


async def test_nobody_listening_is_a_connect_error() -> None:
    with socket.socket() as held:  # and nobody else can
        held.bind(("127.0.0.1", 0))
        async with httpx.AsyncClient(transport=TrioTransport()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{held.getsockname()[1]}/")


async def test_a_silent_server_is_a_read_timeout(autojump_clock: trio.testing.MockClock) -> None:
    ours, peer = pair()
    connection = _Connection(ours, _Door())
    with pytest.raises(httpx.ReadTimeout):
        await connection.read_head(timeout_s=7.0)
    assert trio.current_time() == pytest.approx(7.0)
    connection.close()
    await peer.aclose()


async def test_a_unix_socket_is_a_server_as_any_and_a_full_queue_of_it_is_waited_for(tmp_path: Path) -> None:
    """The kernel refuses a connection at once while as many wait as may; over TCP it would wait by itself."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(64)]
        for one in waiting:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(str(path))
        asked: list[bytes] = []

        def serve() -> None:
            while not asked or not asked[-1]:
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        asked.append(accepted.recv(4096))
                    if asked and asked[-1]:
                        accepted.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        async with trio.open_nursery() as nursery:
            transport = TrioTransport(socket=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get("/", timeout=httpx.Timeout(None, connect=0.05))
                for one in waiting:
                    one.close()
                nursery.start_soon(trio.to_thread.run_sync, serve)
                assert (await client.get("/health", timeout=60)).text == "ok"
        assert asked[-1].startswith(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")


async def test_a_socket_that_is_not_there_is_a_connect_error(tmp_path: Path) -> None:
    async with httpx.AsyncClient(transport=TrioTransport(socket=str(tmp_path / "no")), base_url="http://e") as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")
    assert (socket_of("unix:///run/e.sock"), socket_of("http://h:1")) == ("/run/e.sock", None)
