"""One bubblewrap process: admitted into its bounds, driven to its end, its whole process tree gone afterwards.

How an admission goes: `bwrap` reports the host's process id of process 1 in the box and waits on a pipe; we open a
descriptor of that process (so that a kill can never hit another), put it into the control group, and let go. When
process 1 of a pid namespace has ended, the kernel has ended every process in it, whatever forked how often.

bwrap ends with the command and leaves process 1 to its own parent's reaper. So this process is a *child subreaper*
while a backend is open: the orphan comes to us and is reaped at once, instead of staying a zombie, which counts
against the box's bound of processes, for as long as the host's init pleases (for ever, where that is no real init).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from agentrl.errors import SandboxError
from agentrl.host.cpu_time import cpu_seconds
from agentrl.sandbox.bubblewrap.cgroup import ControlGroup
from agentrl.sandbox.command_deadline import fair_deadline
from agentrl.sandbox.host_process import HostProcess

_START_S = 30.0  # from the spawn to the report of process 1
_REAP_S = 10.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ENV = {b"PATH": b"/usr/sbin:/usr/bin:/sbin:/bin"}  # of bwrap itself; the command gets its own


class Subreaper:
    """Makes this process the reaper of its orphaned descendants while at least one user holds it."""

    _users = 0
    _before = 0

    @classmethod
    def hold(cls) -> None:
        cls._users += 1
        if cls._users == 1:
            flag_before = ctypes.c_int()
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(flag_before), 0, 0, 0)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            cls._before = flag_before.value

    @classmethod
    def release(cls) -> None:
        cls._users -= 1
        if cls._users == 0:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, cls._before, 0, 0, 0)


class BoxCommand:
    """A command in a box. Invariant: after `drive` nothing of it runs and no descriptor is open."""

    def __init__(
        self,
        bwrap: Sequence[bytes],
        rest: Sequence[bytes],
        *,
        filter_file: Path,
        mark: Mapping[str, str],
        output_bytes: int,
    ) -> None:
        """Spawn `bwrap ... rest`; `filter_file` holds a compiled system call filter, `mark` names the owner to its
        janitor. Raises SandboxError."""
        status_read, status_write = os.pipe()
        gate_read, gate_write = os.pipe()
        inherited = [status_write, gate_read]
        try:
            bwrap_arguments = [*bwrap, b"--json-status-fd", b"%d" % status_write, b"--block-fd", b"%d" % gate_read]
            inherited.append(os.open(filter_file, os.O_RDONLY | os.O_CLOEXEC))  # anew: bwrap reads from its position
            bwrap_arguments += [b"--seccomp", b"%d" % inherited[-1], *rest]
            bwrap_variables = {
                **_ENV,
                **{
                    os.fsencode(variable_name): os.fsencode(variable_value)
                    for variable_name, variable_value in mark.items()
                },
            }
            self.child = HostProcess(
                bwrap_arguments, env=bwrap_variables, pass_fds=inherited, output_bytes=output_bytes
            )
        except BaseException:
            os.close(status_read)
            os.close(gate_write)
            raise
        finally:
            # Our copies of its ends. Held open, the pipe of the status would never come to an end, and a bwrap that
            # died in its setup would be awaited for the whole of `_START_S`.
            for descriptor in inherited:
                os.close(descriptor)
        self._status, self._gate = trio.lowlevel.FdStream(status_read), gate_write
        self._report = b""
        self._pid = 0  # of process 1 of the box
        self._tree: int | None = None  # a descriptor of it, so that a kill can never hit another
        self._reported = self._over = False
        self.exit_code: int | None = None  # of the command; None if it never began or was killed from here
        self.killed = False  # from here: by a deadline, a bound, or the box's end
        self.killed_because: str | None = None
        self.cpu_s: float | None = None  # of the whole tree, once it has ended
        self.admitted, self.closed = trio.Event(), trio.Event()

    async def drive(
        self,
        *,
        stdin: bytes | None,
        timeout_s: float,
        group: ControlGroup | None,
        cpus: float,
        watch: Callable[[], Awaitable[str]] | None = None,
    ) -> bool:
        """Run to the end; True if that was the deadline, which waits while this machine starves the command. `stdin`
        None leaves the pipe open; `cpus` is the box's share of processors; `watch` returns, if ever, why the command
        must be killed. Raises SandboxError; under cancellation the tree is ended first."""
        failure: SandboxError | None = None
        timed_out = False
        try:
            async with trio.open_nursery() as pipe_nursery:
                pipe_nursery.start_soon(self.child.drain)
                if stdin is not None:
                    pipe_nursery.start_soon(self.child.feed, stdin)
                try:
                    with fair_deadline(pipe_nursery, timeout_s, self.child.used) as deadline:
                        await self._admit(group)
                        self.child.used.follow(self._pid or self.child.pid, cpus=cpus)
                        await (self.child.ended() if watch is None else self._until_ended(watch))
                    timed_out = deadline.passed
                    await self._end()
                except SandboxError as box_error:  # raised outside the nursery, so that it is no group
                    failure = box_error
                    pipe_nursery.cancel_scope.cancel()
        finally:
            await self._close()
        if failure is not None:
            raise failure
        return timed_out

    def kill(self) -> None:
        """SIGKILL to the whole tree; to one that bwrap has not reported yet, as soon as it has."""
        self.killed = True
        if self._tree is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._tree, signal.SIGKILL)
        elif self._reported:
            self.child.kill_group()

    async def _admit(self, group: ControlGroup | None) -> None:
        """Wait until bwrap has made the box, put the box into its control group, and let the command begin."""
        await self._meet_tree()
        if self._tree is not None and not self.killed:
            try:
                if group is not None:
                    # While bwrap waits at the gate. Moved in later, the command would have had some instants without
                    # bounds, and what it forked in them would stay outside for good.
                    group.enter(self._pid)
            except ProcessLookupError:
                pass  # it died in its setup; bwrap says why
            except OSError as group_error:
                raise SandboxError(f"cannot bound a new process: {group_error}") from group_error
            # A broken pipe: it died in its setup, and nobody waits at the gate.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._gate, b"x")
        self.admitted.set()

    async def _meet_tree(self) -> None:
        """Learn process 1 of the box, and kill it if that was requested meanwhile. Not to be cancelled: were bwrap
        killed before, the process that it had made already would become our orphan, and nobody would know its id."""
        if self._reported:
            return
        with trio.CancelScope(shield=True), trio.move_on_after(_START_S):
            self._pid = int((await self._next_report()).get("child-pid", 0))
            self._reported = True
        if not self._reported:
            self._reported = True
            raise SandboxError(f"bubblewrap did not start a box within {_START_S} s")
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                self._tree = os.pidfd_open(self._pid)
        # The kill came before there was a process to kill: `kill` could only take a note.
        if self.killed:
            self.kill()

    async def _next_report(self) -> dict[str, Any]:
        """The next line of bwrap's status; empty at its end."""
        while b"\n" not in self._report:
            status_bytes = await self._status.receive_some(4096)
            if not status_bytes:
                return {}
            self._report += status_bytes
        report_line, _, self._report = self._report.partition(b"\n")
        return json.loads(report_line)

    async def _until_ended(self, watch: Callable[[], Awaitable[str]]) -> None:
        async with trio.open_nursery() as nursery:

            async def guard() -> None:
                self.killed_because = await watch()
                self.kill()

            nursery.start_soon(guard)
            await self.child.ended()
            nursery.cancel_scope.cancel()

    async def _end(self) -> None:
        """Kill what still runs, see the whole tree gone, learn how the command ended. Once is enough."""
        if self._over:
            return
        with trio.CancelScope(shield=True):
            await self._meet_tree()
            if self.child.running:
                self.kill()
            with trio.move_on_after(_REAP_S):
                await self.child.ended()
                if self._tree is not None:
                    await trio.lowlevel.wait_readable(self._tree)
                    # Between the end and the reaping: before it the sum is not final, after it /proc has forgotten the
                    # process.
                    self.cpu_s = cpu_seconds(self._pid)
                    _collect(self._tree)
                while bwrap_report := await self._next_report():
                    self.exit_code = bwrap_report.get("exit-code", self.exit_code)
                self._over = True
            if not self._over:
                raise SandboxError(f"a killed box is not gone after {_REAP_S} s; the host is in trouble")

    async def _close(self) -> None:
        try:
            try:
                await self._end()
            finally:
                await self.child.close(self.child.kill_group)
        finally:
            with trio.CancelScope(shield=True):
                await self._status.aclose()
            os.close(self._gate)
            if self._tree is not None:
                os.close(self._tree)
                self._tree = None
            self.admitted.set()
            self.closed.set()


def _collect(ended: int) -> None:
    """Reap an orphan that has ended, unless its parent did."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, ended, os.WEXITED)
