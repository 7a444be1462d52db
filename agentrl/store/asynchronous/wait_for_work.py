"""Waiting for work in a trio program: the caller's tasks go on meanwhile. Knows no store, only its signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from agentrl.store.asynchronous.threads import Aside
from agentrl.store.databases.change_signal import Role
from agentrl.store.interfaces import Changes

_BESIDE_S = 0.02


class Signalling(Protocol):
    """A store that tells of changes."""

    def signal(self, role: Role) -> Changes: ...


class Waiting:
    """`await waiting(role, timeout_s)` returns as soon as there may be work for `role` that was not there when this
    last returned; or at the timeout. One for a loop."""

    def __init__(self, store: Signalling) -> None:
        self._store = store
        self._looks: dict[Role, _Looking] = {}

    async def __call__(self, role: Role, timeout_s: float) -> None:
        signal = self._store.signal(role)
        changed = self._looks.setdefault(role, _Looking(signal))
        with trio.move_on_after(timeout_s):
            while not await changed():  # other processes write, and no event of ours tells of it
                with trio.move_on_after(signal.pause_s):
                    await _woken(signal.wakes)


class _Looking:
    """Looks at a signal: at one of a server in a thread, one look at a time. A change that was found for a caller who
    was cancelled is the next one's."""

    def __init__(self, signal: Changes) -> None:
        self._look, self._found = Aside(signal.changed, inline=not signal.remote), False

    async def __call__(self) -> bool:
        await self._look(self._note)
        found, self._found = self._found, False
        return found

    def _note(self, changed: Callable[[], bool]) -> None:
        self._found = changed() or self._found


async def _woken(wakes: int | None) -> None:
    if wakes is None:
        await trio.sleep_forever()
    else:
        try:
            await trio.lowlevel.wait_readable(wakes)
        except (trio.BusyResourceError, OSError):  # another task of this role waits there, or a look has closed it
            await trio.sleep(_BESIDE_S)
