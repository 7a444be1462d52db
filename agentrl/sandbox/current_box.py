"""A box that changes from episode to episode, for tools that are made once."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.protocols import BoxProcess, ExecResult, PackableSandbox, Sandbox
from agentrl.sandbox.recording import Tape, bytes_of_json, result_as_json, result_of_json


class CurrentBox:
    """Stands for the box of the running episode: set `box` when an episode opens one. Satisfies `Sandbox`; raises
    SandboxError while there is none. Closing it closes the box. With a `tape` it records its calls, or answers as
    recorded."""

    box: Sandbox | None = None
    tape: Tape | None = None
    _copy = ""  # which copy of the box it is, on the tape

    def _live(self) -> Sandbox:
        if self.box is None:
            raise SandboxError("no episode has a box now")
        return self.box

    def _unrecorded(self, what: str) -> Sandbox:
        if self.tape is not None:
            # The first reason is kept: it is what the author has to change, and the later ones often follow from it.
            self.tape.flaw = self.tape.flaw or what
        return self._live()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        async def run() -> ExecResult:
            return await self._live().exec(argv, stdin=stdin, cwd=cwd, env=env, timeout_s=timeout_s)

        if self.tape is None:
            return await run()
        call_arguments = list(argv), blake2b(stdin).digest(), cwd, sorted((env or {}).items()), timeout_s
        return await self.tape.ask(f"{self._copy}exec", call_arguments, run, result_of_json, result_as_json)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        live_box = self._unrecorded("a process was started in its box, which no copy of its files restores")
        return await live_box.start(argv, cwd=cwd, env=env)

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        async def read() -> bytes:
            return await self._live().read(path, most_bytes=most_bytes)

        if self.tape is None:
            return await read()
        return await self.tape.ask(f"{self._copy}read", (path, most_bytes), read, bytes_of_json, _text)

    async def write(self, path: str, data: bytes) -> None:
        await self._done("write", (path, blake2b(data).digest()), lambda: self._live().write(path, data))

    async def upload(self, source: Path, target: str) -> None:
        await self._done("upload", (str(source), target), lambda: self._live().upload(source, target))

    async def _done(self, what: str, about: object, do: Callable[[], Awaitable[None]]) -> None:
        if self.tape is None:
            await do()
        else:
            await self.tape.ask(self._copy + what, about, do, _nothing, _nothing)

    async def download(self, source: str, target: Path) -> None:
        await self._unrecorded("its environment downloaded from the box").download(source, target)

    async def snapshot(self) -> str:
        return await self._unrecorded("its environment took a copy of the box").snapshot()

    async def restore(self, snapshot: str) -> None:
        await self._unrecorded("its environment took a copy of the box").restore(snapshot)

    async def fork(self) -> Sandbox:
        if self.tape is None:
            return await self._live().fork()
        forked_box = CurrentBox()

        async def fork() -> None:
            forked_box.box = await self._live().fork()

        await self._done("fork", (), fork)
        # Calls of copies are told apart on the tape: a grader's box and the policy's may run the same command with
        # different answers.
        forked_box.tape, forked_box._copy = self.tape, self.tape.copied()
        return forked_box

    async def pack(self, most_bytes: int) -> bytes:
        return await self._packable().pack(most_bytes)

    async def unpack(self, data: bytes) -> None:
        await self._packable().unpack(data)

    def _packable(self) -> PackableSandbox:
        live_box = self._live()
        if not isinstance(live_box, PackableSandbox):
            raise SandboxError(
                f"boxes of the kind {type(live_box).__name__} cannot be packed: they have no pack and unpack"
            )
        return live_box

    async def close(self) -> None:
        # Forgotten before it is closed: a close that fails must not leave the old box to the next episode.
        closing_box, self.box = self.box, None
        if self._copy and self.tape is not None:
            self.tape.copies_open -= 1
            self.tape = None
        if closing_box is not None:
            await closing_box.close()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _nothing(_: object) -> None:
    return None
