"""A sandbox in memory, for tests of environments, tools and pools: your own function answers the commands.

Nothing runs. For tests that need real commands use a real backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec

Answer = Callable[[Sequence[str], dict[str, bytes]], ExecResult]


def succeed(argv: Sequence[str], files: dict[str, bytes]) -> ExecResult:
    """Every command succeeds without output."""
    del argv, files
    return ExecResult(exit_code=0, stdout=b"", stderr=b"")


class FakeSandbox:
    """One box: `files` is its work folder, `commands` records all commands. `broken` makes every call raise."""

    def __init__(self, spec: SandboxSpec, answer: Answer = succeed) -> None:
        self.spec, self.answer = spec, answer
        self.files: dict[str, bytes] = dict(spec.files)
        self.commands: list[list[str]] = []
        self.closed = self.broken = False
        self._snapshots: dict[str, dict[str, bytes]] = {}

    def _check(self) -> None:
        if self.closed or self.broken:
            raise SandboxError("the box is closed" if self.closed else "the host of the box failed")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        del stdin, cwd, env, timeout_s
        self._check()
        self.commands.append(list(argv))
        return self.answer(argv, self.files)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        raise SandboxError("a fake sandbox has no background processes")

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        self._check()
        if path not in self.files:
            raise SandboxPathError(f"{path!r}: No such file or directory")
        file_bytes = self.files[path]
        if most_bytes is not None and len(file_bytes) > most_bytes:
            raise SandboxPathError(f"{path!r} is larger than {most_bytes} bytes")
        return file_bytes

    async def write(self, path: str, data: bytes) -> None:
        self._check()
        self.files[path] = data

    async def upload(self, source: Path, target: str) -> None:
        self._check()
        self.files[target] = await trio.Path(source).read_bytes()

    async def download(self, source: str, target: Path) -> None:
        await trio.Path(target).write_bytes(await self.read(source))

    async def snapshot(self) -> str:
        self._check()
        snapshot_id = f"snapshot{len(self._snapshots)}"
        self._snapshots[snapshot_id] = dict(self.files)
        return snapshot_id

    async def restore(self, snapshot: str) -> None:
        self._check()
        self.files = dict(self._snapshots[snapshot])

    async def fork(self) -> FakeSandbox:
        self._check()
        forked_box = FakeSandbox(self.spec, self.answer)
        forked_box.files = dict(self.files)
        return forked_box

    async def close(self) -> None:
        self.closed = True


class FakeBackend:
    """Makes fake boxes and remembers them in `boxes`; raises `failure` instead while that is set."""

    name = "fake"

    def __init__(self, answer: Answer = succeed) -> None:
        self.answer = answer
        self.boxes: list[FakeSandbox] = []
        self.failure: SandboxError | None = None
        self.closed = False

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if self.failure is not None:
            raise self.failure
        created_box = FakeSandbox(spec, self.answer)
        self.boxes.append(created_box)
        return created_box

    async def aclose(self) -> None:
        self.closed = True
