"""Answers that are computed once: kept by key, and computed once however many callers need one at the same time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from agentrl.host.clocks import host_time

V = TypeVar("V")


class Remembered(Generic[V]):
    """The last `most` lasting answers. An answer that is not lasting (a run that was cut off) goes to the caller that
    computed it and is forgotten; a caller that waited meanwhile computes anew."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[bytes, V] = OrderedDict()
        self._under_way: dict[bytes, trio.Event] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def get(self, key: bytes, find: Callable[[], Awaitable[tuple[V, bool]]]) -> V:
        """The answer of `key`; `find` gives it, and whether it is lasting."""
        while key not in self._answers:
            if key in self._under_way:
                with host_time("an answer that a sibling asked for"):
                    await self._under_way[key].wait()
                continue
            answer_ready = self._under_way[key] = trio.Event()
            try:
                answer, is_lasting = await find()
                if not is_lasting or not self._most:
                    return answer
                self._answers[key] = answer
            finally:
                del self._under_way[key]
                answer_ready.set()
        self._answers.move_to_end(key)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)
        return self._answers[key]
