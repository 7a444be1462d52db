"""Calls that wait for space on a full disk, for a process that would lose work if it were started again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from agentrl.errors import DiskFull

_LOOK_S = 0.5
_S = TypeVar("_S")
_T = TypeVar("_T")


def once_there_is_space(call: Callable[[], _T], *, deadline_s: float, mark: Callable[[], object]) -> _T:
    """What a call returns that leaves nothing behind if the disk is full. `mark` is called while it waits. Raises what
    it raises; DiskFull after `deadline_s`."""
    began = time.monotonic()
    while True:
        try:
            return call()
        except DiskFull as error:
            if time.monotonic() - began > deadline_s:
                raise
            told = error
        mark()
        if time.monotonic() - began < _LOOK_S:
            print(f"agentrl: {told}; it is waited for", file=sys.stderr)
        time.sleep(_LOOK_S)


def with_space(store: _S, *, deadline_s: float, mark: Callable[[], object]) -> _S:
    """The same store, but each call waits for space as `once_there_is_space` does: a write of a store is made whole or
    not at all."""
    return cast(_S, _WithSpace(store, deadline_s, mark))


class _WithSpace:
    def __init__(self, store: object, deadline_s: float, mark: Callable[[], object]) -> None:
        self._store, self._deadline_s, self._mark = store, deadline_s, mark

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            return once_there_is_space(lambda: found(*given, **named), deadline_s=self._deadline_s, mark=self._mark)

        return call
