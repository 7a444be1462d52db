"""A way out of a closed box, for its setup alone and to named hosts alone.

    command ─► 127.0.0.1 in its namespace ─► Unix socket in the box ─► stdin and stdout of a process of the box ─► here

The box stays without a network: what leaves it are bytes on the pipes of one background process, and here they must
be requests to an HTTP proxy for a host and port that the policy names. Names are resolved here, an address that is not
public is refused, the TLS of a tunnel has to name the host of its request, and each request is counted and logged. When
the phase ends the process is ended, and nothing is left that could carry a byte. Works on every backend. The box needs
python3. `forwarded` carries connections the same way to one port of this machine: a program in a box reaches its model,
and nothing else. Knows nothing of episodes or tools.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import trio

from agentrl.errors import SandboxError
from agentrl.protocols import BoxProcess, ExecResult, NetworkPolicy, Sandbox

log = logging.getLogger(__name__)

_PORT: Final = 3128
_FRAME: Final = struct.Struct(">IBI")  # connection · kind · length
_OPEN, _DATA, _END, _ACK = range(4)
_MOST_FRAME: Final = 32 << 10
_WINDOW: Final = 48 << 10  # bytes on their way from the box, below what a box keeps of a process's output
_CONNECTIONS: Final = 64  # at once
_HEAD_BYTES: Final = 64 << 10
_HEAD_S: Final = 30.0
_CONNECT_S: Final = 30.0
_IDLE_S: Final = 120.0
_KEPT: Final = 10_000  # requests that are listed
_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
_HELLO: Final = 22
_ENCRYPTED_HELLO: Final = 0xFE0D

_RELAY: Final = f"""
import os, select, socket, struct, sys
frame = struct.Struct(">IBI")
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o600); server.listen(64)
connections, names, number, credit, buffer = {{}}, {{}}, 0, {_WINDOW}, b""
def say(name, kind, data=b""):
    data = frame.pack(name, kind, len(data)) + data
    while data: data = data[os.write(1, data):]
say(0, {_ACK})
while True:
    reading = [0, server] + (list(names) if credit >= {_MOST_FRAME} + frame.size else [])
    for ready in select.select(reading, [], [])[0]:
        if ready == 0:
            data = os.read(0, 65536)
            if not data: sys.exit()
            buffer += data
            while len(buffer) >= frame.size:
                name, kind, size = frame.unpack_from(buffer)
                if len(buffer) < frame.size + size: break
                data, buffer = buffer[frame.size:frame.size + size], buffer[frame.size + size:]
                if kind == {_ACK}: credit += struct.unpack(">I", data)[0]
                elif name in connections:
                    try:
                        if kind == {_DATA}: connections[name].sendall(data)
                        else: connections[name].shutdown(socket.SHUT_WR)
                    except OSError: pass
                    if kind == {_END}:
                        names.pop(connections[name], None); connections.pop(name).close()
        elif ready is server:
            number += 1
            connections[number] = server.accept()[0]
            connections[number].settimeout(60.0)
            names[connections[number]] = number
            say(number, {_OPEN}); credit -= frame.size
        elif ready in names and credit >= {_MOST_FRAME} + frame.size:
            try: data = ready.recv({_MOST_FRAME})
            except OSError: data = b""
            say(names[ready], {_DATA} if data else {_END}, data); credit -= frame.size + len(data)
            if not data: del names[ready]
"""
"""In the box: connections of a Unix socket, as frames on stdin and stdout."""

_FRONT: Final = f"""
import os, select, socket, sys, threading
path, *command = sys.argv[1:]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try: server.bind(("127.0.0.1", {_PORT})); server.listen(64)
except OSError: server = None  # another command of a box that shares its loopback serves it
if server is not None and os.fork() == 0:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3): os.dup2(null, fd)
    def pump(source, target):
        try:
            while data := source.recv(65536):
                try: target.sendall(data)
                except OSError: pass  # a client that is answered early sends to its end before it reads the answer
        except OSError: pass
        try: target.shutdown(socket.SHUT_WR)
        except OSError: pass
    while True:
        client = server.accept()[0]
        out = socket.socket(socket.AF_UNIX)
        try: out.connect(path)
        except OSError: client.close(); continue
        for pair in ((client, out), (out, client)): threading.Thread(target=pump, args=pair, daemon=True).start()
