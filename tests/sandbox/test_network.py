"""The way out of a closed box: what setup may fetch, and every way around the policy that we could think of."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case

from agentrl.errors import ConfigError
from agentrl.protocols import Limits, NetworkPolicy, Sandbox, SandboxSpec
from agentrl.sandbox import network_policy
from agentrl.sandbox.bubblewrap.backend import Bubblewrap
from agentrl.sandbox.docker.backend import Docker
from agentrl.sandbox.network_policy import Network, opened

from . import certificates
from .conftest import IMAGE, docker_engine  # noqa: F401  (a fixture)

LARGE = bytes(range(256)) * 8_000  # two megabytes, more than any buffer on the way
FETCH = "import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=60).read())"


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.long])])
async def box(request: pytest.FixtureRequest) -> AsyncGenerator[Sandbox]:
    backend: Any = Bubblewrap()
    if request.param == "docker":
        backend = Docker(image=IMAGE, base_url=request.getfixturevalue("docker_engine"))
    limits = Limits(wall_s=120.0, cpu_s=60.0, memory_bytes=1 << 30, output_bytes=4 << 20)
    yield await backend.create(SandboxSpec(limits=limits))
    await backend.aclose()


pytestmark = pytest.mark.bubblewrap


@pytest.fixture
async def server(nursery: trio.Nursery) -> tuple[int, list[bytes]]:
    """An HTTP server of this machine: its port, and the heads of its requests."""
    heads: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := await stream.receive_some()):
                    return
                head += data
            heads.append(head)
            body = LARGE if b"/large" in head else b"fetched"
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    return listeners[0].socket.getsockname()[1], heads


def named(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Names that resolve here, `_` for a dot; all others do not."""
    known = {name.replace("_", "."): address for name, address in addresses.items()}

    async def getaddrinfo(host: Any, port: int, **_: Any) -> list[Any]:
        with_address = known.get(host, host)
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in with_address else socket.AF_INET, with_address)
        except OSError:
            raise socket.gaierror(f"no {host}") from None
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (with_address, port))]

    monkeypatch.setattr(network_policy.trio.socket, "getaddrinfo", getaddrinfo)


async def fetched(way: Network, box: Sandbox, url: str) -> tuple[int, bytes, bytes]:
    result = await way.exec(box, ["python3", "-c", FETCH, url])
    return result.exit_code, result.stdout, result.stderr[-300:]


async def spoken(way: Network, box: Sandbox, said: bytes) -> bytes:
    """What the proxy answers a client that writes bytes of its own."""
    client = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', 3128)); s.settimeout(60)\n"
        "data = bytes.fromhex(sys.argv[1]); s.sendall(data)\n"
        "while (got := s.recv(65536)): sys.stdout.buffer.write(got)"
    )
    return (await way.exec(box, ["python3", "-c", client, said.hex()])).stdout


