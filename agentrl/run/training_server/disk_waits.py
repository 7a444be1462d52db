"""Waiting for space on a full disk, as a run does: a call that could not be written is made again.

A call of the server is answered once its answer and its effects are on disk, so one that met a full disk has not
happened yet. Never knows what a call does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import trio

from agentrl.errors import DiskFull
from agentrl.host.disk_space import is_full

SPACE_S: Final = 3600.0
"""Seconds in which somebody has to free some space; then the server ends. Started again, it goes on from its folder."""

_LOOK_S: Final = 0.5


class SpaceWait:
    """The waits of one call for space on the disk of `folder`."""

    def __init__(self, folder: Path, *, deadline_s: float = SPACE_S) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._until: float | None = None

    async def after(self, error: BaseException) -> None:
        """Wait for a moment after a write that failed; the first wait is printed. Raises `error` if it is no full disk,
        and DiskFull after the deadline."""
        if not is_full(error):
            raise error
        current_s = trio.current_time()
        # The deadline begins with the first failure of this call and not anew at each: a disk that frees a kilobyte now
        # and then would otherwise be waited for without end.
        if self._until is None:
            self._until = current_s + self._deadline_s
            print(f"agentrl: no space left for {self._folder}: free some; it is waited for", file=sys.stderr)
        if current_s >= self._until:
            raise DiskFull(f"no space left for {self._folder} for {self._deadline_s:g} s") from error
        await trio.sleep(_LOOK_S)
