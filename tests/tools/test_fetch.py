"""The allow list holds for every hop; sizes and time are bounded."""

from __future__ import annotations

import httpx
import pytest
import trio
from trio.testing import MockClock

from agentrl.errors import ToolError, ToolTimeout, UsageError
from agentrl_tools.fetch import HttpFetch


def served(asked: list[str]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        match request.url.path:
            case "/page":
                return httpx.Response(200, content=b"hello \xff")
            case "/out":
                return httpx.Response(302, headers={"location": "http://evil.example.net/secret"})
            case "/in":
                return httpx.Response(302, headers={"location": "/page"})
            case "/loop":
                return httpx.Response(302, headers={"location": "/loop"})
            case "/big":
                return httpx.Response(200, content=b"x" * 100_000)
            case _:
                return httpx.Response(404, content=b"nothing here")

    return httpx.MockTransport(answer)


async def test_page_and_redirect_inside() -> None:
    asked: list[str] = []
    fetch = HttpFetch(["docs.example.org"], transport=served(asked))
    assert (await fetch.call({"url": "https://docs.example.org/page"})).content == "hello \\xff"
    assert (await fetch.call({"url": "http://DOCS.example.org/in"})).content == "hello \\xff"
    result = await fetch.call({"url": "https://docs.example.org/x"})
    assert result.is_error and result.content.startswith("HTTP 404")


@pytest.mark.parametrize(
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
