"""A worker that leaves on purpose: its episodes stop, and go on elsewhere from the journal. Knows no episode."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import trio

_T = TypeVar("_T")


class HandedBack(Exception):
    """The worker gives its episodes back: this one goes on elsewhere, from the journal."""


class Leaving:
    """Whether the worker leaves. Once `set`, no episode begins another turn; `break_off` also ends the waits for turns
    under way, whose tokens so far are journaled. A step of an environment is never cut short by either."""

    def __init__(self) -> None:
        self._set = self._at_once = False
        self._turns: set[trio.CancelScope] = set()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def break_off(self) -> None:
        self._set = self._at_once = True
        for turn in self._turns:
            turn.cancel()

    async def during(self, turn: Awaitable[_T]) -> _T:
        """Wait for a turn. Raises HandedBack if it was broken off."""
        with trio.CancelScope() as scope:
            self._turns.add(scope)
            try:
                if self._at_once:
                    scope.cancel()
                return await turn
            finally:
                self._turns.discard(scope)
        raise HandedBack
