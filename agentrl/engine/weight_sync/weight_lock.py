"""One hand at a time gives weights to an engine: the learner that sends a new version, or the supervisor that fits an
engine again. Interleaved, their calls could leave the weights of the one under the version of the other.

Owns a lock file for each engine, which the kernel lets go with its holder, however that ends. Never asks the engine.
If engine and learner take turns on one GPU (`engine.colocated`), one lock is for the GPU: whoever has it may change who
is there. So a learner's turn is a lease. If the learner dies in it, the supervisor gets the lock, and wakes the engine.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import trio

from agentrl.errors import WeightSyncError

_POLL_S = 0.05
_GPU = "the shared GPU"


def name_of(url: str, *, colocated: bool) -> str:
    """Name of the lock for an engine."""
    return _GPU if colocated else url.rstrip("/")


class WeightLock:
    """A lock that this process holds until it lets go, on any thread."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @property
    def held(self) -> bool:
        return not self._file.closed

    def let_go(self) -> None:
        """Release the lock. Safe to repeat."""
        self._file.close()

    @asynccontextmanager
    async def last(self) -> AsyncGenerator[None]:
        """Let go at the end of the block."""
        try:
            yield
        finally:
            self.let_go()


def hold(folder: Path, name: str, *, deadline_s: float, waits: Callable[[], None]) -> WeightLock:
    """Get a lock, without trio; `waits` is called again and again meanwhile. Raises WeightSyncError if somebody else
    holds it for `deadline_s`."""
    lock_file, deadline = _open(folder, name), time.monotonic() + deadline_s
    # Polling: `flock` can wait, but without a deadline and on a thread that nothing could call back.
    while not _taken(lock_file.fileno()):
        if time.monotonic() > deadline:
            lock_file.close()
            raise WeightSyncError(f"{name} was somebody else's for {deadline_s:g} s")
        waits()
        time.sleep(_POLL_S)
    return WeightLock(lock_file)


@asynccontextmanager
async def exclusive(folder: Path, url: str, *, deadline_s: float) -> AsyncGenerator[None]:
    """Hold the engine at `url`, whose lock file lies in `folder`, for as long as the block runs. Raises WeightSyncError
    if somebody else holds it for `deadline_s`."""
    with _open(folder, url.rstrip("/")) as lock_file:
        with trio.move_on_after(deadline_s) as wait_scope:
            while not _taken(lock_file.fileno()):  # noqa: ASYNC110 - another process that lets a lock go sends no signal
                await trio.sleep(_POLL_S)
        if wait_scope.cancelled_caught:
            holder_phrase = "was the learner's" if url == _GPU else "was taking other weights"
            raise WeightSyncError(f"{url} {holder_phrase} for {deadline_s:g} s")
        yield


def _open(folder: Path, name: str) -> IO[str]:
    # Hashed, since a URL has slashes and a socket's path may be longer than a file name. Never removed: whoever waits
    # on an unlinked file would hold another lock than the next one that comes.
    return (folder / hashlib.sha256(name.encode()).hexdigest()[:16]).open("a")


def _taken(descriptor: int) -> bool:
    try:
        # `flock`, and not a file with a pid: the kernel lets it go with its holder, however that ends, and there is
        # no stale lock to judge (`test_a_killed_process_lets_go`).
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
