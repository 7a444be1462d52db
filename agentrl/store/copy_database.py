"""A run's whole store into another database, row by row. Knows no table but those that triggers
fill, and those that retention empties."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.store.databases.database import Database
from agentrl.store.databases.open_store import ADDRESS, STORE, connect, look, remove
from agentrl.store.schema import BYTES

_COUNTERS = ("group_counts", "ending_counts", "score_counts")
_BATCH = 256
_KEPT = (  # a server may still have what retention dropped
    " WHERE turn_id IN (SELECT t.id FROM turns t JOIN episodes e ON e.id = t.episode_id"
    " JOIN groups g ON g.id = e.group_id WHERE g.tokens_dropped = 0)"
)


def move(run: Path, url: str | None, clock: Callable[[], float]) -> tuple[Path, int]:
    """Copy the store in the folder `run` to PostgreSQL at `url`, or into a file if that is None, and let the folder
    name the copy from now on. Returns the path of what named the old store, which stays as it is, and the rows copied.

    The caller holds the run's lock. Raises UsageError if the run has its store there already."""
    here, target_name = (STORE, ADDRESS) if url is not None else (ADDRESS, STORE)
    if not (run / here).exists():
        where = "in PostgreSQL" if url else "a file"
        raise UsageError(f"{run} has no {here}: its store is {where} already")
    old_place = run / f"{here}.old"
    if old_place.exists():
        raise UsageError(f"{old_place} is there from an earlier copy: remove it or put it elsewhere")
    new = run / f"copy.{target_name}" if target_name == STORE else run / target_name
    with closing(look(run / here, clock=clock)) as source:
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
    # Only now that the copy is committed does the run change its store. The old one is renamed and never deleted:
    # whoever is unsure of the server has it back with one `mv`.
    (run / here).rename(old_place)
    if target_name == STORE:
        new.rename(run / STORE)
    return old_place, rows


def copy(source: Database, target: Database) -> int:
    """Copy all rows into a store that was just made, in one transaction; returns how many."""
    copied = 0
    with source.read(), target.write(durable=True):
        # Tables come in the order of their names, so some rows arrive before those that they refer to. The references
        # are checked all the same, when the transaction commits.
        target.upkeep.loosen()
        tables = target.upkeep.tables()
        # Counters come last. Inserting the other rows fires the triggers that count, and triggers cannot be switched
        # off alike in both databases; so let them count, and put the original numbers in their place at the end.
        for table in sorted(tables, key=lambda name: name in _COUNTERS):
            if table in _COUNTERS:  # triggers count too: what they wrote goes
                target.execute(f"DELETE FROM {table}")
            copied += _copy_table(source, target, table, tables[table])
        target.upkeep.renumber()
    return copied


def _copy_table(source: Database, target: Database, table: str, columns: tuple[str, ...]) -> int:
    names, places = ", ".join(columns), ", ".join("?" * len(columns))
    sql = f"INSERT INTO {table} ({names}) VALUES ({places})"
    copied, batch = 0, list[tuple[object, ...]]()
    free = columns.index("text") if table == "turns" else None  # the column of type ANY
    condition = _KEPT if table in BYTES else ""
    for row in source.execute(f"SELECT {names} FROM {table}{condition}"):
        if free is not None:
            row = (*row[:free], target.any_text(row[free]), *row[free + 1 :])
        batch.append(row)
        copied += 1
        if len(batch) == _BATCH:
            target.execute_many(sql, batch)
            batch.clear()
    target.execute_many(sql, batch)
    return copied
