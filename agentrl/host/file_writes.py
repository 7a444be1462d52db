"""Wakes who waits until somebody writes a file: Linux's inotify, which Python's library does not have.

Owns one descriptor. Never knows what was written, nor whether a reader can see it yet: a hint to look, and no more.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_MODIFY = 0x2  # IN_MODIFY
_EVENTS_BYTES = 4096


class FileWrites:
    """Shows writes of a file by any process of this machine. `descriptor` becomes readable with the first one since
    `seen`; it is None where the system has no such thing, or where there is no such file."""

    def __init__(self, path: Path) -> None:
        self.descriptor = _watched(path)

    def seen(self) -> bool:
        """Whether there was a write since the last call. False without a descriptor."""
        has_events = False
        if self.descriptor is not None:
            with suppress(BlockingIOError):
                while os.read(self.descriptor, _EVENTS_BYTES):
                    has_events = True
        return has_events

    def close(self) -> None:
        """End the watch."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _watched(path: Path) -> int | None:
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "inotify_init1"):  # macOS
        return None
    # A user has 128 instances at most by default, and many runs may share a machine. Without one a reader looks by the
    # clock alone, so a failure is no error.
    descriptor: int = c_library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if c_library.inotify_add_watch(descriptor, os.fsencode(path), ctypes.c_uint32(_MODIFY)) < 0:
        os.close(descriptor)
        return None
    return descriptor
