"""Writes of a trio program by a synchronous handle of the store: each is made in a thread.

While another process holds the store's lock, the caller waits; the loop's other tasks, and the deadlines by which they
watch child processes, go on. The handle belongs to these writes: a read of it in the loop would wait for them too, so
the loop reads by a handle of its own. Never knows what a write is. `store` is the same for many small writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

_S = TypeVar("_S")
_T = TypeVar("_T")


class Aside(Generic[_S]):
    """Calls get `store`, one at a time and in order. A call whose caller is cancelled is still made, before any later
    one. `inline` makes each in the caller's task, without a thread: for virtual time."""

    def __init__(self, store: _S, *, inline: bool = False) -> None:
        self._store, self._inline = store, inline
        self._one = trio.CapacityLimiter(1)

    async def __call__(self, call: Callable[[_S], _T]) -> _T:
        if self._inline:
            return call(self._store)
        return await trio.to_thread.run_sync(call, self._store, abandon_on_cancel=True, limiter=self._one)
