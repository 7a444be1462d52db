"""Places that sessions share: who waits gets one in a turn that is fair by tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

QUANTUM = 256.0
"""Tokens of one visit to a session. Others wait for a visit: few, and a longer request takes several."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """The requests of one session that wait, with their tokens. `credit` is in tokens."""

    waiting: deque[tuple[T, float]] = field(default_factory=deque[tuple[T, float]])
    credit: float = 0.0


class FairQueue(Generic[T]):
    """The requests that wait for a place, by deficit round robin (Shreedhar and Varghese, 1996). Each visit to a
    session adds `quantum` tokens to its credit, and its requests go out while the credit lasts."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._quantum = quantum
        self._lines: dict[str, _Line[T]] = {}  # of the sessions that wait
        self._ring: deque[str] = deque()  # the first one is visited
        self._is_visited = False

    def push(self, session: str, item: T, tokens: float) -> None:
        """Have a request wait behind the others of its session."""
        if session not in self._lines:
            self._lines[session] = _Line()
            self._ring.append(session)
        self._lines[session].waiting.append((item, tokens))

    def remove(self, session: str, item: T) -> None:
        """Forget a request that waits."""
        waiting_entries = self._lines[session].waiting
        waiting_entries.remove(next(queue_entry for queue_entry in waiting_entries if queue_entry[0] is item))
        self._close(session)

    def pop(self) -> T | None:
        """The request that goes out now; None if none waits."""
        while self._ring:
            first_session = self._ring[0]
            session_line = self._lines[first_session]
            if not self._is_visited:
                self._is_visited = True
                session_line.credit += self._quantum
            next_item, token_count = session_line.waiting[0]
            # A request larger than the credit waits for further visits. To send it at once would let a session of few
            # large requests take more tokens than one of many small ones.
            if token_count <= session_line.credit:
                session_line.waiting.popleft()
                session_line.credit -= token_count
                self._close(first_session)
                return next_item
            self._ring.rotate(-1)
            self._is_visited = False
        return None

    def _close(self, session: str) -> None:
        """Leave out a session without requests, and its credit: nobody saves up while it has nothing to send."""
        if self._lines[session].waiting:
            return
        if self._ring[0] == session:
            self._is_visited = False
        self._ring.remove(session)
        del self._lines[session]


class FairTurns:
    """So many `places` at once."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._queue = FairQueue[trio.Event]()

    @asynccontextmanager
    async def turn(self, session: str, tokens: float) -> AsyncGenerator[None]:
        """Wait for a place, for work of about so many tokens, and hold it."""
        turn_event = trio.Event()
        self._queue.push(session, turn_event, tokens)
        self._give()
        try:
            await turn_event.wait()
        except trio.Cancelled:
            # Cancelled after the place was given and before it was used: the place has to go to the next one, or it is
            # lost for the life of the server.
            if turn_event.is_set():
                self._end()
            else:
                self._queue.remove(session, turn_event)
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        self._free += 1
        self._give()

    def _give(self) -> None:
        while self._free and (turn_event := self._queue.pop()) is not None:
            self._free -= 1
            turn_event.set()
