"""The allow list holds for every hop; sizes and time are bounded."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import httpx
import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.errors import ToolError, ToolTimeout, UsageError
from agentrl_tools.fetch import HttpFetch


def served(asked: list[str]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        match request.url.path:
            case "/page":
                return httpx.Response(200, stream=httpx.ByteStream(b"hello \xff"))
            case "/out":
                return httpx.Response(302, headers={"location": "http://evil.example.net/secret"})
            case "/in":
                return httpx.Response(302, headers={"location": "/page"})
            case "/loop":
                return httpx.Response(302, headers={"location": "/loop"})
            case "/big":
                return httpx.Response(200, stream=httpx.ByteStream(b"x" * 100_000))
            case _:
                return httpx.Response(404, stream=httpx.ByteStream(b"nothing here"))

    return httpx.MockTransport(answer)


async def test_page_and_redirect_inside() -> None:
    asked: list[str] = []
    fetch = HttpFetch(["docs.example.org"], transport=served(asked))
    assert (await fetch.call({"url": "https://docs.example.org/page"})).content == "hello \\xff"
    assert (await fetch.call({"url": "http://DOCS.example.org/in"})).content == "hello \\xff"
    result = await fetch.call({"url": "https://docs.example.org/x"})
    assert result.is_error and result.content.startswith("HTTP 404")


@each_case(
    "url",
    [
        "http://other.example.org/page",
        "http://docs.example.org.evil.net/page",
        "http://docs.example.org:8080/page",
        "http://docs.example.org@evil.net/page",
        "http://user:password@docs.example.org/page",
        "ftp://docs.example.org/page",
        "file:///etc/passwd",
        "//docs.example.org/page",
        "http://[::1/page",
        "http://docs.example.org:99999999/page",
        "http:///page",
        "",
    ],
)
async def test_anything_else_is_refused_unasked(url: str) -> None:
    asked: list[str] = []
    with pytest.raises(ToolError):
        await HttpFetch(["docs.example.org"], transport=served(asked)).call({"url": url})
    assert asked == []


async def test_redirect_to_elsewhere_is_not_followed() -> None:
    asked: list[str] = []
    with pytest.raises(ToolError, match=r"evil\.example\.net is not on the list"):
        await HttpFetch(["docs.example.org"], transport=served(asked)).call({"url": "http://docs.example.org/out"})
    assert asked == ["http://docs.example.org/out"]
    with pytest.raises(ToolError, match="redirects"):
        await HttpFetch(["docs.example.org"], transport=served(asked)).call({"url": "http://docs.example.org/loop"})


@each_case(
    "url",
    ["http://docs.example.org../", f"http://{'a' * 64}.example.org/", "http://a..example.org/", "http://\u200d.a/"],
)
async def test_a_host_that_cannot_be_looked_up_is_an_error_that_the_model_reads(url: str) -> None:
    with pytest.raises(ToolError, match="cannot fetch"):
        await HttpFetch(["docs.example.org", "*.example.org", "*.a"]).call({"url": url})


async def test_a_redirect_to_what_is_no_address_is_an_error_that_the_model_reads() -> None:
    for location in ("http://[bad", "//[", "http://docs.example.org:99999/", "/\x01"):
        moved = httpx.MockTransport(lambda _, to=location: httpx.Response(302, headers={"location": to}))
        with pytest.raises(ToolError, match=r"Invalid|not an address|fetch"):
            await HttpFetch(["docs.example.org"], transport=moved).call({"url": "http://docs.example.org/"})


async def test_size_is_bounded_and_flagged() -> None:
    fetch = HttpFetch(["*.example.org"], fetch_bytes=1000, output_bytes=5000, transport=served([]))
    result = await fetch.call({"url": "http://a.example.org/big"})
    assert result.truncated and len(result.content) < 1100


async def test_ports_must_be_named() -> None:
    fetch = HttpFetch(["localhost:8080"], transport=served([]))
    assert (await fetch.call({"url": "http://localhost:8080/page"})).content == "hello \\xff"
    with pytest.raises(ToolError):
        await fetch.call({"url": "http://localhost/page"})


async def test_slow_server_is_given_up(autojump_clock: MockClock) -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await trio.sleep_forever()
        raise AssertionError

    fetch = HttpFetch(["slow.example.org"], timeout_s=3.0, transport=httpx.MockTransport(never))
    with pytest.raises(ToolTimeout):
        await fetch.call({"url": "http://slow.example.org/"})


def test_one_host_is_a_list_of_one() -> None:
    with pytest.raises(UsageError, match=r"^allow = 'docs.python.org': give a list of hosts$"):
        HttpFetch("docs.python.org")


def packed(encoding: str, body: bytes) -> HttpFetch:
    headers = {"content-encoding": encoding}

    def answer(request: httpx.Request) -> httpx.Response:
        assert "zstd" not in request.headers["accept-encoding"] and "br" not in request.headers["accept-encoding"]
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))

    return HttpFetch(["docs.example.org"], transport=httpx.MockTransport(answer))


async def test_a_packed_body_is_unpacked_no_further_than_the_bound() -> None:
    body = gzip.compress(b"x" * (40 << 20))
    tracemalloc.start()
    try:
        result = await packed("gzip", body).call({"url": "https://docs.example.org/"})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert result.truncated and result.content.startswith("xxx")


async def test_packed_bodies_are_read_and_unknown_packing_is_an_error_that_the_model_reads() -> None:
    url, hello = {"url": "https://docs.example.org/"}, b"hello"
    for encoding, body in (("gzip", gzip.compress(hello)), ("deflate", zlib.compress(hello)), ("identity", hello)):
        assert (await packed(encoding, body).call(url)).content == "hello"
    short = gzip.compress(b"x" * 99)[:-12]
    for encoding, body in (("zstd", b"\x28\xb5\x2f\xfd"), ("gzip, gzip", b"x"), ("gzip", b"no gzip"), ("gzip", short)):
        with pytest.raises(ToolError, match=r"packed|unpack"):
            await packed(encoding, body).call(url)
