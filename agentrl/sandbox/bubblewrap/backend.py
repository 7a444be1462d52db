"""Boxes made with bubblewrap: one `bwrap` process per command over a private work folder. The default backend.

What bounds what (closed by default; only `SandboxSpec.network` opens):

    view           own mount namespace: /usr and libraries read-only, a made-up /etc, private /tmp, /proc, /dev
    rights         own user namespace without further ones, no capabilities, no new privileges, own pid, ipc, uts, net
                   and cgroup namespaces, a system call filter; as root every box runs under a user id of its own
    wall time      SIGKILL to process 1 of the box's pid namespace: the whole tree is gone before `exec` returns
    cpu, files     rlimits of each process (cpu, nofile, fsize, core, nproc)
    box as a whole control groups where this process may make them: memory, pids, cpu share; otherwise only the
                   address space of each process is bounded (rlimit)
    disk           a tmpfs of bounded size: mounted as root, else in a user namespace; if neither is allowed, the
                   folder is measured while a command runs, which a fast writer outruns

The box dies with its owner: `--die-with-parent` for processes, a janitor for the rest (`agentrl.host.janitor`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError, SandboxPathError, SandboxUnavailable
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import starved_out
from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec
from agentrl.sandbox.background_process import Background, NeverStarted
from agentrl.sandbox.bubblewrap.bwrap_process import BoxCommand
from agentrl.sandbox.bubblewrap.shared_host import BoxPlace, Host
from agentrl.sandbox.check_command import REFUSED, CommandRefused, checked_argv, checked_env
from agentrl.sandbox.command_deadline import checked_wall_s
from agentrl.sandbox.folder_box import WorkBox
from agentrl.sandbox.work_folder import WORKSPACE, Folder

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENV = {"PATH": _PATH, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "agent"}
_POLL_S = 0.25  # how often an unbounded work folder is measured
_REAP_S = 10.0


class Bubblewrap:
    """Boxes of bubblewrap on this machine, closed by default. `image` of a spec is a folder with a root file
    system; None is the host's /usr.

    `readonly` maps further host paths to paths in every box. `control_groups`: None uses them where they can be made,
    True insists on them, False never does."""

    name = "bubblewrap"

    def __init__(self, *, readonly: Mapping[str, str] | None = None, control_groups: bool | None = None) -> None:
        self._readonly = dict(readonly or {})
        self._want_groups = control_groups
        self._host: Host | None = None
        self._boxes: set[BubblewrapBox] = set()
        self._opening = trio.Lock()

    async def create(self, spec: SandboxSpec | None = None) -> BubblewrapBox:
        """A new box. Raises SandboxUnavailable with what to install, SandboxError if the host fails."""
        # The first episodes of a worker open their boxes at the same moment. Without the lock each of them would probe
        # the host and leave all but one of the folders behind.
        async with self._opening:
            if self._host is None:
                self._host = await self._open_host()
        new_box = await BubblewrapBox.open(self._host, spec or SandboxSpec(), self._boxes)
        try:
            for file_path, file_bytes in new_box.spec.files.items():
                await new_box.write(file_path, file_bytes)
        except BaseException:
            await new_box.close()
            raise
        return new_box

    async def _open_host(self) -> Host:
        new_host = Host(self._readonly, self._want_groups)
        try:
            problem = await self._probe(new_host)
            # A probe and no list of kernel versions: what is allowed depends on sysctls, on security modules and on the
            # container around this process.
            if problem and new_host.drops_user:  # an unprivileged user may be forbidden what root is allowed
                new_host.drops_user = False
                problem = await self._probe(new_host)
            if problem:
                raise SandboxUnavailable(
                    f"bubblewrap cannot make a box here ({problem}); allow user namespaces, or use the backend docker"
                )
        except BaseException:
            new_host.close()
            raise
        return new_host

    async def _probe(self, host: Host) -> str:
        """Run `true` in a box: what is wrong, or nothing."""
        probe_box = await BubblewrapBox.open(host, SandboxSpec(), self._boxes)
        try:
            probe_result = await probe_box.exec(["true"])
            return "" if probe_result.exit_code == 0 else probe_result.stderr.decode(errors="replace").strip()
        except SandboxError as box_error:
            return str(box_error)
        finally:
            await probe_box.close()

    async def aclose(self) -> None:
        """Close all boxes and leave nothing behind. Idempotent."""
        with trio.CancelScope(shield=True):
            for open_box in list(self._boxes):
                await open_box.close()
            if self._host is not None:
                open_host, self._host = self._host, None
                await trio.to_thread.run_sync(open_host.close)


# Why every command gets a bwrap of its own, and no shell stays in the box.
#
# A box could be one process that stays and starts one command after the other, as a terminal does. It would save the
# setup of the namespaces each time. But that process would run beside the commands and as their user. The code of a
# model could stop it, kill it or write into its pipes, so nobody could trust what it reports: whether a command has
# ended, with which status, and what is left of it. A child that forked twice and opened a session of its own would live
# on, and use up the time, the processes and the memory of the commands after it.
#
# So a box is only a place: files, limits and, where possible, a control group. A command is one bwrap that enters it,
# with a pid namespace of its own. When process 1 of this namespace ends, by itself or by SIGKILL from here, the kernel
# ends all others in it, however often they forked. `exec` returns after that. Law 4 rests on it, and law 3: what a
# command does cannot change what is reported of it.
#
# The price is a start of bwrap for each command, and that commands of a box share their files and nothing else. A
# server that one command starts is not in the process list of the next one and, as long as the network is closed, not
# at its loopback address. A process that has to stay is started by `start` and is reached by its pipes; it still ends
# with the box.
#
# `tests/sandbox/test_bubblewrap.py` runs the attacks of `agentrl.testing.sandbox`. With a process that stays, the
# double forks that outlive the end of a command would succeed.
class BubblewrapBox(WorkBox):
    """One box. Invariant: every process of a command is gone when its `exec` returns."""

    @classmethod
    async def open(cls, host: Host, spec: SandboxSpec, siblings: set[BubblewrapBox]) -> BubblewrapBox:
        """Make the work folder and, if possible, the control group. Raises SandboxError."""
        box_place = await trio.to_thread.run_sync(host.place, spec.limits)
        try:
            return cls(host, spec, siblings, box_place)
        except BaseException:
            box_place.close()
            raise

    def __init__(self, host: Host, spec: SandboxSpec, siblings: set[BubblewrapBox], place: BoxPlace) -> None:
        self.spec = spec
        self._host, self._siblings, self._place = host, siblings, place
        work_owner = place.owner if host.drops_user else None
        work_folder = Folder(place.work, limit=spec.limits.disk_bytes, owner=work_owner, bounded=place.bounded)
        super().__init__(work_folder, host.snapshots)
        self._bwrap = host.bwrap(spec, self._place)
        self._limited = host.limited(spec.limits, as_group=self._place.group is not None)
        self._running: set[BoxCommand] = set()
        siblings.add(self)

    # --- commands -----------------------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a command to its end or `timeout_s` (seconds, default `Limits.wall_s`). Raises SandboxError."""
        try:
            wall_s = checked_wall_s(timeout_s, self.spec.limits)
            box_command = self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return refusal.result
        # The kernel counts kills of the box and not of a command: the difference is this command's, or that of one
        # beside it, which shares the same memory.
        kills_before = self._place.oom_kills()
        with policy_time():
            timed_out = await self._drive(box_command, stdin, wall_s)
        # Not a time-out to be scored: this machine gave the command no processor for so long that its deadline says
        # nothing about the code (law 3).
        if timed_out and box_command.child.used.starved_out:
            raise starved_out(box_command.child.used.starved_s, box_command.child.used.cpu_s)
        return self._result(box_command, timed_out=timed_out, oom=self._place.oom_kills() > kills_before)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes.

        A command that cannot be run (NUL bytes, missing folder) gives a process that has ended with code 126."""
        try:
            box_command = self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return NeverStarted(refusal.result)
        background = Background(
            box_command.child,
            drive=lambda: self._drive(box_command, None, math.inf),
            result=lambda: self._result(box_command, timed_out=False, oom=False),
            kill=box_command.kill,
            used=lambda: box_command.child.used,
        )
        # Not before its bounds hold: a process handed out earlier could be written to while it is in no control group
        # yet.
        await box_command.admitted.wait()
        return background

    def _spawn(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> BoxCommand:
        self._must_be_open()
        checked_command = checked_argv(argv)
        variables = checked_env({**_ENV, **self.spec.env, **(env or {})})
        working_folder = WORKSPACE
        if cwd not in (None, "", "."):
            if not self._work.is_directory(cwd):
                raise CommandRefused(f"no folder {cwd!r} in the work folder")
            working_folder = cwd if cwd.startswith("/") else f"{WORKSPACE}/{cwd}"
        last_arguments = [b"--chdir", os.fsencode(working_folder)]
        for variable_name, variable_value in variables.items():
            last_arguments += [b"--setenv", variable_name, variable_value]
        last_arguments += [b"--", *self._limited, *checked_command]
        limits = self.spec.limits
        box_command = BoxCommand(
            self._bwrap,
            last_arguments,
            filter_file=self._host.filter_file,
            mark=self._host.folder.mark,
            output_bytes=limits.output_bytes,
        )
        self._running.add(box_command)
        return box_command

    async def _drive(self, run: BoxCommand, stdin: bytes | None, timeout_s: float) -> bool:
        disk_watch = None if self._place.bounded else self._watch_disk
        try:
            control_group, cpus = self._place.group, self.spec.limits.cpus
            timed_out = await run.drive(
                stdin=stdin, timeout_s=timeout_s, group=control_group, cpus=cpus, watch=disk_watch
            )
        finally:
            self._running.discard(run)
        # Its processes were killed by `close`; the exit code would read as if the policy's command had crashed.
        if self._closed:
            raise SandboxError("the box was closed while a command ran in it")
        return timed_out

    async def _watch_disk(self) -> str:
        """Why a command must be killed: the work folder, which no file system bounds, grew too large. A command that
        finds it too large already may run, and delete, but not add."""
        limit_bytes = self.spec.limits.disk_bytes
        used_bytes = await trio.to_thread.run_sync(self._place.usage)
        # Without the maximum, a box that is too full could not even run the `rm` that would empty it.
        allowed_bytes = max(limit_bytes, used_bytes) if used_bytes < math.inf else limit_bytes
        while True:
            if await trio.to_thread.run_sync(self._place.usage) > allowed_bytes:
                return f"the work folder exceeds {limit_bytes} bytes"
            await trio.sleep(_POLL_S)

    def _result(self, run: BoxCommand, *, timed_out: bool, oom: bool) -> ExecResult:
        host_process = run.child
        stdout, stderr = host_process.stdout.take(), host_process.stderr.take()
        exit_code = run.exit_code
        if exit_code is None and not (run.killed or oom):
            message = stderr.decode(errors="replace").strip() or "bwrap ended without a word"
            # Law 3: a command that was alone and could not be set up has met a broken host. Beside other commands of
            # the box it may have met what those use up, such as the bound of processes.
            if not self._running and "Can't chdir" not in message:
                raise SandboxError(f"bubblewrap could not set up the box: {message}")
            exit_code = REFUSED  # the box's own doing: its other processes took all there was, or the folder vanished
        if run.killed_because:
            stderr += f"\nsandbox: killed: {run.killed_because}\n".encode()
        return ExecResult(
            exit_code=137 if exit_code is None else exit_code,
            stdout=stdout,
            stderr=stderr,
            timed_out=timed_out,
            oom=oom,
            truncated=host_process.stdout.truncated or host_process.stderr.truncated,
            duration_s=host_process.duration_s,
            cpu_s=host_process.used.cpu_s if run.cpu_s is None else run.cpu_s,
            starved_s=host_process.used.starved_s,
        )

    # --- files --------------------------------------------------------------------------------------------------

    async def write(self, path: str, data: bytes) -> None:
        self._must_be_open()
        if not self._place.bounded:
            used_bytes = await trio.to_thread.run_sync(self._place.usage)
            if used_bytes + len(data) > self.spec.limits.disk_bytes:
                raise SandboxPathError(
                    f"{path!r} does not fit: {used_bytes} of {self.spec.limits.disk_bytes} bytes are used"
                )
        await super().write(path, data)

    # --- copies of the box --------------------------------------------------------------------------------------

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended and /tmp is emptied."""
        self._must_be_open()
        await self._end_processes()
        await self._snapshots.put_back(snapshot, self._work)
        await trio.to_thread.run_sync(self._place.clear_tmp)

    def _roots(self) -> dict[str, Path]:
        return {"work": self._place.work, "tmp": self._place.tmp, "shm": self._place.shm}

    def _processes(self) -> int:
        return len(self._running)

    async def fork(self) -> BubblewrapBox:
        """A new box with a copy of the work folder; processes are not copied."""
        self._must_be_open()
        forked_box = await BubblewrapBox.open(self._host, dataclasses.replace(self.spec, files={}), self._siblings)
        try:
            await trio.to_thread.run_sync(forked_box._work.load, self._place.work)
        except BaseException:
            await forked_box.close()
            raise
        return forked_box

    async def alive(self) -> bool:
        """Whether the box can still be used; asks no process."""
        return not self._closed and self._place.work.is_dir()

    # --- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all processes, remove all files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._end_processes()
            self._work.close()
            await trio.to_thread.run_sync(self._remove)
        self._siblings.discard(self)

    async def _end_processes(self) -> None:
        running_commands = list(self._running)
        for running_command in running_commands:
            running_command.kill()
        with trio.move_on_after(_REAP_S) as deadline:
            for running_command in running_commands:
                await running_command.closed.wait()
        if deadline.cancelled_caught:
            raise SandboxError("processes of the box survive SIGKILL; the host is in trouble")

    def _remove(self) -> None:
        self._snapshots.drop(self._taken)
        self._place.close()
