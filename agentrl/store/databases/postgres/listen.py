"""How a process hears of writes to a store in PostgreSQL: it listens on a connection of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg

from agentrl.store.databases.database import PAUSE_S, Row
from agentrl.store.databases.postgres.connection import DeadlineConnection
from agentrl.store.databases.postgres.sql import translated

_LOOK_S = 1.0  # the longest that a lost notification delays anybody


class Notices:
    """Every commit that somebody waits for notifies a `channel`; a connection of its own, which `dial` opens, listens.
    If it was lost, something may have been written meanwhile; and a notification may be lost without a word, so once in
    `_LOOK_S` something may have been, too."""

    def __init__(self, dial: Callable[[], DeadlineConnection], channel: str) -> None:
        self._dial, self._channel = dial, channel
        self._connection: DeadlineConnection | None = None
        self._dialled_s = self._told_s = -math.inf

    @property
    def wakes(self) -> int | None:
        """The socket on which notifications come."""
        with suppress(psycopg.Error):  # another thread may close it just now
            return None if self._connection is None or self._connection.closed else self._connection.fileno()
        return None

    def written(self) -> bool:
        """Whether anybody has committed since this was last asked; also if nobody can tell."""
        written = self._notified() or time.monotonic() > self._told_s + _LOOK_S
        if written:
            self._told_s = time.monotonic()
        return written

    def _notified(self) -> bool:
        try:
            if self._connection is None or self._connection.closed:
                if time.monotonic() < self._dialled_s + PAUSE_S:
                    return True
                self._dialled_s = time.monotonic()
                self._connection = self._dial()
                self._connection.execute(f"LISTEN {self._channel}".encode())
                return True
            return bool(list(self._connection.notifies(timeout=0)))
        except psycopg.Error:
            return True  # whoever reads the store next waits for it, or hears why not

    def row(self, sql: str) -> Row | None:
        """The row that a statement returns."""
        try:
            if self._connection is None:
                return None
            return self._connection.execute(translated(sql)).fetchone()
        except psycopg.Error:
            return (time.monotonic(),)  # unlike any other

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
