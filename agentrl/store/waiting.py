"""Waiting for work in a trio program: the caller's tasks go on meanwhile. Knows no store, only its signals."""

from __future__ import annotations

from typing import Protocol

import trio

from agentrl.store.roles import Changes
from agentrl.store.signal import Role

_BESIDE_S = 0.02


class Signalling(Protocol):
    """A store that tells of changes."""

    def signal(self, role: Role) -> Changes: ...


async def wait_for_work(store: Signalling, role: Role, timeout_s: float) -> None:
    """Return as soon as there may be work for `role` that was not there when this last returned; or at the timeout."""
    signal = store.signal(role)
    with trio.move_on_after(timeout_s):
        while not signal.changed():  # other processes write, and no event of ours tells of it
            with trio.move_on_after(signal.pause_s):
                await _woken(signal.wakes)


async def _woken(wakes: int | None) -> None:
    if wakes is None:
        await trio.sleep_forever()
    else:
        try:
            await trio.lowlevel.wait_readable(wakes)
        except trio.BusyResourceError:  # another task of this role waits there
            await trio.sleep(_BESIDE_S)
