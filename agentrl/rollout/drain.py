"""Gate that holds a worker's turns up: it leaves on purpose, and its episodes go on elsewhere from the journal; or its
run is paused, and they go on here. Knows no episode."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import trio

_T = TypeVar("_T")


class HandedBack(Exception):
    """The worker gives its episodes back: this one goes on elsewhere, from the journal."""


class TurnPaused(Exception):
    """A turn was broken off by a pause: it goes on from the tokens so far, once the run does."""


class TurnGate:
    """Whether turns begin. Once the worker is `leaving`, none does; while the run is `paused`, none does until it goes
    on. `break_off`, and a pause `now`, also end the waits for turns under way, whose tokens so far are journaled. A
    step of an environment is never cut short by any of them."""

    def __init__(self) -> None:
        self.leaving = self.paused = False
        self._leaving_now = self._paused_now = False  # without an end of turns under way
        self._turns: dict[trio.CancelScope, bool] = {}  # and whether a pause may break each off
        self._changed = trio.Event()

    def leave(self) -> None:
        self.leaving = True
        self._change()

    def break_off(self) -> None:
        self._leaving_now = True
        self.leave()
        for turn_scope in self._turns:
            turn_scope.cancel()

    def pause(self, *, now: bool) -> None:
        self.paused, self._paused_now = True, now
        for turn_scope, breakable in self._turns.items():
            if now and breakable:
                turn_scope.cancel()

    def go_on(self) -> None:
        self.paused = self._paused_now = False
        self._change()

    async def passed(self) -> None:
        """Wait until a turn may begin. Raises HandedBack once the worker is leaving."""
        while self.paused and not self.leaving:
            await self._changed.wait()
        if self.leaving:
            raise HandedBack

    async def during(self, turn: Awaitable[_T], *, breakable: bool) -> _T:
        """Wait for a turn. Raises HandedBack if it was broken off because the worker leaves; TurnPaused if by a pause,
        which does that to a `breakable` one."""
        with trio.CancelScope() as turn_scope:
            self._turns[turn_scope] = breakable
            try:
                if self._leaving_now or (self._paused_now and breakable):
                    turn_scope.cancel()
                # Cancelled by a scope of its own, not by an error that is thrown in: the turn ends at its next
                # checkpoint as at any deadline, and writes the tokens that it has (see `generate_turn`).
                return await turn
            finally:
                del self._turns[turn_scope]
        raise HandedBack if self._leaving_now else TurnPaused

    def _change(self) -> None:
        # A new event each time, as trio's cannot be unset. Whoever waits holds the old one and is woken by it, also if
        # the run is paused again before it gets to run; it then looks at the flags anew.
        self._changed.set()
        self._changed = trio.Event()
