"""The two texts of the schema describe one store, and a store of another version is refused in one line."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentrl.errors import FormatError, StoreError, UsageError
from agentrl.store import RunStore, schema
from agentrl.store.databases.open_store import ADDRESS
from agentrl.store.schema import BYTES, SCHEMA_VERSION

from .server import Server

TYPES = {"bigint": "INTEGER", "double precision": "REAL", "bytea": "BLOB", "text": "TEXT"}
OF_POSTGRES = {"schema_version", "last_writes", "parts"}
UNCHECKED = {*((table, "turn_id", "turns") for table in (*BYTES, "steps")), ("turns", "episode_id", "episodes")}
"""References that PostgreSQL does not check, as its text says."""


class Schema(NamedTuple):
    """The rules of a store, in one form for both databases. A condition is its quoted words and its numbers."""

    columns: set[tuple[str, str, str, bool, str | None]]  # table, name, type, NOT NULL, default
    keys: set[tuple[str, str, tuple[str, ...]]]  # table, "p" or "u", columns
    references: set[tuple[str, str, str]]
    checks: set[tuple[str, tuple[str, ...]]]
    indexes: set[tuple[str, str, bool, tuple[str, ...], tuple[str, ...]]]  # table, name, unique, columns, condition
    triggers: set[tuple[str, str, tuple[str, ...], str]]  # table, name, columns and constants of its event, body


def words(text: str) -> tuple[str, ...]:
    """The constants and the names of columns in a condition or a body, without how each database writes operators."""
    return tuple(sorted(set(re.findall(r"'[^']*'|\b\d+\b|\b[a-z]+_[a-z_]+\b", text)) - {"plpgsql"}))


def statements(body: str) -> str:
    """A trigger's statements, in one line."""
    inside = body.replace("BEGIN", "").replace("RETURN NULL;", "").removesuffix("END").removesuffix("END ")
    return " ".join(inside.replace("BIGINT", "INTEGER").split())


def of_sqlite(path: Path) -> Schema:
    schema = Schema(set(), set(), set(), set(), set(), set())
    with closing(sqlite3.connect(path)) as db:
        master = "SELECT name, tbl_name, sql FROM sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%'"
        for table, _, sql in db.execute(master, ("table",)).fetchall():
            info = db.execute(f"PRAGMA table_info({table})").fetchall()
            for _, name, type, notnull, default, key in info:
                kind = "BLOB" if type == "ANY" else type
                schema.columns.add((table, name, kind, bool(notnull or key), default))
            if key := sorted((row[5], row[1]) for row in info if row[5]):
                schema.keys.add((table, "p", tuple(name for _, name in key)))
            for _, name, _, origin, _ in db.execute(f"PRAGMA index_list({table})").fetchall():
                if origin == "u":
                    columns = db.execute(f"PRAGMA index_info({name})").fetchall()
                    schema.keys.add((table, "u", tuple(column for *_, column in columns)))
            for row in db.execute(f"PRAGMA foreign_key_list({table})").fetchall():
                schema.references.add((table, row[3], row[2]))
            for check in re.findall(r"CHECK \((.*?)\)(?:\)|,)", sql, re.DOTALL):
                schema.checks.add((table, words(check)))
        for name, table, sql in db.execute(master, ("index",)).fetchall():
            columns = re.search(r"\((.*?)\)", sql)
            assert columns is not None
            where = sql.partition(" WHERE ")[2]
            schema.indexes.add((table, name, "UNIQUE" in sql, tuple(columns[1].split(", ")), words(where)))
        for name, table, sql in db.execute(master, ("trigger",)).fetchall():
            event, _, body = sql.partition("BEGIN")
            schema.triggers.add((table, name, words(event), statements(body)))
    return schema


