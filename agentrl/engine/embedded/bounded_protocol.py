"""uvicorn's HTTP protocol within the bounds that all our servers share (`agentrl.http.bounds`)."""

# pyright: reportUnknownMemberType=false
# (uvicorn leaves parts of its signatures untyped)

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.http.bounds import ConnectionPlace, Connections, Measure, RequestRefused, ServerBounds, refusal

_REASONS = {400: "Bad Request", 413: "Content Too Large", 414: "URI Too Long", 431: "Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a server that uvicorn runs. Timers run only while a request is on its way in several pieces, or
    none has come."""

    def __init__(self, *, connections: Connections, bounds: ServerBounds, **settings: Any) -> None:
        super().__init__(**settings)
        self._places, self._bounds = connections, bounds
        self._place: ConnectionPlace | None = None
        self._measure = Measure(bounds)
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: Literal["idle", "head", "body"] | None = None
        self._head, self._whole = False, False  # what of the request is there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn's own limit answers 503 to whole requests. A client that connects and sends nothing is never counted
        # there, and would hold descriptors until a run's own turns are refused.
        self._place = self._places.enter(self.client, transport.abort)
        if self._place is None:
            transport.abort()
        else:
            self._await("idle")

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        if self._place is not None:
            self._places.leave(self._place)
            self._place = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        body_bytes, parser = self._measure.body, cast("Any", self.parser)
        # This method replaces uvicorn's `data_received`, whose first line it is. The rest of that method is only the
        # parse, and its handling of what does not parse.
        self._unset_keepalive_if_required()
        try:
            parser.feed_data(data)
            if not self._whole:
                self._measure.fed(len(data), body_bytes)
        except httptools.HttpParserUpgrade:
            self._refuse(RequestRefused(400, "no other protocol is spoken here"))
        except httptools.HttpParserError as error:
            self._refuse(refusal(error))
        except RequestRefused as refused:
            self._refuse(refused)
        else:
            awaited_part = None if self._whole else "body" if self._head else "head"
            # Only at a change of phase: a timer that every piece resets would let a client that sends one byte a
            # second stay for ever (Slowloris).
            if awaited_part != self._awaited:
                self._await(awaited_part)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._measure, self._head, self._whole = Measure(self._bounds), False, False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._measure.url(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure.header(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head = True

    def on_body(self, body: bytes) -> None:
        self._measure.of_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._whole = True
        if self._place is not None:
            self._places.works(self._place)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._place is not None:
            self._places.waits(self._place)

    def _await(self, part: Literal["idle", "head", "body"] | None) -> None:
        """Close unless this part of a request, or its first byte (`idle`), is whole in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = part
        if part is not None:
            timeout_s = {"idle": self._bounds.idle_s, "head": self._bounds.head_s, "body": self._bounds.body_s}[part]
            self._timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _refuse(self, refused: RequestRefused) -> None:
        error_document = {"error": {"message": str(refused), "type": "BadRequestError", "code": refused.status}}
        error_body = json.dumps(error_document).encode()
        head = f"HTTP/1.1 {refused.status} {_REASONS.get(refused.status, 'Refused')}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(error_body)}\r\nconnection: close\r\n\r\n"
        response_cycle = cast("Any", self.cycle)  # None before the first request
        # While an earlier answer is on its way, a second head in the middle of it would be read as a part of its
        # body: then closing is the only clear sign.
        if response_cycle is None or response_cycle.response_complete or not response_cycle.response_started:
            self.transport.write(head.encode() + error_body)
        self.transport.close()
