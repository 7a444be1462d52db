"""The tables that hold a run's bytes, divided into parts of so many turns, so that retention drops tables, not rows.

A part has the turns of a range of numbers; a new one has a thirty-second of all turns, so that there are never many.
A process that writes a turn makes the next part ahead of time. Retention counts the forgotten turns of each part. Once
half of a full part is forgotten, the kept turns move into a new table, or into the part before if that has little left,
and the old table is dropped: nothing is deleted row by row, and nothing is left to vacuum. Until then the bytes of a
forgotten group are still there.

A dropped table is gone for whoever began to read before, too, so every read transaction begins with a share of the lock
of `tokens`, which a drop takes alone: it waits for readers for `_MOMENT_MS`, else until retention is called again.

Owns the parts and the table that lists them (first number, first number after, rows, rows forgotten). Never knows which
groups are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from agentrl.errors import StoreBusy
from agentrl.store.databases.driver import Driver
from agentrl.store.databases.transactions import Transactions
from agentrl.store.schema import BYTES

TURNS = 1 << 14
"""How many turns a part has room for, at least."""

READ = ("SET LOCAL lock_timeout = '60s'", "LOCK TABLE ONLY tokens IN ACCESS SHARE MODE")
"""What begins a transaction that reads."""

_MOMENT_MS = 100
_AHEAD = TURNS // 4

_FORGET = """
UPDATE parts SET gone = parts.gone + own.n FROM (
    SELECT p.start, COUNT(*) AS n
    FROM json_each(?) i CROSS JOIN episodes e ON e.group_id = CAST(i.value AS BIGINT)
        CROSS JOIN turns t ON t.episode_id = e.id JOIN parts p ON p.start <= t.id AND t.id < p.until GROUP BY p.start
) own WHERE own.start = parts.start
"""
_SHRINKS = "2 * gone >= rows AND gone > 0"
_KEPT = """
SELECT t.id FROM turns t JOIN episodes e ON e.id = t.episode_id JOIN groups g ON g.id = e.group_id
WHERE t.id >= {start} AND t.id < {until} AND g.tokens_dropped = 0
"""


class Partitions:
    """The parts of a store. `run` runs a statement that no later one resembles; `lock` is the number of the lock that
    whoever makes a part takes."""

    def __init__(self, driver: Driver, run: Callable[[str], Any], lock: Callable[[], int]) -> None:
        self._driver, self._run, self._lock = driver, run, lock
        self._until = 0  # there is room for turns before it

    def room(self, turn: int) -> None:
        """See that there is a part for a turn, and for some after it; in a new store there is none yet. Inside a
        write."""
        if turn + _AHEAD < self._until:
            return
        ((self._until,),) = self._driver.rows("SELECT COALESCE(MAX(until), 0) FROM parts")
        if turn + _AHEAD < self._until:
            return
        # Looked at again under the lock: two journal writers, which share the store's own lock, may both see that room
        # runs out. A quarter of a part ahead, so that nobody ever waits for a table to be made.
        self._driver.row("SELECT pg_advisory_xact_lock(?)", (self._lock(),))  # somebody else may be making it
        ((covered_until,),) = self._driver.rows("SELECT COALESCE(MAX(until), 0) FROM parts")
        while covered_until <= turn + _AHEAD:
            part_end = covered_until + max(TURNS, covered_until // 32)
            for table_name in BYTES:
                self._run(f"CREATE TABLE {table_name}_{covered_until} (LIKE {table_name} INCLUDING ALL)")
                self._attach(table_name, covered_until, part_end)
            self._driver.execute(
                "INSERT INTO parts VALUES (?, ?, ?, 0)", (covered_until, part_end, part_end - covered_until)
            )
            covered_until = part_end

    def forget(self, groups: Sequence[int]) -> None:
        """Count what retention no longer keeps. Inside a write."""
        self._driver.execute(_FORGET, (json.dumps(list(groups)),))

    def reclaim(self, transactions: Transactions) -> None:
        """Give back the space of full parts of which half is forgotten; the next call does it if somebody reads now."""
        full_parts_sql = (
            f"SELECT start FROM parts WHERE {_SHRINKS} AND until <= (SELECT MAX(id) FROM turns) ORDER BY start"
        )
        with transactions.read():
            shrinkable_parts = self._driver.rows(full_parts_sql)
        with suppress(StoreBusy):
            for (part_start,) in shrinkable_parts:
                with transactions.write():
                    self._shrink(part_start)

    def _shrink(self, start: int) -> None:
        """Leave of a part what is kept."""
        run_sql = self._run
        part_row = self._driver.row(f"SELECT until FROM parts WHERE start = ? AND {_SHRINKS}", (start,))
        if part_row is None:
            return  # another process has done it
        (part_end,) = part_row
        # A moment, although waiting longer would succeed more often: in PostgreSQL everybody who comes after a waiting
        # exclusive lock queues behind it. Ten seconds of patience here would be ten seconds in which no episode can be
        # read or claimed. Nothing is lost by giving up, the next retention tries again.
        run_sql(f"SET LOCAL lock_timeout = {_MOMENT_MS}")
        run_sql(f"LOCK TABLE {', '.join(f'ONLY {table_name}' for table_name in BYTES)} IN ACCESS EXCLUSIVE MODE")
        run_sql(f"CREATE TABLE kept AS {_KEPT.format(start=start, until=part_end)}")
        ((kept_count,),) = self._driver.rows("SELECT COUNT(*) FROM kept")
        # Kept turns move into the part before if they fit. Otherwise a run that keeps one turn in a hundred would end
        # with hundreds of nearly empty tables, and planning a query takes longer with each of them.
        neighbour_sql = "SELECT start, rows FROM parts WHERE until = ? AND rows + ? <= ?"
        target_start, target_rows = self._driver.row(neighbour_sql, (start, kept_count, part_end - start)) or (start, 0)
        for table_name in BYTES:
            run_sql(f"ALTER TABLE {table_name} DETACH PARTITION {table_name}_{start}")
            run_sql(f"ALTER TABLE {table_name}_{start} RENAME TO {table_name}_old")
            if target_start == start:
                run_sql(f"CREATE TABLE {table_name}_{target_start} (LIKE {table_name} INCLUDING ALL)")
            else:
                run_sql(f"ALTER TABLE {table_name} DETACH PARTITION {table_name}_{target_start}")
            run_sql(
                f"INSERT INTO {table_name}_{target_start}"
                f" SELECT o.* FROM {table_name}_old o JOIN kept k ON k.id = o.turn_id"
            )
            run_sql(f"DROP TABLE {table_name}_old")
            self._attach(table_name, target_start, part_end)
        run_sql("DROP TABLE kept")
        run_sql(f"DELETE FROM parts WHERE start IN ({start}, {target_start})")
        run_sql(f"INSERT INTO parts VALUES ({target_start}, {part_end}, {target_rows + kept_count}, 0)")

    def _attach(self, table: str, start: int, until: int) -> None:
        lower_bound = start or "MINVALUE"
        self._run(f"ALTER TABLE {table} ATTACH PARTITION {table}_{start} FOR VALUES FROM ({lower_bound}) TO ({until})")
