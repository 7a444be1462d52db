"""A box whose processes and files only an engine can reach: everything goes through commands run in a container.

The image needs `sh` and the programs of `shell_scripts.PROGRAMS`. Knows nothing of the docker SDK: `ContainerEngine` is
what a box needs of the engine that holds it. A command that ended may leave processes. `kill -1` by the box's user ends
them at once, whatever they forked; if other commands of the box go on, processes that carry their mark in the
environment are spared.
"""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Protocol

import trio

from agentrl.errors import BoxBusy, SandboxError, SandboxLost, SandboxPathError, SandboxUnavailable
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import GroupCpuTime, starved_out
from agentrl.host.janitor import OwnedFolder
from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec
from agentrl.sandbox.background_process import Background, NeverStarted
from agentrl.sandbox.check_command import CommandRefused, checked_argv, checked_env
from agentrl.sandbox.command_deadline import FairDeadline, checked_wall_s, fair_deadline
from agentrl.sandbox.docker import tar as archive
from agentrl.sandbox.docker.attached_streams import AttachedStreams
from agentrl.sandbox.docker.shell_scripts import (
    BOUND,
    CHECK,
    CLEAR,
    ENTER,
    MARK,
    PACK,
    PACK_FOLDER,
    PROGRAMS,
    READ,
    REFUSED,
    SWEEP_ALL,
    SWEEP_OTHERS,
    UNPACK,
    UNPACK_FOLDER,
    WRITE_FILE,
    checked_path,
    is_text,
    shell_word,
)
from agentrl.sandbox.work_folder import WORKSPACE


class ContainerEngine(Protocol):
    """The calls that a box makes to its host. Every method raises SandboxError; if the host does not answer,
    SandboxLost: then nothing is known of the box."""

    folder: OwnedFolder

    def next_uid(self) -> int: ...
    async def start_container(self, spec: SandboxSpec, uid: int) -> tuple[str, AttachedStreams]: ...
    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]: ...
    async def state(self, execution: str) -> tuple[bool, int | None]: ...
    async def processes(self, container: str) -> int: ...
    def cpu_time(self, container: str, cpus: float) -> GroupCpuTime: ...
    async def is_running(self, container: str) -> bool: ...
    async def out_of_memory(self, container: str, since: float) -> bool: ...
    async def remove(self, container: str) -> None: ...


class ContainerCommand:
    """One command in a container, on its way."""

    def __init__(self, execution: str, streams: AttachedStreams, mark: str, used: GroupCpuTime) -> None:
        self.execution, self.streams, self.mark, self.used = execution, streams, mark, used
        self.started_at, self.began = time.time(), time.monotonic()
        self.stop = trio.Event()
        self.closed = trio.Event()
        self.exit_code: int | None = None
        self.oom = False
        self.duration_s = 0.0


ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
_POLL_S = 0.2  # how often a silent command is asked whether it still runs
_END_S = 10.0  # for a killed command to be gone
_AGAIN_S = 1.0  # until its processes are swept once more
_FILE_S = 60.0  # for one of our own commands
_WRITABLE: tuple[str, ...] = (WORKSPACE, "/tmp", "/dev/shm")
_CUT = "docker: the connection to a command broke, and its output is not whole"
_OWN_PROCESSES = 2  # the engine's process 1 and what it waits for


