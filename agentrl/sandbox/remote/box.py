"""A box behind calls that carry text: commands, files, copies. Everything goes through `helper`, which runs there.

Commands run on while a connection is broken, and their output waits. Knows no provider: a `ProviderBox` makes the
calls. Providers that know no trio run in an `AsyncioLoop`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from agentrl.errors import SandboxError, SandboxLost, SandboxPathError, SandboxUnavailable, boundary
from agentrl.host.clocks import HOST_DEADLINE_S, credit_host, host_time, policy_time
from agentrl.host.cpu_time import starved_out
from agentrl.host.janitor import OwnedFolder
from agentrl.protocols import BoxProcess, ExecResult, Limits, SandboxSpec
from agentrl.sandbox.background_process import NeverStarted
from agentrl.sandbox.check_command import CommandRefused, checked_argv, checked_env
from agentrl.sandbox.command_deadline import checked_wall_s
from agentrl.sandbox.docker import tar
from agentrl.sandbox.remote.helper_calls import CALL_S, PIECE, Helper, ProviderBox, RemoteFiles, text
from agentrl.sandbox.work_folder import WORKSPACE

T = TypeVar("T")


class AsyncioLoop:
    """Runs coroutines of asyncio from trio tasks. The thread is a daemon and starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def call(self, make: Callable[[], Coroutine[Any, Any, T]], *, deadline_s: float) -> T:
        """The result of a coroutine that is made in the loop's thread. Raises what it raises, TimeoutError after
        `deadline_s`. A cancelled or late one is cancelled there, and not waited for."""
        running_loop = self._started()
        trio_token, call_done = trio.lowlevel.current_trio_token(), trio.Event()

        async def run() -> T:
            return await asyncio.wait_for(make(), deadline_s)

        call_future = asyncio.run_coroutine_threadsafe(run(), running_loop)
        call_future.add_done_callback(lambda _: _tell(trio_token, call_done))
        try:
            with trio.move_on_after(deadline_s + 5.0):  # a library may swallow its cancellation
                await call_done.wait()
        finally:
            call_future.cancel()
        if not call_done.is_set():
            raise TimeoutError(f"no answer within {deadline_s:.0f} s")
        return call_future.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-asyncio", daemon=True)
            self._thread.start()
        return self._loop

    async def aclose(self) -> None:
        """End the thread; a call that hangs is left to it. Idempotent."""
        running_loop, self._loop = self._loop, None
        if running_loop is not None:
            running_loop.call_soon_threadsafe(running_loop.stop)


