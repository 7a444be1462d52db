"""The run store in PostgreSQL: a schema of a database that many hosts share.

The run's folder holds an address file in the place of SQLite's file. Owns the connection, its deadlines, and what
PostgreSQL says in other words than SQLite: parameters (`?`, `?2`), `INDEXED BY`, `CROSS JOIN … ON`, column types and
triggers. Never knows what a table is for.

Every commit waits for the server's disk: the server may fall and come back under processes that live on, and they must
not have seen what it lost. A write holds an advisory lock of its run until it commits, so writers take turns as they do
with SQLite. The server ends a session that is silent within a transaction for `_SILENT_S`, and one whose host no longer
answers: a process that hangs, or is cut off, gives the lock up and leaves nothing of its transaction. A connection that
was lost between two transactions is made anew, for as long as a write may wait for the lock; one that is lost within a
transaction fails that call.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psycopg
from psycopg import sql as names
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.types.string import StrDumper

from agentrl.errors import DiskFull, StoreBusy, StoreError, StoreVersionError, UsageError
from agentrl.store import schema
from agentrl.store.database import Cursor, Database, Row, Watch

CONNECT_S = 10.0
_SILENT_S = 30.0
_PAUSE_S = 0.2
_MOMENT_S = 1.0  # one try for the write lock; `Database` tries again
_STATEMENT_S = 180.0
_BORN_WITH = 18  # the schema version whose tables the first stores in PostgreSQL had
_LOCK = schema.APPLICATION_ID << 32  # advisory locks of run stores: this, and the schema's number

_OURS = """
CREATE FUNCTION iif(boolean, anycompatible, anycompatible) RETURNS anycompatible LANGUAGE sql IMMUTABLE
    AS 'SELECT CASE WHEN $1 THEN $2 ELSE $3 END';
