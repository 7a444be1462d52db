"""A run's whole store into another database, row by row. Knows no table but those that triggers fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.errors import StoreError, UsageError
from agentrl.store.choice import ADDRESS, STORE, connect, look, remove
from agentrl.store.database import Database

_COUNTERS = ("group_counts", "ending_counts", "score_counts")
_BATCH = 256


def move(run: Path, url: str | None, clock: Callable[[], float]) -> tuple[Path, int]:
    """Copy the store in the folder `run` to PostgreSQL at `url`, or into a file if that is None, and let the folder
    name the copy from now on. Returns the path of what named the old store, which stays as it is, and the rows copied.

    The caller holds the run's lock. Raises UsageError if the run has its store there already."""
    here, there = (STORE, ADDRESS) if url is not None else (ADDRESS, STORE)
    if not (run / here).exists():
        where = "in PostgreSQL" if url else "a file"
        raise UsageError(f"{run} has no {here}: its store is {where} already")
    kept = run / f"{here}.old"
    if kept.exists():
        raise UsageError(f"{kept} is there from an earlier copy: remove it or put it elsewhere")
    new = run / f"copy.{there}" if there == STORE else run / there
    source = look(run / here, clock=clock)
    try:
        target = connect(new, clock=clock, create=True, url=url)
        try:
            target.prepare(create=True)
            rows = copy(source, target)
        except BaseException:
            target.close()
            remove(new)
            new.unlink(missing_ok=True)
            raise
        target.close()
    finally:
        source.close()
    (run / here).rename(kept)
    if there == STORE:
        new.rename(run / STORE)
    return kept, rows


def copy(source: Database, target: Database) -> int:
    """Copy all rows into a store that was just made, in one transaction; returns how many. Raises StoreError if the two
    have other tables."""
    with source.read(), target.write(durable=True):
        tables = source.tables()
        if tables != target.tables():
            raise StoreError(f"{source.path} and {target.path} have different tables: bring the older one up to date")
        target.loosen()
        copied = 0
        for table in sorted(tables, key=lambda name: name in _COUNTERS):  # triggers count too: what they wrote goes
            if table in _COUNTERS:
                target.execute(f"DELETE FROM {table}")
            copied += _copy_table(source, target, table, tables[table])
        target.renumber()
    return copied


def _copy_table(source: Database, target: Database, table: str, columns: tuple[str, ...]) -> int:
    names, places = ", ".join(columns), ", ".join("?" * len(columns))
    copied, batch = 0, list[tuple[object, ...]]()
    free = columns.index("text") if table == "turns" else None  # the column of type ANY
    for row in source.execute(f"SELECT {names} FROM {table}"):
        if free is not None:
            row = (*row[:free], target.any_text(row[free]), *row[free + 1 :])
        batch.append(row)
        copied += 1
        if len(batch) == _BATCH:
            target.execute_many(f"INSERT INTO {table} ({names}) VALUES ({places})", batch)
            batch.clear()
    target.execute_many(f"INSERT INTO {table} ({names}) VALUES ({places})", batch)
    return copied