@pytest.mark.medium
@pytest.mark.parametrize(
    "box", ["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])], indirect=True
)
async def test_setup_fetches_what_is_allowed_and_the_agent_nothing(
    box: Sandbox, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heads = server
    named(monkeypatch, registry_example="127.0.0.1")
    policy = NetworkPolicy(allow=[f"registry.example:{port}"], private=True)
    async with opened(box, policy) as way:
        url = f"http://registry.example:{port}"
        assert await fetched(way, box, f"{url}/pkg?v=1") == (0, b"fetched", b"")
        assert (await fetched(way, box, f"{url}/large"))[:2] == (0, LARGE)
        assert (await way.exec(box, ["no-such-program"])).exit_code == 127
        assert (await way.exec(box, ["sh", "-c", "exit 3"])).exit_code == 3
    assert heads[0].startswith(b"GET /pkg?v=1 HTTP/1.1\r\nhost: registry.example:") and b"close" in heads[0]
    assert [(each.host, each.refused) for each in way.requests] == [("registry.example", "")] * 2
    assert way.requests[1].received > len(LARGE) and (way.total, way.refused) == (2, 0)
    # after the phase: the proxy's address, its socket, and the variables lead nowhere
    code, out, _ = await fetched(way, box, f"{url}/late")
    assert code != 0 and b"fetched" not in out
    find = await box.exec(["sh", "-c", "ps ax 2>/dev/null | grep -c '[n]etwork-'; ls /proc | grep -c '^[0-9]'"])
    assert find.stdout.split()[0] == b"0"
    assert len(heads) == 2


@pytest.mark.medium
@each_case(
    ("ask", "why"),
    [
        (b"GET http://other.example:{port}/ HTTP/1.1\r\n\r\n", "not among the hosts"),
        (b"GET http://registry.example:1/ HTTP/1.1\r\n\r\n", "not among the hosts"),
        (b"CONNECT other.example:{port} HTTP/1.1\r\n\r\n", "not among the hosts"),
        (b"GET http://registry.example:{port}/ HTTP/1.1\r\nHost: other.example\r\n\r\n", "Host header names another"),
        (
            b"GET http://registry.example:{port}/ HTTP/1.1\r\nHost: registry.example\r\nHost: other.example\r\n\r\n",
            "Host header names another",
        ),
        (b"GET http://registry.example:{port}@other.example/ HTTP/1.1\r\n\r\n", "only http:// and tunnels"),
        (b"GET https://registry.example:{port}/ HTTP/1.1\r\n\r\n", "only http:// and tunnels"),
        (b"CONNECT registry.example HTTP/1.1\r\n\r\n", "a target that is none"),
        (b"GET / HTTP/1.1\r\nHost: registry.example\r\n\r\n", "only http:// and tunnels"),
        (b"\x05\x01\x00\r\n\r\n", "no request to an HTTP proxy"),
        (b"GET http://registry.example:{port}/ HTTP/1.1\r\nHost : x\r\n\r\n", "a header that is none"),
        (b"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n", "not among the hosts"),
        (b"GET http://inside.example:{port}/ HTTP/1.1\r\n\r\n", "not public"),
        (b"GET http://mapped.example:{port}/ HTTP/1.1\r\n\r\n", "not public"),
        (b"GET http://metadata.example:{port}/ HTTP/1.1\r\n\r\n", "not public"),
        (b"GET http://translated.example:{port}/ HTTP/1.1\r\n\r\n", "not public"),
        (b"GET http://nowhere.example:{port}/ HTTP/1.1\r\n\r\n", "has no address"),
    ],
)
async def test_what_the_policy_does_not_name_is_refused(
    box: Sandbox, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch, ask: bytes, why: str
) -> None:
    port, heads = server
    named(
        monkeypatch,
        other_example="127.0.0.1",
        inside_example="127.0.0.1",
        mapped_example="::ffff:10.0.0.1",
        metadata_example="169.254.169.254",
        translated_example="64:ff9b::7f00:1",
        registry_example="93.184.216.34",
    )
    names = ("registry", "inside", "mapped", "metadata", "translated", "nowhere")
    policy = NetworkPolicy(allow=[f"{name}.example:{port}" for name in names])
    async with opened(box, policy) as way:
        answer = await spoken(way, box, ask.replace(b"{port}", b"%d" % port))
    assert answer.startswith(b"HTTP/1.1 403") and why in answer.decode()
    assert not heads and way.refused == 1 and why in way.requests[0].refused


async def test_an_address_is_the_one_that_was_looked_at(
    box: Sandbox, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when it is looked at and private a moment later: it is resolved once."""
    port, heads = server
    calls: list[str] = []

    async def getaddrinfo(host: str, number: int, **_: Any) -> list[Any]:
        calls.append(host)
        address = "203.0.113.1" if host == "rebound.example" and len(calls) == 1 else "127.0.0.1"
        if host == "203.0.113.1":
            raise OSError("unreachable from here")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, number))]

    monkeypatch.setattr(network_policy.trio.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network_policy, "_is_public", lambda address: address == "203.0.113.1")
    async with opened(box, NetworkPolicy(allow=[f"rebound.example:{port}"])) as way:
        answer = await spoken(way, box, b"GET http://rebound.example:%d/ HTTP/1.1\r\n\r\n" % port)
    assert b"does not answer" in answer and not heads and "rebound.example" not in calls[1:]


async def test_a_tunnel_is_tls_for_the_host_that_was_asked_for(
    box: Sandbox, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = certificates.Authority("the CA of the tests")
    authority.issue(tmp_path, "127.0.0.1")  # the client of this test checks no name
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    asked: list[str] = []
    context.sni_callback = lambda _, name, __: asked.append(name)

    async def serve(stream: trio.SocketStream) -> None:
        with trio.move_on_after(60):
            try:
                tls = trio.SSLStream(stream, context, server_side=True)
                await tls.receive_some()
                await tls.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nfetched")
            except trio.BrokenResourceError:
                pass

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    port = listeners[0].socket.getsockname()[1]
    named(monkeypatch, registry_example="127.0.0.1")
    client = f"""
import socket, ssl, sys
s = socket.create_connection(("127.0.0.1", 3128)); s.settimeout(60)
s.sendall(b"CONNECT registry.example:{port} HTTP/1.1\\r\\n\\r\\n")
assert s.recv(1000).startswith(b"HTTP/1.1 200"), "no tunnel"
c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
t = c.wrap_socket(s, server_hostname=sys.argv[1] or None)
t.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n"); print(t.recv(1000))
"""
    async with opened(box, NetworkPolicy(allow=[f"registry.example:{port}"], private=True)) as way:
        good = await way.exec(box, ["python3", "-c", client, "registry.example"])
        assert b"fetched" in good.stdout, good.stderr
        for other in ("other.example", ""):
            bad = await way.exec(box, ["python3", "-c", client, other])
            assert bad.exit_code != 0 and b"fetched" not in bad.stdout
        plain = await spoken(way, box, b"CONNECT registry.example:%d HTTP/1.1\r\n\r\nSSH-2.0-x\r\n" % port)
        assert plain == b"HTTP/1.1 200 OK\r\n\r\n"
    assert asked == ["registry.example"]
    assert [each.refused for each in way.requests] == [
        "",
        "its TLS asks for 'other.example' in a tunnel to registry.example",
        "TLS without a name",
        "a tunnel without TLS",
    ]


@each_case(
    ("headers", "status", "why"),
    [
        (b"Transfer-Encoding: chunked", b"411 Length Required", "a body without a length"),
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked", b"411 Length Required", "a body without a length"),
        (b"Content-Length: 3\r\nContent-Length: 4", b"400 Bad Request", "a body with two lengths"),
        (b"Content-Length: -3", b"400 Bad Request", "a length that is none"),
        (b"Content-Length: 0x3", b"400 Bad Request", "a length that is none"),
    ],
)
async def test_law_8_a_body_without_one_length_is_refused_with_a_status_and_is_not_noted_as_served(
    box: Sandbox, server: tuple[int, list[bytes]], headers: bytes, status: bytes, why: str
) -> None:
    port, heads = server
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}"])) as way:
        answer = await spoken(way, box, b"POST http://127.0.0.1:%d/ HTTP/1.1\r\n%s\r\n\r\nabc" % (port, headers))
    assert answer.startswith(b"HTTP/1.1 %s\r\n" % status) and why in answer.decode()
    assert not heads and (way.total, way.refused) == (1, 1) and why in way.requests[0].refused


@pytest.mark.medium
@each_case(
    ("begin", "status", "why"),
    [
        (b"", b"HTTP/1.1 408 Request Timeout\r\n", "no head of a request"),
        (b"GET http://127.0.0.1:{port}/ HTTP/1.1\r\n", b"HTTP/1.1 408 Request Timeout\r\n", "no head of a request"),
        (b"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", "no TLS in a tunnel"),
    ],
)
async def test_law_8_a_client_that_does_not_say_what_it_wants_in_time_is_answered_and_noted(
    box: Sandbox,
    server: tuple[int, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    begin: bytes,
    status: bytes,
    why: str,
) -> None:
    monkeypatch.setattr(network_policy, "_HEAD_S", 1.0)
    port, heads = server
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}"])) as way:
        answer = await spoken(way, box, begin.replace(b"{port}", b"%d" % port))
    assert answer.startswith(status)
    assert not heads and (way.total, way.refused) == (1, 1) and why in way.requests[0].refused


async def test_law_8_a_connection_too_many_is_answered_and_noted(
    box: Sandbox, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_policy, "_CONNECTIONS", 0)
    port, _ = server
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}"])) as way:
        answer = await spoken(way, box, b"")
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert (way.total, way.refused) == (1, 1) and "connections already" in way.requests[0].refused


async def test_a_second_request_of_a_connection_goes_nowhere(
    box: Sandbox, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heads = server
    named(monkeypatch, registry_example="127.0.0.1")
    ask = b"GET http://registry.example:%d/ HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc" % port
    async with opened(box, NetworkPolicy(allow=[f"registry.example:{port}"], private=True)) as way:
        await spoken(way, box, ask + b"GET /second HTTP/1.1\r\nHost: other.example\r\n\r\n")
    assert len(heads) == 1 and b"second" not in heads[0]


async def test_a_server_that_breaks_off_ends_its_own_request_alone(
    box: Sandbox, server: tuple[int, list[bytes]], nursery: trio.Nursery
) -> None:
    port, _ = server

    async def reset(stream: trio.SocketStream) -> None:
        await stream.receive_some(10)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
        await stream.aclose()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, reset, listeners)
    bad = listeners[0].socket.getsockname()[1]
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}", f"127.0.0.1:{bad}"])) as way:
        for _ in range(3):
            assert (await fetched(way, box, f"http://127.0.0.1:{bad}/"))[0] != 0
        assert (await fetched(way, box, f"http://127.0.0.1:{port}/"))[1] == b"fetched"


async def test_the_box_has_no_other_way_out(box: Sandbox, server: tuple[int, list[bytes]]) -> None:
    port, heads = server
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}"])) as way:
        probe = f"""
import socket
for kind, family in ((socket.SOCK_RAW, socket.AF_INET), (socket.SOCK_RAW, 17)):
    try: socket.socket(family, kind, socket.IPPROTO_ICMP); print("raw")
    except OSError: pass
for address in (("127.0.0.1", {port}), ("93.184.216.34", 443), ("169.254.169.254", 80)):
    try: socket.create_connection(address, 2); print("direct", address)
    except OSError: pass
try: print("resolved", socket.getaddrinfo("registry.example", 80))
except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: s.sendto(b"x", ("8.8.8.8", 53)); print("datagram")
except OSError: pass
print("done")
"""
        result = await way.exec(box, ["python3", "-c", probe])
        assert result.stdout == b"done\n", result
        assert (await fetched(way, box, f"http://127.0.0.1:{port}/"))[1] == b"fetched"  # the policy names the address
    assert len(heads) == 1


async def test_a_hostile_box_floods_its_own_way_alone(box: Sandbox, server: tuple[int, list[bytes]]) -> None:
    port, _ = server
    async with opened(box, NetworkPolicy(allow=[f"127.0.0.1:{port}"])) as way:
        flood = "import socket; c = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(60)]; print(len(c))"
        assert (await way.exec(box, ["python3", "-c", flood])).stdout == b"60\n"
        assert await spoken(way, box, b"x" * 70_000) != b"fetched"
        assert (await fetched(way, box, f"http://127.0.0.1:{port}/"))[1] == b"fetched"


def test_names_in_a_client_hello_are_read_as_openssl_writes_them() -> None:
    for host in ("registry.example", "a.b.c.example"):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=host)
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = outgoing.read()
        assert network_policy._server_name(hello) == host
        for cut in (0, 1, 5, 40, len(hello) - 1):
            assert network_policy._server_name(hello[:cut]) is None
        body = hello[5:]
        parted = b"".join(b"\x16\x03\x01" + struct.pack(">H", len(part)) + part for part in (body[:50], body[50:]))
        assert network_policy._server_name(parted) == host


@each_case("allow", [[], "pypi.org:443", ["pypi.org"], ["*.org:443"], ["http://x:80"], [3], ["x:0"]])
def test_a_policy_that_is_none_is_refused(allow: Any) -> None:
    with pytest.raises(ConfigError, match=r"network\.allow"):
        NetworkPolicy(allow=allow)
    with pytest.raises(ConfigError, match="choose setup"):
        NetworkPolicy(allow=["pypi.org:443"], phase="agent")
