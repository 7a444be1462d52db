"""The rows of a run's store, read from outside: of SQLite's file, or of PostgreSQL if an address file is in its place.

Shares no code with the store.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

_BUSY_S = 120.0
ADDRESS = "store.address"


def place(run: Path) -> Path:
    """The store's file in the run's folder."""
    address = run / ADDRESS
    return address if address.exists() else run / "store.sqlite"


def opened(path: Path) -> sqlite3.Connection:
    """The store as it stands now, or a copy of it in memory. Waits for another's lock, or for a server that restarts,
    but not for ever."""
    if path.name == ADDRESS:
        from tests.parts.postgres_copy import copied

        return copied(path, patience_s=_BUSY_S)
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_BUSY_S)
    db.execute("BEGIN")
    return db


def ask(path: Path, sql: str, *arguments: object) -> Any:
    """One value of the store, None if it cannot be read now."""
    if path.name == ADDRESS:
        from tests.parts import postgres_copy

        return postgres_copy.ask(path, sql, *arguments)
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as db:
        row = db.execute(sql, arguments).fetchone()
        return None if row is None else row[0]
    return None
