"""What a scoring client sends, what it waits for and how it fails, against answers written out by hand."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import EngineError, EngineTimeout, ScoreError
from agentrl.records import Message
from agentrl.testing.scoring import FakeScoring

HELLO: list[Message] = [{"role": "user", "content": "hello"}]
Handler = Callable[[httpx.Request], httpx.Response]


def answering(handler: Handler, **settings: Any) -> ScoringClient:
    return ScoringClient("http://judge", transport=httpx.MockTransport(handler), **settings)


async def test_what_is_sent_and_read() -> None:
    fake = FakeScoring("fine", outputs=(0.25, -3.5))
    client = ScoringClient("http://judge:8000/v1/", model="scorer", transport=fake)
    assert await client.classify("a text") == (0.25, -3.5)
    assert await client.classify((5, 6, 7), activation=True) == (0.25, -3.5)
    assert await client.classify_chat(HELLO) == (0.25, -3.5)
    assert await client.chat(HELLO, max_tokens=9) == "fine"
    assert await client.chat(HELLO, schema={"type": "integer"}) == "fine"
    schema = {"name": "answer", "strict": True, "schema": {"type": "integer"}}
    assert fake.requests == [
        ("/classify", {"model": "scorer", "input": "a text", "use_activation": False}),
        ("/classify", {"model": "scorer", "input": [5, 6, 7], "use_activation": True}),
        ("/classify", {"model": "scorer", "messages": HELLO, "use_activation": False}),
        ("/v1/chat/completions", {"model": "scorer", "messages": HELLO, "max_tokens": 9}),
        (
            "/v1/chat/completions",
            {
                "model": "scorer",
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": schema},
            },
        ),
    ]


@pytest.mark.parametrize(("key", "shown"), [("secret", "Bearer secret"), (None, None)])
async def test_a_key_is_shown_only_where_one_is_given(key: str | None, shown: str | None) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers.get("authorization") == shown
        assert str(request.url) == "http://judge/classify"
        assert "model" not in json.loads(request.content)
        return httpx.Response(200, json={"data": [{"probs": [1]}]})

    assert await answering(handler, api_key=key).classify("x") == (1.0,)


@pytest.mark.parametrize("failure", [500, 503, 429, 408, "refused"])
async def test_what_passes_is_asked_again(failure: int | str, autojump_clock: MockClock) -> None:
    calls: list[float] = []

    def handler(_: httpx.Request) -> httpx.Response:
        calls.append(trio.current_time())
        if len(calls) < 4:
            if isinstance(failure, str):
                raise httpx.ConnectError(failure)
            return httpx.Response(failure, text="busy")
        return httpx.Response(200, json={"data": [{"probs": [2.0]}]})

    assert await answering(handler).classify("x") == (2.0,)
    start = calls[0]
    assert [at - start for at in calls] == pytest.approx([0.0, 0.25, 0.75, 1.75])


async def test_pauses_stop_growing_and_the_deadline_ends_them(autojump_clock: MockClock) -> None:
    calls: list[float] = []

    def handler(_: httpx.Request) -> httpx.Response:
        calls.append(trio.current_time())
        return httpx.Response(503, text="loading")

    start = trio.current_time()
    with pytest.raises(
        EngineTimeout, match=r"did not answer /classify within 30 s; the last attempt: .* answered 503: loading"
    ):
        await answering(handler, deadline_s=30.0).classify("x")
    assert trio.current_time() - start == pytest.approx(30.0)
    pauses = [after - before for before, after in itertools.pairwise(calls)]
    assert pauses == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 8])


async def test_a_refusal_is_final() -> None:
    calls: list[int] = []

    def handler(_: httpx.Request) -> httpx.Response:
        calls.append(1)
        return httpx.Response(404, json={"error": {"message": "no such model"}})

    with pytest.raises(EngineError, match="answered 404: no such model"):
        await answering(handler).classify("x")
    assert len(calls) == 1


@each_case(
    "answer",
    [{}, {"data": []}, {"data": [{}]}, {"data": [{"probs": ["high"]}]}, {"data": [{"probs": [1]}, {"probs": [2]}]}],
)
async def test_another_answer_is_no_classification(answer: Any) -> None:
    with pytest.raises(ScoreError, match="gave no classification"):
        await answering(lambda _: httpx.Response(200, json=answer)).classify("x")


@each_case("answer", [{}, {"choices": []}, {"choices": [{"text": "x"}]}, {"choices": [{"message": 3}]}])
async def test_another_answer_is_no_chat(answer: Any) -> None:
    with pytest.raises(ScoreError, match="gave no chat completion"):
        await answering(lambda _: httpx.Response(200, json=answer)).chat(HELLO)


async def test_a_model_that_only_thought_said_nothing() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "reasoning": "hm"}}]}
    assert await answering(lambda _: httpx.Response(200, json=answer)).chat(HELLO) == ""


class Slow(httpx.AsyncBaseTransport):
    """Takes a second a call and counts how many run at once."""

    running = most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(1.0)
        finally:
            self.running -= 1
        return httpx.Response(200, json={"data": [{"probs": [0.0]}]})


async def test_so_many_at_once_and_the_wait_counts(autojump_clock: MockClock) -> None:
    slow = Slow()
    client = ScoringClient("http://judge", concurrency=2, deadline_s=2.5, transport=slow)
    ends: list[float | None] = []

    async def one() -> None:
        try:
            await client.classify("x")
        except EngineTimeout:
            ends.append(None)
        else:
            ends.append(trio.current_time())

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(one)
    assert slow.most == 2
    done = [end - start for end in ends if end is not None]
    assert done == pytest.approx([1.0, 1.0, 2.0, 2.0]) and ends.count(None) == 2
    assert trio.current_time() - start == pytest.approx(2.5)


class Server:
    """Counts the connections of a client that keeps them."""

    def __init__(self) -> None:
        self.connections = 0
        self.gone = trio.Event()

    async def __call__(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        body = json.dumps({"data": [{"probs": [4.0]}]}).encode()
        async for data in stream:
            if data.endswith(b"}"):  # our requests' bodies do
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                await stream.send_all(head.encode() + body)
        self.gone.set()


def test_one_client_serves_loop_after_loop_and_its_connections_end_with_each() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        client = ScoringClient(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline_s=60.0)

        async def serve(server: Server) -> None:
            listening.listen()
            copy = trio.socket.from_stdlib_socket(listening.dup())
            await trio.serve_listeners(server, [trio.SocketListener(copy)])

        async def ask() -> None:
            assert await client.classify("x") == (4.0,)
            assert await client.classify("y") == (4.0,)

        async def main() -> None:
            server = Server()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, server)
                for _ in range(2):  # each in a loop of its own, with a thread
                    await trio.to_thread.run_sync(trio.run, ask)
                    with trio.fail_after(60):
                        await server.gone.wait()
                    server.gone = trio.Event()
                nursery.cancel_scope.cancel()
            assert server.connections == 2

        trio.run(main)
