"""Awaited calls of the run's store, and writes of files, each made again until the disk has space for it.

A step's work would be lost with a call that fails for want of space, and the process that is started again would find
the same full disk.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio

from agentrl.errors import DiskFull
from agentrl.host.disk_space import wait_for_space
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Waiting

_T = TypeVar("_T")


class StoreCalls:
    """`await calls(call)` makes a call of `store` in a thread, one at a time and in order. Calls wait `deadline_s` for
    space, and call `mark` meanwhile. With `inline` there is no thread: for virtual time."""

    def __init__(self, store: RunStore, mark: Callable[[], None], *, deadline_s: float, inline: bool = False) -> None:
        self._aside, self._waiting = Aside(store, inline=inline), Waiting(store)
        self._mark, self._deadline_s = mark, deadline_s

    async def __call__(self, call: Callable[[RunStore], _T]) -> _T:
        """Make the call. Returns its result and raises its error; DiskFull after the deadline."""
        return await self._with_space(partial(self._aside, call))

    async def write_file(self, write: Callable[[], object]) -> None:
        """Make a write that is no call of the store, in a thread too. Raises as a call does."""
        await self._with_space(partial(trio.to_thread.run_sync, write))

    async def wait_for_work(self, timeout_s: float) -> None:
        """Wait until there may be work for a learner, or until the timeout."""
        await self._waiting("learner", timeout_s)

    async def _with_space(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        async def marked() -> _T:
            try:
                return await attempt()
            except DiskFull:
                # Each refused attempt is a sign of life: waiting for space has its own deadline, and the heartbeat's
                # would end a learner that does the right thing.
                self._mark()
                raise

        return await wait_for_space(marked, deadline_s=self._deadline_s, tell=_tell)


def _tell(error: DiskFull) -> None:
    print(f"agentrl: {error}; the learner waits for it", file=sys.stderr)
