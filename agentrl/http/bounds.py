"""Bounds on the cost of an HTTP client to our servers: training server, recording proxy, embedded engine, page.

`ServerBounds` has the numbers, `Connections` decides who is let in, `Reader` reads one request within the bounds. No
sockets and no clock: `agentrl.http.http_server` has them under trio, `agentrl.engine.embedded.bounded_protocol` under
asyncio.

When all places are taken, the connection that has longest owed a request makes room, of the peer that has most. So
connections that stand idle, or send a request byte by byte, keep nobody out, however many they are.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

_OTHER_FILES = 256  # that a process opens beside its connections
# A single peer is the usual case (every program of a run on one machine), so its share is large; but another one
# always finds a quarter, however many connections the first opens.
_PEER_SHARE = 0.75  # of all connections


# Defaults for a training server: 16,384 connections because each episode of an agent program may have one, a body of
# 32 MiB because a request has its whole conversation, with pictures. 600 s for a body, since a program behind a slow
# link is no attacker; the head has no such excuse.
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """`head_bytes` are those of the URL and the headers together. `head_s` begins with a request's first byte, `body_s`
    where its head ends; a connection without a request is closed after `idle_s`. One peer has three quarters of the
    `connections` at most."""

    connections: int = 16_384
    head_bytes: int = 65_536
    url_bytes: int = 16_384
    head_s: float = 30.0
    body_bytes: int = 32 << 20
    body_s: float = 600.0
    idle_s: float = 600.0


class RequestRefused(Exception):
    """A request that is not read to its end: the `status` of the answer, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True, eq=False)
class ConnectionPlace:
    """A connection's place: `close` ends the connection at once. One that was `taken` is another's already."""

    peer: str
    close: Callable[[], None]
    taken: bool = False


@dataclass(slots=True)
class _Peer:
    count: int = 0
    # A dict without values is an ordered set: the oldest is its first key, and leaving it costs the same for any
    # number of connections. Who is being answered is not in it, so work is never thrown away to make room.
    # `tests/engine/test_http_bounds.py::test_a_network_of_ipv6_is_one_peer_and_who_works_is_never_closed`.
    waiting: dict[ConnectionPlace, None] = field(
        default_factory=dict[ConnectionPlace, None]
    )  # those without a whole request, oldest first


class Connections:
    """The connections of one server. Never more than the process may have open files."""

    def __init__(self, bounds: ServerBounds) -> None:
        # Bounded by the open files of the process: beyond them `accept` fails for everybody, the supervisor's own
        # connections included, and so does opening the store.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connection_room = (
            bounds.connections if soft_limit == resource.RLIM_INFINITY else max(16, soft_limit - _OTHER_FILES)
        )
        self._most = min(bounds.connections, connection_room)
        self._of_peer = max(1, int(self._most * _PEER_SHARE))
        self._peers: dict[str, _Peer] = {}
        self._count = 0

    def enter(self, address: object, close: Callable[[], None]) -> ConnectionPlace | None:
        """A place for a new connection, for which another may have been closed; None if all are at work."""
        peer_name = _peer(address)
        peer_entry = self._peers.get(peer_name)
        # First its own share: a peer that is full makes room among its own connections, even if the server has
        # places.
        if peer_entry is not None and peer_entry.count >= self._of_peer and not self._close_oldest(peer_entry):
            return None
        if self._count >= self._most:
            # The peer with the most connections gives one up, not the one with the oldest: an attacker opens many,
            # and the oldest connection is most likely the idle one of an honest client.
            # `test_the_oldest_idle_connection_of_the_fullest_peer_makes_room`.
            fullest_peer = max(
                (waiting_peer for waiting_peer in self._peers.values() if waiting_peer.waiting), key=_size, default=None
            )
            if fullest_peer is None or not self._close_oldest(fullest_peer):
                return None
        new_place = ConnectionPlace(peer_name, close)
        # Read again: closing the oldest may have removed the peer's entry, and a place counted in a dead entry would
        # never be given back.
        peer_entry = self._peers.setdefault(peer_name, _Peer())
        peer_entry.count += 1
        peer_entry.waiting[new_place] = None
        self._count += 1
        return new_place

    def works(self, place: ConnectionPlace) -> None:
        """Its request is whole, and is being answered."""
        if not place.taken:
            self._peers[place.peer].waiting.pop(place, None)

    def waits(self, place: ConnectionPlace) -> None:
        """It has its answer, and may ask again."""
        if not place.taken:
            self._peers[place.peer].waiting[place] = None

    def leave(self, place: ConnectionPlace) -> None:
        """Give back the place of a connection that is closed. Safe to call again."""
        if place.taken:
            return
        place.taken = True
        peer_entry = self._peers[place.peer]
        peer_entry.waiting.pop(place, None)
        peer_entry.count -= 1
        self._count -= 1
        if not peer_entry.count:
            del self._peers[place.peer]

    def _close_oldest(self, peer: _Peer) -> bool:
        oldest_place = next(iter(peer.waiting), None)
        if oldest_place is None:
            return False
        # Left before it is closed: its place is free at once, and when its task ends and leaves again, `taken` says
        # that it has.
        self.leave(oldest_place)
        oldest_place.close()
        return True


def _size(peer: _Peer) -> int:
    return peer.count