def of_postgres(rows: Callable[[str], Iterable[tuple[Any, ...]]]) -> Schema:
    schema = Schema(set(), set(), set(), set(), set(), set())
    ((of_schema,),) = rows("SELECT current_schema()::text")
    for table, name, type, nullable, default, collation in rows(
        "SELECT table_name::text, column_name::text, data_type::text, is_nullable::text, column_default::text,"
        " collation_name::text FROM information_schema.columns WHERE table_schema = current_schema()"
    ):
        if table not in OF_POSTGRES and not re.search(r"_\d+$", table):
            plain = None if default is None or "nextval" in default else default.removesuffix("::text")
            schema.columns.add((table, name, TYPES[type], nullable == "NO", plain))
            assert collation == ("C" if type == "text" else None)
    for table, kind, text in rows(
        "SELECT c.relname::text, k.contype::text, pg_get_constraintdef(k.oid) FROM pg_constraint k JOIN pg_class c"
        " ON c.oid = k.conrelid WHERE k.connamespace = to_regnamespace(current_schema()) AND NOT c.relispartition"
    ):
        if table in OF_POSTGRES:
            continue
        inside = text[text.index("(") + 1 :].partition(")")[0]
        if kind in ("p", "u"):
            schema.keys.add((table, kind, tuple(inside.split(", "))))
        elif kind == "f":
            target = re.search(r"REFERENCES (?:\w+\.)?(\w+)\(", text)
            assert target is not None and text.endswith("DEFERRABLE")
            schema.references.add((table, inside, target[1]))
        else:
            schema.checks.add((table, words(text)))
    for table, name, text in rows(
        "SELECT tablename::text, indexname::text, indexdef FROM pg_indexes WHERE schemaname = current_schema()"
    ):
        if not name.endswith(("_pkey", "_key")):
            columns, _, where = text.partition(" USING btree (")[2].partition(")")
            schema.indexes.add((table, name, "UNIQUE" in text, tuple(columns.split(", ")), words(where)))
    for table, name, text, body in rows(
        "SELECT c.relname::text, t.tgname::text, pg_get_triggerdef(t.oid), p.prosrc FROM pg_trigger t JOIN pg_class c"
        " ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid WHERE NOT t.tgisinternal"
        " AND c.relnamespace = to_regnamespace(current_schema())"
    ):
        if name != "tell":
            event = text.partition(" EXECUTE ")[0].replace(f"{of_schema}.", "")
            schema.triggers.add((table, name, words(event), statements(body)))
    return schema


@pytest.mark.postgres
def test_both_texts_have_the_same_tables_constraints_and_indexes(store: RunStore, tmp_path: Path, server: Server):
    pytest.importorskip("psycopg")
    with RunStore.create(tmp_path / ADDRESS, "{}", url=server.url) as other:
        db = other._db  # pyright: ignore[reportPrivateUsage]
        with db.read():
            ours, theirs = of_sqlite(store.path), of_postgres(db.rows)
            assert {table for table, *_ in ours.columns} == db.upkeep.tables().keys()
    assert ours.columns == theirs.columns
    assert ours.keys == theirs.keys
    assert ours.references - theirs.references == UNCHECKED and theirs.references < ours.references
    assert ours.checks == theirs.checks
    assert ours.indexes == theirs.indexes
    assert ours.triggers == theirs.triggers
    assert min(map(len, ours)) > 3, "each of them was read"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def set_version(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> tuple[Path, Callable[[int], None]]:
    """A store, and what gives it another version."""
    if request.param == "sqlite":
        RunStore.create(path, "{}").close()

        def set_sqlite(version: int) -> None:
            with closing(sqlite3.connect(path)) as db:
                db.execute(f"PRAGMA user_version = {version}")

        return path, set_sqlite
    psycopg = pytest.importorskip("psycopg")
    server: Server = request.getfixturevalue("server")
    address = tmp_path / ADDRESS
    RunStore.create(address, "{}", url=server.url).close()

    def set_postgres(version: int) -> None:
        with psycopg.connect(server.url, autocommit=True) as db:
            db.execute(f"UPDATE {json.loads(address.read_text())['schema']}.schema_version SET version = {version}")

    return address, set_postgres


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_store_of_another_version_is_refused_in_one_line_and_untouched(
    set_version: tuple[Path, Callable[[int], None]], version: int
) -> None:
    path, change = set_version
    change(version)
    for open_it in (RunStore.open, RunStore.read):
        with pytest.raises(FormatError) as refused:
            open_it(path)
        assert (refused.value.format, refused.value.expected, refused.value.exit_code) == (version, SCHEMA_VERSION, 2)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    change(SCHEMA_VERSION)
    RunStore.open(path).close()


def test_a_database_of_another_program_has_version_0_and_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    before = path.read_bytes()
    for open_it in (RunStore.open, RunStore.read, lambda path: RunStore.create(path, "{}")):
        with pytest.raises(FormatError) as refused:
            open_it(path)
        assert refused.value.format == 0
    assert path.read_bytes() == before


def test_a_store_is_made_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = schema.text("schema.sql")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "text", lambda _: f"{whole}\nCREATE TABLE groups (id INTEGER);")
        with pytest.raises(StoreError, match="table groups already exists"):
            RunStore.create(path, "{}")
    with pytest.raises(UsageError, match="it was never begun"):
        RunStore.open(path)
    RunStore.create(path, "{}").close()
    RunStore.open(path).close()
