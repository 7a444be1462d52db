"""Printing that waits for no reader. A terminal that is held (Ctrl-S) or a pager that nobody scrolls stops whoever
prints into it; a run goes on, and text that nobody read is left out, with a note."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO

_HELD = 1 << 20  # characters that wait for a reader
_LAST_S = 2.0  # how long the end of the text may take to be read


class Unread(io.TextIOBase):
    """Text for the file descriptor of `stream`, written by a thread.

    `write` never blocks: past 1 MiB of text that nobody read yet, each further text is left out whole. A reader that
    returns reads how many characters it missed; one that is gone for good is not missed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._fd = stream, stream.fileno()
        stream.flush()
        self._waiting: deque[str] = deque()
        self._held = self._missed = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._print, name="agentrl prints", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # a property in CPython too
        return self._stream.encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._changed:
            # The newest text is left out and not the oldest: what waits may be half of a line that is being written
            # now, and the note about the gap stands where the gap is.
            if self._held + len(text) > _HELD:
                self._missed += len(text)
            else:
                self._waiting.append(text)
                self._held += len(text)
                self._changed.notify()
        return len(text)

    def close(self) -> None:
        """Write what waits, if it is read within two seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(_LAST_S)
        super().close()

    def _print(self) -> None:
        with suppress(OSError):  # the reader is gone: what follows is held, then left out
            while (next_text := self._next()) is not None:
                unwritten = memoryview(next_text.encode(self.encoding, "replace"))
                while unwritten:
                    try:
                        unwritten = unwritten[os.write(self._fd, unwritten) :]
                    except BlockingIOError:  # another program made the terminal so
                        write_poller = select.poll()  # select() knows no descriptor above 1,023
                        write_poller.register(self._fd, select.POLLOUT)
                        write_poller.poll()

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._missed or self._ended)
            if self._waiting:
                next_text = self._waiting.popleft()
                self._held -= len(next_text)
                return next_text
            missed, self._missed = self._missed, 0
            return f"\nagentrl: {missed} characters were not read in time and are left out\n" if missed else None


@contextmanager
def waiting_for_no_reader() -> Generator[None]:
    """Inside, what is printed on standard output and standard error waits for no reader. Streams that are no files,
    as a test's, stay as they are."""
    with (
        _unread(sys.stdout) as unread_output,
        _unread(sys.stderr) as unread_errors,
        redirect_stdout(unread_output),
        redirect_stderr(unread_errors),
    ):
        yield


@contextmanager
def _unread(stream: TextIO) -> Generator[TextIO]:
    try:
        unread_stream = Unread(stream)
    except io.UnsupportedOperation:
        yield stream
        return
    with unread_stream:
        yield unread_stream  # pyright: ignore[reportReturnType]  # a text stream in all but its declared base
