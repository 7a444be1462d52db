"""Child processes that answer requests: a line of JSON asks, a line answers. A pool of them serves many threads.

Code that may hang, or that needs a main thread of its own, runs in such a child: it can be ended there, and costs its
process alone. A child ends with its standard input, also while it works. Never knows what the requests mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import IO, Any, Final, cast

import trio

from agentrl.errors import EnvError, HostBusy, UsageError
from agentrl.host.clocks import HOST_DEADLINE_S, credit_host, host_time_in_thread
from agentrl.host.cpu_time import CpuTime, starved_out
from agentrl.host.platform_checks import kill_group

_START_S: Final = 120.0  # for a process to import its code
_PATIENCE_S: Final = 0.3  # a call waits so long for a process before another one is started
_LEAST_S: Final = 0.001  # less than that is no time left
_ENDS_S: Final = 1.0  # for a process whose output has ended to end as well
_LOOK_S: Final = 0.3  # a thread that waits looks so often whether its caller has left


class Hangs(Exception):
    """A child did not answer in time, and was ended."""


class ChildProcesses:
    """At most `most` children that run `python -m module arguments…`, started as they are needed, for any number of
    threads. `name` says in messages of whom they are.

    Calls get a child in the order in which they came. The wait for one, and its start, are the host's time
    (`agentrl.host.clocks`)."""

    def __init__(self, module: str, arguments: Sequence[str] = (), *, name: str, most: int = 1) -> None:
        self._command, self._name, self._most = [sys.executable, "-m", module, *arguments], name, most
        self._idle: list[Child] = []
        self._waiting: deque[object] = deque()
        self._started = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def borrowed(self) -> Generator[Child]:
        """Hold one child, alone. Raises HostBusy where this machine has none in time."""
        taken_child = self._take()
        try:
            yield taken_child
        finally:
            self._give_back(taken_child)

    def close(self) -> None:
        """End the children that are idle."""
        with self._changed:
            idle_children, self._idle = self._idle, []
            self._started -= len(idle_children)
        for idle_child in idle_children:
            idle_child.end()

    def _take(self) -> Child:
        """An idle process; a new one if none becomes idle soon."""
        with host_time_in_thread():
            return self._next() or self._start()

    def _next(self) -> Child | None:
        """An idle process, or None and the right to start one."""
        own_ticket, wait_began = object(), time.monotonic()

        def may_go() -> bool:
            # The first process starts at once; a further one only if none of those that there are becomes idle soon.
            # Each imports its code anew, often with torch or sympy behind it, and most requests take milliseconds.
            may_start = self._started < self._most and (
                not self._started or time.monotonic() >= wait_began + _PATIENCE_S
            )
            return self._waiting[0] is own_ticket and (bool(self._idle) or may_start)

        with self._changed:
            self._waiting.append(own_ticket)
            try:
                while True:
                    while not self._changed.wait_for(may_go, timeout=_LOOK_S):
                        _leave_if_abandoned()
                        if time.monotonic() - wait_began > HOST_DEADLINE_S:
                            raise HostBusy(
                                f"waited {HOST_DEADLINE_S:g} s for one of {self._most} processes of {self._name}:"
                                " give more processes, or fewer episodes at once"
                            )
                    if not self._idle:
                        self._started += 1
                        return None
                    if (idle_process := self._idle.pop()).lives:
                        return idle_process
                    self._started -= 1
            finally:
                self._waiting.remove(own_ticket)
                self._changed.notify_all()

    def _start(self) -> Child:
        try:
            return Child(self._command, self._name)
        except BaseException:
            with self._changed:
                self._started -= 1
                self._changed.notify_all()
            raise

    def _give_back(self, child: Child) -> None:
        with self._changed:
            if child.lives:
                self._idle.append(child)
            else:
                self._started -= 1
            self._changed.notify_all()


def _leave_if_abandoned() -> None:
    """Raise trio.Cancelled in a thread whose caller was cancelled: nobody reads what it would find out."""
    with contextlib.suppress(RuntimeError):  # in a thread that trio did not start
        trio.from_thread.check_cancelled()


class Child:
    """One process. Raises EnvError or UsageError if it does not start."""

    def __init__(self, command: Sequence[str], name: str) -> None:
        self._name = name
        python_path = os.pathsep.join(path_entry for path_entry in sys.path if path_entry)
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path},
            # Its own group, so that what it has started is ended with it, and Ctrl-C of the terminal reaches
            # nobody here.
            process_group=0,
        )
        self._read = b""
        try:
            self._answer(_START_S)
        except Hangs:
            raise EnvError(f"the process of {name} did not start within {_START_S:g} s") from None

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> tuple[dict[str, Any], float]:
        """The answer to a request, and how many seconds it took. Raises Hangs, and ends the process, past `deadline_s`;
        EnvError or UsageError for an answer that names an `error`. Time in which this machine gave the process no
        processor does not count."""
        cpu_account, call_began = CpuTime(self._process.pid), time.monotonic()
        cpu_account.begin()
        try:
            stdin = cast("IO[bytes]", self._process.stdin)
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except OSError as pipe_error:
            self.end()
            raise EnvError(f"the process of {self._name} ended: {pipe_error}") from pipe_error
        answer = self._answer(deadline_s, cpu_account)
        if (wall_s := time.monotonic() - call_began) > _LOOK_S:
            credit_host(cpu_account.look())
        return answer, max(0.0, wall_s - cpu_account.starved_s)

    def end(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()
        for open_pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", open_pipe).close()

    def _answer(self, deadline_s: float, used: CpuTime | None = None) -> dict[str, Any]:
        answer_line = self._line(deadline_s, used)
        if not answer_line:
            # Its output has ended. It need not have: code that it runs may close descriptors that are not its own.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_ENDS_S)
            self.end()
            status = self._process.returncode
            raise EnvError(f"the process of {self._name} ended with status {status}: its output is in the log")
        read_answer: dict[str, Any] = json.loads(answer_line)
        if "error" not in read_answer:
            return read_answer
        raise (UsageError if read_answer.get("usage") else EnvError)(read_answer["error"])

    def _line(self, left_s: float, used: CpuTime | None) -> bytes:
        """The next line; b"" at the end of the process. Raises Hangs, and ends it, if none comes in time."""
        descriptor = cast("IO[bytes]", self._process.stdout).fileno()
        # Not `select.select`, which fails for descriptors above 1023; a worker with many boxes has more.
        output_poll = select.poll()
        output_poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._read:
            look_began = time.monotonic()
            if not output_poll.poll(1000 * max(0.0, min(left_s, _LOOK_S))):
                left_s -= time.monotonic() - look_began
                # Past the deadline the kernel is asked how long the process was ready to run and got no processor. That
                # time is the host's, not the answer's (law 3), and is given back before anybody is called late.
                if left_s <= 0 and used is not None:
                    credit_host(starved_s := used.look())
                    left_s += starved_s
                try:
                    _leave_if_abandoned()
                except BaseException:
                    self.end()
                    raise
                if left_s <= _LEAST_S:
                    self.end()
                    if used is not None and used.starved_out:
                        raise starved_out(used.starved_s, used.cpu_s)
                    raise Hangs
                continue
            new_bytes = os.read(descriptor, 1 << 16)
            if not new_bytes:
                return b""
            self._read += new_bytes
        first_line, _, self._read = self._read.partition(b"\n")
        return first_line


def serve(start: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """In a child: answer requests until standard input ends. `start` gives the function that answers one; a UsageError
    that it raises is the first answer. What the code prints goes to standard error."""
    # Standard output is for answers alone, so whatever is printed goes to standard error: one stray `print` would
    # otherwise be read as an answer.
    answer_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for request_line in sys.stdin.buffer:
            requests.put(request_line)
        # Without waiting for the main thread, in which a request may hang: the owner is gone, and nobody reads what it
        # returns (law 4).
        os._exit(0)

    def write(answer: Mapping[str, Any]) -> None:
        answer_file.write(json.dumps(answer) + "\n")
        answer_file.flush()

    threading.Thread(target=read, daemon=True).start()
    try:
        answer_one = start()
    except UsageError as usage_error:
        write({"error": str(usage_error), "usage": True})
        return
    write({})
    while True:
        write(answer_one(json.loads(requests.get())))
