"""Who supervises a run whose store is in PostgreSQL: the database decides, since hosts need not share a disk.

Owns a connection whose session holds an advisory lock of the run, and the row of `meta` that names its holder. The
server frees the lock with the session: at once if the process died, soon after the host did. A supervisor that lost its
session takes the lock again, or learns who has it now.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import psycopg

from agentrl.errors import RunFailed, StoreAway, UsageError
from agentrl.store import schema
from agentrl.store.databases.postgres.address import Address
from agentrl.store.databases.postgres.connection import DeadlineConnection
from agentrl.store.run_values import SUPERVISOR

_LOCK = (schema.APPLICATION_ID ^ 1) << 32  # beside the locks of writers: this, and the schema's number
# The keepalives of `Address.connect` need 5 s and three probes of 5 s to give a host up: 20 s, and some for the server
# to end the session.
_FREED_S = 25.0  # by which the server has noticed that a host is gone
_LOOK_S = 0.25
_NAMED = "INSERT INTO meta VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Supervision:
    """This process is the run's only supervisor. Raises as `take`."""

    def __init__(self, path: Path, address: Address) -> None:
        self._path, self._address = path, address
        self._name = f"process {os.getpid()} on {socket.gethostname()} (folder {path.parent.resolve()})"
        self._session: DeadlineConnection | None = None
        self._refused_at: float | None = None  # since when somebody else has the lock that this one had

    def take(self) -> None:
        """Take the lock. Raises UsageError, which names its holder, if that one does not give it up in time, and
        StoreAway."""
        deadline_s, is_reported = time.monotonic() + _FREED_S, False
        try:
            while not self._try():
                if time.monotonic() > deadline_s:
                    raise UsageError(f"{self._path.parent}: {self._holder()} supervises this run: end it there first")
                if not is_reported:
                    waiting_notice = f"it is waited for, {_FREED_S:g} s at most, should it be gone"
                    print(
                        f"agentrl: {self._holder()} supervises this run: {waiting_notice}", file=sys.stderr, flush=True
                    )
                is_reported = True
                time.sleep(_LOOK_S)
        except psycopg.Error as error:
            self.close()
            raise StoreAway(f"{self._path}: the database does not answer ({error}): start it") from error
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """See that this is still so; take the lock again if the session was lost. While the database is away nothing is
        known, and nobody else can begin. Raises RunFailed once another supervisor has it."""
        try:
            if self._session is not None and not self._session.closed:
                self._session.execute("SELECT 1")
                if self._refused_at is None:
                    return
            if self._try():
                self._refused_at = None
                return
        except psycopg.Error:
            self.close()
            return
        checked_at_s = time.monotonic()
        # Refused is not yet replaced: after a cut network the server may hold our own old session, with our own lock,
        # until its keepalives fail. A supervisor that ended at the first refusal would end at every short cut.
        self._refused_at = self._refused_at or checked_at_s
        if checked_at_s - self._refused_at > _FREED_S:  # until then it may be our own session of before
            raise RunFailed(f"{self._path.parent}: {self._holder()} supervises this run now, so this one ends")

    def close(self) -> None:
        """Give it up."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _try(self) -> bool:
        if self._session is None or self._session.closed:
            self._session = self._address.connect()
        lock_row = self._session.execute(
            "SELECT pg_try_advisory_lock($1 + to_regnamespace($2)::oid::bigint)", (_LOCK, self._address.schema)
        ).fetchone()
        assert lock_row is not None
        if lock_row[0] is None:  # there is no run: whoever opens it says so
            return True
        if not lock_row[0]:
            return False
        self._session.execute(_NAMED, (SUPERVISOR.key, self._name))
        return True

    def _holder(self) -> str:
        assert self._session is not None
        holder_row = self._session.execute("SELECT value FROM meta WHERE key = $1", (SUPERVISOR.key,)).fetchone()
        return "another process" if holder_row is None else str(holder_row[0])
