"""The run store's schema: its version, and the texts of its tables. Knows SQL, never what the rows are used for.

`schema.sql` says what every table and index is for. SQLite keeps the version in `PRAGMA user_version`, PostgreSQL in
the table `schema_version`. A store of another version is refused: there is no code that reads one.
"""

from __future__ import annotations

import sqlite3
from importlib import resources
from typing import Final, Literal

from agentrl.errors import FormatError

SCHEMA_VERSION: Final = 1

APPLICATION_ID: Final = 0x6152_4C31
"""`PRAGMA application_id`, "aRL1": distinguishes our file from any other SQLite database."""

BYTES: Final = ("tokens", "experts", "artifacts")
"""The tables of large arrays, by turn: what retention drops."""

FIRST_META: Final = "INSERT INTO meta VALUES ('config', ?), ('attempt', '1'), ('next_task', '0')"
SET_META: Final = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


# Two texts, and not one that is translated by regular expressions: a reader could see nowhere which tables PostgreSQL
# has. A test compares the two on a real server, so they cannot drift apart.
def text(name: Literal["schema.sql", "schema.postgres.sql"]) -> str:
    """The text of the schema for a database."""
    return resources.files("agentrl.store").joinpath(name).read_text(encoding="utf-8")


def check_version(version: int, path: object) -> None:
    """Raise FormatError, which names the store at `path`, unless `version` is that of this agentrl."""
    if version != SCHEMA_VERSION:
        raise FormatError(path, "store schema", version, SCHEMA_VERSION)


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite database has no table, as a process leaves it that died before its first commit."""
    return connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0


def read_version(connection: sqlite3.Connection) -> int:
    """The schema version of an open SQLite database, 0 if another program wrote it."""
    is_ours = connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    return int(connection.execute("PRAGMA user_version").fetchone()[0]) if is_ours else 0


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty SQLite database. The caller holds a write transaction and commits it."""
    # Not `executescript`, which would commit that transaction before it begins.
    statement = ""
    for sql_line in text("schema.sql").splitlines(keepends=True):
        statement += sql_line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
