"""Boxes without walls or programs: what runs there floods, ends at once, or says what it was told to say."""

from __future__ import annotations

import trio

from agentrl.protocols import ExecResult

PIECE = 1 << 16


class Floods:
    """Box and process in one, which writes without end and never a line, but for `first`. `written` counts bytes as if
    `first` were a piece like the others."""

    def __init__(self, first: bytes = b"") -> None:
        self._first = first
        self.written = 0
        self.killed = False

    async def start(self, *_: object, **__: object) -> Floods:
        return self

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        self.written += PIECE
        first, self._first = self._first, b""
        return first or b"x" * PIECE

    async def kill(self) -> None:
        self.killed = True


class EndsAtOnce:
    """Box and process in one: whatever is started has ended with `code` and said nothing."""

    def __init__(self, code: int) -> None:
        self._result = ExecResult(exit_code=code, stdout=b"", stderr=b"")

    async def start(self, *_: object, **__: object) -> EndsAtOnce:
        return self

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""

    async def kill(self) -> ExecResult:
        return self._result


class Says:
    """Box and process in one: what is started says these lines, one for each look."""

    def __init__(self, *lines: bytes) -> None:
        self._lines = list(lines)

    async def start(self, *_: object, **__: object) -> Says:
        return self

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._lines.pop(0) + b"\n" if self._lines else b""

    async def kill(self) -> None: ...
