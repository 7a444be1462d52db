"""Boxes whose commands are processes of this host behind a wrapper of yours (firejail, unshare, a remote shell).

A backend derives from `ProcessBackend`, says in `wrap` how a command is started, and gets the rest: work folders,
files, snapshots, forks, deadlines, bounded output, background processes, the end. The wrapper makes
the walls. At a deadline its process group is ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import starved_out
from agentrl.host.janitor import OwnedFolder
from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec
from agentrl.sandbox.background_process import Background, NeverStarted
from agentrl.sandbox.check_command import CommandRefused, checked_argv, checked_env
from agentrl.sandbox.command_deadline import checked_wall_s, fair_deadline
from agentrl.sandbox.folder_box import FolderSnapshots, WorkBox
from agentrl.sandbox.host_process import HostProcess, exit_code
from agentrl.sandbox.work_folder import WORKSPACE, Folder

_KEPT = ("PATH", "LANG", "LC_ALL")  # of this process's environment; the rest may hold secrets
_DRAIN_S = 1.0  # for pipes that an escaped process still holds open


class ProcessBackend:
    """Base of backends that start commands by a wrapper. `name` is the registry id."""

    name = ""

    def __init__(self) -> None:
        self._home: OwnedFolder | None = None
        self._snapshots: FolderSnapshots | None = None
        self._count = itertools.count()
        self._boxes: set[ProcessBox] = set()

    def wrap(self, command: list[bytes], spec: SandboxSpec, folder: Path) -> list[bytes]:
        """The words that run `command` in a box whose work folder is `folder`. Exit codes of a shell are expected:
        127 for a missing program, 126 for one that cannot be run."""
        raise NotImplementedError

    def check(self, spec: SandboxSpec) -> None:
        """Raise SandboxError for a spec that this backend cannot make."""

    async def create(self, spec: SandboxSpec | None = None) -> ProcessBox:
        """A new work folder. Raises SandboxError if the host fails or cannot make such a box."""
        spec = spec or SandboxSpec()
        self.check(spec)
        if self._home is None:
            self._home = OwnedFolder()
            self._snapshots = FolderSnapshots(self._home.path / "snapshots")
        assert self._snapshots
        new_box = ProcessBox(self._home, f"box{next(self._count)}", spec, self._snapshots, self)
        self._boxes.add(new_box)
        try:
            for file_path, file_bytes in spec.files.items():
                await new_box.write(file_path, file_bytes)
        except BaseException:
            await new_box.close()
            raise
        return new_box

    def forget(self, box: ProcessBox) -> None:
        """A box says that it closed."""
        self._boxes.discard(box)

    async def aclose(self) -> None:
        """Close all boxes and leave nothing behind. Idempotent."""
        with trio.CancelScope(shield=True):
            for open_box in list(self._boxes):
                await open_box.close()
            if self._home is not None:
                home_folder, self._home = self._home, None
                await trio.to_thread.run_sync(home_folder.close)


class ProcessBox(WorkBox):
    """A work folder and the processes started in it."""

    def __init__(
        self, home: OwnedFolder, name: str, spec: SandboxSpec, snapshots: FolderSnapshots, backend: ProcessBackend
    ) -> None:
        self.spec = spec
        self._home, self._backend = home, backend
        self._root = home.path / name
        self._path = self._root / "work"
        self._path.mkdir(mode=0o700, parents=True)
        super().__init__(Folder(self._path, limit=spec.limits.disk_bytes), snapshots)
        self._running: dict[HostProcess, trio.Event] = {}

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
            command_process = self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return refusal.result
        with policy_time():
            timed_out = await self._drive(command_process, stdin, wall_s)
        if timed_out and command_process.used.starved_out:
            raise starved_out(command_process.used.starved_s, command_process.used.cpu_s)
        return _result(command_process, timed_out=timed_out)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes."""
        try:
            command_process = self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return NeverStarted(refusal.result)
        return Background(
            command_process,
            drive=lambda: self._drive(command_process, None, math.inf),
            result=lambda: _result(command_process, timed_out=False),
            kill=command_process.kill_group,
            used=lambda: command_process.used,
        )

    def _spawn(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> HostProcess:
        self._must_be_open()
        checked_command = checked_argv(argv)
        inherited = {variable_name: os.environ[variable_name] for variable_name in _KEPT if variable_name in os.environ}
        home_variables = {"HOME": str(self._path), "TMPDIR": str(self._path)}
        # The mark comes last: a variable of the same name would hide the command's processes from the janitor, and they
        # would outlive this process.
        variables = checked_env({**inherited, **home_variables, **self.spec.env, **(env or {}), **self._home.mark})
        working_folder = self._path
        if cwd not in (None, "", "."):
            if not self._work.is_directory(cwd):
                raise CommandRefused(f"no folder {cwd!r} in the work folder")
            working_folder = self._path / cwd.removeprefix(WORKSPACE).lstrip("/")
        wrapped_command = self._backend.wrap(checked_command, self.spec, self._path)
        command_process = HostProcess(
            wrapped_command, env=variables, cwd=working_folder, output_bytes=self.spec.limits.output_bytes
        )
        self._running[command_process] = trio.Event()
        return command_process

    async def _drive(self, child: HostProcess, stdin: bytes | None, timeout_s: float) -> bool:
        timed_out = False
        try:
            async with trio.open_nursery() as pipe_nursery:
                pipe_nursery.start_soon(child.drain)
                if stdin is not None:
                    pipe_nursery.start_soon(child.feed, stdin)
                with fair_deadline(pipe_nursery, timeout_s, child.used) as deadline:
                    await child.ended()
                timed_out = deadline.passed
                await child.end(child.kill_group)
                # A process that has left the group may hold the pipes as long as it likes. The command has ended, so
                # its output is what has come until now.
                pipe_nursery.cancel_scope.deadline = trio.current_time() + _DRAIN_S
            child.take_rest()
        finally:
            try:
                await child.close(child.kill_group)
            finally:
                self._running.pop(child).set()
        if self._closed:
            raise SandboxError("the box was closed while a command ran in it")
        return timed_out

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended."""
        self._must_be_open()
        await self._end_processes()
        await self._snapshots.put_back(snapshot, self._work)

    def _processes(self) -> int:
        return len(self._running)

    async def fork(self) -> ProcessBox:
        """A new box with a copy of the work folder; processes are not copied."""
        self._must_be_open()
        forked_box = await self._backend.create(dataclasses.replace(self.spec, files={}))
        try:
            await trio.to_thread.run_sync(forked_box._work.load, self._path)
        except BaseException:
            await forked_box.close()
            raise
        return forked_box

    async def close(self) -> None:
        """End all processes, remove all files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._end_processes()
            self._work.close()
            self._snapshots.drop(self._taken)
            await trio.to_thread.run_sync(self._home.remove, self._root)
        self._backend.forget(self)

    async def _end_processes(self) -> None:
        running_processes = dict(self._running)
        for running_process in running_processes:
            running_process.kill_group()
        for process_ended in running_processes.values():
            await process_ended.wait()


def _result(child: HostProcess, *, timed_out: bool) -> ExecResult:
    return ExecResult(
        exit_code=137 if timed_out else exit_code(child.status or 0),
        stdout=child.stdout.take(),
        stderr=child.stderr.take(),
        timed_out=timed_out,
        truncated=child.stdout.truncated or child.stderr.truncated,
        duration_s=child.duration_s,
        cpu_s=child.cpu_s,
        starved_s=child.used.starved_s,
    )
