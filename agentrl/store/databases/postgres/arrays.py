"""Arrays as PostgreSQL takes them in binary: a column of many rows in one parameter.

psycopg packs an array value by value, which costs a turn more than its row. Knows no table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

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
    for at, row in enumerate(rows):
        own = sum(len(value) for value in row if isinstance(value, (bytes, str)))
        if size + own > _MOST_BYTES and at > begin:
            yield rows[begin:at]
            begin, size = at, 0
        size += own
    yield rows[begin:]
