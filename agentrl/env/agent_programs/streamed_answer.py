"""The body of an answer that is read while it is made: events for the text so far, then for the rest of the answer.

It begins once there is some text, so that a failure before it still has a status. Owns the order of events; what they
look like is the API's. Never knows a socket or a policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from agentrl.env.agent_programs.model_apis import Api, Reply, event_line
from agentrl.env.agent_programs.open_requests import Pending
from agentrl.env.agent_programs.request_checks import note
from agentrl.records import Json


class StreamedAnswer:
    """The answer to `pending` as server-sent events of `api`. `on_end` is called with True once all of it was written,
    or with False when the client has left; `refusal` says why an answer never became whole. `remember` gets the whole
    one."""

    def __init__(
        self,
        api: Api,
        pending: Pending,
        body: Mapping[str, Json],
        *,
        on_end: Callable[[bool], None],
        refusal: Callable[[], str],
        remember: Callable[[Reply], None],
    ) -> None:
        self._api, self._pending, self._body = api, pending, body
        self._on_end, self._refusal, self._remember = on_end, refusal, remember
        self._lines: deque[str] = deque()
        self._sent = ""
        self._count = 0
        self._is_whole = self._is_over = False

    def __aiter__(self) -> StreamedAnswer:
        return self

    async def __anext__(self) -> bytes:
        while not self._lines:
            if self._is_over:
                self._on_end(self._is_whole)
                raise StopAsyncIteration
            await self._next()
        lines = "".join(self._lines)
        self._lines.clear()
        return lines.encode()

    async def aclose(self) -> None:
        """End the answer; a client that has not read all of it has left."""
        self._on_end(False)

    async def _next(self) -> None:
        pending = self._pending
        moved = pending.moved
        if pending.answered.is_set():
            self._end(pending.reply)
        elif pending.begun is not None and len(pending.begun.text) > len(self._sent):
            added = pending.begun.text[len(self._sent) :]
            self._write(self._api.piece(pending.begun, self._body, added, is_first=not self._sent))
            self._sent = pending.begun.text
        else:
            await moved.wait()

    def _end(self, reply: Reply | None) -> None:
        self._is_over = True
        # Thoughts stand in front of the words, and a client that has read words can no longer get them.
        is_continued = reply is not None and reply.text.startswith(self._sent) and not (self._sent and reply.thoughts)
        if reply is not None and is_continued:
            self._is_whole = True
            self._remember(reply)
            self._write(self._api.events(reply, self._body, sent=len(self._sent)))
            return
        if reply is not None:
            note("an answer turned out otherwise than its stream had begun: its client is told to ask again")
        reason = "the answer is another than its stream had begun: ask again" if reply is not None else self._refusal()
        self._write([("error", self._api.error(reason))])

    def _write(self, events: list[tuple[str, Json]]) -> None:
        for name, data in events:
            fields = cast("dict[str, Json]", data) if isinstance(data, dict) else {}
            if "sequence_number" in fields:  # each call of the API begins at 0
                fields["sequence_number"] = self._count
            self._count += 1
            self._lines.append(event_line(name, data))