class Container:
    """One box. Invariant: every process of a command is gone when its `exec` returns, or the container is."""

    def __init__(self, engine: ContainerEngine, spec: SandboxSpec, siblings: set[Container]) -> None:
        self.spec = spec
        self._engine, self._siblings = engine, siblings
        self._uid = engine.next_uid()
        self.name = ""
        self._keeper: AttachedStreams | None = None
        self._running: set[ContainerCommand] = set()
        self._moving = trio.Lock()  # held while processes are started or swept: a sweep must know all marks
        self._snapshots: dict[str, Path] = {}
        self._broken = ""
        self._closed = self._entered = False  # entered: it has run a command that was not ours
        self._made_at = time.time()
        siblings.add(self)

    @classmethod
    async def open(cls, engine: ContainerEngine, spec: SandboxSpec, siblings: set[Container]) -> Container:
        """Start a container and lay the files of its spec. Raises SandboxError."""
        box = cls(engine, spec, siblings)
        try:
            with trio.CancelScope(shield=True):  # a container that was started must be known
                # The connection is the container's lifeline: its main program is a `cat` that reads from it. When this
                # process ends, the connection closes, the `cat` ends, and the container with it (law 4).
                box.name, box._keeper = await engine.start_container(spec, box._uid)
            code, _, words = await box._own(CHECK)
            output = " ".join(words.decode(errors="replace").split())[:200]
            if code == 2:
                raise SandboxUnavailable(f"image {spec.image!r}: {output} (docs/how-to/images.md)")
            if code == 1 and not set(output.split()) - set(PROGRAMS.split()):
                needed = ", ".join(["sh", *PROGRAMS.split()])
                raise SandboxUnavailable(
                    f"image {spec.image!r} lacks {', '.join(output.split())}: a box needs {needed}, see "
                    "docs/how-to/images.md"
                )
            if code != 0:
                raise SandboxUnavailable(f"image {spec.image!r} cannot run sh: {output}")
            for path, data in spec.files.items():
                await box.write(path, data)
        except BaseException:
            await box.close()
            raise
        return box

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
            command = await self._spawn(argv, cwd, env)
        except CommandRefused as refused:
            return refused.result
        with policy_time():
            timed_out = await self._drive(command, stdin, wall_s)
        if timed_out and command.used.starved_out:
            raise starved_out(command.used.starved_s, command.used.cpu_s)
        return self._result(command, timed_out=timed_out)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes."""
        try:
            command = await self._spawn(argv, cwd, env)
        except CommandRefused as refused:
            return NeverStarted(refused.result)
        return Background(
            command.streams,
            drive=lambda: self._drive(command, None, math.inf),
            result=lambda: self._result(command, timed_out=False),
            kill=command.stop.set,
            used=lambda: command.used,
        )

    async def _spawn(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> ContainerCommand:
        words, variables = checked_argv(argv), checked_env({**self.spec.env, **(env or {})})
        self._entered = True
        folder = os.fsencode(cwd or ".")
        if b"\0" in folder:
            raise CommandRefused("the folder holds a NUL byte")
        script = BOUND.format(pids=self.spec.limits.pids)
        if not all(is_text(part) for pair in variables.items() for part in pair):
            raise CommandRefused("a variable is not UTF-8")
        plain = {key.decode(): value.decode() for key, value in variables.items()}
        before, word = shell_word(folder)
        script += before + ENTER.format(workspace=WORKSPACE, cwd=word)
        if all(map(is_text, words)):
            return await self._begin([f'{script}exec "$@"', "sandbox", *map(bytes.decode, words)], plain)
        quoted = [shell_word(each, number) for number, each in enumerate(words)]
        script += "".join(before for before, _ in quoted)
        return await self._begin([f"{script}exec {' '.join(word for _, word in quoted)}"], plain)

    async def _begin(
        self, script: list[str], env: Mapping[str, str], output_bytes: int | None = None
    ) -> ContainerCommand:
        self._must_be_open()
        if self._broken:
            raise CommandRefused(self._broken, 137)
        mark = secrets.token_hex(8)
        bound = self.spec.limits.output_bytes if output_bytes is None else output_bytes
        launched: list[ContainerCommand] = []
        used = self._engine.cpu_time(self.name, self.spec.limits.cpus)
        async with self._moving:
            with trio.CancelScope(shield=True):  # what was started must be known
                try:
                    execution, streams = await self._engine.execute(
                        self.name, ["sh", "-c", *script], self._uid, {**env, MARK: mark}, bound
                    )
                except SandboxError as error:
                    if not isinstance(error, SandboxLost) and await self._died_of_memory():
                        raise CommandRefused(self._broken, 137) from None
                    raise
                launched.append(ContainerCommand(execution, streams, mark, used))
            self._running.update(launched)
        return launched[0]

    async def _drive(
        self, command: ContainerCommand, stdin: bytes | None, timeout_s: float, *, ours: bool = False
    ) -> bool:
        """Run to the end; True if that was the deadline. Under cancellation the processes are ended first."""
        failure: SandboxError | None = None
        timed_out = ended = False
        try:
            async with trio.open_nursery() as pipes:
                pipes.start_soon(command.streams.drain)
                if stdin is not None:
                    pipes.start_soon(command.streams.feed, stdin)
                try:
                    with fair_deadline(pipes, timeout_s, command.used) as deadline:
                        await self._until_ended(command, deadline)
                    timed_out = deadline.passed
                    command.used.count()
                    with trio.CancelScope(shield=True):
                        await self._finish(command, timed_out=timed_out, ours=ours)
                    ended = True
                except SandboxError as error:  # raised outside the nursery, so that it is no group
                    failure = error
                pipes.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                if not ended and failure is None:
                    await self._sweep(command)
                await command.streams.close()
            self._running.discard(command)
            command.duration_s = time.monotonic() - command.began
            command.closed.set()
        if self._closed:
            raise SandboxError("the box was closed while a command ran in it")
        if failure is not None:
            if isinstance(failure, SandboxLost) or not await self._died_of_memory():
                raise failure
            command.oom, command.exit_code = True, 137
        return timed_out

    async def _until_ended(self, command: ContainerCommand, deadline: FairDeadline) -> None:
        """Until the streams ended, someone stops it, or the engine says that it ended though a child holds them. While
        the engine is asked, the deadline stands still."""
        failure: list[SandboxError] = []
        async with trio.open_nursery() as nursery:

            async def on(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            async def ask() -> None:
                pause = _POLL_S
                try:
                    while True:
                        with deadline.paused():  # a host that does not answer takes none of the policy's time (law 3)
                            if not (await self._engine.state(command.execution))[0]:
                                break
                        await trio.sleep(pause)
                        # Most commands end by their streams. The question is for those whose child holds the output
                        # open, so it may become rare.
                        pause = min(1.5 * pause, 2.0)
                except SandboxError as error:
                    failure.append(error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(on, command.streams.ended)
            nursery.start_soon(on, command.stop)
            await trio.sleep(_POLL_S)
            nursery.start_soon(ask)
        if failure:
            raise failure[0]

    # Why the end of a command is put together from several signs.
    #
    # The kernel reports the end of a child once and for all. Here there are three signs, and none is enough alone:
    #
    #   streams ended       Nobody holds the output open any more. A child of the command may hold it as long as it
    #                       likes, and a connection that breaks looks alike from here. If it breaks within a frame, or
    #                       without input that the engine could have dropped, output is missing (`is_cut`): SandboxLost,
    #                       also after the command's end. The result of a command that we killed is known without it,
    #                       so there the output is flagged as cut.
    #   engine: it ended    The first process has ended, and its status is known. Its children may run on, and the
    #                       engine may learn of the end some time after the streams have ended.
    #   process count       No more than the container's own are left. It does not say of which command the others are,
    #                       so it decides nothing while another command runs.
    #
    # The engine's API has no call that ends one command. The kill is therefore a command itself (`_sweep`), by the
    # box's user. It may even come too early: the engine answers before it has started a command, so a command can begin
    # after its own kill. While the streams stay open, the sweep is repeated every `_AGAIN_S`.
    #
    # What is unclear after `_END_S` ends in one of two ways (law 4), and law 3 decides which. If nothing of the command
    # is left and the end of its output is missing, the network is to blame: SandboxLost, and the episode is not scored.
    # If something still runs, it has survived its kill: the container is removed, and the command has the exit code
    # 137, which the policy reads as its own.
    #
    # The price is a few requests to the engine for each command. `tests/sandbox/test_container.py` has an engine for
    # each case: one that learns of the end late or never, one that starts a command after its kill, one behind a bad
    # network.
    async def _finish(self, command: ContainerCommand, *, timed_out: bool, ours: bool) -> None:
        """See that nothing of it is left, and learn how it ended."""
        if self._closed:
            return
        running, command.exit_code = await self._engine.state(command.execution)
        if command.streams.broken and not (timed_out or command.stop.is_set()):
            deadline = trio.current_time() + _AGAIN_S  # the engine breaks off where nobody read the input to its end
            while running and command.streams.fed and trio.current_time() < deadline:
                await trio.sleep(_POLL_S / 10)
                running, command.exit_code = await self._engine.state(command.execution)
            if running:
                await self._sweep(command)
                raise SandboxLost(_CUT)
        others = self._running != {command}
        if running or (not ours and (others or await self._engine.processes(self.name) > _OWN_PROCESSES)):
            await self._sweep(command)
        deadline = trio.current_time() + _END_S
        while not command.streams.ended.is_set() and trio.current_time() < deadline:
            with trio.move_on_after(_AGAIN_S) as waited:
                await command.streams.ended.wait()
            if waited.cancelled_caught and (running or not ours):
                await self._sweep(command)  # it began after the last one: the engine answers before it starts a command
        deadline = trio.current_time() + _END_S  # the engine says so some time after the streams have ended
        while running and trio.current_time() < deadline:
            await trio.sleep(_POLL_S / 10)
            running, command.exit_code = await self._engine.state(command.execution)
        if command.streams.is_cut and not (timed_out or command.stop.is_set()):
            raise SandboxLost(_CUT)
        has_streams_ended = command.streams.ended.is_set()
        if not running and not has_streams_ended and await self._engine.processes(self.name) <= _OWN_PROCESSES:
            raise SandboxLost("docker: a command ended, and the end of its output did not come from the engine")
        if running or not has_streams_ended:
            await self._break("sandbox: the processes of a command could not be ended; the box was destroyed")
            command.exit_code = 137
        if command.exit_code == 137 and not (timed_out or command.stop.is_set() or self._broken):
            command.oom = await self._engine.out_of_memory(self.name, command.started_at)

    async def _sweep(self, command: ContainerCommand) -> None:
        """End all processes of the box save those of its other commands."""
        async with self._moving:
            if self._closed or self._broken:
                return
            others = [other.mark for other in self._running if other is not command]
            script = SWEEP_OTHERS.format(pattern="|".join(f"{MARK}={mark}" for mark in others)) if others else SWEEP_ALL
            try:
                _, streams = await self._engine.execute(self.name, ["sh", "-c", script], self._uid, {}, 1000)
            except SandboxLost:
                raise
            except SandboxError:
                await self._break("sandbox: the box took all it may have and was destroyed")
                return
            try:
                with trio.move_on_after(_END_S):
                    await streams.drain()
            finally:
                await streams.close()

    async def _died_of_memory(self) -> bool:
        """Whether the container is gone because the kernel ended its process 1 for want of memory: what the box used
        up is the box's own doing."""
        with suppress(SandboxError):
            if await self._engine.is_running(self.name):
                return False
        if not await self._engine.out_of_memory(self.name, self._made_at):
            return False
        self._broken = "the box ran out of memory and was destroyed"
        return True

    async def _break(self, why: str) -> None:
        self._broken = why
        await self._engine.remove(self.name)

    def _result(self, command: ContainerCommand, *, timed_out: bool) -> ExecResult:
        streams = command.streams
        code = 137 if timed_out or command.stop.is_set() or command.exit_code is None else command.exit_code
        return ExecResult(
            exit_code=code,
            stdout=streams.stdout.take(),
            stderr=streams.stderr.take(),
            timed_out=timed_out,
            oom=command.oom,
            truncated=streams.stdout.truncated or streams.stderr.truncated or streams.is_cut,
            duration_s=command.duration_s,
            cpu_s=command.used.cpu_s if command.used.known else None,
            starved_s=command.used.starved_s,
        )

    # --- files --------------------------------------------------------------------------------------------------

    async def _own(
        self, script: str, *arguments: str, stdin: bytes = b"", limit: int = 1 << 16
    ) -> tuple[int, bytes, bytes]:
        """Run one of our scripts in the work folder: exit code, stdout, stderr. It runs as the box's user, whose other
        processes may stop it: once there were some, the time is the policy's."""
        words = [shell_word(os.fsencode(argument), number) for number, argument in enumerate(arguments)]
        prepare = "".join(before for before, _ in words) + f"set -- {' '.join(word for _, word in words)}; "
        text = f"cd {WORKSPACE} || exit {REFUSED}; {prepare}{script}"
        try:
            command = await self._begin([text], {}, output_bytes=limit)
        except CommandRefused as refused:
            raise SandboxPathError(str(refused)) from None
        with policy_time() if self._entered else nullcontext():
            timed_out = await self._drive(command, stdin, _FILE_S, ours=True)
        if timed_out:
            raise SandboxPathError(f"the files of the box did not answer within {_FILE_S:.0f} s")
        return command.exit_code or 0, command.streams.stdout.take(), command.streams.stderr.take()

    async def _must_own(
        self, path: str, script: str, *arguments: str, stdin: bytes = b"", limit: int = 1 << 16
    ) -> bytes:
        """Like `_own`; a refusal raises SandboxPathError, more output than `limit` too."""
        code, out, words = await self._own(script, *arguments, stdin=stdin, limit=limit)
        if code != 0:
            raise SandboxPathError(f"{path!r}: {words.decode(errors='replace').strip() or f'exit code {code}'}")
        if len(out) >= limit:
            raise SandboxPathError(f"{path!r} is larger than {limit - 1} bytes")
        return out

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a file of the work folder. Raises SandboxPathError if there are more than `most_bytes`."""
        self._must_be_open()
        disk_bytes = self.spec.limits.disk_bytes
        bound = (disk_bytes if most_bytes is None else min(most_bytes, disk_bytes)) + 1
        return await self._must_own(path, READ, checked_path(path), str(bound), limit=bound)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work folder, making parent folders as needed."""
        self._must_be_open()
        await self._write(path, data, "")

    async def _write(self, path: str, data: bytes, mode: str) -> None:
        folder, name = posixpath.split(checked_path(path))
        if name in ("", ".", ".."):
            raise SandboxPathError(f"{path!r} is a folder")
        await self._must_own(path, WRITE_FILE, folder or ".", name, mode, stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree into the work folder."""
        self._must_be_open()
        path = trio.Path(source)
        if await path.is_file():
            await self._write(target, await path.read_bytes(), f"{(await path.stat()).st_mode & 0o777:o}")
            return
        data = await trio.to_thread.run_sync(archive.pack, source, self.spec.limits.disk_bytes)
        await self._must_own(target, UNPACK, checked_path(target) or ".", stdin=data)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the work folder to the host; links that could lead out are left behind."""
        self._must_be_open()
        bound = 2 * self.spec.limits.disk_bytes + archive.OVERHEAD
        code, data, words = await self._own(PACK, checked_path(source) or ".", str(bound), limit=bound)
        if code == 92:
            data = await self.read(source)
            await trio.Path(target.parent).mkdir(parents=True, exist_ok=True)
            await trio.Path(target).write_bytes(data)
            return
        if code != 0 or len(data) >= bound:
            raise SandboxPathError(f"{source!r}: {words.decode(errors='replace').strip() or 'the tree is too large'}")
        await trio.to_thread.run_sync(archive.unpack, data, target, self.spec.limits.disk_bytes)

    # --- copies of the box --------------------------------------------------------------------------------------

    async def _pack(self) -> bytes:
        bound = 2 * self.spec.limits.disk_bytes + archive.OVERHEAD
        return await self._must_own("the work folder", PACK, ".", str(bound), limit=bound)

    async def _unpack(self, data: bytes) -> None:
        await self._must_own("the work folder", CLEAR)
        await self._must_own("the work folder", UNPACK, ".", stdin=data)

    async def pack(self, most_bytes: int) -> bytes:
        """All that commands have written, for `unpack` of another box; in memory, tars of up to eight times as much."""
        bound = min(8 * most_bytes, 2 * self.spec.limits.disk_bytes) + archive.OVERHEAD
        parts, full = dict.fromkeys(_WRITABLE, b""), {WORKSPACE}
        for place, folder in enumerate(_WRITABLE):
            if folder in full:
                self._must_be_still()
                code, tar, words = await self._own(
                    PACK_FOLDER, folder, str(bound), *_WRITABLE[place + 1 :], limit=bound
                )
                if code != 0 or len(tar) >= bound:
                    raise SandboxPathError(f"{folder!r} cannot be packed: its files are too large, or not readable")
                parts[folder] = tar
                full.update(words.decode(errors="replace").split("\n"))
        return await trio.to_thread.run_sync(archive.join, parts, most_bytes)

    async def unpack(self, data: bytes) -> None:
        """Replace what commands have written by the files of a box that was packed."""
        self._must_be_still()
        await self._must_own("the work folder", CLEAR)
        for folder, tar in archive.split(data, _WRITABLE, 2 * self.spec.limits.disk_bytes + archive.OVERHEAD):
            await self._must_own(folder, UNPACK_FOLDER, folder, stdin=tar)

    def _must_be_still(self) -> None:
        self._must_be_open()
        if self._running:
            raise BoxBusy(len(self._running))

    async def snapshot(self) -> str:
        """Keep a copy of the work folder until this box closes."""
        self._must_be_open()
        data = await self._pack()
        name = secrets.token_hex(8)
        path = self._engine.folder.path / name
        await trio.Path(path).write_bytes(data)
        self._snapshots[name] = path
        return name

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended and /tmp is emptied."""
        self._must_be_open()
        paths = [box._snapshots[snapshot] for box in self._siblings if snapshot in box._snapshots]
        if not paths:
            raise SandboxError(f"no snapshot {snapshot!r}: its box was closed, or it is another backend's")
        data = await trio.Path(paths[0]).read_bytes()
        await self._end_commands()
        await self._unpack(data)

    async def fork(self) -> Container:
        """A new box with a copy of the work folder; processes are not copied."""
        self._must_be_open()
        data = await self._pack()
        twin = await Container.open(self._engine, dataclasses.replace(self.spec, files={}), self._siblings)
        try:
            await twin._unpack(data)
        except BaseException:
            await twin.close()
            raise
        return twin

    async def alive(self) -> bool:
        """Whether the box can still be used."""
        return not (self._closed or self._broken) and await self._engine.is_running(self.name)

    # --- the end ------------------------------------------------------------------------------------------------

    async def _end_commands(self) -> None:
        commands = list(self._running)
        for command in commands:
            command.stop.set()
        for command in commands:
            await command.closed.wait()

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            try:
                if self.name:
                    await self._engine.remove(self.name)
                await self._end_commands()
            finally:
                if self._keeper is not None:
                    await self._keeper.close()
                for path in self._snapshots.values():
                    path.unlink(missing_ok=True)
                self._snapshots.clear()
                self._siblings.discard(self)

    def _must_be_open(self) -> None:
        if self._closed:
            raise SandboxError("the box is closed")
