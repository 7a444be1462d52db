"""A run's whole store into another database, row by row. Knows no table but those that triggers
fill, and those that retention empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from agentrl.errors import StoreError, UsageError
from agentrl.store.databases.database import Database
from agentrl.store.databases.open_store import ADDRESS, STORE, connect, look, parts, remove
from agentrl.store.run_values import PLACE
from agentrl.store.schema import BYTES

_COUNTERS = {
    "group_counts": "purpose, state",
    "ending_counts": "attempt, evaluation, stop_reason",
    "score_counts": "source",
}
_OF_THE_RUN = ("checkpoints", "imported_versions", "leases", "meta", "metrics", "sources", "versions")
_BATCH = 256
_KEPT = (  # a server may still have what retention dropped
    " WHERE turn_id IN (SELECT t.id FROM turns t JOIN episodes e ON e.id = t.episode_id"
    " JOIN groups g ON g.id = e.group_id WHERE g.tokens_dropped = 0)"
)


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
    sources: list[Database] = []
    try:
        for one in (several := parts(run / here)):
            if len(several) > 1:  # no other call opens it, so none would have brought it up to date
                with closing(connect(one, clock=clock)) as old:
                    old.prepare(create=False)
            sources.append(look(one, clock=clock))
        target = connect(new, clock=clock, create=True, url=url)
        try:
            target.prepare(create=True)
            rows = copy(sources, target)
        except BaseException:
            target.close()
            remove(new)
            new.unlink(missing_ok=True)
            raise
        target.close()
    finally:
        for source in sources:
            source.close()
    for one in reversed(parts(run / here)):
        one.rename(one.with_name(f"{one.name}.old"))
    if there == STORE:
        new.rename(run / STORE)
    return kept, rows


def copy(sources: Sequence[Database], target: Database) -> int:
    """Copy all rows into a store that was just made, in one transaction; returns how many. `sources` are the databases
    of a store, in order: older runs may have several, whose groups and their rows have different numbers, while the
    first alone knows all of the run. Raises StoreError if the stores have other tables, or one is missing."""
    copied = 0
    with ExitStack() as looks, target.write(durable=True):
        target.loosen()
        tables = target.tables()
        for source in sources:
            looks.enter_context(source.read())
            if source.tables() != tables:
                raise StoreError(
                    f"{source.path} and {target.path} have different tables: bring the older one up to date"
                )
        _check_places(sources)
        for table in sorted(tables, key=lambda name: name in _COUNTERS):
            if table in _COUNTERS:  # triggers count too: what they wrote goes
                target.execute(f"DELETE FROM {table}")
            for source in sources[:1] if table in _OF_THE_RUN else sources:
                copied += _copy_table(source, target, table, tables[table])
        target.execute("DELETE FROM meta WHERE key = ?", (PLACE.key,))
        target.renumber()
    return copied


def _check_places(sources: Sequence[Database]) -> None:
    """Raise StoreError unless these are all databases of one run, each in its place; inside their transactions."""
    for at, source in enumerate(sources):
        place = PLACE.within(source)
        if place != (None if len(sources) == 1 else f"{at}/{len(sources)}"):
            found = "a store of its own" if place is None else f"database {place} of a store, counted from 0,"
            n = f"{len(sources)} address file{'s' * (len(sources) > 1)}"
            raise StoreError(f"{source.path} names {found} but {source.path.parent} has {n}: put the run's own back")


def _copy_table(source: Database, target: Database, table: str, columns: tuple[str, ...]) -> int:
    names, places = ", ".join(columns), ", ".join("?" * len(columns))
    sql = f"INSERT INTO {table} ({names}) VALUES ({places})"
    if table in _COUNTERS:
        sql += f" ON CONFLICT ({_COUNTERS[table]}) DO UPDATE SET n = {table}.n + excluded.n"
    elif table == "quarantine":  # one task, in two databases
        sql += " ON CONFLICT DO NOTHING"
    copied, batch = 0, list[tuple[object, ...]]()
    free = columns.index("text") if table == "turns" else None  # the column of type ANY
    kept = _KEPT if table in BYTES else ""
    for row in source.execute(f"SELECT {names} FROM {table}{kept}"):
        if free is not None:
            row = (*row[:free], target.any_text(row[free]), *row[free + 1 :])
        batch.append(row)
        copied += 1
        if len(batch) == _BATCH:
            target.execute_many(sql, batch)
            batch.clear()
    target.execute_many(sql, batch)
    return copied
