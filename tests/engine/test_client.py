"""The client's parsing and naming of failures, against answers written out by hand."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Callable

import httpx
import numpy as np
import pytest
import trio
from each_case import each_case

from agentrl.engine.client import EngineClient
from agentrl.engine.generation import Stitcher
from agentrl.errors import ConfigError, EngineBroke, EngineError, EngineRefusal, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import RoutedExperts, SamplingParams, VersionSpan, spans_of

UNSOUND = (b"null", b"NaN", b"-9999.0", b"-Infinity", b"0.5", b"true", b'"-0.3"', b"1" + b"0" * 400)


def ask(**changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(1,))
    fields = {"request_id": "r", "session": "s", "token_ids": (5, 6), "sampling": sampling, **changes}
    return GenerateRequest(**fields)  # pyright: ignore[reportArgumentType]


def event(tokens: list[int], *, finish: str | None = None, spans: list[tuple[str, int, int]] | None = None) -> bytes:
    choice: dict[str, object] = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -t / 10} for t in tokens]},
        "finish_reason": finish,
    }
    if spans is not None:
        choice["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n"


class Body(httpx.AsyncByteStream):
    """A response body in pieces; an exception among them is raised in its place."""

    def __init__(self, *parts: bytes | Exception | float) -> None:
        self.parts, self.closed = parts, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                await trio.sleep(part)
            else:
                yield part

    async def aclose(self) -> None:
        self.closed = True


def client_of(body: Body, status: int = 200) -> EngineClient:
    return client_with(lambda _: httpx.Response(status, stream=body))


def client_with(handler: Callable[[httpx.Request], httpx.Response]) -> EngineClient:
    return EngineClient("http://engine/", transport=httpx.MockTransport(handler))


async def test_versions_in_every_chunk_are_taken_as_they_are() -> None:
    body = Body(
        event([3, 4], spans=[("default", 0, 2)]),
        event([5, 1], finish="stop", spans=[("default", 2, 3), ("7", 3, 4)]),
        b"data: [DONE]\n\n",
    )
    generation = await client_of(body).generate(ask())
    assert generation.token_ids == (3, 4, 5, 1)
    assert generation.logprobs == (-0.3, -0.4, -0.5, -0.1)
    assert generation.spans == (VersionSpan(0, 0, 3), VersionSpan(7, 3, 4))
    assert generation.finish == "stop"


async def test_versions_stamped_only_at_the_end_replace_the_assumed_ones() -> None:
    body = Body(event([3, 4]), event([5]), event([6], finish="length", spans=[("2", 0, 3), ("3", 3, 4)]))
    client = client_of(body)
    client.version = 1
    chunks = [chunk async for chunk in client.stream(ask())]
    assert chunks[0].spans == (VersionSpan(1, 0, 2),)
    stitcher = Stitcher()
    for chunk in chunks:
        stitcher.add(chunk)
    assert stitcher.generation("length").spans == (VersionSpan(2, 0, 3), VersionSpan(3, 3, 4))


async def test_a_last_event_without_tokens_still_stamps_and_finishes() -> None:
    body = Body(event([3, 4]), event([], finish="stop", spans=[("9", 0, 2)]))
    assert (await client_of(body).generate(ask())).spans == (VersionSpan(9, 0, 2),)


async def test_stop_texts_are_sent() -> None:
    seen: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content)["sampling_params"])
        return httpx.Response(200, stream=Body(event([1], finish="stop", spans=[("0", 0, 1)])))

    await client_with(handler).generate(ask(sampling=SamplingParams(max_tokens=8, stop=("</call>", "\n\n"))))
    assert seen[0]["stop"] == ["</call>", "\n\n"]


async def test_events_cut_anywhere_are_put_together() -> None:
    text = event([3], spans=[("1", 0, 1)]) + event([4], finish="stop", spans=[("1", 1, 2)]) + b"data: [DONE]\n\n"
    body = Body(*(text[i : i + 7] for i in range(0, len(text), 7)))
    assert (await client_of(body).generate(ask())).token_ids == (3, 4)


def with_experts(array: np.ndarray) -> bytes:
    saved = io.BytesIO()
    np.save(saved, array)
    event_of = json.loads(event([9, 1], finish="stop", spans=[("0", 0, 2)])[6:])
    event_of["choices"][0]["routed_experts"] = base64.b64encode(saved.getvalue()).decode()
    return b"data: " + json.dumps(event_of).encode() + b"\n\n"


async def test_the_experts_of_a_request_come_with_its_last_token() -> None:
    """Context 5 6, sampled 3 4 | 9 1: asked from token 1 on, those of 6 3 4 9."""
    array = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2)
    body = Body(event([3, 4]), with_experts(array))
    generation = await client_of(body).generate(ask(experts_from=1))
    told = generation.experts
    assert told == RoutedExperts(start=1, layers=2, per_token=2, width=1, data=bytes(range(16)))
    assert told.end == 5
    wide = await client_of(Body(event([3, 4]), with_experts(array + 300))).generate(ask(experts_from=1))
    assert wide.experts is not None
    assert (wide.experts.width, np.frombuffer(wide.experts.data, "<u2").tolist()) == (2, list(range(300, 316)))


@each_case("array", [np.zeros((3, 2, 2), np.uint8), np.zeros((4, 2)), np.full((4, 2, 2), -1)])
async def test_experts_that_are_not_those_asked_for_are_refused(array: np.ndarray) -> None:
    with pytest.raises(EngineError, match=r"the engine's experts are .* not those of tokens 1 to 4"):
        await client_of(Body(event([3, 4]), with_experts(array))).generate(ask(experts_from=1))


async def test_an_engine_that_names_no_experts_is_refused_if_asked_for_them() -> None:
    body = Body(event([3], finish="stop", spans=[("0", 0, 1)]))
    with pytest.raises(EngineError, match="does not say which experts"):
        await client_of(body).generate(ask(experts_from=0))


async def test_what_is_sent() -> None:
    seen: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        assert str(request.url) == "http://engine/inference/v1/generate"
        return httpx.Response(200, stream=Body(event([1], finish="stop", spans=[("0", 0, 1)])))

    await client_with(handler).generate(ask())
    params = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "logprobs": 0}
    params |= {"stop_token_ids": [1]}
    assert seen == [{"request_id": "r", "token_ids": [5, 6], "sampling_params": params, "stream": True}]


@each_case(
    ("body", "status", "error", "words"),
    [
        (Body(event([3])), 200, EngineBroke, "before its end"),
        (Body(event([3]), httpx.ReadError("reset")), 200, EngineBroke, "reset"),
        (Body(b'{"error": {"message": "too long"}}'), 400, EngineRefusal, "answered 400: too long"),
        (Body(b"Not Found"), 404, EngineBroke, "answered 404: Not Found"),
        (Body(b"busy"), 503, EngineUnavailable, "answered 503: busy"),
        (Body(b"Internal Server Error"), 500, EngineBroke, "answered 500: Internal Server Error"),
        (Body(b'data: {"error": {"message": "engine died"}}\n\n'), 200, EngineBroke, "engine died"),
        (Body(b"data: {nonsense\n\n"), 200, EngineBroke, "not JSON"),
        (Body(b"data: " + b"[" * 100_000 + b"\n\n"), 200, EngineBroke, "not JSON"),
        (Body(b'data: {"choices": [7]}\n\n'), 200, EngineBroke, "unknown shape"),
        (Body(b'data: {"choices": {"0": 7}}\n\n'), 200, EngineBroke, "unknown shape"),
        (Body(event([3], spans=[("seven", 0, 1)])), 200, EngineBroke, "seven"),
        (Body(event([3], finish="stop", spans=[("1", 0, 5)])), 200, EngineBroke, "outside"),
        (Body(event([3, 4], spans=[("1", 0, 1)])), 200, EngineBroke, "no weight version of some"),
        (Body(event([-3])), 200, EngineBroke, "token ids"),
        (Body(event([3]).replace(b"logprob", b"other")), 200, EngineBroke, "log-probs"),
        *((Body(event([3]).replace(b"-0.3", bad)), 200, EngineBroke, "as the log-prob of token 0") for bad in UNSOUND),
    ],
)
async def test_failures_have_one_name_and_one_line(
    body: Body, status: int, error: type[EngineError], words: str
) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        await client_of(body, status).generate(ask())
    assert type(caught.value) is error
    if status != 200:
        assert (caught.value.url, caught.value.status) == ("http://engine", status) and caught.value.reason in words
    assert "\n" not in str(caught.value)
    assert body.closed


async def test_a_token_beyond_the_vocabulary_is_an_engine_that_broke() -> None:
    handler = httpx.MockTransport(lambda _: httpx.Response(200, stream=Body(event([9, 10], finish="stop"))))
    assert (await EngineClient("http://engine", vocabulary=11, transport=handler).generate(ask())).token_ids == (9, 10)
    with pytest.raises(EngineBroke, match="token 10, and the model has 10"):
        await EngineClient("http://engine", vocabulary=10, transport=handler).generate(ask())


async def test_what_was_received_before_a_failure_is_not_lost() -> None:
    got: list[Chunk] = []
    with pytest.raises(EngineUnavailable):
        async for chunk in client_of(Body(event([3, 4]), httpx.ReadError("gone"))).stream(ask()):
            got.append(chunk)
    assert [chunk.token_ids for chunk in got] == [(3, 4)]


async def test_the_deadline_holds_over_the_whole_stream(autojump_clock: trio.testing.MockClock) -> None:
    body = Body(event([3]), 6.0, event([4]), 6.0, event([5], finish="stop"))
    with pytest.raises(EngineTimeout, match="within 10 s"):
        await client_of(body).generate(ask(deadline_s=10.0))
    assert trio.current_time() == pytest.approx(10.0)
    assert body.closed


async def test_a_finished_turn_does_not_wait_for_a_connection_that_hangs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    body = Body(event([3], finish="stop", spans=[("1", 0, 1)]), 1000.0)
    assert (await client_of(body).generate(ask())).token_ids == (3,)
    assert trio.current_time() < 5


async def test_leaving_a_stream_closes_it() -> None:
    body = Body(event([3]), event([4]))
    stream = client_of(body).stream(ask())
    await anext(stream)
    await stream.aclose()
    assert body.closed


@each_case(
    ("changes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop": ("",)}, "stop"),
    ],
)
async def test_impossible_sampling_is_refused_before_anything_is_sent(changes: dict[str, object], field: str) -> None:
    def nobody(_: httpx.Request) -> httpx.Response:
        raise AssertionError("nothing should be sent")

    sampling = SamplingParams(**{"max_tokens": 4, **changes})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"sampling.{field}"):
        await client_with(nobody).generate(ask(sampling=sampling))


async def test_metrics_are_read_by_name() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:ttft_bucket{le="1"} 5\nplain 1e3\n'
    )
    client = client_with(lambda _: httpx.Response(200, text=text))
    assert await client.metrics() == {"vllm:num_requests_running": 7.0, "plain": 1000.0}


def test_equal_versions_join() -> None:
    assert spans_of([3, 3, 4]) == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert spans_of([]) == ()


def test_where_a_new_request_went_on_is_told_where_it_is_news() -> None:
    one = VersionSpan(3, 0, 3), VersionSpan(4, 3, 5)
    assert spans_of([3, 3, 3, 4, 4], {2}) == one, "all that was computed anew had version 3 already"
    assert spans_of([3, 3, 3, 4, 4], {3}) == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 5, recomputed=True))
    two = VersionSpan(3, 0, 3), VersionSpan(4, 3, 4), VersionSpan(4, 4, 5, recomputed=True)
    assert spans_of([3, 3, 3, 4, 4], {1, 4}) == two
    assert spans_of([3, 4, 4, 4], {2, 3}) == (*spans_of([3, 4]), VersionSpan(4, 2, 4, recomputed=True))
