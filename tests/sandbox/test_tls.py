"""A TLS stream ends its own direction alone, and takes no cut connection for an end."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from agentrl.sandbox.docker.engine_address import TlsStream

from .certificates import Authority

HOST = "127.0.0.1"
MEGABYTE = bytes(range(256)) * 4096


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a client, and of the server that it trusts."""
    Authority("the CA of the tests").issue(tmp_path, HOST)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return ssl.create_default_context(cafile=tmp_path / "ca.pem"), server


async def talk(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], serve: Callable[[trio.SSLStream[trio.abc.Stream]], Awaitable[None]]
) -> bytes:
    """What a client receives that sends a megabyte and ends its direction."""
    near, far = trio.testing.memory_stream_pair()
    client = TlsStream(near, contexts[0], HOST)
    server = trio.SSLStream[trio.abc.Stream](far, contexts[1], server_side=True)
    received = b""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, server)
            await client.handshake()
            await client.send_all(MEGABYTE)
            await client.send_eof()
            while part := await client.receive_some(1000):
                received += part
    return received


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_answer_arrives_after_our_direction_has_ended(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], version: ssl.TLSVersion
) -> None:
    contexts[0].minimum_version = contexts[0].maximum_version = version
    heard = bytearray()

    async def serve(stream: trio.SSLStream[trio.abc.Stream]) -> None:
        while part := await stream.receive_some():
            heard.extend(part)
        await stream.send_all(MEGABYTE[::-1])
        await stream.aclose()

    assert await talk(contexts, serve) == MEGABYTE[::-1]
    assert heard == MEGABYTE


async def test_a_connection_that_is_cut_has_not_ended(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def serve(stream: trio.SSLStream[trio.abc.Stream]) -> None:
        while await stream.receive_some():
            pass
        await stream.send_all(b"the first half")
        await stream.transport_stream.aclose()

    with pytest.raises(ExceptionGroup) as caught:
        await talk(contexts, serve)
    assert caught.group_contains(trio.BrokenResourceError, match="EOF")


async def test_a_server_of_another_authority_is_not_spoken_with(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    Authority("another").issue(tmp_path / "other", HOST)
    stranger = ssl.create_default_context(cafile=tmp_path / "other" / "ca.pem")

    async def serve(stream: trio.SSLStream[trio.abc.Stream]) -> None:
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()

    with pytest.raises(ExceptionGroup) as caught:
        await talk((stranger, contexts[1]), serve)
    assert caught.group_contains(ssl.SSLCertVerificationError)
