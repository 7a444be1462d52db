"""The server of agent programs: hostile bytes on one connection cost that connection, and linear time."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
from each_case import each_case

from agentrl.env.agent_programs import model_endpoint, session
from agentrl.http import bounds as http_bounds

PATH = "/key/v1/chat/completions"


@asynccontextmanager
async def served() -> AsyncGenerator[str]:
    """The address of a server that sends the field `answer` of a request back; without one it cannot write."""

    async def handler(request: model_endpoint.Request) -> model_endpoint.Response:
        return model_endpoint.Response(200, model_endpoint.parsed(request.content).get("answer", {1}))  # type: ignore[arg-type]  # a set is no JSON

    address = await session.register("key", handler)
    try:
        yield address.removesuffix("/key")
    finally:
        await session.unregister("key")


async def post(address: str, data: bytes) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as client:
        return await client.post(PATH, content=data)


@each_case("data", [b"[" * 3_000, b"[", b"\xff", b"1" * 5_000, b"null"])
async def test_a_body_that_is_no_json_object_is_a_bad_request(data: bytes) -> None:
    async with served() as address:
        assert (await post(address, data)).status_code == 400
        assert (await post(address, b'{"answer": 1}')).json() == 1


async def test_what_goes_wrong_in_one_connection_ends_it_alone() -> None:
    async with served() as address:
        with pytest.raises(httpx.RemoteProtocolError):
            await post(address, b"{}")
        assert (await post(address, b'{"answer": 1}')).json() == 1


async def test_a_body_of_many_chunks_is_measured_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0

    def counting(value: bytes) -> int:
        nonlocal measured
        measured += len(value)
        return len(value)

    monkeypatch.setattr(http_bounds, "len", counting, raising=False)
    chunks = 500
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = "1\r\n \r\n" * chunks + 'd\r\n{"answer": 1}\r\n0\r\n\r\n'
    async with served() as address:
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        async with stream:
            await stream.send_all((head + body).encode())
            got = b"".join([piece async for piece in stream])
    assert json.loads(got.rpartition(b"\r\n")[2]) == 1
    assert measured <= 2 * len(head + body)


async def test_a_body_beyond_the_bound_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_BODY", 1_000)
    async with served() as address:
        answer = await post(address, b" " * 1_001)
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        assert (await post(address, b'{"answer": 1}')).json() == 1


async def test_without_the_key_no_body_is_read() -> None:
    """The head is answered while the body, of which nothing was sent, would still be waited for."""
    async with served() as address:
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        async with stream:
            head = "POST /wrong/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67000000\r\n\r\n"
            await stream.send_all(head.encode())
            with trio.fail_after(60):
                got = await stream.receive_some(1_000)
    assert got.startswith(b"HTTP/1.1 404 ") and b"no such episode" in got


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with served() as address:
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        async with stream:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 13\r\n\r\n"
            await stream.send_all(head.encode())
            with trio.fail_after(60):
                assert await stream.receive_some(1_000) == b"HTTP/1.1 100 Continue\r\n\r\n"
                await stream.send_all(b'{"answer": 1}')
                assert (await stream.receive_some(1_000)).endswith(b"\r\n\r\n1")