try: os.execvp(command[0], command)
except FileNotFoundError: code = 127
except OSError: code = 126
sys.stderr.write(f"sandbox: {{command[0]}} cannot be run\\n"); sys.exit(code)
"""
"""In a command's namespace: the port of the proxy in front of the Unix socket; then the command itself."""


def _socket_path() -> str:
    return f"/tmp/.network-{secrets.token_hex(8)}"


@dataclass(slots=True)
class NetworkRequest:
    """One request of a box. `refused` says why it was not let through; empty if it was. Bytes are counted both ways."""

    host: str
    port: int
    refused: str = ""
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Network:
    """Network access of a box while the phase lasts. `requests` are the first requests; the counters below it count all
    requests, and the refused ones."""

    policy: NetworkPolicy
    requests: list[NetworkRequest] = field(default_factory=list[NetworkRequest])
    total: int = 0
    refused: int = 0
    path: str = field(default_factory=_socket_path)  # of the socket in the box

    async def exec(
        self, box: Sandbox, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> ExecResult:
        """Run a command that finds the proxy by the usual variables."""
        proxy_address = f"http://127.0.0.1:{_PORT}"
        variable_names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        front_command = ["python3", "-I", "-c", _FRONT, self.path, *argv]
        return await box.exec(
            front_command, env={**dict.fromkeys(variable_names, proxy_address), **(env or {})}, timeout_s=timeout_s
        )

    def note(self, request: NetworkRequest) -> None:
        """Count and log a request."""
        self.total += 1
        self.refused += bool(request.refused)
        if len(self.requests) < _KEPT:
            self.requests.append(request)
        request_target = f"{request.host[:200]!r}:{request.port}"
        if request.refused:
            log.warning("a box requested %s, refused: %s", request_target, request.refused)
        else:
            log.info("a box requested %s", request_target)


@asynccontextmanager
async def opened(box: Sandbox, policy: NetworkPolicy) -> AsyncGenerator[Network]:
    """`async with`: the phase in which a box may reach what the policy allows. Raises SandboxError."""
    network = Network(policy)

    async def connect(tunnel: _Tunnel, name: int, pieces: trio.MemoryReceiveChannel[bytes]) -> None:
        await _Connection(tunnel, name, pieces, network).run()

    async with _relayed(box, network.path, connect, lambda why: network.note(NetworkRequest("", 0, refused=why))):
        yield network


@dataclass(frozen=True, slots=True)
class Forward:
    """The way of a box's commands to one port of this machine. In the box it is at `address`."""

    path: str
    address: str = f"http://127.0.0.1:{_PORT}"

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command, as the box has to run it so that it finds the address served."""
        return ["python3", "-I", "-c", _FRONT, self.path, *argv]


@asynccontextmanager
async def forwarded(box: Sandbox, port: int) -> AsyncGenerator[Forward]:
    """`async with`: commands of the box reach 127.0.0.1:`port` of this machine, and nothing else. What listens there
    bounds how long a connection lasts. Raises SandboxError."""

    async def connect(tunnel: _Tunnel, name: int, pieces: trio.MemoryReceiveChannel[bytes]) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as server_stream, trio.open_nursery() as nursery:
            nursery.start_soon(_up, pieces, server_stream)
            while server_bytes := await server_stream.receive_some(_MOST_FRAME):
                await tunnel.say(name, _DATA, server_bytes)
            nursery.cancel_scope.cancel()

    box_forward = Forward(_socket_path())
    async with _relayed(box, box_forward.path, connect, lambda why: log.warning("a box asked for its model: %s", why)):
        yield box_forward


async def _up(pieces: trio.MemoryReceiveChannel[bytes], stream: trio.SocketStream) -> None:
    """Send what a client in the box sends to `stream`; an empty piece ends it."""
    async for piece in pieces:
        if not piece:
            break
        await stream.send_all(piece)
    with suppress(trio.BrokenResourceError):
        await stream.send_eof()


_Connect = Callable[["_Tunnel", int, "trio.MemoryReceiveChannel[bytes]"], Awaitable[None]]
_Note = Callable[[str], None]


@asynccontextmanager
async def _relayed(box: Sandbox, path: str, connect: _Connect, note: _Note) -> AsyncGenerator[None]:
    """`async with`: a process of the box carries the connections of a Unix socket at `path`, each served by `connect`.
    `note` is called with the reason why a connection is refused."""
    relay_process = await box.start(["python3", "-I", "-c", _RELAY, path])
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:  # what fails is raised outside the nursery, so that it is no group
                await nursery.start(_Tunnel(relay_process, connect, note, nursery).run)
                yield
            except Exception as phase_error:
                failure = phase_error
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await relay_process.kill()
    if failure is not None:
        raise failure


class _Tunnel:
    """The frames of one box. What comes from the box is hostile: its sizes and counts are bounded."""

    def __init__(self, process: BoxProcess, connect: _Connect, note: _Note, nursery: trio.Nursery) -> None:
        self._process, self._connect, self._note, self._nursery = process, connect, note, nursery
        self._sending = trio.Lock()
        self._inputs: dict[int, trio.MemorySendChannel[bytes]] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read frames until the process ends or sends nonsense."""
        frame_buffer, has_begun = bytearray(), False
        while new_bytes := await self._process.receive():
            frame_buffer += new_bytes
            while len(frame_buffer) >= _FRAME.size:
                connection_number, frame_kind, frame_size = _FRAME.unpack_from(frame_buffer)
                # A frame that is none ends the tunnel: there is no mark by which the next frame could be found again.
                if frame_size > _MOST_FRAME or frame_kind > _ACK:
                    return
                if len(frame_buffer) < _FRAME.size + frame_size:
                    break
                frame_bytes = bytes(frame_buffer[_FRAME.size : _FRAME.size + frame_size])
                del frame_buffer[: _FRAME.size + frame_size]
                if not has_begun:
                    has_begun = True
                    task_status.started()
                    continue
                if not await self._frame(connection_number, frame_kind, frame_bytes):
                    return
        relay_result = await self._process.wait(1.0)  # raises if the host lost it: then the policy did not end it
        if not has_begun:
            error_text = "" if relay_result is None else relay_result.stderr.decode(errors="replace").strip()[-200:]
            raise SandboxError(
                f"a box's way to the network does not start: it needs python3 ({error_text or 'no answer'})"
            )

    async def _frame(self, name: int, kind: int, piece: bytes) -> bool:
        if kind == _OPEN:
            # The number comes from the box: a hostile one may open connections without end, or the same one twice.
            if len(self._inputs) >= _CONNECTIONS or name in self._inputs:
                refusal = _Refused(f"it has {_CONNECTIONS} connections already", HTTPStatus.SERVICE_UNAVAILABLE)
                self._note(str(refusal))
                await self.say(name, _DATA, refusal.answer())
                await self.say(name, _END)
            else:
                # A short channel, so that a slow server holds back its client. It holds back the box's other
                # connections too, as all share one pipe; what stays bounded is the memory of this process.
                self._inputs[name], pieces = trio.open_memory_channel[bytes](8)
                self._nursery.start_soon(self._serve, name, pieces)
        elif (input_channel := self._inputs.get(name)) is not None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await input_channel.send(piece if kind == _DATA else b"")
        # The box sends no more than the window ahead of these: what a box keeps of a process's output is bounded, and
        # what is beyond it is thrown away, which would tear a connection.
        await self.say(0, _ACK, struct.pack(">I", _FRAME.size + len(piece)))
        return True

    async def say(self, name: int, kind: int, data: bytes = b"") -> None:
        """Send a frame to the box."""
        async with self._sending:
            await self._process.send(_FRAME.pack(name, kind, len(data)) + data)

    async def _serve(self, name: int, pieces: trio.MemoryReceiveChannel[bytes]) -> None:
        """One connection, from its request to its end."""
        try:
            await self._connect(self, name, pieces)
        except* (
            OSError,
            trio.TooSlowError,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            SandboxError,
        ):
            pass  # the other side is gone, or says nothing
        finally:
            pieces.close()
            self._inputs.pop(name).close()
            with trio.CancelScope(shield=True), trio.move_on_after(5.0), suppress(SandboxError):
                await self.say(name, _END)


class _Refused(Exception):
    """A request that is not served, and why; the client gets the status."""

    def __init__(self, why: str, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> None:
        super().__init__(why)
        self.status = status

    def answer(self) -> bytes:
        answer_head = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nConnection: close\r\n\r\n"
        return f"{answer_head}agentrl: {self}\n".encode()


# Why this side, and not the box, decides which host a name is.
#
# A firewall would be the simple way: a network for the box, and a list of addresses. But names move from address to
# address, and one address of a large provider serves many sites, so such a list breaks and allows too much at once. It
# needs root as well. A proxy that compares names alone allows too much, too. The setup of a box runs code of strangers,
# such as the install script of a package, and this code has three ways to lie with a name that the policy allows:
#
#   it points inside      The owner of a name may give it any address: 127.0.0.1, a machine of the local network, the
#                         server with the credentials of a cloud. So every address of the name must be public, also one
#                         within an IPv6 address (mapped, NAT64, 6to4, Teredo).
#   it changes            Public when it is looked at, private when the connection is made ("DNS rebinding"). So it is
#                         resolved once, here, and the connection goes to the address that was looked at.
#   another host is named The tunnel leads to an allowed host of a provider, and what goes through it asks for another
#                         site there. So its first bytes must be TLS that names the same host, and TLS that encrypts
#                         this name is refused.
#
# An entry of the policy that is an address, or `private`, allows what is not public: then somebody has chosen it.
#
# The TLS is not opened: every box would have to trust a certificate of ours for it. So nobody sees which site a request
# within the tunnel names. Other prices: only HTTP and TLS pass, and a connection carries one plain request. What is
# refused is counted, and logged with its reason (law 8).
#
# `tests/sandbox/test_network.py` fails without each of these: `test_what_the_policy_does_not_name_is_refused`,
# `test_an_address_is_the_one_that_was_looked_at`, `test_a_tunnel_is_tls_for_the_host_that_was_asked_for`.
class _Connection:
    """A client of the proxy: one request."""

    def __init__(self, tunnel: _Tunnel, name: int, pieces: trio.MemoryReceiveChannel[bytes], network: Network) -> None:
        self._tunnel, self._name, self._pieces, self._network = tunnel, name, pieces, network
        self._buffer = bytearray()

    async def run(self) -> None:
        request = NetworkRequest("", 0)
        try:
            with _time_for("head of a request", HTTPStatus.REQUEST_TIMEOUT):
                method, target, headers = await self._head()
            request.host, request.port = _target(method, target)
            literal = _allowed(self._network.policy, request.host, request.port)
            plain = None if method == "CONNECT" else _rewritten(method, target, headers, request.host)
            stream = await self._connected(request, literal)
        except _Refused as refused:
            self._refuse(request, refused)
            await self._say(refused.answer())
            return
        async with stream:
            if plain is None:
                await self._say(b"HTTP/1.1 200 OK\r\n\r\n")
                try:
                    with _time_for("TLS in a tunnel"):
                        first, length = await self._hello(request.host), None
                except _Refused as refused:  # the tunnel has its answer already: all that is left is to close it
                    self._refuse(request, refused)
                    return
            else:
                first, length = plain
            self._network.note(request)
            await self._both(stream, request, first, length)

    def _refuse(self, request: NetworkRequest, refused: _Refused) -> None:
        request.refused = str(refused)
        self._network.note(request)

    async def _more(self) -> bool:
        """Whether more bytes came."""
        try:
            new_bytes = await self._pieces.receive()
        except trio.EndOfChannel:
            new_bytes = b""
        self._buffer += new_bytes
        return bool(new_bytes)

    async def _head(self) -> tuple[str, str, list[tuple[str, str]]]:
        while (head_length := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_BYTES or not await self._more():
                raise _Refused("no request to an HTTP proxy")
        head_lines = bytes(self._buffer[:head_length]).decode("latin-1").split("\r\n")
        del self._buffer[: head_length + 4]
        request_words = head_lines[0].split(" ")
        if (
            len(request_words) != 3
            or not request_words[2].startswith("HTTP/1.")
            or any("\n" in head_line or "\r" in head_line for head_line in head_lines)
        ):
            raise _Refused("no request to an HTTP proxy")
        headers: list[tuple[str, str]] = []
        for head_line in head_lines[1:]:
            header_name, colon, header_value = head_line.partition(":")
            if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header_name):
                raise _Refused("a header that is none")
            headers.append((header_name.lower(), header_value.strip()))
        return request_words[0], request_words[1], headers

    async def _connected(self, request: NetworkRequest, literal: bool) -> trio.SocketStream:
        """Connect to the host of a request by an address that is looked at first. `literal`: any address will do."""
        try:
            with trio.fail_after(_CONNECT_S):
                address_infos = await trio.socket.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, trio.TooSlowError):
            raise _Refused(f"{request.host} has no address") from None
        addresses = list(dict.fromkeys(str(candidate[4][0]) for candidate in address_infos))
        # One that is not public refuses all: taking the public ones only would let the owner of the name try out which
        # of them we choose.
        if not literal and (private_addresses := [candidate for candidate in addresses if not _is_public(candidate)]):
            raise _Refused(f"{request.host} has the address {private_addresses[0]}, which is not public")
        for address in addresses:
            with suppress(OSError, trio.TooSlowError), trio.fail_after(_CONNECT_S):
                return await trio.open_tcp_stream(address, request.port)  # an address: nothing is resolved again
        raise _Refused(f"{request.host}:{request.port} does not answer")

    async def _hello(self, host: str) -> bytes:
        """The first bytes of a tunnel, which have to be TLS for the host of its request."""
        while (server_name := _server_name(bytes(self._buffer))) is None:
            if len(self._buffer) > _HEAD_BYTES or not await self._more():
                raise _Refused("a tunnel without TLS")
        if server_name != host:
            raise _Refused(
                f"its TLS asks for {server_name[:100]!r} in a tunnel to {host}" if server_name else "TLS without a name"
            )
        hello_bytes, self._buffer = bytes(self._buffer), bytearray()
        return hello_bytes

    async def _both(
        self, stream: trio.SocketStream, request: NetworkRequest, first: bytes, remaining: int | None
    ) -> None:
        """Carry bytes both ways until one side ends; `remaining` bounds the bytes of the client's body."""

        async def down() -> None:
            while server_bytes := await stream.receive_some(_MOST_FRAME):
                request.received += len(server_bytes)
                await self._say(server_bytes)
                idle_scope.deadline = trio.current_time() + _IDLE_S
            nursery.cancel_scope.cancel()

        with trio.CancelScope(deadline=trio.current_time() + _IDLE_S) as idle_scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(down)
                client_bytes = first
                while True:
                    await stream.send_all(client_bytes)
                    request.sent += len(client_bytes)
                    idle_scope.deadline = trio.current_time() + _IDLE_S
                    if remaining == 0 or (not self._buffer and not await self._more()):
                        break
                    client_bytes = bytes(self._buffer[:remaining])
                    self._buffer = bytearray()
                    remaining = None if remaining is None else remaining - len(client_bytes)
                if remaining is None:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_eof()

    async def _say(self, data: bytes) -> None:
        await self._tunnel.say(self._name, _DATA, data)


@contextmanager
def _time_for(part: str, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> Generator[None]:
    """`with`: time for a client to send a part of its request. Raises _Refused with `status` when the time is over."""
    try:
        with trio.fail_after(_HEAD_S):
            yield
    except trio.TooSlowError:
        raise _Refused(f"no {part} within {_HEAD_S:g} s", status) from None


def _target(method: str, target: str) -> tuple[str, int]:
    """Host and port of a request. Raises _Refused."""
    try:
        target_url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        target_host, target_port = target_url.hostname or "", target_url.port
    except ValueError:
        raise _Refused("a target that is none") from None
    if method == "CONNECT" and (target_port is None or target_url.path or target_url.query or "@" in target_url.netloc):
        raise _Refused("a target that is none")
    if method != "CONNECT" and (target_url.scheme != "http" or "@" in target_url.netloc):
        raise _Refused("only http:// and tunnels")
    return _plain_host(target_host), 80 if target_port is None else target_port


def _plain_host(host: str) -> str:
    return host.lower().rstrip(".")


def _host_of(value: str) -> str:
    with suppress(ValueError):
        return _plain_host(urlsplit(f"//{value}").hostname or "")
    return ""


def _allowed(policy: NetworkPolicy, host: str, port: int) -> bool:
    """Whether the entry that allows it names an address itself. Raises _Refused if none does."""
    for policy_entry in policy.allow:
        allowed_host, allowed_port = policy.parsed(policy_entry)
        if (allowed_host, allowed_port) == (host, port):
            with suppress(ValueError):
                ipaddress.ip_address(allowed_host)
                return True
            return policy.private
    raise _Refused(f"{host}:{port} is not among the hosts of this policy")


def _is_public(address: str) -> bool:
    parsed_address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed_address, ipaddress.IPv6Address):
        if parsed_address.ipv4_mapped is not None:
            return _is_public(str(parsed_address.ipv4_mapped))
        # Such an address has an IPv4 address within it, private or not, and a translator on the way may deliver it
        # there.
        if any(parsed_address in translated_net for translated_net in _TRANSLATED):
            return False
    return parsed_address.is_global and not parsed_address.is_multicast


def _rewritten(method: str, target: str, headers: Sequence[tuple[str, str]], host: str) -> tuple[bytes, int]:
    """The request for the server itself, and how long its body is: one request a connection. Raises _Refused."""
    target_url = urlsplit(target)
    # The server behind the address chooses its site by this header, not by the target: with another name here, one
    # allowed host would open all sites of its provider.
    if [_host_of(header_value) for header_name, header_value in headers if header_name == "host"] not in ([], [host]):
        raise _Refused(f"its Host header names another host than {host}")
    # Two ways to say where a body ends are the way to hide a second request in it, whose host nobody has looked at. One
    # length, or none.
    if any(header_name == "transfer-encoding" for header_name, _ in headers):
        raise _Refused("a body without a length: send Content-Length", HTTPStatus.LENGTH_REQUIRED)
    body_lengths = {header_value for header_name, header_value in headers if header_name == "content-length"} or {"0"}
    if len(body_lengths) > 1:
        raise _Refused("a body with two lengths", HTTPStatus.BAD_REQUEST)
    body_length = body_lengths.pop()
    if not re.fullmatch(r"[0-9]{1,12}", body_length):
        raise _Refused("a length that is none", HTTPStatus.BAD_REQUEST)
    request_path = (target_url.path or "/") + (f"?{target_url.query}" if target_url.query else "")
    # Headers of this hop. `upgrade` above all: a connection that has turned into another protocol could carry anything.
    dropped_headers = {"host", "connection", "proxy-connection", "proxy-authorization", "upgrade", "keep-alive", "te"}
    kept_headers = [
        f"{header_name}: {header_value}" for header_name, header_value in headers if header_name not in dropped_headers
    ]
    request_lines = [
        f"{method} {request_path} HTTP/1.1",
        f"host: {target_url.netloc}",
        *kept_headers,
        "connection: close",
        "",
        "",
    ]
    return "\r\n".join(request_lines).encode("latin-1"), int(body_length)


def _server_name(data: bytes) -> str | None:
    """The name that a TLS ClientHello asks for: None as long as it is not whole, empty where it names none. Raises
    _Refused for what is no ClientHello, or hides its name."""
    handshake_bytes = bytearray()
    position = 0
    while True:
        if len(data) < position + 5:
            if data[:1] and data[0] != _HELLO:
                raise _Refused("a tunnel without TLS")
            return None
        record_kind, record_length = data[position], int.from_bytes(data[position + 3 : position + 5], "big")
        if record_kind != _HELLO or data[position + 1] != 3 or not 0 < record_length <= 1 << 14:
            raise _Refused("a tunnel without TLS")
        handshake_bytes += data[position + 5 : position + 5 + record_length]
        position += 5 + record_length
        if len(handshake_bytes) >= 4:
            if handshake_bytes[0] != 1:
                raise _Refused("a tunnel without TLS")
            hello_size = int.from_bytes(handshake_bytes[1:4], "big")
            if len(handshake_bytes) >= 4 + hello_size:
                return _name_of(bytes(handshake_bytes[4 : 4 + hello_size]))


def _name_of(hello: bytes) -> str:
    try:
        position = 34 + 1 + hello[34]  # version and random, then the session
        position += 2 + int.from_bytes(hello[position : position + 2], "big")  # ciphers
        position += 1 + hello[position]  # compressions
        extensions_end = position + 2 + int.from_bytes(hello[position : position + 2], "big")
        position += 2
        server_names: list[str] = []
        while position < extensions_end:
            extension_kind = int.from_bytes(hello[position : position + 2], "big")
            extension_size = int.from_bytes(hello[position + 2 : position + 4], "big")
            extension_body = hello[position + 4 : position + 4 + extension_size]
            position += 4 + extension_size
            if extension_kind == _ENCRYPTED_HELLO:
                raise _Refused("TLS that hides whom it asks for")
            if extension_kind == 0:
                server_names.append(extension_body[5 : 5 + int.from_bytes(extension_body[3:5], "big")].decode("ascii"))
    except (IndexError, UnicodeDecodeError):
        raise _Refused("a ClientHello that is broken") from None
    return _plain_host(server_names[0]) if len(server_names) == 1 else ""
