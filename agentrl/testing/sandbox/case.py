"""One promise of a sandbox backend, or one attack on it: the class of a case, and helpers to write one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import trio

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.protocols import ExecResult, Limits, Sandbox, SandboxBackend, SandboxSpec

Suite = Literal["conformance", "red team"]

GUARD_S = 60.0
"""Seconds that a part of a case may take on the slowest machine: only what is broken takes longer."""

QUICK = Limits(wall_s=GUARD_S)
"""Limits of boxes in most cases: the defaults, with room for a slow machine."""


class Bench:
    """The tools of a case: a backend, and boxes that close at the end of the case."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend = backend

    @asynccontextmanager
    async def box(self, *, limits: Limits = QUICK, **spec: Any) -> AsyncGenerator[Sandbox]:
        """A new box for the case, closed at the end."""
        box = await self.backend.create(SandboxSpec(limits=limits, **spec))
        try:
            yield box
        finally:
            # A case that ran out of time is cancelled in here, and its box must go all the same, or the next case meets
            # its processes.
            with trio.CancelScope(shield=True):
                await box.close()


@dataclass(frozen=True, slots=True)
class Case:
    """One promise or one attack. `body` raises AssertionError if the promise is broken or the attack succeeds."""

    name: str
    suite: Suite
    body: Callable[[Bench], Awaitable[None]]
    isolation: bool
    deadline_s: float

    def __str__(self) -> str:
        return self.name

    async def run(self, backend: SandboxBackend) -> None:
        """Run the case. Raises AssertionError, also when the deadline passes."""
        with trio.move_on_after(self.deadline_s) as deadline_scope:
            await self.body(Bench(backend))
        assert not deadline_scope.cancelled_caught, f"not done after {self.deadline_s:.0f} s"


Body = Callable[[Bench], Awaitable[None]]


def case(
    cases: list[Case], suite: Suite, *, isolation: bool | None = None, deadline_s: float = 3 * GUARD_S
) -> Callable[[Body], Body]:
    """Make an async function a case and add it to `cases`; its docstring is the case's name."""

    def add(body: Body) -> Body:
        assert body.__doc__, "a case is named by its docstring"
        needs_isolation = suite == "red team" if isolation is None else isolation
        cases.append(Case(body.__doc__.strip().rstrip("."), suite, body, needs_isolation, deadline_s))
        return body

    return add


async def sh(box: Sandbox, script: str, **options: object) -> ExecResult:
    """Run a shell script in a box."""
    return await box.exec(["sh", "-c", script], **options)  # pyright: ignore[reportArgumentType]


async def py(box: Sandbox, program: str, *arguments: str, **options: object) -> ExecResult:
    """Run a Python program in a box."""
    return await box.exec(["python3", "-c", program, *arguments], **options)  # pyright: ignore[reportArgumentType]


async def output(box: Sandbox, script: str) -> str:
    """Standard output of a shell script that must succeed."""
    result = await sh(box, script)
    assert result.exit_code == 0, f"{script!r} ended with {result.exit_code}: {result.stderr!r}"
    return result.stdout.decode()


async def must_refuse(operation: Awaitable[object]) -> str:
    """The text of the SandboxPathError that an operation must raise."""
    try:
        await operation
    except SandboxPathError as error:
        return str(error)
    raise AssertionError("a path that must be refused was served")


async def must_fail(operation: Awaitable[object]) -> None:
    """The operation must raise SandboxError."""
    try:
        await operation
    except SandboxError:
        return
    raise AssertionError("no SandboxError was raised")


def host_processes(marker: str) -> list[int]:
    """Ids of host processes whose command line holds `marker`."""
    process_ids: list[int] = []
    for process_folder in Path("/proc").iterdir():
        if process_folder.name.isdecimal() and int(process_folder.name) != os.getpid():
            try:
                # By a random text in the command line, as the only thing that survives: a process that escaped has
                # another parent, group and session.
                if marker.encode() in (process_folder / "cmdline").read_bytes():
                    process_ids.append(int(process_folder.name))
            except OSError:
                continue
    return process_ids


async def must_vanish(marker: str) -> None:
    """Host processes with `marker` must be gone soon."""
    with trio.move_on_after(GUARD_S / 4):
        for process_id in host_processes(marker):
            with suppress(ProcessLookupError):
                # By descriptor: while the end is awaited, the number may be given to another process, and the case
                # would then wait for a stranger.
                descriptor = os.pidfd_open(process_id)
                try:
                    await trio.lowlevel.wait_readable(descriptor)
                finally:
                    os.close(descriptor)
    survivors = host_processes(marker)
    for process_id in survivors:  # this case started them: no other process has its marker
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    assert not survivors, "processes of the box still run on the host"
