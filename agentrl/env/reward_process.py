"""Reward functions in processes of their own, in whose main thread they run.

Some need that: math-verify ends a long comparison by a signal, which only a main thread gets. And a function that hangs
can be ended there, and costs its process alone. A process imports the functions once, and judges one answer after the
other: a line of JSON asks, a line answers. It ends with its standard input, also while a function runs.
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
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Final, cast

import trio

from agentrl.env.reward_functions import Answer, RewardFunction
from agentrl.errors import AgentRLError, EnvError, HostBusy, UsageError, place_of
from agentrl.host.clocks import HOST_DEADLINE_S, credit_host, host_time_in_thread
from agentrl.host.cpu_time import CpuTime, starved_out
from agentrl.host.platform_checks import kill_group

_START_S: Final = 120.0  # for a process to import the functions
_PATIENCE_S: Final = 0.3  # a call waits so long for a process before another one is started
_LEAST_S: Final = 0.001  # less than that is no time left
_LOOK_S: Final = 0.3  # a thread that waits looks so often whether its caller has left


class Hangs(Exception):
    """A function did not answer in time, and its process was ended."""


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """The functions' scores of an answer. `scores` has None where a function abstains; `late` functions had not judged
    it in time, and have no score."""

    scores: Mapping[str, float | None]
    late: Sequence[str] = ()


class RewardProcesses:
    """At most `most` processes, started as they are needed, for any number of threads that call `judge`.

    Calls get a process in the order in which they came. The wait for one, and its start, which imports the functions,
    are the host's time (`agentrl.host.clocks`) and no part of a function's."""

    def __init__(self, names: Sequence[str], most: int = 1) -> None:
        self.names, self.most = names, most
        self._idle: list[_Process] = []
        self._waiting: deque[object] = deque()
        self._started = 0
        self._changed = threading.Condition()

    def judge(self, answer: Answer, deadline_s: float) -> AnswerScores:
        """Have all functions judge an answer, one after the other, within `deadline_s` seconds altogether.

        Raises HostBusy where this machine has no process in time, or gives it no processor; else as a function does."""
        scores_by_name: dict[str, float | None] = {}
        left_s = deadline_s
        taken_process = self._take()
        try:
            for function_name in self.names:
                scores_by_name[function_name], used_s = taken_process.score(function_name, answer, left_s)
                left_s = max(0.0, left_s - used_s)
        except Hangs:
            pass
        finally:
            self._give_back(taken_process)
        return AnswerScores(
            scores_by_name, [function_name for function_name in self.names if function_name not in scores_by_name]
        )

    def close(self) -> None:
        """End the processes that are idle."""
        with self._changed:
            idle_processes, self._idle = self._idle, []
            self._started -= len(idle_processes)
        for idle_process in idle_processes:
            idle_process.end()

    def _take(self) -> _Process:
        """An idle process; a new one if none becomes idle soon."""
        with host_time_in_thread():
            return self._next() or self._start()

    def _next(self) -> _Process | None:
        """An idle process, or None and the right to start one."""
        own_ticket, wait_began = object(), time.monotonic()

        def may_go() -> bool:
            # The first process starts at once; a further one only if none of those that there are becomes idle soon.
            # Each imports the functions anew, often with torch or sympy behind them, and most answers are judged in
            # milliseconds.
            may_start = self._started < self.most and (
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
                                f"waited {HOST_DEADLINE_S:g} s for one of {self.most} reward processes:"
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

    def _start(self) -> _Process:
        try:
            return _Process(self.names)
        except BaseException:
            with self._changed:
                self._started -= 1
                self._changed.notify_all()
            raise

    def _give_back(self, process: _Process) -> None:
        with self._changed:
            if process.lives:
                self._idle.append(process)
            else:
                self._started -= 1
            self._changed.notify_all()


def _leave_if_abandoned() -> None:
    """Raise trio.Cancelled in a thread whose caller was cancelled: nobody reads what it would find out."""
    with contextlib.suppress(RuntimeError):  # in a thread that trio did not start
        trio.from_thread.check_cancelled()


class _Process:
    """One process. Raises EnvError or UsageError if it does not start."""

    def __init__(self, names: Sequence[str]) -> None:
        python_path = os.pathsep.join(path_entry for path_entry in sys.path if path_entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path},
            # Its own group, so that what a function has started is ended with it, and Ctrl-C of the terminal reaches
            # nobody here.
            process_group=0,
        )
        self._read = b""
        try:
            self._answer(_START_S)
        except Hangs:
            raise EnvError(f"reward functions {', '.join(names)} were not imported within {_START_S:g} s") from None

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def score(self, name: str, answer: Answer, deadline_s: float) -> tuple[float | None, float]:
        """The function's score, and how many seconds it took. Raises Hangs, and ends the process, past `deadline_s`.
        Time in which this machine gave the process no processor does not count."""
        cpu_account, call_began = CpuTime(self._process.pid), time.monotonic()
        cpu_account.begin()
        try:
            stdin = cast("IO[bytes]", self._process.stdin)
            stdin.write(json.dumps({"name": name, **asdict(answer)}).encode() + b"\n")
            stdin.flush()
        except OSError as pipe_error:
            self.end()
            raise EnvError(f"the process of the reward functions ended: {pipe_error}") from pipe_error
        function_score = self._answer(deadline_s, cpu_account)["score"]
        if (wall_s := time.monotonic() - call_began) > _LOOK_S:
            credit_host(cpu_account.look())
        return function_score, max(0.0, wall_s - cpu_account.starved_s)

    def end(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()
        for open_pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", open_pipe).close()

    def _answer(self, deadline_s: float, used: CpuTime | None = None) -> dict[str, Any]:
        answer_line = self._line(deadline_s, used)
        read_answer: dict[str, Any] = (
            json.loads(answer_line) if answer_line else {"error": f"ended with status {self._process.wait()}"}
        )
        if "error" not in read_answer:
            return read_answer
        if not answer_line:
            self.end()
            raise EnvError(f"the process of the reward functions {read_answer['error']}: its output is in the log")
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


def main(names: Sequence[str]) -> None:
    """Serve the functions until standard input ends. What they print goes to standard error."""
    # Standard output is for answers alone, so whatever a function prints goes to standard error: one stray `print`
    # would otherwise be read as a score.
    answer_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for request_line in sys.stdin.buffer:
            requests.put(request_line)
        # Without waiting for the main thread, in which a function may hang: the owner is gone, and nobody reads what it
        # returns (law 4).
        os._exit(0)

    def answer(document: dict[str, Any]) -> None:
        answer_file.write(json.dumps(document) + "\n")
        answer_file.flush()

    threading.Thread(target=read, daemon=True).start()
    try:
        functions = {function_name: RewardFunction.of(function_name) for function_name in names}
    except UsageError as call_error:
        answer({"error": str(call_error), "usage": True})
        return
    answer({})
    while True:
        next_request: dict[str, Any] = json.loads(requests.get())
        function_name = str(next_request.pop("name"))
        try:
            answer({"score": functions[function_name](Answer(**next_request))})
        except AgentRLError as call_error:
            answer({"error": str(call_error), "usage": isinstance(call_error, UsageError)})
        except (Exception, SystemExit) as call_error:
            traceback.print_exc()
            problem = " ".join(f"{type(call_error).__name__}: {call_error}".split())
            answer({"error": f"the reward function {function_name!r} raised {problem} ({place_of(call_error)})"})


if __name__ == "__main__":
    main(sys.argv[1:])
