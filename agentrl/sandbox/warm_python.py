"""Warm interpreters: a Python that waits in a box and forks a child for each run, for runs that only compute.

Starting a box and an interpreter is most of what a short run costs. Here a run costs a fork. It must not be a
shortcut that code in it could notice, or use to reach the run after it, so a run may compute and nothing else:

    parent   starts isolated (-I -S) in a box in which nothing else ever runs, and never looks at what it passes on
    child    forked before its input arrives, reads it, then is shut in by a system call filter: its own memory, and
             read and write on its two pipes and /dev/null. No file, process, signal, socket, clock or shared memory
    else     any other system call, a signal or a deadline ends the run without an answer: the caller makes it again
             in a fresh box, where all is as it would have been

So what a child can change ends with it. It could tell that it is a fork (classes that the parent knows, a hash seed
that its predecessors had), but never by asking the system. Bounds of the box hold for each child as for any command.

Knows nothing of what is computed. Needs a box with `python3`, its `_ctypes`, and system call filters.
"""

from __future__ import annotations

from typing import Final

import trio

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.host.clocks import host_time, unwatched
from agentrl.protocols import BoxProcess, Sandbox, SandboxBackend, SandboxSpec
from agentrl.sandbox.bubblewrap import seccomp

_MOST: Final = 32 << 10  # bytes that go in, or out: a pipe that nobody reads yet must hold them
_START_S: Final = 20.0
_TRIES: Final = 3  # in a row, after which no more follow
_CANNOT: Final = 3  # how a parent ends that cannot shut its children in
_SIZE: Final = 4  # bytes of a length

_PARENT: Final = r"""
import posix, sys
try:
    import _ctypes
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")
except (ImportError, OSError):
    posix._exit(3)
most, program = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
room = memoryview(bytearray(most))
# struct sock_fprog: how many instructions, and where they are
fprog = b"".join(n.to_bytes(8, sys.byteorder) for n in (len(program) // 8, id(program) + bytes.__basicsize__ - 1))
shut_in = ((prctl, (38, 1, 0, 0, 0)), (prctl, (22, 2, fprog)))  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP

def fill(fd, view):
    at = 0
    while at < len(view):
        n = posix.readv(fd, [view[at:]])
        if not n:
            break
        at += n
    return at

def put(fd, data):
    try:
        while data:
            data = data[posix.write(fd, data):]
    except OSError:
        pass

def serve(child, give, take):
    size = room[:4]
    if fill(0, size) < 4:
        posix._exit(0)
    size = int.from_bytes(size, "big")
    fill(0, room[:size])
    put(give, room[:size])
    posix.close(give)
    got = fill(take, room)
    if got == most:
        posix.kill(child, 9)
    ended = posix.waitpid(child, 0)[1] & 127
    posix.close(take)
    put(1, bytes([ended]) + got.to_bytes(4, "big"))
    put(1, room[:got])
    room[:max(size, got)] = bytes(max(size, got))  # the next child has a copy of this memory

child = posix.fork()
if not child:
    if any([_ctypes.call_function(*each) for each in shut_in]):
        posix._exit(3)
    posix.getppid()
    posix._exit(4)
if posix.waitpid(child, 0)[1] & 127 != 31:  # SIGSYS
    posix._exit(3)
posix.write(1, b"+")

while True:
    given, give = posix.pipe()
    take, taken = posix.pipe()
    child = posix.fork()
    if not child:
        break
    posix.close(given), posix.close(taken)
    serve(child, give, take)

posix.dup2(given, 0), posix.dup2(taken, 1)
posix.closerange(3, 1024)
call = _ctypes.call_function
del sys.argv[1:], sys.modules["_ctypes"]
del _ctypes, prctl, most, room, fprog, fill, put, serve, child, given, give, take, taken
"""
_SHUT_IN: Final = r"""
if any([call(*each) for each in shut_in]):
    posix._exit(3)
del call, shut_in, program
"""


