"""How often a child that died may be started again, and how soon."""

from __future__ import annotations

import math
from dataclasses import dataclass

import trio

from agentrl.errors import RunFailed

_PAUSE_S = 4.0  # pause before the second restart in a row


@dataclass(slots=True)
class RestartBudget:
    """How often a child may be restarted: `allowed` times in a row; the count is reset once it was well for `window_s`
    seconds. The first restart is immediate, then pauses double, so that an outage of a minute does not spend it all."""

    allowed: int = 5
    window_s: float = 60.0
    _spent: int = 0
    _well_since: float = math.inf

    def well(self) -> None:
        """Note that the child is up and well from now on."""
        self._well_since = trio.current_time()

    async def spend(self, why: str) -> None:
        """Record that the child ended; returns when it may be started. Raises RunFailed if the budget is spent."""
        if trio.current_time() - self._well_since >= self.window_s:
            self._spent = 0
        self._well_since = math.inf
        if self._spent >= self.allowed:
            raise RunFailed(f"{why} (started again {self.allowed} times, never well for {self.window_s:g} s)")
        if self._spent:
            await trio.sleep(_PAUSE_S * 2 ** (self._spent - 1))
        self._spent += 1

    def forgive(self) -> None:
        """Take back one restart that the child did not cause."""
        self._spent = max(0, self._spent - 1)