def _peer(address: object) -> str:
    """Who counts as one: an IPv4 address, an IPv6 network of 64 bits, all of a Unix socket."""
    host_address = str(cast("tuple[object, ...]", address)[0]) if isinstance(address, tuple) and address else ""
    if ":" not in host_address:
        return host_address
    # A household or a host gets a /64, so single addresses of IPv6 cost nothing: counted one by one, one machine
    # would be as many peers as it likes.
    return str(ipaddress.ip_network((host_address.partition("%")[0], 64), strict=False))


def raise_open_files(bounds: ServerBounds) -> None:
    """Let this process have as many files open as its connections need, if the system allows it."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = bounds.connections + _OTHER_FILES
    if hard_limit != resource.RLIM_INFINITY:
        open_files = min(open_files, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))


def refusal(error: httptools.HttpParserError) -> RequestRefused:
    """Why the parser gave up: one of our callbacks refused, or it is no HTTP."""
    # httptools wraps an exception of a callback in its own, as its context; the refusal with its status is that
    # context.
    cause = error.__context__
    return cause if isinstance(cause, RequestRefused) else RequestRefused(400, f"this is no HTTP request: {error}")


class Measure:
    """Counts the bytes of one request as they come. Raises RequestRefused where there are too many."""

    __slots__ = ("_announced", "_body_bytes", "_bounds", "_headers", "_silent", "body")

    def __init__(self, bounds: ServerBounds) -> None:
        self._bounds = bounds
        self._headers, self._silent, self.body = 0, 0, 0
        self._announced, self._body_bytes = 0, bounds.body_bytes

    def fed(self, count: int, body_before: int) -> None:
        """Count bytes that the parser has read: those that were no body are of the head, or of a trailer or the frame
        of a chunk, which the parser keeps in memory until they end."""
        # A parser gives no sign of what it reads between the parts of a body. Unbounded, a chunk's extension or a
        # trailer that never ends would fill its memory without a byte of body: `self._silent` counts what led to
        # nothing.
        if self.body == body_before:
            self._silent += count
            if self._silent > self._bounds.head_bytes:
                raise self._head()
        else:
            self._silent = 0

    def url(self, length: int) -> None:
        if length > self._bounds.url_bytes:
            raise RequestRefused(414, f"the URL is longer than {self._bounds.url_bytes} bytes")

    def header(self, name: bytes, value: bytes) -> None:
        """Count a header. A content-length above the bound is refused here, before any byte of the body."""
        # 4 for the colon, the space and the line's end, as they came: a thousand empty headers are not free.
        self._headers += len(name) + len(value) + 4
        if self._headers > self._bounds.head_bytes:
            raise self._head()
        if name.lower() == b"content-length" and value.isdigit():
            # Cut to 19 digits, which any size fits in: `int` of a text of a megabyte takes quadratic time, or raises
            # beyond its limit of digits.
            self._announced = int(value[:19])
            self.bound_body(self._body_bytes)

    def bound_body(self, count: int) -> None:
        """Allow `count` bytes of body at most. Raises RequestRefused if more are announced, or there already."""
        # Never raised: a path has a bound smaller than the server's, or none of its own.
        self._body_bytes = min(self._body_bytes, count)
        if max(self._announced, self.body) > self._body_bytes:
            raise self._body()

    def of_body(self, count: int) -> None:
        self.body += count
        if self.body > self._body_bytes:
            raise self._body()

    def _head(self) -> RequestRefused:
        return RequestRefused(431, f"the headers are longer than {self._bounds.head_bytes} bytes")

    def _body(self) -> RequestRefused:
        return RequestRefused(413, f"the body is larger than {self._body_bytes} bytes")


class Reader:
    """One request, from the bytes that `feed` gets; httptools calls `on_...`."""

    def __init__(self, bounds: ServerBounds) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        self._measure = Measure(bounds)
        self._begun = False
        self._body: list[bytes] = []
        self.target = b""
        self.headers: dict[str, str] = {}
        self.method = ""
        self.head, self.whole, self.keeps_open = False, False, True

    @property
    def content(self) -> bytes:
        return b"".join(self._body)

    def feed(self, data: bytes) -> None:
        """Read on; `head` and `whole` say how far it is. Raises RequestRefused."""
        body_before = self._measure.body
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # A client that asks for WebSocket or HTTP/2 would otherwise wait for an answer in a protocol that nobody
            # speaks.
            raise RequestRefused(400, "no other protocol is spoken here") from None
        except httptools.HttpParserError as error:
            raise refusal(error) from None
        if not self.whole:
            self._measure.fed(len(data), body_before)

    def bound_body(self, count: int) -> None:
        """Allow `count` bytes of body at most. Raises RequestRefused if it has more."""
        self._measure.bound_body(count)

    def on_message_begin(self) -> None:
        # Pipelined requests are refused: their answers would have to be buffered in order, and no client of a model's
        # API sends them.
        if self._begun:
            raise RequestRefused(400, "the next request has to wait for the answer")
        self._begun = True

    def on_url(self, url: bytes) -> None:
        # The parser gives a long URL in pieces, so its length is that of all pieces.
        self.target += url
        self._measure.url(len(self.target))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure.header(name, value)
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.method = self._parser.get_method().decode("latin-1")
        self.head = True

    def on_body(self, body: bytes) -> None:
        self._measure.of_body(len(body))
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.whole, self.keeps_open = True, self._parser.should_keep_alive()
