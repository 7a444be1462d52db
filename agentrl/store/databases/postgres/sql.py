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
    array_header = _HEADER.pack(1, None in values, type, len(values), 1)
    if fixed_format := _FIXED.get(type):
        pack_fixed = fixed_format.pack
        return array_header + b"".join(
            [_NULL if array_value is None else pack_fixed(8, array_value) for array_value in values]
        )
    array_parts = [array_header]
    for array_value in values:
        if array_value is None:
            array_parts.append(_NULL)
        else:
            value_bytes = array_value.encode() if isinstance(array_value, str) else array_value
            array_parts += (_LENGTH.pack(len(value_bytes)), value_bytes)
    return b"".join(array_parts)


def parted(rows: Sequence[Sequence[Any]]) -> Iterator[Sequence[Sequence[Any]]]:
    """Rows, divided where they are too much for one statement."""
    batch_start = batch_bytes = 0
    for row_position, row_values in enumerate(rows):
        row_bytes = sum(len(column_value) for column_value in row_values if isinstance(column_value, (bytes, str)))
        if batch_bytes + row_bytes > _MOST_BYTES and row_position > batch_start:
            yield rows[batch_start:row_position]
            batch_start, batch_bytes = row_position, 0
        batch_bytes += row_bytes
    yield rows[batch_start:]


# Quoted texts are matched too, and left alone: a question mark inside one is no parameter.
_PLACE = re.compile(r"\?(\d*)|'[^']*'")
_HINT = re.compile(r" INDEXED BY \w+")
_CROSS = re.compile(
    r"CROSS JOIN (?P<table>\w+) (?P<name>\w+) ON (?P<condition>.+?)(?=\s(WHERE|((LEFT|CROSS) )?JOIN)\b|\s*$)", re.DOTALL
)


@lru_cache(maxsize=1024)
def translated(sql: str) -> bytes:
    """A statement as PostgreSQL reads it."""
    place_count = 0

    def place(match: re.Match[str]) -> str:
        nonlocal place_count
        if match[1] is None:
            return match[0]
        place_count += 1
        return f"${match[1] or place_count}"

    ordered_sql = _CROSS.sub(_in_order, _HINT.sub("", sql))
    return _PLACE.sub(place, ordered_sql).encode()


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
    insert_match = _INSERT.fullmatch(sql)
    column_list = insert_match["columns"] if insert_match else None
    return insert_match and PlainInsert(insert_match["table"], tuple(column_list.split(", ")) if column_list else ())


@lru_cache
def many(sql: str, types: tuple[int, ...]) -> bytes:
    """A plain insert of many rows, with an array for each column."""
    unnested_arrays = ", ".join(
        f"unnest(${parameter_number}::{NAMES[type_oid]}[])" for parameter_number, type_oid in enumerate(types, 1)
    )
    return f"{sql.partition(' VALUES ')[0]} SELECT {unnested_arrays}".encode()
