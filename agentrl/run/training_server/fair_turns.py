"""Places that sessions share: who waits gets one in a turn that is fair by tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from agentrl.engine.router.gateway import QUANTUM, FairQueue


class FairTurns:
    """So many `places` at once."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._queue = FairQueue[trio.Event](QUANTUM)
        self._known = set[str]()

    @asynccontextmanager
    async def turn(self, session: str, tokens: float) -> AsyncGenerator[None]:
        """Wait for a place, for work of about so many tokens, and hold it."""
        if session not in self._known:
            self._known.add(session)
            self._queue.join(session)
        mine = trio.Event()
        self._queue.push(session, mine, tokens)
        self._give()
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():
                self._end(session)
            else:
                self._queue.remove(session, mine)
            raise
        try:
            yield
        finally:
            self._end(session)

    def _end(self, session: str) -> None:
        self._free += 1
        self._queue.done(session)
        self._give()

    def _give(self) -> None:
        while self._free and (found := self._queue.pop()) is not None:
            self._free -= 1
            found[1].set()