def _tell(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(done.set)


_WATCH_S: Final = 600.0  # a box without its owner ends after so long
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RemoteBox:
    """A box of ours at a provider."""

    def __init__(
        self, remote: ProviderBox, spec: SandboxSpec, backend: RemoteBackend, *, mark: Mapping[str, str]
    ) -> None:
        self.spec = spec
        self._remote, self._backend, self._mark = remote, backend, dict(mark)
        helper_place = "/tmp"
        if remote.own_machine:  # below a folder that this machine's janitor removes; its user may pass, not look
            helper_place = str(backend.folder())
            backend.folder().chmod(0o711)
        work_folder = None if remote.own_machine else WORKSPACE
        self._helper = Helper(remote, backend.name, place=helper_place, work=work_folder, mark=self._mark)
        self._work = self._helper.work
        self._files = RemoteFiles(self._helper, spec.limits.disk_bytes)
        self._running: set[_Job] = set()
        self._snapshots: dict[str, Path] = {}

    @property
    def closed(self) -> bool:
        return self._helper.closed

    async def open(self) -> None:
        """Make the work folder there, and lay the files of the spec. Raises SandboxError."""
        try:
            setup_reply = await self._helper.ask("setup", empty=not self._remote.own_machine)
            if "error" in setup_reply:
                raise SandboxUnavailable(f"{self._backend.name}: no work folder {self._work}: {setup_reply['error']}")
            if not self._remote.own_machine:
                await self.beat()
            for file_path, file_bytes in self.spec.files.items():
                await self.write(file_path, file_bytes)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.close()
            raise

    async def beat(self) -> None:
        """Tell the box that its owner lives."""
        await self._helper.ask("touch", seconds=_WATCH_S, not_in=_own_processes())

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
            command_job = await self._start(argv, stdin, cwd, env, wall_s)
        except CommandRefused as refusal:
            return refusal.result
        try:
            with policy_time():
                command_result = await command_job.wait()
        except BaseException:
            with trio.CancelScope(shield=True):
                await command_job.abandon()
            raise
        assert command_result is not None
        # The supervisor in the box has moved the command's own deadline already. The deadlines around it lie in this
        # process, and have to move as well.
        credit_host(command_result.starved_s)
        if command_result.timed_out and command_result.starved_s >= HOST_DEADLINE_S:
            raise starved_out(command_result.starved_s, command_result.cpu_s or 0.0)
        return command_result

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes."""
        try:
            return await self._start(argv, None, cwd, env, math.inf)
        except CommandRefused as refusal:
            return NeverStarted(refusal.result)

    async def _start(
        self,
        argv: Sequence[str],
        stdin: bytes | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        wall_s: float,
    ) -> _Job:
        self._helper.must_be_open()
        arguments = checked_argv(argv)
        home_variables = {"HOME": self._work if self._remote.own_machine else "/tmp", "LANG": "C.UTF-8", "PATH": _PATH}
        variables = checked_env(
            {"TMPDIR": home_variables["HOME"], **home_variables, **self.spec.env, **(env or {}), **self._mark}
        )
        working_folder = os.fsencode(cwd or ".")
        if b"\0" in working_folder:
            raise CommandRefused("the folder holds a NUL byte")
        working_folder = self._inside(working_folder)
        command_job = _Job(self._helper, self._running, secrets.token_hex(8))
        self._running.add(command_job)
        try:
            with trio.CancelScope(shield=True):  # a command that was started must be known
                await self._launch(command_job, arguments, variables, working_folder, stdin, wall_s)
        except BaseException:
            self._running.discard(command_job)
            raise
        return command_job

    async def _launch(
        self,
        job: _Job,
        words: Sequence[bytes],
        variables: Mapping[bytes, bytes],
        folder: bytes,
        stdin: bytes | None,
        wall_s: float,
    ) -> None:
        start_reply = await self._helper.ask(
            "start",
            id=job.id,
            argv=[text(argument) for argument in words],
            env=[[text(variable_name), text(variable_value)] for variable_name, variable_value in variables.items()],
            cwd=text(folder),
            stdin=text(stdin or b""),
            ends_stdin=stdin is not None,
            wall_s=min(wall_s, 1e9),
            output_bytes=self.spec.limits.output_bytes,
            limits=_bounds(self.spec.limits),
            again=False,
        )
        if "error" in start_reply:
            raise SandboxError(f"{self._backend.name}: a command cannot be started: {start_reply['error']}")

    def _inside(self, path: bytes) -> bytes:
        """A path as the helper takes it: relative to the work folder."""
        for root_path in (WORKSPACE.encode(), self._work.encode()):
            if path == root_path or path.startswith(root_path + b"/"):
                return path[len(root_path) :].lstrip(b"/") or b"."
        return path

    # --- files --------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a file of the work folder. Raises SandboxPathError if there are more than `most_bytes`."""
        most_read = self.spec.limits.disk_bytes
        file_bytes = await self._files.read(path, most_read if most_bytes is None else min(most_bytes, most_read))
        if file_bytes is None:
            raise SandboxPathError(f"{path!r}: Is a directory")
        return file_bytes

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work folder, making parent folders as needed."""
        await self._files.write(path, data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree into the work folder."""
        self._helper.must_be_open()
        source_path = trio.Path(source)
        if await source_path.is_file():
            await self._files.write(target, await source_path.read_bytes(), (await source_path.stat()).st_mode & 0o777)
            return
        packed_tree = await trio.to_thread.run_sync(tar.pack, source, self.spec.limits.disk_bytes)
        await self._files.unpack(target, packed_tree, clear=False)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the work folder to the host; links that could lead out are left behind."""
        self._helper.must_be_open()
        file_bytes = await self._files.read(source, self.spec.limits.disk_bytes)
        if file_bytes is not None:
            await trio.Path(target.parent).mkdir(parents=True, exist_ok=True)
            await trio.Path(target).write_bytes(file_bytes)
            return
        packed_tree = await self._files.pack(source)
        await trio.to_thread.run_sync(tar.unpack, packed_tree, target, self.spec.limits.disk_bytes)

    # --- copies of the box --------------------------------------------------------------------------------------

    async def snapshot(self) -> str:
        """Keep a copy of the work folder until this box closes; its id, good for every box of this backend."""
        packed_tree = await self._files.pack()
        snapshot_id = secrets.token_hex(8)
        snapshot_path = self._backend.folder() / snapshot_id
        await trio.Path(snapshot_path).write_bytes(packed_tree)
        self._snapshots[snapshot_id] = snapshot_path
        return snapshot_id

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended."""
        self._helper.must_be_open()
        snapshots = [sibling._snapshots[snapshot] for sibling in self._backend.boxes if snapshot in sibling._snapshots]
        if not snapshots:
            raise SandboxError(f"no snapshot {snapshot!r}: its box was closed, or it is another backend's")
        packed_tree = await trio.Path(snapshots[0]).read_bytes()
        for running_job in list(self._running):
            await running_job.kill()
        await self._files.unpack(".", packed_tree, clear=True)

    async def fork(self) -> RemoteBox:
        """A new box with a copy of the work folder; processes are not copied."""
        packed_tree = await self._files.pack()
        forked_box = await self._backend.create(dataclasses.replace(self.spec, files={}))
        try:
            await forked_box._files.unpack(".", packed_tree, clear=True)
        except BaseException:
            with trio.CancelScope(shield=True):
                await forked_box.close()
            raise
        return forked_box

    # --- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give the box back. Idempotent."""
        if self.closed:
            return
        self._helper.closed = True
        self._backend.boxes.discard(self)
        with trio.CancelScope(shield=True):
            try:
                if self._remote.own_machine:
                    # A box that is a machine of its own ends with its machine. On this machine its processes would
                    # stay.
                    await self._helper.ask("stop")
            finally:
                for running_job in list(self._running):
                    running_job.lost()
                for snapshot_path in self._snapshots.values():
                    snapshot_path.unlink(missing_ok=True)
                self._snapshots.clear()
                with host_time(self._backend.name), boundary(SandboxError, f"{self._backend.name}: closing a box:"):
                    await self._remote.close()


class _Job:
    """A command on its way in the box. Satisfies `BoxProcess`."""

    def __init__(self, helper: Helper, running: set[_Job], id: str) -> None:
        """It leaves the `running` commands of its box at its end."""
        self._helper, self._running, self.id = helper, running, id
        self._ask_s = helper.remote.most_wait_s
        self._numbers: dict[str, int] = {}
        self._locks = {channel_name: trio.Lock() for channel_name in ("send", "receive", "wait", "kill")}
        self._result: ExecResult | None = None
        self._lost = trio.Event()

    async def send(self, data: bytes) -> None:
        """Write to its stdin; does nothing if the process has ended or closed it."""
        for start in range(0, len(data), PIECE):
            await self._query("send", data=text(data[start : start + PIECE]))

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """New bytes of its stdout: at least one, none at its end or when `timeout_s` (seconds) has passed."""
        wait_until = trio.current_time() + (math.inf if timeout_s is None else timeout_s)
        with policy_time():
            while True:
                remaining_s = max(wait_until - trio.current_time(), 0.0)
                try:
                    output_reply = await self._query("receive", timeout_s=min(remaining_s, self._ask_s))
                except SandboxError:
                    if self._helper.closed:
                        return b""  # it ended with the box
                    raise
                output_bytes = base64.b64decode(output_reply.get("out", ""))
                if output_bytes or remaining_s <= self._ask_s or "out" not in output_reply or await self._has_ended():
                    return output_bytes

    async def _has_ended(self) -> bool:
        return await self.wait(0.0) is not None

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """How it ended, with output not yet received; None if it still runs after `timeout_s` seconds."""
        wait_until = trio.current_time() + (math.inf if timeout_s is None else timeout_s)
        with policy_time():
            while self._result is None:
                remaining_s = max(wait_until - trio.current_time(), 0.0)
                wait_reply = await self._query("wait", timeout_s=min(remaining_s, self._ask_s))
                if wait_reply.get("ended"):
                    self._result = _result(wait_reply)
                    self._running.discard(self)
                elif "gone" in wait_reply:
                    self._running.discard(self)
                    raise SandboxLost(f"{self._helper.name}: a command is gone: {wait_reply['gone']}")
                elif remaining_s <= self._ask_s:
                    return None
        return self._result

    async def kill(self) -> ExecResult:
        """End it and all it started. Idempotent."""
        if self._result is None:
            await self._query("kill")
        final_result = await self.wait()
        assert final_result is not None
        return final_result

    async def abandon(self) -> None:
        """End it without an answer: its caller is gone."""
        self._running.discard(self)
        if self._result is None and not self._helper.closed:
            with trio.move_on_after(CALL_S), suppress(SandboxError):
                await self._query("kill")
                await self._query("wait", timeout_s=self._ask_s)

    def lost(self) -> None:
        """The box is closed, or gone."""
        self._lost.set()

    async def _query(self, channel: str, **request: Any) -> dict[str, Any]:
        """A question to the command's supervisor; one at a time a channel, numbered, so that each counts once."""
        if self._result is not None:
            return {"ended": True, "out": ""} if channel == "receive" else {}
        self._helper.must_be_open()
        # The supervisor keeps the answer of the last number of each channel for a repeated call. Two calls at once
        # would take each other's.
        async with self._locks[channel]:
            call_number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
            supervisor_answer: dict[str, Any] = {}
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await self._lost.wait()
                    nursery.cancel_scope.cancel()

                failures: list[SandboxError] = []
                nursery.start_soon(stop)
                try:
                    supervisor_answer = await self._helper.ask(
                        "ask",
                        id=self.id,
                        channel=channel,
                        number=call_number,
                        wait_s=request.get("timeout_s", 0.0),
                        **request,
                    )
                except SandboxError as box_error:
                    failures.append(box_error)
                nursery.cancel_scope.cancel()
            if self._lost.is_set():
                raise SandboxError("the box was closed while a command ran in it")
            if failures:
                raise failures[0]
            return supervisor_answer


class RemoteBackend:
    """Base of backends whose boxes are elsewhere. A subclass has a `name` and writes `connect`."""

    name = ""

    def __init__(self) -> None:
        self.boxes: set[RemoteBox] = set()
        self._beating: trio.CancelScope | None = None
        self._home: OwnedFolder | None = None

    async def connect(self, spec: SandboxSpec) -> ProviderBox:
        """A new box at the provider. Raises SandboxUnavailable that says what to install or to set."""
        raise NotImplementedError

    async def disconnect(self) -> None:
        """Give back what the backend holds at the provider beside its boxes, which are closed already. Idempotent."""

    def folder(self) -> Path:
        """A private folder on this machine for snapshots, which goes with this process."""
        return self._owned().path

    def mark(self) -> Mapping[str, str]:
        """Variables by which this machine's janitor knows processes of ours: for boxes that share this machine."""
        return self._owned().mark

    def _owned(self) -> OwnedFolder:
        if self._home is None:
            self._home = OwnedFolder()
        return self._home

    async def create(self, spec: SandboxSpec | None = None) -> RemoteBox:
        """A new box. Raises SandboxUnavailable, SandboxError if the provider fails."""
        spec = spec or SandboxSpec()
        provider_box = await self.connect(spec)
        new_box = RemoteBox(provider_box, spec, self, mark=self.mark() if provider_box.own_machine else {})
        self.boxes.add(new_box)
        await new_box.open()
        if not provider_box.own_machine and self._beating is None:
            self._beating = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._beat, self._beating)
        return new_box

    async def _beat(self, scope: trio.CancelScope) -> None:
        """Show the boxes that their owner lives. One that cannot be reached fails as lost when it is used."""
        with scope:
            while self.boxes:
                await trio.sleep(_WATCH_S / 4)
                for living_box in list(self.boxes):
                    with suppress(SandboxError):
                        await living_box.beat()
        self._beating = None

    async def aclose(self) -> None:
        """Give all boxes back. Idempotent."""
        with trio.CancelScope(shield=True):
            for open_box in list(self.boxes):
                await open_box.close()
            if self._beating is not None:
                self._beating.cancel()
            await self.disconnect()
            if self._home is not None:
                home_folder, self._home = self._home, None
                await trio.to_thread.run_sync(home_folder.close)


def _own_processes() -> str:
    """This machine's name for the processes that this one sees."""
    return str(Path("/proc/self/ns/pid").readlink())


def _bounds(limits: Limits) -> dict[str, int]:
    """The rlimits of each process, by their names in `resource`."""
    return {
        "RLIMIT_CPU": math.ceil(limits.cpu_s),
        "RLIMIT_NPROC": limits.pids,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_AS": limits.memory_bytes,
    }


def _result(reply: Mapping[str, Any]) -> ExecResult:
    return ExecResult(
        exit_code=reply["code"],
        stdout=base64.b64decode(reply["out"]),
        stderr=base64.b64decode(reply["err"]),
        timed_out=reply["timed_out"],
        oom=reply["oom"],
        truncated=reply["truncated"],
        duration_s=reply["duration_s"],
        cpu_s=reply["cpu_s"],
        starved_s=reply["starved_s"],
    )
