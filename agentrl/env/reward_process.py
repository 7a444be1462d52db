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
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final, cast

from agentrl.env.reward_functions import Answer, RewardFunction
from agentrl.errors import AgentRLError, EnvError, UsageError, place_of

_START_S: Final = 120.0  # for a process to import the functions
_PATIENCE_S: Final = 0.3  # a call waits so long for a process before another one is started


class Hangs(Exception):
    """A function did not answer in time, and its process was ended."""


@dataclass(slots=True)
class RewardProcesses:
    """At most `most` processes, started as they are needed, for any number of threads that call `score`."""

    names: Sequence[str]
    most: int = 1
    _idle: queue.LifoQueue[_Process] = field(default_factory=lambda: queue.LifoQueue["_Process"]())
    _started: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def score(self, name: str, answer: Answer, deadline_s: float) -> float:
        """The function's result. Raises Hangs past `deadline_s` seconds, else as the function itself does."""
        process = self._take()
        try:
            return process.score(name, answer, deadline_s)
        finally:
            if process.lives:
                self._idle.put(process)
            else:
                with self._lock:
                    self._started -= 1

    def close(self) -> None:
        """End those that are idle."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()
                with self._lock:
                    self._started -= 1

    def _take(self) -> _Process:
        """An idle process; a new one if none becomes idle soon."""
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._idle.get(timeout=_PATIENCE_S if self._started else 0.001)
                if found.lives:
                    return found
                with self._lock:
                    self._started -= 1
                continue
            with self._lock:
                if self._started >= self.most:
                    continue
                self._started += 1
            try:
                return _Process(self.names)
            except BaseException:
                with self._lock:
                    self._started -= 1
                raise


class _Process:
    """One process. Raises EnvError or UsageError if it does not start."""

    def __init__(self, names: Sequence[str]) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
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

    def score(self, name: str, answer: Answer, deadline_s: float) -> float:
        try:
            stdin = cast("IO[bytes]", self._process.stdin)
            stdin.write(json.dumps({"name": name, **asdict(answer)}).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            self.end()
            raise EnvError(f"the process of the reward functions ended: {error}") from error
        return float(self._answer(deadline_s)["score"])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", pipe).close()

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        line = self._line(time.monotonic() + deadline_s)
        said: dict[str, Any] = json.loads(line) if line else {"error": f"ended with status {self._process.wait()}"}
        if "error" not in said:
            return said
        if not line:
            self.end()
            raise EnvError(f"the process of the reward functions {said['error']}: its output is in the log")
        raise (UsageError if said.get("usage") else EnvError)(said["error"])

    def _line(self, until: float) -> bytes:
        """The next line; b"" at the end of the process. Raises Hangs, and ends it, if none comes."""
        descriptor = cast("IO[bytes]", self._process.stdout).fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._read:
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                self.end()
                raise Hangs
            data = os.read(descriptor, 1 << 16)
            if not data:
                return b""
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line


def main(names: Sequence[str]) -> None:
    """Serve the functions until standard input ends. What they print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            asked.put(line)
        os._exit(0)

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    try:
        functions = {name: RewardFunction.of(name) for name in names}
    except UsageError as error:
        answer({"error": str(error), "usage": True})
        return
    answer({})
    while True:
        request: dict[str, Any] = json.loads(asked.get())
        name = str(request.pop("name"))
        try:
            answer({"score": functions[name](Answer(**request))})
        except AgentRLError as error:
            answer({"error": str(error), "usage": isinstance(error, UsageError)})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())
            answer({"error": f"the reward function {name!r} raised {said} ({place_of(error)})"})


if __name__ == "__main__":
    main(sys.argv[1:])
