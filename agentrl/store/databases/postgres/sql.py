"""The store's SQL, which both databases read, as PostgreSQL reads it.

Owns what PostgreSQL says in other words than SQLite: parameters (`?`, `?2`), `INDEXED BY` and `CROSS JOIN … ON`; and
arrays in binary, a column of many rows in one parameter, since
psycopg packs an array value by value, which costs a turn more than its row. Knows no connection, nor what a table is
for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_BYTEA, _INT8, _TEXT, _FLOAT8 = 17, 20, 25, 701  # the server's numbers of its types

NAMES: Final[Mapping[int, str]] = {_BYTEA: "bytea", _INT8: "bigint", _TEXT: "text", _FLOAT8: "double precision"}
"""The types of the store's columns."""

ARRAYS: Final[Mapping[int, int]] = {_BYTEA: 1001, _INT8: 1016, _TEXT: 1009, _FLOAT8: 1022}
"""Their arrays'."""

_MOST_BYTES = 1 << 24  # in one statement: far less than an array may hold

_HEADER = struct.Struct(">iiIii")  # dimensions, whether there are NULLs, type, length, first index
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)
_FIXED: Final = {_INT8: struct.Struct(">iq"), _FLOAT8: struct.Struct(">id")}


def array(type: int, values: Sequence[Any]) -> bytes:
    """Values of one type, or None, as an array. Raises struct.error for one that is none of it."""
    header = _HEADER.pack(1, None in values, type, len(values), 1)
    if fixed := _FIXED.get(type):
        pack = fixed.pack
        return header + b"".join([_NULL if value is None else pack(8, value) for value in values])
    parts = [header]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def parted(rows: Sequence[Sequence[Any]]) -> Iterator[Sequence[Sequence[Any]]]:
    """Rows, divided where they are too much for one statement."""
    begin = size = 0
    for place, row in enumerate(rows):
        row_bytes = sum(len(value) for value in row if isinstance(value, (bytes, str)))
        if size + row_bytes > _MOST_BYTES and place > begin:
            yield rows[begin:place]
            begin, size = place, 0
        size += row_bytes
    yield rows[begin:]


# Quoted texts are matched too, and left alone: a question mark inside one is no parameter.
_PLACE = re.compile(r"\?(\d*)|'[^']*'")
_HINT = re.compile(r" INDEXED BY \w+")
_CROSS = re.compile(
    r"CROSS JOIN (?P<table>\w+) (?P<name>\w+) ON (?P<condition>.+?)(?=\s(WHERE|((LEFT|CROSS) )?JOIN)\b|\s*$)", re.DOTALL
)


@lru_cache(maxsize=1024)
def translated(sql: str) -> bytes:
    """A statement as PostgreSQL reads it."""
    count = 0

    def place(match: re.Match[str]) -> str:
        nonlocal count
        if match[1] is None:
            return match[0]
        count += 1
        return f"${match[1] or count}"

    text = _CROSS.sub(_in_order, _HINT.sub("", sql))
    return _PLACE.sub(place, text).encode()


def _in_order(join: re.Match[str]) -> str:
    """A join that begins with its left side, as SQLite's CROSS JOIN does, whatever the planner believes of a new table
    that nobody has counted yet."""
    condition = join["condition"].replace(f"{join['name']}.", "")
    # `OFFSET 0` changes no row and keeps the planner from pulling the subquery up and choosing the order of the join
    # itself. A table that was just made has no statistics, and the planner would read all running episodes where a few
    # leases decide.
    return f"CROSS JOIN LATERAL (SELECT * FROM {join['table']} WHERE {condition} OFFSET 0) {join['name']}"


class PlainInsert(NamedTuple):
    """Table and columns of `INSERT INTO table (columns) VALUES (?, …)`; no columns are all of them."""

    table: str
    columns: tuple[str, ...]


_INSERT = re.compile(r"INSERT INTO (?P<table>\w+)( \((?P<columns>[\w, ]+)\))? VALUES \((\?, )*\?\)")


@lru_cache
def plain_insert(sql: str) -> PlainInsert | None:
    """A statement that inserts the row of its parameters as it is; None if it is another."""
    match = _INSERT.fullmatch(sql)
    columns = match["columns"] if match else None
    return match and PlainInsert(match["table"], tuple(columns.split(", ")) if columns else ())


@lru_cache
def many(sql: str, types: tuple[int, ...]) -> bytes:
    """A plain insert of many rows, with an array for each column."""
    values = ", ".join(f"unnest(${number}::{NAMES[type]}[])" for number, type in enumerate(types, 1))
    return f"{sql.partition(' VALUES ')[0]} SELECT {values}".encode()