class WarmPython:
    """Runs one script over and over, in boxes of `backend` like `spec`: `before`, then, shut in, `after`.

    Both are text of the top level of a module. `before` reads the input from stdin and opens what it needs; `after` may
    run code of the policy's, and writes to (a copy of) stdout. A run has `deadline_s` seconds. As many interpreters
    are kept as ever ran at once; they end with the backend."""

    def __init__(
        self,
        backend: SandboxBackend,
        spec: SandboxSpec,
        *,
        before: str,
        after: str,
        deadline_s: float,
    ) -> None:
        self._failures = 0  # to start an interpreter, in a row
        self._backend, self._spec = backend, spec
        self._script = _PARENT + before + _SHUT_IN + after
        self._deadline_s = deadline_s
        self._most = min(_MOST, spec.limits.output_bytes - 1 - _SIZE)  # the box keeps no more of what is not read yet
        self._idle: list[_Interpreter] = []

    async def run(self, data: bytes) -> bytes | None:
        """Run the script on `data` and return its output; None if this run must be made another way. Raises
        HostBusy."""
        if len(data) > self._most:
            return None
        interpreter = await self._take()
        if interpreter is None:
            return None
        answered = False
        try:
            with trio.move_on_after(self._deadline_s):
                output = await interpreter.run(data)
                answered = True
                return output
        except SandboxError:
            pass
        finally:
            # An interpreter without an answer is in an unknown state: its child may still run, and its late output
            # would be taken for the answer to the next run.
            if answered:
                self._idle.append(interpreter)
            else:
                await interpreter.close()
        return None

    async def _take(self) -> _Interpreter | None:
        while self._idle:
            interpreter = self._idle.pop()
            is_alive = False
            try:
                if is_alive := await interpreter.alive():
                    return interpreter
            finally:
                if not is_alive:  # or the run was cancelled, and nobody else knows of it
                    await interpreter.close()
        # A machine that cannot start one will not start the next either, and each try costs the run its time. The other
        # way is only slower.
        if self._failures >= _TRIES:
            return None
        interpreter = None
        try:
            with host_time("a warm interpreter"), unwatched():  # waiting for it is not waiting for the policy's code
                interpreter = await self._start()
        except SandboxUnavailable:
            self._failures = _TRIES
        except SandboxError:  # who makes the run another way meets it again, and says so
            pass
        self._failures = self._failures + 1 if interpreter is None else 0
        return interpreter

    async def _start(self) -> _Interpreter | None:
        filter_program = seccomp.program("computing").hex()
        interpreter = _Interpreter(await self._backend.create(self._spec))
        exit_code = None
        try:
            exit_code = await interpreter.start(
                ["python3", "-I", "-S", "-c", self._script, str(self._most), filter_program]
            )
        finally:
            if exit_code != 0:
                await interpreter.close()
        if exit_code == _CANNOT:
            self._failures = _TRIES
        return interpreter if exit_code == 0 else None


class _Interpreter:
    """A box and the parent in it. After an answer it is as it was before."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._process: BoxProcess | None = None
        self._waiting = b""

    async def start(self, command: list[str]) -> int | None:
        """0 when it is ready, else how it ended, None if it did not say in time. Raises SandboxError."""
        self._process = await self._box.start(command)
        with trio.move_on_after(_START_S):
            if await self._process.receive() == b"+":
                return 0
            process_result = await self._process.wait()
            return process_result.exit_code or None if process_result else None
        return None

    async def alive(self) -> bool:
        try:
            return self._process is not None and await self._process.wait(0) is None
        except SandboxError:  # its box was closed
            return False

    async def run(self, data: bytes) -> bytes | None:
        """Run the script on `data` in a child and return its output; None if a signal ended the child. Raises
        SandboxError if the parent ended."""
        assert self._process is not None
        await self._process.send(len(data).to_bytes(_SIZE, "big") + data)
        answer_head = await self._read(1 + _SIZE)
        output = await self._read(int.from_bytes(answer_head[1:], "big"))
        return None if answer_head[0] else output

    async def _read(self, size: int) -> bytes:
        assert self._process is not None
        while len(self._waiting) < size:
            more_bytes = await self._process.receive()
            if not more_bytes:
                raise SandboxError("a warm interpreter ended")
            self._waiting += more_bytes
        answer_bytes, self._waiting = self._waiting[:size], self._waiting[size:]
        return answer_bytes

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            try:
                await self._box.close()
            except SandboxError:  # the host lost it; its reaper clears what is left
                return
