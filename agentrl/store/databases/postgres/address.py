"""Where a run's store is in PostgreSQL, and how it is connected to.

The run's folder holds an address file in the place of SQLite's file. The server ends a session that is silent within a
transaction for `SILENT_S`, and one whose host no longer answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumper

from agentrl.errors import UsageError
from agentrl.store.databases.postgres.connection import DeadlineConnection

CONNECT_S = 10.0
SILENT_S = 30.0
MOMENT_S = 1.0  # one try for the write lock; `Transactions` tries again
_STATEMENT_S = 60.0  # less than `ANSWER_S`


class Address(NamedTuple):
    """Where a store is: a URL for libpq without a password, and the schema of its run."""

    url: str
    schema: str

    @classmethod
    def of(cls, url: str, run: Path) -> Address:
        """The address of a new run in the database at `url`. Raises UsageError for a URL that names no database or
        holds a password, since it is written to the run's folder."""
        try:
            url_parts = conninfo_to_dict(url)
        except psycopg.Error:  # its message may quote a password
            raise UsageError(f"the store's URL is none of PostgreSQL: {_EXAMPLE}") from None
        # A run's folder is copied, attached to issues and put into images. `tests/store/test_postgres_rights.py` looks
        # for the password in every file of a run.
        if "password" in url_parts or "sslpassword" in url_parts:
            raise UsageError(f"the store's URL holds a password: leave it out, and give it in PGPASSWORD or {_PASSES}")
        if not url.startswith(("postgresql://", "postgres://")) or not url_parts.get("dbname"):
            raise UsageError(f"store {url!r} names no database: {_EXAMPLE}")
        folder_word = re.sub(r"\W+", "_", run.name.lower(), flags=re.ASCII)[:30].strip("_")
        # The folder's name alone is not enough: every user of a shared database has a run called `runs/coder`, and a
        # run that is begun again in an emptied folder must not meet the tables of the first.
        run_mark = hashlib.sha256(f"{run.absolute()}:{time.time_ns()}:{os.getpid()}".encode()).hexdigest()[:8]
        return cls(url, f"agentrl_{folder_word}_{run_mark}")

    @classmethod
    def read(cls, path: Path) -> Address:
        """Read an address file. Raises UsageError."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            address = cls(str(document["url"]), str(document["schema"]))
            if not _SCHEMA.fullmatch(address.schema):  # it stands in statements as it is
                raise ValueError(f"{address.schema!r} is no schema of ours")
            return address
        except FileNotFoundError:
            raise UsageError(f"{path} holds no run: there is no such file") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not say where the run's store is ({error})") from None

    def write(self, path: Path) -> None:
        """Write an address file, whole or not at all: others open the run as soon as it is there."""
        draft_path = path.with_name(f"{path.name}.new")
        draft_path.write_text(json.dumps(self._asdict()) + "\n", encoding="utf-8")
        draft_path.replace(path)

    def connect(self, *, reads: bool = False) -> DeadlineConnection:
        """A new connection, outside any transaction. Raises psycopg.Error."""
        session_settings = {
            "search_path": self.schema,
            "lock_timeout": f"{int(1000 * MOMENT_S)}",
            # Shorter than the client's own deadline (`ANSWER_S`). If the client gave up first, the statement could
            # still commit after its caller was told that it failed.
            "statement_timeout": f"{int(1000 * _STATEMENT_S)}",
            "idle_in_transaction_session_timeout": f"{int(1000 * SILENT_S)}",
            # Set for both ends. Linux waits two hours by default before it probes a silent connection; a host that lost
            # power would hold the run's lock for as long.
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            "tcp_user_timeout": f"{int(1000 * SILENT_S)}",
            "default_transaction_read_only": "on" if reads else "off",
        }
        connection = DeadlineConnection.connect(
            self.url,
            autocommit=True,
            prepare_threshold=None,  # what psycopg prepares it forgets at a rollback, and all that `Pipeline` prepared
            cursor_factory=psycopg.RawCursor,
            connect_timeout=int(CONNECT_S),
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=int(1000 * SILENT_S),
            application_name="agentrl",
            options=" ".join(
                f"-c {setting_name}={setting_value}" for setting_name, setting_value in session_settings.items()
            ),
        )
        connection.adapters.register_dumper(str, StrDumper)
        connection.adapters.register_dumper(int, Int8Dumper)  # one type, so one prepared statement, however large
        connection.adapters.register_loader("numeric", _Number)
        return connection


_SCHEMA = re.compile("agentrl_[a-z0-9_]{1,50}")
_EXAMPLE = "give postgresql://user@host/database"
_PASSES = "~/.pgpass"


class _Number(Loader):
    """A sum or mean of PostgreSQL: an int if it is one, else a float."""

    def load(self, data: Buffer) -> int | float:
        number_text = bytes(data).decode()
        return int(number_text) if number_text.lstrip("-").isdigit() else float(number_text)
