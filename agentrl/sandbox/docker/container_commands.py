"""Commands in one container, from their start to the end of all that they started.

Knows nothing of the docker SDK: `ContainerEngine` is what a box needs of the engine that holds it. A command that
ended may leave processes. `kill -1` by the box's user ends them at once, whatever they forked; if other commands of the
box go on, processes that carry their mark in the environment are spared.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Protocol

import trio

from agentrl.errors import BoxBusy, SandboxError, SandboxLost, SandboxPathError
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import GroupCpuTime
from agentrl.host.janitor import OwnedFolder
from agentrl.protocols import ExecResult, Limits, SandboxSpec
from agentrl.sandbox.check_command import CommandRefused
from agentrl.sandbox.command_deadline import FairDeadline, fair_deadline
from agentrl.sandbox.docker.attached_streams import AttachedStreams
from agentrl.sandbox.docker.shell_scripts import MARK, REFUSED, SWEEP_ALL, SWEEP_OTHERS, shell_word
from agentrl.sandbox.work_folder import WORKSPACE

_POLL_S = 0.2  # how often a silent command is checked for life
_END_S = 10.0  # for a killed command to be gone
_AGAIN_S = 1.0  # until its processes are swept once more
_FILE_S = 60.0  # for one of our own commands
_CUT = "docker: the connection to a command broke, and its output is not whole"
_OWN_PROCESSES = 2  # the engine's process 1 and what it waits for


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

    def result(self, *, timed_out: bool) -> ExecResult:
        """How it ended; its output is taken."""
        streams = self.streams
        exit_code = 137 if timed_out or self.stop.is_set() or self.exit_code is None else self.exit_code
        return ExecResult(
            exit_code=exit_code,
            stdout=streams.stdout.take(),
            stderr=streams.stderr.take(),
            timed_out=timed_out,
            oom=self.oom,
            truncated=streams.stdout.truncated or streams.stderr.truncated or streams.is_cut,
            duration_s=self.duration_s,
            cpu_s=self.used.cpu_s if self.used.known else None,
            starved_s=self.used.starved_s,
        )


class ContainerCommands:
    """The commands of one container. Invariant: every process of a command is gone when `drive` returns, or the
    container is."""

    def __init__(self, engine: ContainerEngine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self.uid = engine.next_uid()
        self.name = ""  # the container's, once it is started
        self._running: set[ContainerCommand] = set()
        self._moving = trio.Lock()  # held while processes are started or swept: a sweep must know all marks
        self.broken = ""  # why the container was destroyed
        self.closed = self.is_entered = False  # entered: it has run a command that was not ours
        self._made_at = time.time()

    def must_be_open(self) -> None:
        """Raises SandboxError after the end of the box."""
        if self.closed:
            raise SandboxError("the box is closed")

    async def begin(
        self, script: list[str], env: Mapping[str, str], output_bytes: int | None = None
    ) -> ContainerCommand:
        """Start `sh -c` with a script and its arguments. Raises CommandRefused if the box was destroyed."""
        self.must_be_open()
        if self.broken:
            raise CommandRefused(self.broken, 137)
        command_mark = secrets.token_hex(8)
        most_output = self._limits.output_bytes if output_bytes is None else output_bytes
        launched_commands: list[ContainerCommand] = []
        cpu_account = self._engine.cpu_time(self.name, self._limits.cpus)
        async with self._moving:
            with trio.CancelScope(shield=True):  # what was started must be known
                try:
                    execution, streams = await self._engine.execute(
                        self.name, ["sh", "-c", *script], self.uid, {**env, MARK: command_mark}, most_output
                    )
                except SandboxError as engine_error:
                    # A refusal has two readings: the engine failed, or the box has killed itself by using up its
                    # memory. The second is the policy's doing and a result (law 3), so it is asked for before the error
                    # is believed.
                    if not isinstance(engine_error, SandboxLost) and await self._died_of_memory():
                        raise CommandRefused(self.broken, 137) from None
                    raise
                launched_commands.append(ContainerCommand(execution, streams, command_mark, cpu_account))
            self._running.update(launched_commands)
        return launched_commands[0]

    async def drive(
        self, command: ContainerCommand, stdin: bytes | None, timeout_s: float, *, ours: bool = False
    ) -> bool:
        """Run to the end; True if that was the deadline. Under cancellation the processes are ended first."""
        failure: SandboxError | None = None
        timed_out = has_ended = False
        try:
            async with trio.open_nursery() as pipe_nursery:
                pipe_nursery.start_soon(command.streams.drain)
                if stdin is not None:
                    pipe_nursery.start_soon(command.streams.feed, stdin)
                try:
                    with fair_deadline(pipe_nursery, timeout_s, command.used) as deadline:
                        await self._until_ended(command, deadline)
                    timed_out = deadline.passed
                    # Before the sweep: afterwards the group has no processes left to count.
                    command.used.count()
                    with trio.CancelScope(shield=True):
                        await self._finish(command, timed_out=timed_out, ours=ours)
                    has_ended = True
                except SandboxError as engine_error:  # raised outside the nursery, so that it is no group
                    failure = engine_error
                pipe_nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                if not has_ended and failure is None:
                    await self._sweep(command)
                await command.streams.close()
            self._running.discard(command)
            command.duration_s = time.monotonic() - command.began
            command.closed.set()
        if self.closed:
            raise SandboxError("the box was closed while a command ran in it")
        if failure is not None:
            if isinstance(failure, SandboxLost) or not await self._died_of_memory():
                raise failure
            command.oom, command.exit_code = True, 137
        return timed_out

    async def _until_ended(self, command: ContainerCommand, deadline: FairDeadline) -> None:
        """Until the streams ended, someone stops it, or the engine says that it ended though a child holds them. While
        a request to the engine runs, the deadline stands still."""
        failures: list[SandboxError] = []
        async with trio.open_nursery() as nursery:

            async def on(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            async def ask() -> None:
                pause_s = _POLL_S
                try:
                    while True:
                        with deadline.paused():  # a host that does not answer takes none of the policy's time (law 3)
                            if not (await self._engine.state(command.execution))[0]:
                                break
                        await trio.sleep(pause_s)
                        # Most commands end by their streams. The question is for those whose child holds the output
                        # open, so it may become rare.
                        pause_s = min(1.5 * pause_s, 2.0)
                except SandboxError as engine_error:
                    failures.append(engine_error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(on, command.streams.ended)
            nursery.start_soon(on, command.stop)
            # Most commands end sooner than this, and cost the engine no question.
            await trio.sleep(_POLL_S)
            nursery.start_soon(ask)
        if failures:
            raise failures[0]

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
        if self.closed:
            return
        is_running, command.exit_code = await self._engine.state(command.execution)
        if command.streams.broken and not (timed_out or command.stop.is_set()):
            deadline = trio.current_time() + _AGAIN_S  # the engine breaks off where nobody read the input to its end
            while is_running and command.streams.fed and trio.current_time() < deadline:
                await trio.sleep(_POLL_S / 10)
                is_running, command.exit_code = await self._engine.state(command.execution)
            if is_running:
                await self._sweep(command)
                raise SandboxLost(_CUT)
        has_others = self._running != {command}
        if is_running or (not ours and (has_others or await self._engine.processes(self.name) > _OWN_PROCESSES)):
            await self._sweep(command)
        deadline = trio.current_time() + _END_S
        while not command.streams.ended.is_set() and trio.current_time() < deadline:
            with trio.move_on_after(_AGAIN_S) as wait_scope:
                await command.streams.ended.wait()
            if wait_scope.cancelled_caught and (is_running or not ours):
                await self._sweep(command)  # it began after the last one: the engine answers before it starts a command
        deadline = trio.current_time() + _END_S  # the engine says so some time after the streams have ended
        while is_running and trio.current_time() < deadline:
            await trio.sleep(_POLL_S / 10)
            is_running, command.exit_code = await self._engine.state(command.execution)
        if command.streams.is_cut and not (timed_out or command.stop.is_set()):
            raise SandboxLost(_CUT)
        has_streams_ended = command.streams.ended.is_set()
        if not is_running and not has_streams_ended and await self._engine.processes(self.name) <= _OWN_PROCESSES:
            raise SandboxLost("docker: a command ended, and the end of its output did not come from the engine")
        if is_running or not has_streams_ended:
            await self._break("sandbox: the processes of a command could not be ended; the box was destroyed")
            command.exit_code = 137
        if command.exit_code == 137 and not (timed_out or command.stop.is_set() or self.broken):
            command.oom = await self._engine.out_of_memory(self.name, command.started_at)

    async def _sweep(self, command: ContainerCommand) -> None:
        """End all processes of the box save those of its other commands."""
        async with self._moving:
            if self.closed or self.broken:
                return
            spared_marks = [other_command.mark for other_command in self._running if other_command is not command]
            sweep_script = (
                SWEEP_OTHERS.format(pattern="|".join(f"{MARK}={spared_mark}" for spared_mark in spared_marks))
                if spared_marks
                else SWEEP_ALL
            )
            try:
                _, streams = await self._engine.execute(self.name, ["sh", "-c", sweep_script], self.uid, {}, 1000)
            except SandboxLost:
                raise
            except SandboxError:
                # The sweep is a process of the box too, and a box at its bound of processes or memory cannot start it.
                # There is no gentler means left: the kernel ends everything with the container.
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
        self.broken = "the box ran out of memory and was destroyed"
        return True

    async def _break(self, why: str) -> None:
        self.broken = why
        await self._engine.remove(self.name)

    async def run_script(
        self, script: str, *arguments: str, stdin: bytes = b"", limit: int = 1 << 16
    ) -> tuple[int, bytes, bytes]:
        """Run one of our scripts in the work folder: exit code, stdout, stderr. It runs as the box's user, whose other
        processes may stop it: once there were some, the time is the policy's."""
        shell_words = [shell_word(os.fsencode(argument), word_number) for word_number, argument in enumerate(arguments)]
        preparations = (
            "".join(preparation for preparation, _ in shell_words)
            + f"set -- {' '.join(shell_word_text for _, shell_word_text in shell_words)}; "
        )
        shell_text = f"cd {WORKSPACE} || exit {REFUSED}; {preparations}{script}"
        try:
            command = await self.begin([shell_text], {}, output_bytes=limit)
        except CommandRefused as refusal:
            raise SandboxPathError(str(refusal)) from None
        # Before the first command of a policy only our own programs are in the box, and a slow read is the host's.
        with policy_time() if self.is_entered else nullcontext():
            timed_out = await self.drive(command, stdin, _FILE_S, ours=True)
        if timed_out:
            raise SandboxPathError(f"the files of the box did not answer within {_FILE_S:.0f} s")
        return command.exit_code or 0, command.streams.stdout.take(), command.streams.stderr.take()

    async def must_run(
        self, path: str, script: str, *arguments: str, stdin: bytes = b"", limit: int = 1 << 16
    ) -> bytes:
        """Like `run_script`; a refusal raises SandboxPathError, more output than `limit` too."""
        exit_code, script_output, error_output = await self.run_script(script, *arguments, stdin=stdin, limit=limit)
        if exit_code != 0:
            raise SandboxPathError(
                f"{path!r}: {error_output.decode(errors='replace').strip() or f'exit code {exit_code}'}"
            )
        if len(script_output) >= limit:
            raise SandboxPathError(f"{path!r} is larger than {limit - 1} bytes")
        return script_output

    def must_be_still(self) -> None:
        """Raises BoxBusy while a command runs."""
        self.must_be_open()
        if self._running:
            raise BoxBusy(len(self._running))

    async def end_all(self) -> None:
        """Stop all commands, and wait until they are gone."""
        commands = list(self._running)
        for command in commands:
            command.stop.set()
        for command in commands:
            await command.closed.wait()
