"""A host process under trio: spawned, fed, drained within a bound, and reaped. Knows nothing of boxes or namespaces.

`trio.open_process` spawns from a worker thread, and Linux ties PR_SET_PDEATHSIG (bubblewrap's `--die-with-parent`) to
the thread that forked: when trio retires the idle thread the process would die. So `HostProcess` spawns from the
calling thread; that costs the event loop the time of a vfork.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError
from agentrl.host.cpu_time import CpuTime, cpu_seconds
from agentrl.host.platform_checks import kill_group

_CHUNK = 1 << 16
_PAUSE_S = 0.001  # between chunks that are thrown away: an endless writer costs us at most 64 MB/s
_REAP_S = 10.0  # a killed tree that is not gone by then is a failure of the host


class Output:
    """A bounded store of bytes: after `limit` unread bytes, further ones are dropped and `truncated` is set."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.truncated = False
        self._data = bytearray()

    def add(self, chunk: bytes | bytearray) -> None:
        # The first bytes are kept and not the last, as in a shell that stops reading: a ring would need the whole
        # output to pass through it, and an endless writer would decide what the policy reads.
        free_bytes = self.limit - len(self._data)
        self._data += chunk[:free_bytes] if free_bytes < len(chunk) else chunk
        self.truncated = self.truncated or free_bytes < len(chunk)

    def take(self) -> bytes:
        """All bytes not yet taken."""
        taken_bytes = bytes(self._data)
        self._data.clear()
        return taken_bytes

    def __len__(self) -> int:
        return len(self._data)


class HostProcess:
    """One host process with three pipes. Invariant: after `close` returns no process and no descriptor is left."""

    def __init__(
        self,
        argv: Sequence[bytes],
        *,
        env: Mapping[bytes, bytes],
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        output_bytes: int,
    ) -> None:
        """Spawn `argv`, a session of its own. Raises SandboxError if the host cannot."""
        pipe = subprocess.PIPE
        self.started = time.monotonic()
        self.duration_s = 0.0  # set at the end
        self.cpu_s: float | None = None  # set at the end: of the process and its descendants that it waited for
        try:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as spawn_error:
            raise SandboxError(f"cannot start {os.fsdecode(argv[0])!r} on this host: {spawn_error}") from spawn_error
        self.pid = self._popen.pid
        self.used = CpuTime(self.pid)
        """CPU time of the process while it runs. A process that only wraps a command may follow the command instead."""
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        # Duplicates, as `Popen` and trio would both close the same number, and the second close may hit a descriptor
        # that somebody else has opened since.
        self.stdin = trio.lowlevel.FdStream(os.dup(self._popen.stdin.fileno()))
        self._streams = [
            trio.lowlevel.FdStream(os.dup(output_pipe.fileno()))
            for output_pipe in (self._popen.stdout, self._popen.stderr)
        ]
        for pipe_file in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            pipe_file.close()
        self.stdout, self.stderr = Output(output_bytes), Output(output_bytes)
        self.changed = trio.Event()  # replaced whenever stdout grew or ended
        self.drained = False
        # Its end is awaited without reaping it. `waitpid` in a thread does both in one step, after which the group
        # could only be killed by a number that may be another's.
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    async def send(self, data: bytes) -> None:
        """Write to stdin. A child that does not read, or has ended, is no error."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stdin.send_all(data)

    async def feed(self, data: bytes) -> None:
        """Write all of `data` to stdin and close it."""
        if data:
            await self.send(data)
        await self.stdin.aclose()

    async def drain(self) -> None:
        """Read stdout and stderr until both end; bytes beyond the bound are thrown away, slowly."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, self._streams[0], self.stdout)
            nursery.start_soon(self._drain, self._streams[1], self.stderr)
        self.drained = True
        self._signal_change()

    async def _drain(self, stream: trio.lowlevel.FdStream, output: Output) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while chunk := await stream.receive_some(_CHUNK):
                output.add(chunk)
                self._signal_change()
                if output.truncated:
                    await trio.sleep(_PAUSE_S)

    def take_rest(self) -> None:
        """Take what the command left in its pipes, if `drain` was cut off before it had read all of it."""
        for stream, output in zip(self._streams, (self.stdout, self.stderr), strict=True):
            with contextlib.suppress(OSError, trio.ClosedResourceError):  # nothing is left in it
                while not output.truncated and (chunk := os.read(stream.fileno(), _CHUNK)):
                    output.add(chunk)

    def _signal_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def ended(self) -> None:
        """Wait for the process itself, end the processes that it left in its group, and reap it."""
        if self._pidfd is not None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.kill_group()  # before the reaping: afterwards its id may be another's
            if self._popen.returncode is None:
                self.cpu_s = cpu_seconds(self.pid)
            self._popen.wait()
        else:
            await trio.to_thread.run_sync(self._popen.wait, abandon_on_cancel=True)
            # After the reaping, for want of a way to wait without it. The kernel gives the number to nobody as long as
            # a member of the group lives, so it is another's only if nobody was left and the numbers went round.
            kill_group(self.pid)
        self.duration_s = time.monotonic() - self.started

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status once reaped, negative for a signal."""
        return self._popen.returncode

    def kill_group(self) -> None:
        """SIGKILL to all of the process's group, unless the process was reaped."""
        if self._popen.returncode is None:
            kill_group(self.pid)

    async def end(self, kill: Callable[[], None]) -> None:
        """Kill it if it still runs and reap it, also under cancellation.

        Raises SandboxError if a killed process is not gone after ten seconds."""
        if self._popen.returncode is None:
            kill()
            with trio.CancelScope(shield=True), trio.move_on_after(_REAP_S):
                await self.ended()
            if self._popen.returncode is None:
                raise SandboxError(f"process {self.pid} survives SIGKILL; the host is in trouble")

    async def close(self, kill: Callable[[], None]) -> None:
        """`end` it and close every descriptor."""
        try:
            await self.end(kill)
        finally:
            with trio.CancelScope(shield=True):
                for stream in (self.stdin, *self._streams):
                    await stream.aclose()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None


def exit_code(status: int) -> int:
    """A shell's view of a wait status: 128 + n for signal n."""
    return 128 - status if status < 0 else status