CREATE AGGREGATE total(double precision) (sfunc = float8pl, stype = double precision, initcond = '0');
CREATE FUNCTION json_extract(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF((CASE WHEN $2 LIKE '$[%' THEN $1::json -> trim('$[]' FROM $2)::integer
                   ELSE $1::json -> substr($2, 3) END)::text, 'null') $$;
CREATE FUNCTION json_each(text) RETURNS TABLE (value text) LANGUAGE sql IMMUTABLE
    AS 'SELECT value::text FROM json_array_elements($1::json)';
CREATE TABLE schema_version (version BIGINT NOT NULL);
INSERT INTO schema_version VALUES (0);
"""


class Address(NamedTuple):
    """Where a store is: a URL for libpq without a password, and the schema of its run."""

    url: str
    schema: str

    @classmethod
    def of(cls, url: str, run: Path) -> Address:
        """The address of a new run in the database at `url`. Raises UsageError for a URL that names no database or
        holds a password, since it is written to the run's folder."""
        try:
            parts = conninfo_to_dict(url)
        except psycopg.Error as error:
            raise UsageError(f"store {url!r} is no URL of PostgreSQL ({_line(error)}): {_EXAMPLE}") from None
        if "password" in parts:
            raise UsageError(f"the store's URL holds a password: leave it out, and give it in PGPASSWORD or {_PASSES}")
        if not url.startswith(("postgresql://", "postgres://")) or not parts.get("dbname"):
            raise UsageError(f"store {url!r} names no database: {_EXAMPLE}")
        word = re.sub(r"\W+", "_", run.name.lower(), flags=re.ASCII)[:30].strip("_")
        mark = hashlib.sha256(f"{run.absolute()}:{time.time_ns()}:{os.getpid()}".encode()).hexdigest()[:8]
        return cls(url, f"agentrl_{word}_{mark}")

    @classmethod
    def read(cls, path: Path) -> Address:
        """Read an address file. Raises UsageError."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            address = cls(str(found["url"]), str(found["schema"]))
            if not _SCHEMA.fullmatch(address.schema):  # it stands in statements as it is
                raise ValueError(f"{address.schema!r} is no schema of ours")
            return address
        except FileNotFoundError:
            raise UsageError(f"{path} holds no run: there is no such file") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not say where the run's store is ({error})") from None

    def write(self, path: Path) -> None:
        """Write an address file."""
        path.write_text(json.dumps(self._asdict()) + "\n", encoding="utf-8")

    def connect(self, *, reads: bool = False) -> psycopg.Connection[Any]:
        """A new connection, outside any transaction. Raises psycopg.Error."""
        settings = {
            "search_path": self.schema,
            "lock_timeout": f"{int(1000 * _MOMENT_S)}",
            "statement_timeout": f"{int(1000 * _STATEMENT_S)}",
            "idle_in_transaction_session_timeout": f"{int(1000 * _SILENT_S)}",
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": f"{int(1000 * _SILENT_S)}",
            "default_transaction_read_only": "on" if reads else "off",
        }
        connection: psycopg.Connection[Any] = psycopg.Connection.connect(
            self.url,
            autocommit=True,
            cursor_factory=psycopg.RawCursor,
            connect_timeout=int(CONNECT_S),
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=int(1000 * _SILENT_S),
            application_name="agentrl",
            options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
        )
        connection.adapters.register_dumper(str, StrDumper)
        connection.adapters.register_loader("numeric", _Number)
        return connection


_SCHEMA = re.compile("agentrl_[a-z0-9_]{1,50}")
_EXAMPLE = "give postgresql://user@host/database"
_PASSES = "~/.pgpass"


class _Number(Loader):
    """A sum or mean of PostgreSQL: an int if it is one, else a float."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data).decode()
        return int(text) if text.lstrip("-").isdigit() else float(text)


class Postgres(Database):
    """A store in a schema of a PostgreSQL database."""

    _errors: ClassVar[type[Exception]] = psycopg.Error

    def __init__(self, path: Path, address: Address, clock: Callable[[], float], *, reads: bool = False) -> None:
        """Connect. `path` is the address file, which names the store in messages. Raises StoreError."""
        super().__init__(path, clock)
        self._address, self._reads = address, reads
        self._lock_id = 0
        with self._naming():
            self._connection = self._dial()

    def _dial(self) -> psycopg.Connection[Any]:
        connection = self._address.connect(reads=self._reads)
        found = connection.execute("SELECT to_regnamespace($1)::oid::bigint", (self._address.schema,)).fetchone()
        self._lock_id = 0 if found is None or found[0] is None else _LOCK + found[0]
        return connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def prepare(self, *, create: bool, first: Callable[[], object] = lambda: None) -> None:
        if create:
            with self._lock, self._naming():
                name = names.Identifier(self._address.schema)
                self._connection.execute(names.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
                self._connection.close()
                self._connection = self._dial()
        elif self._version() == schema.SCHEMA_VERSION:
            return
        with self.write():
            version = self._read_version()
            if create and version:
                raise UsageError(f"{self.path} holds a run already: resume it, or choose another folder")
            if create:
                self._connection.execute(_OURS)
            if version < schema.SCHEMA_VERSION:
                for statement in schema.statements(version):
                    if (text := _definition(statement, empty=version < _BORN_WITH)) is not None:
                        self._connection.execute(text)
                self.execute("UPDATE schema_version SET version = ?", (schema.SCHEMA_VERSION,))
            if create:
                first()

    def look(self) -> None:
        """See that there is a store of this version. Raises UsageError, StoreVersionError."""
        if self._version() < schema.SCHEMA_VERSION:
            raise UsageError(f"{self.path}: an older agentrl wrote this store: go on with its run, then look again")

    def drop(self) -> None:
        """Remove the schema with all that is in it."""
        with self._lock, self._naming():
            name = names.Identifier(self._address.schema)
            self._connection.execute(names.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(name))

    def _version(self) -> int:
        with self.read():
            return self._read_version()

    def _read_version(self) -> int:
        found = self.row("SELECT to_regclass(?) IS NOT NULL", (f"{self._address.schema}.schema_version",))
        assert found is not None
        if not found[0]:
            if self._lock_id:
                return 0
            raise UsageError(f"{self.path}: the database has no schema {self._address.schema}: the run was removed")
        row = self.row("SELECT version FROM schema_version")
        version = 0 if row is None else row[0]
        if version > schema.SCHEMA_VERSION:
            hint = f"this agentrl reads up to {schema.SCHEMA_VERSION}: upgrade agentrl"
            raise StoreVersionError(f"{self.path} has store schema {version}, {hint}")
        return version

    # --- transactions and statements ----------------------------------------------------------------------------------

    @property
    def _in_transaction(self) -> bool:
        return self._connection.info.transaction_status in (
            TransactionStatus.ACTIVE,
            TransactionStatus.INTRANS,
            TransactionStatus.INERROR,
        )

    def _begin_read(self) -> None:
        self._start("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _begin_write(self, *, durable: bool) -> None:
        self._start("BEGIN", lambda: f"SELECT pg_advisory_xact_lock({self._lock_id})")

    def _start(self, begin: str, lock: Callable[[], str] | None = None) -> None:
        """Begin a transaction; on a new connection if the old one was lost."""
        began = time.monotonic()
        while True:
            try:
                if self._connection.closed:
                    self._connection = self._dial()
                self._run(begin if lock is None else f"{begin}; {lock()}")
                return
            except (psycopg.OperationalError, psycopg.InterfaceError):
                if not self._connection.closed:
                    self._roll_back()
                    raise
                most_s = CONNECT_S if self._reads else self._busy_s  # reads may stand in a loop of tasks
                if time.monotonic() - began > most_s:
                    raise
            time.sleep(_PAUSE_S)

    def _run(self, command: str) -> None:
        self._connection.execute(command.encode())

    def _commit(self) -> None:
        self._run(f"NOTIFY {self._address.schema}; COMMIT")

    def _roll_back(self) -> None:
        if self._in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except psycopg.OperationalError:  # it was lost: the server has rolled back
                self._connection.close()

    def _named(self, error: Exception) -> StoreError:
        state = getattr(error, "sqlstate", None) or ""
        if state == "53100":
            return DiskFull(f"{self.path}: no space left for the database: free some; what was journaled is kept")
        if state in ("55P03", "57014"):
            who = f"another session has held the run's write lock for over {self._busy_s:g} s"
            hint = "find it in pg_stat_activity and end it with pg_terminate_backend"
            return StoreBusy(f"{self.path}: {who}: {hint}; then go on with agentrl train --resume {self.path.parent}")
        if state in ("3F000", "42P01"):
            return StoreError(f"{self.path}: the database has no such run any more ({_line(error)})")
        return StoreError(f"{self.path}: the database says: {_line(error)}")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        return self._connection.execute(translated(sql), _plain(parameters))

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        text, every = translated(sql), [_plain(row) for row in rows]
        if every:
            with self._connection.cursor() as cursor:
                cursor.executemany(text, every)

    def insert(self, sql: str, parameters: Sequence[Any]) -> int:
        number = "version" if sql.startswith("INSERT INTO versions") else "id"
        row = self.row(f"{sql} RETURNING {number}", parameters)
        assert row is not None
        return row[0]

    def watch(self) -> Watch:
        return Notices(self._address)

    def tables(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for table, column in self.rows(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
            " AND table_name <> 'schema_version' ORDER BY table_name, ordinal_position"
        ):
            found[table] = (*found.get(table, ()), column)
        return found

    def loosen(self) -> None:
        self._run("SET CONSTRAINTS ALL DEFERRED")

    def renumber(self) -> None:
        for table, columns in self.tables().items():
            if columns[0] in ("id", "version") and self.row("SELECT pg_get_serial_sequence(?, ?)", (table, columns[0])):
                sequence = f"pg_get_serial_sequence('{table}', '{columns[0]}')"
                self.execute(f"SELECT setval({sequence}, (SELECT MAX({columns[0]}) FROM {table}))")

    def faults(self) -> list[str]:
        return []  # checksums are the server's own affair

    def any_text(self, text: str | bytes) -> str | bytes:
        return text.encode() if isinstance(text, str) else text  # a text of PostgreSQL cannot hold a NUL


class Notices:
    """Every commit notifies the channel of its run's schema; a connection of its own listens. If it was lost, something
    may have been written meanwhile."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None
        self._dialled_s = -math.inf

    def written(self) -> bool:
        """Whether anybody has committed since this was last asked; also if nobody can tell."""
        try:
            if self._connection is None or self._connection.closed:
                if time.monotonic() < self._dialled_s + _PAUSE_S:
                    return True
                self._dialled_s = time.monotonic()
                self._connection = self._address.connect(reads=True)
                self._connection.execute(f"LISTEN {self._address.schema}".encode())
                return True
            return bool(list(self._connection.notifies(timeout=0)))
        except psycopg.Error:
            return True  # whoever reads the store next waits for it, or hears why not

    def row(self, sql: str) -> Row | None:
        """The row that a statement returns."""
        try:
            if self._connection is None:
                return None
            return self._connection.execute(translated(sql)).fetchone()
        except psycopg.Error:
            return (time.monotonic(),)  # unlike any other

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _plain(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Flags are numbers, as SQLite has them."""
    return tuple(int(each) if isinstance(each, bool) else each for each in parameters)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- the same SQL -----------------------------------------------------------------------------------------------------

_PLACE = re.compile(r"\?(\d*)|'[^']*'")
_HINT = re.compile(r" INDEXED BY \w+")
_CROSS = re.compile(r"CROSS JOIN (\w+ \w+) ON")


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

    text = _CROSS.sub(r"JOIN \1 ON", _HINT.sub("", sql))
    return _PLACE.sub(place, text).encode()


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


def _definition(statement: str, *, empty: bool) -> bytes | None:
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
