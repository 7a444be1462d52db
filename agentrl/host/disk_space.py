"""A full disk: which errors are one, and calls that wait for space, whose work would be lost or done twice otherwise.

`is_full` knows such errors; who wrote names them DiskFull, and what could not be written. A task waits in
`wait_for_space`. Never knows what a call writes: it leaves nothing behind if it raises DiskFull. What nobody misses, a
gauge say, is skipped where it is written. The processes that find a disk full have no place to say so: the supervisor
watches it for them (`watch_disk`). trio is loaded where a task waits: a store is used without it, too.
"""

from __future__ import annotations

import errno
import math
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from agentrl.errors import AgentRLError, DiskFull

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_LEAST = 1 << 20  # bytes; with less a disk is full for a store and its log
_POSTGRES = "53100"  # disk_full, in PostgreSQL's table of states
_T = TypeVar("_T")


def is_full(error: BaseException) -> bool:
    """Whether a disk, or a quota on it, had no space for a write. Errors of SQLite, psycopg and the operating system
    have numbers; libraries that write weights have only words."""
    if isinstance(error, AgentRLError):
        return isinstance(error, DiskFull)
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    sql_state: object = getattr(error, "sqlstate", "")  # of psycopg: None if the server is not heard any more
    if sql_state != "":
        return sql_state == _POSTGRES
    return getattr(error, "errno", None) in _NO_SPACE or "No space left on device" in str(error)


def no_space_on(folder: Path) -> str:
    """Return a message if the disk of `folder` has no space left; empty if it has some, or if that cannot be read."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"no space left on the disk of {folder} ({free_bytes >> 10} KiB): free some" if free_bytes < _LEAST else ""


async def watch_disk(folder: Path, say: Callable[[str], None], *, every_s: float = 2.0) -> None:
    """Say once when the disk of a run's folder is full, and once when it is not any more, until cancelled."""
    import trio

    earlier_problem = ""
    while True:
        # In a thread that may be abandoned: the disk may be a network's, and asking a server that is gone can take
        # minutes.
        disk_problem = await trio.to_thread.run_sync(no_space_on, folder, abandon_on_cancel=True)
        if disk_problem and not earlier_problem:
            say(f"{disk_problem}; what was journaled is kept, and the run waits for it")
        if earlier_problem and not disk_problem:
            say(f"the disk of {folder} has space again")
        earlier_problem = disk_problem
        await trio.sleep(every_s)


async def wait_for_space(
    call: Callable[[], Awaitable[_T]],
    *,
    deadline_s: float = math.inf,
    every_s: float = 1.0,
    tell: Callable[[DiskFull], object] = lambda _: None,
) -> _T:
    """Return the result of an awaited call, made every `every_s` seconds until the disk has space for it. `tell` gets
    the error once, if the call has to wait. Raises what the call raises; DiskFull after `deadline_s`, at once if that
    is 0."""
    import trio

    deadline_at_s: float | None = None  # the clock is read only when there is no space
    while True:
        try:
            return await call()
        except DiskFull as error:
            failed_s, is_first = trio.current_time(), deadline_at_s is None
            deadline_at_s = failed_s + deadline_s if deadline_at_s is None else deadline_at_s
            if failed_s >= deadline_at_s:
                raise
            if is_first:
                tell(error)
        await trio.sleep(every_s)
