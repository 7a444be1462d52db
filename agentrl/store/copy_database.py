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
    source_name, target_name = (STORE, ADDRESS) if url is not None else (ADDRESS, STORE)
    if not (run / source_name).exists():
        present_place = "in PostgreSQL" if url else "a file"
        raise UsageError(f"{run} has no {source_name}: its store is {present_place} already")
    old_place = run / f"{source_name}.old"
    if old_place.exists():
        raise UsageError(f"{old_place} is there from an earlier copy: remove it or put it elsewhere")
    new_path = run / f"copy.{target_name}" if target_name == STORE else run / target_name
    with closing(look(run / source_name, clock=clock)) as source_store:
        target_store = connect(new_path, clock=clock, create=True, url=url)
        try:
            target_store.prepare(create=True)
            row_count = copy(source_store, target_store)
        except BaseException:
            target_store.close()
            remove(new_path)
            new_path.unlink(missing_ok=True)
            raise
        target_store.close()
    # Only now that the copy is committed does the run change its store. The old one is renamed and never deleted:
    # whoever is unsure of the server has it back with one `mv`.
    (run / source_name).rename(old_place)
    if target_name == STORE:
        new_path.rename(run / STORE)
    return old_place, row_count


def copy(source: Database, target: Database) -> int:
    """Copy all rows into a store that was just made, in one transaction; returns how many."""
    row_count = 0
    with source.read(), target.write(durable=True):
        # Tables come in the order of their names, so some rows arrive before those that they refer to. The references
        # are checked all the same, when the transaction commits.
        target.upkeep.loosen()
        columns_by_table = target.upkeep.tables()
        # Counters come last. Inserting the other rows fires the triggers that count, and triggers cannot be switched
        # off alike in both databases; so let them count, and put the original numbers in their place at the end.
        for table_name in sorted(columns_by_table, key=lambda name: name in _COUNTERS):
            if table_name in _COUNTERS:  # triggers count too: what they wrote goes
                target.execute(f"DELETE FROM {table_name}")
            row_count += _copy_table(source, target, table_name, columns_by_table[table_name])
        target.upkeep.renumber()
    return row_count


def _copy_table(source: Database, target: Database, table: str, columns: tuple[str, ...]) -> int:
    column_names, placeholders = ", ".join(columns), ", ".join("?" * len(columns))
    insert_sql = f"INSERT INTO {table} ({column_names}) VALUES ({placeholders})"
    row_count, row_batch = 0, list[tuple[object, ...]]()
    untyped_index = columns.index("text") if table == "turns" else None  # the column of type ANY
    condition = _KEPT if table in BYTES else ""
    for copied_row in source.execute(f"SELECT {column_names} FROM {table}{condition}"):
        if untyped_index is not None:
            copied_row = (
                *copied_row[:untyped_index],
                target.any_text(copied_row[untyped_index]),
                *copied_row[untyped_index + 1 :],
            )
        row_batch.append(copied_row)
        row_count += 1
        if len(row_batch) == _BATCH:
            target.execute_many(insert_sql, row_batch)
            row_batch.clear()
    target.execute_many(insert_sql, row_batch)
    return row_count
