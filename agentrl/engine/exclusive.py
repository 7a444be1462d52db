"""One hand at a time gives weights to an engine: the learner that sends a new version, or the supervisor that fits an
engine again. Interleaved, their calls could leave the weights of the one under the version of the other.

Owns a lock file for each engine, which the kernel lets go with its holder, however that ends. Never asks the engine.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from agentrl.errors import WeightSyncError

_POLL_S = 0.05


@asynccontextmanager
async def exclusive(folder: Path, url: str, *, deadline_s: float) -> AsyncGenerator[None]:
    """Hold the engine at `url`, whose lock file lies in `folder`, for as long as the block runs. Raises WeightSyncError
    if somebody else holds it for `deadline_s`."""
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    with (folder / name).open("a") as file:
        with trio.move_on_after(deadline_s) as scope:
            while not _taken(file.fileno()):  # noqa: ASYNC110 - of a lock that another process lets go nobody tells us
                await trio.sleep(_POLL_S)
        if scope.cancelled_caught:
            raise WeightSyncError(f"{url} was being given other weights for {deadline_s:g} s")
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
