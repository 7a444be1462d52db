"""Calls of `helper.py`, which runs in a box, and the file operations made of them.

A call is short and may be made again, so that a connection that breaks costs nothing. Knows no provider: a
`ProviderBox` makes the calls.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from agentrl.errors import SandboxError, SandboxLost, SandboxPathError
from agentrl.host.clocks import host_time
from agentrl.sandbox.docker import tar
from agentrl.sandbox.docker.shell_scripts import checked_path

CALL_S: Final = 60.0  # deadline of a call, beside what it waits for
PIECE: Final = 3 << 20  # bytes of a file in one call
_AGAIN_S: Final = 60.0  # how long calls are made again after a connection broke
_INLINE: Final = 60_000  # characters of a request that fit one argument
_FIRST_UID: Final = 20_000
_UIDS: Final = 40_000


class ProviderBox(Protocol):
    """A box at a provider. Every method raises an exception of any kind if it fails."""

    own_machine: bool
    """Whether the box is no machine of its own, but shares this one's processes and files."""
    most_wait_s: float
    """The longest that one call may wait for a command."""

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        """Stdout of a short command, whatever its exit code."""
        ...

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None: ...
    async def close(self) -> None: ...


@functools.cache
def _helper() -> str:
    return Path(__file__).with_name("helper.py").read_text("utf-8")


class Helper:
    """The helper in one box. `work` is the work folder there, `mark` are variables of every process."""

    def __init__(
        self, remote: ProviderBox, name: str, *, place: str, work: str | None, mark: Mapping[str, str]
    ) -> None:
        """`name` is the backend's. The helper has a folder of its own in `place`, and the work folder beside it if
        there is no `work`."""
        self.remote, self.name, self._mark = remote, name, mark
        self._state = f"{place}/agentrl-{secrets.token_hex(8)}"
        self.work = work or f"{self._state}-work"
        self._uid = _FIRST_UID + secrets.randbelow(_UIDS)
        self.closed = False

    def must_be_open(self) -> None:
        """Raises SandboxError after the end of the box."""
        if self.closed:
            raise SandboxError("the box is closed")

    async def ask(self, do: str, *, again: bool = True, wait_s: float = 0.0, **request: Any) -> dict[str, Any]:
        """One operation of the helper. Made again where the connection broke, if `again`. Raises SandboxLost."""
        request_fields = {"do": do, "state": self._state, "work": text(self.work.encode()), "uid": self._uid, **request}
        request_text = text(json.dumps(request_fields).encode())
        repeat_until = trio.current_time() + _AGAIN_S
        pause_s = 0.2
        while True:
            try:
                with host_time(self.name, deadline_s=CALL_S + wait_s + 30.0):
                    return await self._call(request_text, wait_s)
            except SandboxError:
                raise
            except Exception as call_error:  # any kind: it is the provider's library that failed
                # Only calls that may happen twice are made again: nobody knows whether the one that broke has reached
                # the box, and a piece that is appended twice is another file.
                if not again or trio.current_time() >= repeat_until or self.closed:
                    raise SandboxLost(f"{self.name}: a call was not answered: {_words(call_error)}") from call_error
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    async def _call(self, request: str, wait_s: float) -> dict[str, Any]:
        argument, deadline_s = request, CALL_S + wait_s
        # Linux takes 128 KiB in one argument, and the helper's own text is one beside it.
        if len(request) > _INLINE:
            request_path = f"{self._state}/{secrets.token_hex(8)}.request"
            await self.remote.write_text(request_path, request, deadline_s=deadline_s)
            argument = f"@{request_path}"
        helper_command = ["python3", "-I", "-c", _helper(), argument]
        if self._mark:
            helper_command = [
                "env",
                *(f"{variable_name}={variable_value}" for variable_name, variable_value in self._mark.items()),
                *helper_command,
            ]
        command_output = await self.remote.execute(helper_command, deadline_s=deadline_s)
        # The mark is searched for, since a provider's shell may greet before it and warn after it.
        answer_line = next(
            (answer_line for answer_line in command_output.split("\n") if answer_line.startswith("agentrl ")), None
        )
        if answer_line is None:
            raise SandboxLost(f"the box answered {command_output[-300:]!r}: it needs python3 (3.9 or later)")
        return json.loads(answer_line.removeprefix("agentrl "))


