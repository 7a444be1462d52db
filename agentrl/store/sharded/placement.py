"""Where the rows of a run are whose store is several databases: pure arithmetic, and one watch over all of them.

The database `k` of `n` gives its groups, and the rows that belong to them, the numbers k + 1, k + 1 + n, k + 1 + 2 n, …
So any process knows from the number of a group or an episode where it is, and asks nobody.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence

from agentrl.errors import StoreError
from agentrl.store.databases.database import Database, Row, Watch
from agentrl.store.databases.open_store import SUFFIX

NUMBERED = ("groups", "episodes", "turns", "lineage", "outages")
"""The tables whose rows belong to groups, and have numbers."""

SHARD = "shard"
"""The key in `meta` under which a database says which it is: "2/3" is the last of three."""


def home(id: int, n: int) -> int:
    """Which of `n` databases has the group, or the episode, with this number."""
    return (id - 1) % n


def next_id(last: int, shard: int, n: int) -> int:
    """The smallest number above `last` that database `shard` gives."""
    return last + 1 + (shard - last) % n


def check(dbs: Sequence[Database]) -> None:
    """Raises StoreError if these are not all databases of one run, each in its place."""
    for shard, db in enumerate(dbs):
        if db.path.suffix != SUFFIX:
            continue
        with db.read():
            row = db.row("SELECT value FROM meta WHERE key = ?", (SHARD,))
        if row != (None if len(dbs) == 1 else (f"{shard}/{len(dbs)}",)):
            said = "a store of its own" if row is None else f"database {row[0]} of a store, counted from 0,"
            n = f"{len(dbs)} address file{'s' * (len(dbs) > 1)}"
            raise StoreError(f"{db.path} names {said} but {db.path.parent} has {n}: put the run's own files back")


def spaced(db: Database, shard: int, n: int) -> None:
    """Let a new database give the numbers of `shard`, inside a transaction."""
    db.execute("INSERT INTO meta VALUES (?, ?)", (SHARD, f"{shard}/{n}"))
    for table in NUMBERED:
        ((sequence,),) = db.rows("SELECT pg_get_serial_sequence(?, 'id')", (table,))
        db.execute(f"ALTER SEQUENCE {sequence} INCREMENT BY {n} RESTART WITH {shard + 1}")


def goes_on_at(db: Database, table: str, id: int, n: int) -> None:
    """Let the next row of a table have at least this number, inside a transaction."""
    ((sequence,),) = db.rows("SELECT pg_get_serial_sequence(?, 'id')", (table,))
    db.execute(
        f"SELECT setval('{sequence}', GREATEST(?, last_value + CASE WHEN is_called THEN {n} ELSE 0 END), FALSE)"
        f" FROM {sequence}",
        (id,),
    )


class Watches:
    """One `Watch` over those of several databases."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches
        self._woken_by = frozenset[int]()
        self._poll: select.epoll | None = None

    @property
    def wakes(self) -> int | None:
        """A descriptor that is readable when that of any watch is; None if one of them has none now."""
        found = [watch.wakes for watch in self._watches]
        if any(one is None for one in found):
            return None
        by = frozenset(one for one in found if one is not None)
        if self._poll is None or by != self._woken_by:
            self._drop()
            self._poll, self._woken_by = select.epoll(), by
            for one in by:
                self._poll.register(one, select.EPOLLIN)
        return self._poll.fileno()

    def written(self) -> bool:
        written = [watch.written() for watch in self._watches]  # each counts as asked
        return any(written)

    def row(self, sql: str) -> Row | None:
        """The rows of all databases, one after the other."""
        return tuple(self._values(sql))

    def _values(self, sql: str) -> Iterator[object]:
        for watch in self._watches:
            yield from watch.row(sql) or (None,)

    def _drop(self) -> None:
        if self._poll is not None:
            self._poll.close()
        self._poll = None

    def close(self) -> None:
        self._drop()
        for watch in self._watches:
            watch.close()
