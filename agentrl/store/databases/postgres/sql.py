"""The store's SQL, which both databases read, as PostgreSQL reads it.

Owns what PostgreSQL says in other words than SQLite: parameters (`?`, `?2`), `INDEXED BY`, `CROSS JOIN … ON`, column
types, triggers, and functions that only SQLite has. Knows no connection, nor what a table is for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from agentrl.store.databases.postgres.arrays import NAMES

OURS = """
CREATE FUNCTION iif(boolean, anycompatible, anycompatible) RETURNS anycompatible LANGUAGE sql IMMUTABLE
    AS 'SELECT CASE WHEN $1 THEN $2 ELSE $3 END';
CREATE AGGREGATE total(double precision) (sfunc = float8pl, stype = double precision, initcond = '0');
CREATE FUNCTION json_extract(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF((CASE WHEN $2 LIKE '$[%' THEN $1::json -> trim('$[]' FROM $2)::integer
                   ELSE $1::json -> substr($2, 3) END)::text, 'null') $$;
CREATE FUNCTION json_each(text) RETURNS TABLE (value text) LANGUAGE sql IMMUTABLE
    AS 'SELECT value::text FROM json_array_elements($1::json)';
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN PERFORM pg_notify(TG_TABLE_SCHEMA, ''); RETURN NULL; END $$;
CREATE TABLE schema_version (version BIGINT NOT NULL);
INSERT INTO schema_version VALUES (0);
"""
"""What a new schema has beside the tables."""

_PLACE = re.compile(r"\?(\d*)|'[^']*'")
_HINT = re.compile(r" INDEXED BY \w+")
_CROSS = re.compile(
    r"CROSS JOIN (?P<table>\w+) (?P<name>\w+) ON (?P<condition>.+?)(?=\s(WHERE|((LEFT|CROSS) )?JOIN)\b|\s*$)", re.DOTALL
)


@lru_cache(maxsize=1024)
def translated(sql: str) -> bytes:
    """A statement as PostgreSQL reads it."""
    count = 0

    def place(found: re.Match[str]) -> str:
        nonlocal count
        if found[1] is None:
            return found[0]
        count += 1
        return f"${found[1] or count}"

    text = _CROSS.sub(_in_order, _HINT.sub("", sql))
    return _PLACE.sub(place, text).encode()


def _in_order(join: re.Match[str]) -> str:
    """A join that begins with its left side, as SQLite's CROSS JOIN does, whatever the planner believes of a new table
    that nobody has counted yet."""
    condition = join["condition"].replace(f"{join['name']}.", "")
    return f"CROSS JOIN LATERAL (SELECT * FROM {join['table']} WHERE {condition} OFFSET 0) {join['name']}"


class PlainInsert(NamedTuple):
    """What `INSERT INTO table (columns) VALUES (?, …)` says; no columns are all of them."""

    table: str
    columns: tuple[str, ...]


_INSERT = re.compile(r"INSERT INTO (?P<table>\w+)( \((?P<columns>[\w, ]+)\))? VALUES \((\?, )*\?\)")


@lru_cache
def plain_insert(sql: str) -> PlainInsert | None:
    """A statement that inserts a row as it is given; None if it is another."""
    found = _INSERT.fullmatch(sql)
    columns = found["columns"] if found else None
    return found and PlainInsert(found["table"], tuple(columns.split(", ")) if columns else ())


@lru_cache
def many(sql: str, types: tuple[int, ...]) -> bytes:
    """A plain insert of many rows, given an array for each column."""
    values = ", ".join(f"unnest(${at}::{NAMES[type]}[])" for at, type in enumerate(types, 1))
    return f"{sql.partition(' VALUES ')[0]} SELECT {values}".encode()


_TYPES = (
    (re.compile(r"\b(id|version) INTEGER PRIMARY KEY( AUTOINCREMENT)?(?! REFERENCES)"), r"\1 BIGSERIAL PRIMARY KEY"),
    (re.compile(r"\bREFERENCES (\w+)"), r"REFERENCES \1 DEFERRABLE"),
    (re.compile(r"\bINTEGER\b"), "BIGINT"),
    (re.compile(r"\bREAL\b"), "DOUBLE PRECISION"),
    (re.compile(r"\b(BLOB|ANY)\b"), "BYTEA"),
    (re.compile(r"\bTEXT\b"), 'TEXT COLLATE "C"'),
    (re.compile(r"\) STRICT(, WITHOUT ROWID)?$"), ")"),
)
_TRIGGER = re.compile(
    r"CREATE TRIGGER (?P<name>\w+) (?P<when>AFTER [\w ,]+ ON \w+)\s*(WHEN (?P<condition>.*?))?\s*BEGIN(?P<body>.*)END$",
    re.DOTALL,
)


def definition(statement: str, *, empty: bool) -> bytes | None:
    """A statement of the schema's history in PostgreSQL's words; None if it has nothing to do in an `empty` store."""
    text = statement.rstrip().removesuffix(";")
    if trigger := _TRIGGER.match(text):
        name, condition = trigger["name"], f" WHEN ({trigger['condition']})" if trigger["condition"] else ""
        return (
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN{trigger['body']}"
            f" RETURN NULL; END $$; CREATE TRIGGER {name} {trigger['when']} FOR EACH ROW{condition}"
            f" EXECUTE FUNCTION {name}()"
        ).encode()
    if text.startswith(("INSERT", "UPDATE", "DELETE")):
        return None if empty else translated(text)
    for pattern, replacement in _TYPES:
        text = pattern.sub(replacement, text)
    return text.encode()
