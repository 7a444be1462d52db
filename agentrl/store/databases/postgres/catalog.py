"""What the server's catalogue says of a store's tables: their columns, and what numbers their rows.

Knows no table by its name but those that are the server's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.store.databases.database import Database


class Tables:
    """The tables of a store in the schema `schema`. Every call is made inside a transaction."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db, self._schema = db, schema
        self._columns = dict[str, Mapping[str, int]]()
        self._sequences = dict[str, str]()

    def all(self) -> dict[str, tuple[str, ...]]:
        """The columns of each table."""
        found: dict[str, tuple[str, ...]] = {}
        for table, column in self._db.rows(
            "SELECT c.relname::text, a.attname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
            " WHERE c.relnamespace = to_regnamespace(current_schema()) AND c.relkind IN ('r', 'p')"
            " AND NOT c.relispartition AND a.attnum > 0 AND NOT a.attisdropped"
            " AND c.relname NOT IN ('schema_version', 'last_writes', 'parts') ORDER BY c.relname, a.attnum"
        ):
            found[table] = (*found.get(table, ()), column)
        return found

    def types(self, table: str) -> Mapping[str, int]:
        """The types of a table's columns, by name and in their order."""
        if table not in self._columns:
            found = self._db.rows(
                "SELECT attname::text, atttypid::bigint FROM pg_attribute"
                " WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                (f"{self._schema}.{table}",),
            )
            self._columns[table] = dict(found)
        return self._columns[table]

    def numbers(self, table: str, n: int) -> Sequence[int]:
        """See `Database.numbers`."""
        found = self._db.rows(
            "SELECT nextval(?::regclass) FROM generate_series(1, ?::integer)", (self._sequence(table), n)
        )
        return [id for (id,) in found]

    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        """See `Database.skip_numbers`."""
        sequence = self._sequence(table)
        self._db.execute(
            f"SELECT setval('{sequence}', GREATEST(?::bigint, last_value) + ?::bigint + 1) FROM {sequence}", (beyond, n)
        )

    def renumber(self) -> None:
        """See `Database.renumber`."""
        for table, columns in self.all().items():
            column = columns[0]
            if column in ("id", "version") and (sequence := self._found(table, column)):
                self._db.execute(f"SELECT setval('{sequence}', (SELECT MAX({column}) FROM {table}))")

    def _sequence(self, table: str) -> str:
        """What numbers a table's rows. That of a table which was made anew has a name of its own."""
        if table not in self._sequences:
            found = self._found(table, "version" if table == "versions" else "id")
            assert found is not None
            self._sequences[table] = found
        return self._sequences[table]

    def _found(self, table: str, column: str) -> str | None:
        ((sequence,),) = self._db.rows("SELECT pg_get_serial_sequence(?, ?)", (table, column))
        return sequence
