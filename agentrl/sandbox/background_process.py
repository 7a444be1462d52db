"""Background processes of a box. Knows nothing of how a box starts, bounds or ends them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from agentrl.errors import SandboxError, SandboxLost, boundary
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import CpuTime
from agentrl.protocols import ExecResult
from agentrl.sandbox.host_process import Output


class Piped(Protocol):
    """A running child process, or a running command in a container."""

    stdout: Output
    changed: trio.Event  # replaced whenever stdout grew or ended
    drained: bool  # stdout has come to its end

    async def send(self, data: bytes) -> None: ...


class Background:
    """A running command, driven to its end by a trio system task, so that it needs no nursery of the caller's."""

    def __init__(
        self,
        child: Piped,
        *,
        drive: Callable[[], Awaitable[object]],
        result: Callable[[], ExecResult],
        kill: Callable[[], None],
        used: Callable[[], CpuTime],
    ) -> None:
        """`drive` runs it to its end and may raise SandboxError; `result` says how it ended; `kill` ends its tree;
        `used` is what it uses while it runs."""
        self._child, self._drive, self._make_result, self._kill, self._used = child, drive, result, kill, used
        self._result: ExecResult | None = None
        self._failure: SandboxError | None = None
        self._ended = trio.Event()
        # A system task, because `start` returns while the process runs, and no nursery of the caller's is known to live
        # as long. The box ends it in `close`.
        trio.lowlevel.spawn_system_task(self._supervise)

    async def _supervise(self) -> None:
        """A system task must never raise: it would end the whole process."""
        try:
            with boundary(SandboxError, "a background process of a box:", passes=(SandboxError,), place=True):
                await self._drive()
        except SandboxError as error:
            self._failure = error
        finally:
            self._ended.set()
            # Whoever waits in `receive` looks at `_ended` only when it is woken.
            self._child.changed.set()

    @property
    def starved_s(self) -> float:
        """Seconds so far in which it could have run and its host gave it no processor, as of some seconds ago."""
        return self._used().starved_s

    async def send(self, data: bytes) -> None:
        """Write to its stdin; nothing happens if it has ended or closed it."""
        await self._child.send(data)

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """New bytes of its stdout: at least one, none at its end or when `timeout_s` (seconds) has passed. Raises
        SandboxLost: an output that the host cut has no end."""
        child = self._child
        with policy_time(), trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            while not len(child.stdout) and not child.drained and not self._ended.is_set():
                await child.changed.wait()
        # What came before the loss is still given out; the failure takes the place of the end. Given as b"" it would
        # look as if the program had finished, and the policy would be judged by half an output.
        if isinstance(self._failure, SandboxLost) and not len(child.stdout):
            raise self._failure
        return child.stdout.take()

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """How it ended, with output not yet received; None if it still runs after `timeout_s` seconds."""
        with policy_time(), trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            await self._ended.wait()
        if not self._ended.is_set():
            return None
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            self._result = self._make_result()
        return self._result

    async def kill(self) -> ExecResult:
        """End it and all it started. Idempotent."""
        if not self._ended.is_set():
            self._kill()
        final_result = await self.wait()
        assert final_result is not None
        return final_result


class NeverStarted:
    """Stands for a command that could not be run: it has ended before it began."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result

    async def send(self, data: bytes) -> None: ...

    async def receive(self, timeout_s: float | None = None) -> bytes:
        return b""

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        return self._result

    async def kill(self) -> ExecResult:
        return self._result
