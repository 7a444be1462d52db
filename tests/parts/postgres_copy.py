"""A run's tables in PostgreSQL, as they stand at one moment, copied into SQLite in memory.

So an auditor reads them by the same SQL as a file. Shares no code with the store: it reads the address file and the
server's own catalogue. It waits for a server that restarts.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

_ANSWER_S, _PAUSE_S = 60, 0.2
_ROWS = 500  # read at a time
_COLUMNS = """
SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = to_regnamespace(%s) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
    AND a.attnum > 0 AND NOT a.attisdropped
GROUP BY c.relname
"""


def copied(address: Path, *, patience_s: float) -> sqlite3.Connection:
    """All tables of the run that an address file names. Waits `patience_s` for a server that is away; then it raises
    psycopg.OperationalError."""
    until = time.monotonic() + patience_s
    while True:
        copy = sqlite3.connect(":memory:")
        try:
            with _connected(address) as (source, schema):
                tokens = sql.Identifier(schema, "tokens")
                source.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(tokens))
                for table, columns in source.execute(_COLUMNS, (schema,)).fetchall():
                    _copy(source, copy, schema, table, columns)
                return copy
        except psycopg.OperationalError:
            copy.close()
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def ask(address: Path, statement: str, *arguments: object) -> Any:
    """The first value that a statement, with `?` for an argument, returns; None if there is none, or if the server is
    away."""
    try:
        with _connected(address) as (source, schema):
            source.execute(sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(schema)))
            query = statement.replace("%", "%%").replace("?", "%s").encode()
            row = source.execute(query, arguments).fetchone()
    except psycopg.Error:
        return None
    return None if row is None else row[0]


@contextmanager
def _connected(address: Path) -> Generator[tuple[psycopg.Connection[tuple[Any, ...]], str]]:
    """A transaction that sees one state and writes nothing, and the run's schema."""
    place = json.loads(address.read_text())
    options = f"-c statement_timeout={1000 * _ANSWER_S}"
    with closing(psycopg.connect(place["url"], connect_timeout=_ANSWER_S, options=options)) as source:
        source.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        source.read_only = True
        yield source, place["schema"]


def _copy(
    source: psycopg.Connection[tuple[Any, ...]], copy: sqlite3.Connection, schema: str, table: str, columns: list[str]
) -> None:
    """Copy one table; columns that name rows get an index."""
    copy.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
    with source.cursor(name="rows") as rows:
        rows.itersize = _ROWS
        rows.execute(
            sql.SQL("SELECT {} FROM {}").format(
                sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(schema, table)
            )
        )
        copy.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)
    for column in columns:
        if column == "id" or column.endswith("_id"):
            copy.execute(f"CREATE INDEX {table}_{column} ON {table} ({column})")
