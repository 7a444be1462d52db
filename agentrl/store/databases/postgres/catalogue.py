"""Catalogue of a server, as far as a store needs it: the columns of its tables, their types, and who numbers new
rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.store.databases.driver import Driver


class Catalogue:
    """The tables of a store in the schema `schema`. Every call is made inside a transaction."""

    def __init__(self, driver: Driver, schema: str) -> None:
        self._driver, self._schema = driver, schema
        self._columns = dict[str, Mapping[str, int]]()
        self._sequences = dict[str, str]()

    def tables(self) -> dict[str, tuple[str, ...]]:
        """The columns of each table."""
        columns_by_table: dict[str, tuple[str, ...]] = {}
        for table_name, column_name in self._driver.rows(
            "SELECT c.relname::text, a.attname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
            " WHERE c.relnamespace = to_regnamespace(current_schema()) AND c.relkind IN ('r', 'p')"
            " AND NOT c.relispartition AND a.attnum > 0 AND NOT a.attisdropped"
            " AND c.relname NOT IN ('schema_version', 'last_writes', 'parts') ORDER BY c.relname, a.attnum"
        ):
            columns_by_table[table_name] = (*columns_by_table.get(table_name, ()), column_name)
        return columns_by_table

    def types(self, table: str) -> Mapping[str, int]:
        """The types of a table's columns, by name and in their order."""
        if table not in self._columns:
            type_rows = self._driver.rows(
                "SELECT attname::text, atttypid::bigint FROM pg_attribute"
                " WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                (f"{self._schema}.{table}",),
            )
            self._columns[table] = dict(type_rows)
        return self._columns[table]

    def numbers(self, table: str, n: int) -> Sequence[int]:
        """See `Driver.numbers`."""
        number_rows = self._driver.rows(
            "SELECT nextval(?::regclass) FROM generate_series(1, ?::integer)", (self._sequence(table), n)
        )
        return [row_id for (row_id,) in number_rows]

    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        """See `Upkeep.skip_numbers`."""
        sequence = self._sequence(table)
        self._driver.execute(
            f"SELECT setval('{sequence}', GREATEST(?::bigint, last_value) + ?::bigint + 1) FROM {sequence}", (beyond, n)
        )

    def renumber(self) -> None:
        """See `Upkeep.renumber`."""
        for table_name, column_names in self.tables().items():
            first_column = column_names[0]
            if first_column in ("id", "version") and (sequence := self._serial(table_name, first_column)):
                self._driver.execute(f"SELECT setval('{sequence}', (SELECT MAX({first_column}) FROM {table_name}))")

    def _sequence(self, table: str) -> str:
        """The sequence that numbers a table's rows."""
        if table not in self._sequences:
            sequence = self._serial(table, "version" if table == "versions" else "id")
            assert sequence is not None
            self._sequences[table] = sequence
        return self._sequences[table]

    def _serial(self, table: str, column: str) -> str | None:
        ((sequence,),) = self._driver.rows("SELECT pg_get_serial_sequence(?, ?)", (table, column))
        return sequence
