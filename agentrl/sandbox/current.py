"""A box that changes from episode to episode, for tools that are made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.protocols import BoxProcess, ExecResult, PackableSandbox, Sandbox


class CurrentBox:
    """Stands for the box of the running episode: set `box` when an episode opens one. Satisfies `Sandbox`; raises
    SandboxError while there is none. Closing it closes the box."""

    box: Sandbox | None = None

    def _live(self) -> Sandbox:
        if self.box is None:
            raise SandboxError("no episode has a box now")
        return self.box

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        return await self._live().exec(argv, stdin=stdin, cwd=cwd, env=env, timeout_s=timeout_s)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        return await self._live().start(argv, cwd=cwd, env=env)

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        return await self._live().read(path, most_bytes=most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._live().write(path, data)

    async def upload(self, source: Path, target: str) -> None:
        await self._live().upload(source, target)

    async def download(self, source: str, target: Path) -> None:
        await self._live().download(source, target)

    async def snapshot(self) -> str:
        return await self._live().snapshot()

    async def restore(self, snapshot: str) -> None:
        await self._live().restore(snapshot)

    async def fork(self) -> Sandbox:
        return await self._live().fork()

    async def pack(self, most_bytes: int) -> bytes:
        return await self._packable().pack(most_bytes)

    async def unpack(self, data: bytes) -> None:
        await self._packable().unpack(data)

    def _packable(self) -> PackableSandbox:
        box = self._live()
        if not isinstance(box, PackableSandbox):
            raise SandboxError(f"boxes of the kind {type(box).__name__} cannot be packed: they have no pack and unpack")
        return box

    async def close(self) -> None:
        box, self.box = self.box, None
        if box is not None:
            await box.close()
