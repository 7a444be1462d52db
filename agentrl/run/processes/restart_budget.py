"""How often a child that died may be started again, and how soon."""

from __future__ import annotations

import math
from dataclasses import dataclass

import trio

from agentrl.errors import RunFailed

_PAUSE_S = 4.0  # pause before the second restart in a row


@dataclass(slots=True)
class RestartBudget:
    """How often a child may be restarted: `allowed` times in a row. A life with `window_s` seconds between its first
    and its last sign resets the count. The first restart is immediate, then pauses double, so that an outage of a
    minute does not spend it all.

    The time from its start to its end would not do: it contains the silence until a hang is noticed, which is longer
    than the window, so a child that hangs at every start would be restarted for ever."""

    allowed: int = 5
    window_s: float = 60.0
    _spent: int = 0
    _first_sign: float = math.inf
    _last_sign: float = -math.inf

    def begin(self) -> None:
        """Note that a life of the child begins: signs of an earlier one do not count for it."""
        self._first_sign, self._last_sign = math.inf, -math.inf

    def lives(self) -> None:
        """Record a sign of life."""
        self._last_sign = trio.current_time()
        self._first_sign = min(self._first_sign, self._last_sign)

    async def spend(self, why: str) -> None:
        """Record that the child ended; returns when it may be started. Raises RunFailed if the budget is spent."""
        # Between signs of one life, so a life that gives a single sign and then hangs has lasted no time at all.
        # `tests/run/test_restart.py` adds up no signs of two lives.
        if self._last_sign - self._first_sign >= self.window_s:
            self._spent = 0
        self.begin()
        if self._spent >= self.allowed:
            raise RunFailed(f"{why} (started again {self.allowed} times, never well for {self.window_s:g} s)")
        if self._spent:
            # 4, 8, 16, 32 s: a minute in all. Five restarts at once would all fall into the same outage of a disk, a
            # driver or a name server.
            await trio.sleep(_PAUSE_S * 2 ** (self._spent - 1))
        self._spent += 1

    def forgive(self) -> None:
        """Take back one restart that the child did not cause."""
        self._spent = max(0, self._spent - 1)