class RemoteFiles:
    """Files of the work folder. None may be larger than `disk_bytes`."""

    def __init__(self, helper: Helper, disk_bytes: int) -> None:
        self._helper, self._disk_bytes = helper, disk_bytes

    async def read(self, path: str, most: int) -> bytes | None:
        """At most `most` bytes of a file; None for a folder."""
        self._helper.must_be_open()
        encoded_path, file_bytes, file_size = text(os.fsencode(checked_path(path) or ".")), bytearray(), 1
        while len(file_bytes) < file_size:
            read_reply = await self._operate(path, "read", path=encoded_path, at=len(file_bytes), size=PIECE, most=most)
            if read_reply.get("folder"):
                return None
            file_piece = base64.b64decode(read_reply["data"])
            file_bytes += file_piece
            file_size = min(read_reply["size"], most) if file_piece else 0
        return bytes(file_bytes[:most])

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a file, making parent folders as needed."""
        self._helper.must_be_open()
        if len(data) > self._disk_bytes:
            raise SandboxPathError(f"{path!r} does not fit: {len(data)} bytes, {self._disk_bytes} there are")
        encoded_path = text(os.fsencode(checked_path(path)))
        for piece_start in range(0, max(len(data), 1), PIECE):
            encoded_piece = text(data[piece_start : piece_start + PIECE])
            await self._operate(
                path,
                "write",
                path=encoded_path,
                data=encoded_piece,
                more=piece_start > 0,
                mode=mode,
                again=piece_start == 0,
            )

    async def pack(self, path: str = ".") -> bytes:
        """An archive of a tree."""
        archive_name = f"{secrets.token_hex(8)}.tar"
        encoded_path = text(os.fsencode(checked_path(path) or "."))
        most_bytes = 2 * self._disk_bytes + tar.OVERHEAD
        try:
            tar_reply = await self._operate(
                path, "tar", id=archive_name, path=encoded_path, packs=True, clear=False, most=most_bytes
            )
            archive_bytes = bytearray()
            while len(archive_bytes) < tar_reply["size"]:
                spool_reply = await self._operate(
                    path, "spool", id=archive_name, data=None, at=len(archive_bytes), size=PIECE
                )
                if not spool_reply["data"]:
                    raise SandboxPathError(f"{path!r}: its archive broke off")
                archive_bytes += base64.b64decode(spool_reply["data"])
            return bytes(archive_bytes)
        finally:
            await self._dropped(archive_name)

    async def unpack(self, path: str, data: bytes, *, clear: bool) -> None:
        """Lay an archive into a folder, in the place of its contents if `clear`."""
        archive_name = f"{secrets.token_hex(8)}.tar"
        encoded_path = text(os.fsencode(checked_path(path) or "."))
        most_bytes = 2 * self._disk_bytes + tar.OVERHEAD
        try:
            for piece_start in range(0, len(data), PIECE):
                await self._operate(
                    path, "spool", id=archive_name, data=text(data[piece_start : piece_start + PIECE]), again=False
                )
            await self._operate(
                path, "tar", id=archive_name, path=encoded_path, packs=False, clear=clear, most=most_bytes, again=False
            )
        finally:
            await self._dropped(archive_name)

    async def _dropped(self, name: str) -> None:
        if not self._helper.closed:
            with trio.CancelScope(shield=True):
                await self._helper.ask("drop", id=name)

    async def _operate(self, named: str, do: str, /, **request: Any) -> dict[str, Any]:
        """A file operation; a refusal raises SandboxPathError."""
        self._helper.must_be_open()
        helper_reply = await self._helper.ask(do, **request)
        if "error" in helper_reply:
            self._helper.must_be_open()  # closed under the call: its folders are gone, and no path was wrong
            raise SandboxPathError(f"{named!r}: {helper_reply['error']}")
        return helper_reply


def text(data: bytes) -> str:
    """Bytes as a request carries them."""
    return base64.b64encode(data).decode()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]
