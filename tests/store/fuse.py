"""A crash at a chosen statement: what a SIGKILL there leaves of a store, without the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """The process died here."""


class Fuse:
    """A connection that dies before or after its n-th statement, and does nothing at all from then on."""

    def __init__(self, connection: Any, left: int, *, after: bool) -> None:
        self._connection, self._left, self._after, self._dead = connection, left, after, False

    def _burn(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._dead:
            raise Killed
        self._left -= 1
        self._dead = self._left < 0
        if self._dead and not self._after:
            raise Killed
        result = call(*arguments)
        if self._dead:
            raise Killed
        return result

    def execute(self, *arguments: Any) -> Any:
        return self._burn(self._connection.execute, *arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self._burn(self._connection.executemany, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
