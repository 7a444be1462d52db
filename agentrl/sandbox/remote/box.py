"""A box behind calls that carry text: commands, files, copies. Everything goes through `helper`, which runs there.

A call is short and may be made again, so that a connection that breaks costs nothing: commands run on, and their output
waits. Knows no provider: a `ProviderBox` makes the calls. Providers that know no trio run in an `AsyncioLoop`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import math
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

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
from agentrl.sandbox.docker.shell_scripts import checked_path
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
        loop = self._started()
        token, done = trio.lowlevel.current_trio_token(), trio.Event()

        async def run() -> T:
            return await asyncio.wait_for(make(), deadline_s)

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        future.add_done_callback(lambda _: _tell(token, done))
        try:
            with trio.move_on_after(deadline_s + 5.0):  # a library may swallow its cancellation
                await done.wait()
        finally:
            future.cancel()
        if not done.is_set():
            raise TimeoutError(f"no answer within {deadline_s:.0f} s")
        return future.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-asyncio", daemon=True)
            self._thread.start()
        return self._loop

    async def aclose(self) -> None:
        """End the thread; a call that hangs is left to it. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def _tell(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(done.set)


_CALL_S: Final = 60.0  # deadline of a call, beside what it waits for
_AGAIN_S: Final = 60.0  # how long calls are made again after a connection broke
_INLINE: Final = 60_000  # characters of a request that fit one argument
_PIECE: Final = 3 << 20  # bytes of a file in one call
_FIRST_UID: Final = 20_000
_UIDS: Final = 40_000
_WATCH_S: Final = 600.0  # a box without its owner ends after so long
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ProviderBox(Protocol):
    """A box at a provider. Every method raises an exception of any kind if it fails."""

    own_machine: bool
    """Whether the box is no machine of its own, but shares this one's processes and files."""
    most_wait_s: float
    """The longest that one call may wait for a command."""

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        """Stdout of a short command, whatever its exit code."""
        ...

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None: ...
    async def close(self) -> None: ...


@functools.cache
def _helper() -> str:
    return Path(__file__).with_name("helper.py").read_text("utf-8")


class RemoteBox:
    """A box of ours at a provider."""

    def __init__(
        self, remote: ProviderBox, spec: SandboxSpec, backend: RemoteBackend, *, mark: Mapping[str, str]
    ) -> None:
        self.spec = spec
        self._remote, self._backend, self._mark = remote, backend, dict(mark)
        name = secrets.token_hex(8)
        place = "/tmp"
        if remote.own_machine:  # below a folder that this machine's janitor removes; its user may pass, not look
            place = str(backend.folder())
            backend.folder().chmod(0o711)
        self._state = f"{place}/agentrl-{name}"
        self._work = f"{self._state}-work" if remote.own_machine else WORKSPACE
        self._uid = _FIRST_UID + secrets.randbelow(_UIDS)
        self.running: set[_Job] = set()
        self._snapshots: dict[str, Path] = {}
        self.closed = False

    async def open(self) -> None:
        """Make the work folder there, and lay the files of the spec. Raises SandboxError."""
        try:
            reply = await self.ask("setup", empty=not self._remote.own_machine)
            if "error" in reply:
                raise SandboxUnavailable(f"{self._backend.name}: no work folder {self._work}: {reply['error']}")
            if not self._remote.own_machine:
                await self.beat()
            for path, data in self.spec.files.items():
                await self.write(path, data)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.close()
            raise

    @property
    def backend_name(self) -> str:
        return self._backend.name

    @property
    def most_wait_s(self) -> float:
        return self._remote.most_wait_s

    async def beat(self) -> None:
        """Tell the box that its owner lives."""
        await self.ask("touch", seconds=_WATCH_S, not_in=_own_processes())

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
            job = await self._start(argv, stdin, cwd, env, wall_s)
        except CommandRefused as refused:
            return refused.result
        try:
            with policy_time():
                result = await job.wait()
        except BaseException:
            with trio.CancelScope(shield=True):
                await job.abandon()
            raise
        assert result is not None
        credit_host(result.starved_s)
        if result.timed_out and result.starved_s >= HOST_DEADLINE_S:
            raise starved_out(result.starved_s, result.cpu_s or 0.0)
        return result

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes."""
        try:
            return await self._start(argv, None, cwd, env, math.inf)
        except CommandRefused as refused:
            return NeverStarted(refused.result)

    async def _start(
        self,
        argv: Sequence[str],
        stdin: bytes | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        wall_s: float,
    ) -> _Job:
        self.must_be_open()
        words = checked_argv(argv)
        home = {"HOME": self._work if self._remote.own_machine else "/tmp", "LANG": "C.UTF-8", "PATH": _PATH}
        variables = checked_env({"TMPDIR": home["HOME"], **home, **self.spec.env, **(env or {}), **self._mark})
        folder = os.fsencode(cwd or ".")
        if b"\0" in folder:
            raise CommandRefused("the folder holds a NUL byte")
        folder = self._inside(folder)
        job = _Job(self, secrets.token_hex(8))
        self.running.add(job)
        try:
            with trio.CancelScope(shield=True):  # a command that was started must be known
                await self._launch(job, words, variables, folder, stdin, wall_s)
        except BaseException:
            self.running.discard(job)
            raise
        return job

    async def _launch(
        self,
        job: _Job,
        words: Sequence[bytes],
        variables: Mapping[bytes, bytes],
        folder: bytes,
        stdin: bytes | None,
        wall_s: float,
    ) -> None:
        reply = await self.ask(
            "start",
            id=job.id,
            argv=[_text(word) for word in words],
            env=[[_text(key), _text(value)] for key, value in variables.items()],
            cwd=_text(folder),
            stdin=_text(stdin or b""),
            ends_stdin=stdin is not None,
            wall_s=min(wall_s, 1e9),
            output_bytes=self.spec.limits.output_bytes,
            limits=_bounds(self.spec.limits),
            again=False,
        )
        if "error" in reply:
            raise SandboxError(f"{self._backend.name}: a command cannot be started: {reply['error']}")

    def _inside(self, path: bytes) -> bytes:
        """A path as the helper takes it: relative to the work folder."""
        for root in (WORKSPACE.encode(), self._work.encode()):
            if path == root or path.startswith(root + b"/"):
                return path[len(root) :].lstrip(b"/") or b"."
        return path

    # --- files --------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a file of the work folder. Raises SandboxPathError if there are more than `most_bytes`."""
        bound = self.spec.limits.disk_bytes
        data = await self._read(path, bound if most_bytes is None else min(most_bytes, bound))
        if data is None:
            raise SandboxPathError(f"{path!r}: Is a directory")
        return data

    async def _read(self, path: str, most: int) -> bytes | None:
        self.must_be_open()
        name, data, size = _text(os.fsencode(checked_path(path) or ".")), bytearray(), 1
        while len(data) < size:
            reply = await self._path(path, "read", path=name, at=len(data), size=_PIECE, most=most)
            if reply.get("folder"):
                return None
            piece = base64.b64decode(reply["data"])
            data += piece
            size = min(reply["size"], most) if piece else 0
        return bytes(data[:most])

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work folder, making parent folders as needed."""
        await self._write(path, data, None)

    async def _write(self, path: str, data: bytes, mode: int | None) -> None:
        self.must_be_open()
        if len(data) > self.spec.limits.disk_bytes:
            raise SandboxPathError(f"{path!r} does not fit: {len(data)} bytes, {self.spec.limits.disk_bytes} there are")
        name = _text(os.fsencode(checked_path(path)))
        for start in range(0, max(len(data), 1), _PIECE):
            piece = _text(data[start : start + _PIECE])
            await self._path(path, "write", path=name, data=piece, more=start > 0, mode=mode, again=start == 0)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree into the work folder."""
        self.must_be_open()
        path = trio.Path(source)
        if await path.is_file():
            await self._write(target, await path.read_bytes(), (await path.stat()).st_mode & 0o777)
            return
        data = await trio.to_thread.run_sync(tar.pack, source, self.spec.limits.disk_bytes)
        await self._unpack(target, data, clear=False)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the work folder to the host; links that could lead out are left behind."""
        self.must_be_open()
        data = await self._read(source, self.spec.limits.disk_bytes)
        if data is not None:
            await trio.Path(target.parent).mkdir(parents=True, exist_ok=True)
            await trio.Path(target).write_bytes(data)
            return
        tree = await self._pack(source)
        await trio.to_thread.run_sync(tar.unpack, tree, target, self.spec.limits.disk_bytes)

    async def _pack(self, path: str = ".") -> bytes:
        name = f"{secrets.token_hex(8)}.tar"
        where = _text(os.fsencode(checked_path(path) or "."))
        most = 2 * self.spec.limits.disk_bytes + tar.OVERHEAD
        try:
            reply = await self._path(path, "tar", id=name, path=where, packs=True, clear=False, most=most)
            data = bytearray()
            while len(data) < reply["size"]:
                piece = await self._path(path, "spool", id=name, data=None, at=len(data), size=_PIECE)
                if not piece["data"]:
                    raise SandboxPathError(f"{path!r}: its archive broke off")
                data += base64.b64decode(piece["data"])
            return bytes(data)
        finally:
            await self._dropped(name)

    async def _unpack(self, path: str, data: bytes, *, clear: bool) -> None:
        name = f"{secrets.token_hex(8)}.tar"
        where = _text(os.fsencode(checked_path(path) or "."))
        most = 2 * self.spec.limits.disk_bytes + tar.OVERHEAD
        try:
            for start in range(0, len(data), _PIECE):
                await self._path(path, "spool", id=name, data=_text(data[start : start + _PIECE]), again=False)
            await self._path(path, "tar", id=name, path=where, packs=False, clear=clear, most=most, again=False)
        finally:
            await self._dropped(name)

    async def _dropped(self, name: str) -> None:
        if not self.closed:
            with trio.CancelScope(shield=True):
                await self.ask("drop", id=name)

    async def _path(self, named: str, do: str, /, **request: Any) -> dict[str, Any]:
        """A file operation; a refusal raises SandboxPathError."""
        self.must_be_open()
        reply = await self.ask(do, **request)
        if "error" in reply:
            self.must_be_open()  # closed under the call: its folders are gone, and no path was wrong
            raise SandboxPathError(f"{named!r}: {reply['error']}")
        return reply

    # --- copies of the box --------------------------------------------------------------------------------------

    async def snapshot(self) -> str:
        """Keep a copy of the work folder until this box closes; its id, good for every box of this backend."""
        data = await self._pack()
        name = secrets.token_hex(8)
        path = self._backend.folder() / name
        await trio.Path(path).write_bytes(data)
        self._snapshots[name] = path
        return name

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended."""
        self.must_be_open()
        snapshots = [box._snapshots[snapshot] for box in self._backend.boxes if snapshot in box._snapshots]
        if not snapshots:
            raise SandboxError(f"no snapshot {snapshot!r}: its box was closed, or it is another backend's")
        data = await trio.Path(snapshots[0]).read_bytes()
        for job in list(self.running):
            await job.kill()
        await self._unpack(".", data, clear=True)

    async def fork(self) -> RemoteBox:
        """A new box with a copy of the work folder; processes are not copied."""
        data = await self._pack()
        twin = await self._backend.create(dataclasses.replace(self.spec, files={}))
        try:
            await twin._unpack(".", data, clear=True)
        except BaseException:
            with trio.CancelScope(shield=True):
                await twin.close()
            raise
        return twin

    # --- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give the box back. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._backend.boxes.discard(self)
        with trio.CancelScope(shield=True):
            try:
                if self._remote.own_machine:
                    await self.ask("stop")
            finally:
                for job in list(self.running):
                    job.lost()
                for path in self._snapshots.values():
                    path.unlink(missing_ok=True)
                self._snapshots.clear()
                with host_time(self._backend.name), boundary(SandboxError, f"{self._backend.name}: closing a box:"):
                    await self._remote.close()

    def must_be_open(self) -> None:
        if self.closed:
            raise SandboxError("the box is closed")

    async def ask(self, do: str, *, again: bool = True, wait_s: float = 0.0, **request: Any) -> dict[str, Any]:
        """One operation of the helper. Made again where the connection broke, if `again`. Raises SandboxLost."""
        message = {"do": do, "state": self._state, "work": _text(self._work.encode()), "uid": self._uid, **request}
        text = base64.b64encode(json.dumps(message).encode()).decode()
        until = trio.current_time() + _AGAIN_S
        pause = 0.2
        while True:
            try:
                with host_time(self._backend.name, deadline_s=_CALL_S + wait_s + 30.0):
                    return await self._call(text, wait_s)
            except SandboxError:
                raise
            except Exception as error:  # any kind: it is the provider's library that failed
                if not again or trio.current_time() >= until or self.closed:
                    raise SandboxLost(f"{self._backend.name}: a call was not answered: {_words(error)}") from error
            await trio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _call(self, text: str, wait_s: float) -> dict[str, Any]:
        argument, deadline_s = text, _CALL_S + wait_s
        if len(text) > _INLINE:
            path = f"{self._state}/{secrets.token_hex(8)}.request"
            await self._remote.write_text(path, text, deadline_s=deadline_s)
            argument = f"@{path}"
        words = ["python3", "-I", "-c", _helper(), argument]
        if self._mark:
            words = ["env", *(f"{key}={value}" for key, value in self._mark.items()), *words]
        output = await self._remote.execute(words, deadline_s=deadline_s)
        line = next((line for line in output.split("\n") if line.startswith("agentrl ")), None)
        if line is None:
            raise SandboxLost(f"the box answered {output[-300:]!r}: it needs python3 (3.9 or later)")
        return json.loads(line.removeprefix("agentrl "))


class _Job:
    """A command on its way in the box. Satisfies `BoxProcess`."""

    def __init__(self, box: RemoteBox, id: str) -> None:
        self._box, self.id = box, id
        self._ask_s = box.most_wait_s
        self._numbers: dict[str, int] = {}
        self._locks = {channel: trio.Lock() for channel in ("send", "receive", "wait", "kill")}
        self._result: ExecResult | None = None
        self._lost = trio.Event()

    async def send(self, data: bytes) -> None:
        """Write to its stdin; does nothing if the process has ended or closed it."""
        for start in range(0, len(data), _PIECE):
            await self._asked("send", data=_text(data[start : start + _PIECE]))

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """New bytes of its stdout: at least one, none at its end or when `timeout_s` (seconds) has passed."""
        until = trio.current_time() + (math.inf if timeout_s is None else timeout_s)
        with policy_time():
            while True:
                remaining_s = max(until - trio.current_time(), 0.0)
                try:
                    reply = await self._asked("receive", timeout_s=min(remaining_s, self._ask_s))
                except SandboxError:
                    if self._box.closed:
                        return b""  # it ended with the box
                    raise
                data = base64.b64decode(reply.get("out", ""))
                if data or remaining_s <= self._ask_s or "out" not in reply or await self._has_ended():
                    return data

    async def _has_ended(self) -> bool:
        return await self.wait(0.0) is not None

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """How it ended, with output not yet received; None if it still runs after `timeout_s` seconds."""
        until = trio.current_time() + (math.inf if timeout_s is None else timeout_s)
        with policy_time():
            while self._result is None:
                remaining_s = max(until - trio.current_time(), 0.0)
                reply = await self._asked("wait", timeout_s=min(remaining_s, self._ask_s))
                if reply.get("ended"):
                    self._result = _result(reply)
                    self._box.running.discard(self)
                elif "gone" in reply:
                    self._box.running.discard(self)
                    raise SandboxLost(f"{self._box.backend_name}: a command is gone: {reply['gone']}")
                elif remaining_s <= self._ask_s:
                    return None
        return self._result

    async def kill(self) -> ExecResult:
        """End it and all it started. Idempotent."""
        if self._result is None:
            await self._asked("kill")
        result = await self.wait()
        assert result is not None
        return result

    async def abandon(self) -> None:
        """End it without an answer: its caller is gone."""
        self._box.running.discard(self)
        if self._result is None and not self._box.closed:
            with trio.move_on_after(_CALL_S), suppress(SandboxError):
                await self._asked("kill")
                await self._asked("wait", timeout_s=self._ask_s)

    def lost(self) -> None:
        """The box is closed, or gone."""
        self._lost.set()

    async def _asked(self, channel: str, **request: Any) -> dict[str, Any]:
        """A question to the command's supervisor; one at a time a channel, numbered, so that each counts once."""
        if self._result is not None:
            return {"ended": True, "out": ""} if channel == "receive" else {}
        self._box.must_be_open()
        async with self._locks[channel]:
            number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
            answer: dict[str, Any] = {}
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await self._lost.wait()
                    nursery.cancel_scope.cancel()

                failure: list[SandboxError] = []
                nursery.start_soon(stop)
                try:
                    answer = await self._box.ask(
                        "ask",
                        id=self.id,
                        channel=channel,
                        number=number,
                        wait_s=request.get("timeout_s", 0.0),
                        **request,
                    )
                except SandboxError as error:
                    failure.append(error)
                nursery.cancel_scope.cancel()
            if self._lost.is_set():
                raise SandboxError("the box was closed while a command ran in it")
            if failure:
                raise failure[0]
            return answer


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
        remote = await self.connect(spec)
        box = RemoteBox(remote, spec, self, mark=self.mark() if remote.own_machine else {})
        self.boxes.add(box)
        await box.open()
        if not remote.own_machine and self._beating is None:
            self._beating = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._beat, self._beating)
        return box

    async def _beat(self, scope: trio.CancelScope) -> None:
        """Show the boxes that their owner lives. One that cannot be reached fails as lost when it is used."""
        with scope:
            while self.boxes:
                await trio.sleep(_WATCH_S / 4)
                for box in list(self.boxes):
                    with suppress(SandboxError):
                        await box.beat()
        self._beating = None

    async def aclose(self) -> None:
        """Give all boxes back. Idempotent."""
        with trio.CancelScope(shield=True):
            for box in list(self.boxes):
                await box.close()
            if self._beating is not None:
                self._beating.cancel()
            await self.disconnect()
            if self._home is not None:
                home, self._home = self._home, None
                await trio.to_thread.run_sync(home.close)


def _own_processes() -> str:
    """This machine's name for the processes that this one sees."""
    return str(Path("/proc/self/ns/pid").readlink())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


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


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]
