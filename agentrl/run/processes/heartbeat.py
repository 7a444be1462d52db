"""Signs of life: how a process shows progress, and how its owner detects that it hangs. A hang counts as a death.

A process makes a mark at points that it reaches only by real progress; its owner reads the count and ends the process
when the count stands still. A mark proves different things:

    worker       a task of its event loop marks: the loop turns, so no environment blocks it, and it is not stopped
    learner      the training thread marks between two passes and two files: training goes on. A separate thread of
                 marks would prove less. One pass may take long, so the deadline is long; a stopped learner shows
                 earlier, by its state in the kernel (`is_stopped`), which needs no mark
    supervisor   as a worker; its owner is the parent of `agentrl train --keep-alive`
    engine       none: `agentrl.run.children.engine_health` asks it over HTTP

A process that waits for the store's lock does not hang: that wait has a deadline, and meanwhile its loop turns or a
thread marks. A mark is a count, not a time, so no two clocks are compared. The owner runs on a `HostClock`: while the
machine is suspended, or the owner itself stopped, no time passes and no process is ended. Standard library, trio
and `agentrl.host`; never knows what happens to a process that hangs.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio

from agentrl.host.platform_checks import is_stopped, process_start

VARIABLE = "AGENTRL_HEARTBEAT"
"""Names the file of a child's marks, in its environment."""

DUMP = signal.SIGUSR2
"""A child answers it with the stacks of its threads, in its log."""

BEAT_S = 1.0
_LOOK_S = 1.0
_DUMP_S = 1.0  # time for a child to write its stacks
_COUNT = struct.Struct("q")
_RETIRED = -1


# Why a mark is a number in a mapped file, and no message.
#
# The learner marks on its training thread, between two passes; a worker marks in its event loop. A message through a
# pipe or a socket may block: when its owner is stopped, the pipe fills up, and then the owner's trouble stops the work
# that it watches.
#
# A write into a mapped page waits for nobody and needs no system call, so a mark may stand in any loop. A mark that
# nobody has seen is no loss, as only a change of the number counts. So no lock is needed: a number that is read in the
# middle of a write has changed too. A process without an owner marks in memory of its own, and its code is the same.
#
# The owner makes the file before it starts the process, with the number 0 for each start (`prepare`), so that marks of
# an earlier process never count. The variable with its name is taken out of the environment when it is read: a child
# that inherits it would mark for a parent that hangs.
#
# The prices: the owner has to look, here once a second, and a file is of one host. On another host a process looks for
# the owner (`Marked`). And a mark is no proof of death: that a process has ended, the owner learns by waiting for it.
#
# Law 4 rests on it: a process that hangs is ended like one that died. `tests/run/test_heartbeat.py` has processes that
# stand still, that are stopped, and that only take long.
class Heartbeat:
    """The marks of this process. Without an owner that reads them, they have no effect."""

    def __init__(self, path: Path | None = None) -> None:
        self._count, self._retired = 0, False
        self._memory: mmap.mmap | bytearray = bytearray(_COUNT.size)
        if path is not None:
            with path.open("r+b") as mark_file:
                self._memory = mmap.mmap(mark_file.fileno(), _COUNT.size)

    @classmethod
    def of_process(cls) -> Heartbeat:
        """Marks for the owner that the environment names; children of this process do not inherit the variable."""
        mark_path = os.environ.pop(VARIABLE, None)
        return cls(Path(mark_path) if mark_path else None)

    def mark(self) -> None:
        """Record that the work has advanced."""
        if self._retired:
            return
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)

    def retire(self) -> None:
        """Announce that no more marks come and that this is no hang: the remaining work has no deadline."""
        self._retired = True
        _COUNT.pack_into(self._memory, 0, _RETIRED)

    async def beat(self) -> None:
        """Mark for ever, as long as this event loop turns."""
        while True:
            self.mark()
            await trio.sleep(BEAT_S)

    def mark_while(self, waits: Callable[[], bool]) -> None:
        """Start a thread that marks while `waits` is true: while the process waits under another deadline."""

        def watch() -> None:
            while True:
                time.sleep(BEAT_S)
                if waits():
                    self.mark()

        threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def prepare(path: Path) -> dict[str, str]:
    """Make the file for the marks of a process that is about to start. Returns the variable for its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(_COUNT.size))
    return {VARIABLE: str(path)}


def read(path: Path) -> int:
    """The number of marks, 0 if the file cannot be read."""
    with suppress(OSError, struct.error):
        return _COUNT.unpack(path.read_bytes())[0]
    return 0


def age_s() -> float:
    """Seconds since this process began; 0 if there is no /proc."""
    start_ticks = process_start(os.getpid())
    if not start_ticks.isdecimal():
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_ticks) / os.sysconf("SC_CLK_TCK")


class Marked(Protocol):
    """A process that marks, here or on another host."""

    def count(self) -> int:
        """The number of its marks."""
        ...

    def stopped(self) -> bool:
        """Whether the kernel of its host says that it is stopped."""
        ...

    def dump(self) -> None:
        """Have it write the stacks of its threads to its log, if it lives."""
        ...


class Here:
    """A process of this machine that marks in the file `beat`."""

    pid: Any  # int, None before it is started
    beat: Any  # Path

    def count(self) -> int:
        return read(self.beat)

    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def dump(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, DUMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How long a process may be silent: `start_s` until its first mark, `silent_s` afterwards, and `stopped_s` while
    the kernel says that it is stopped. `names` are the settings of the last two."""

    process: Marked
    start_s: float
    silent_s: float
    stopped_s: float
    names: tuple[str, str]

    async def run(self, hangs: Callable[[str], None], lives: Callable[[], None] = lambda: None) -> None:
        """Listen until the process hangs, have it log its stacks if it can, then call `hangs` with the reason. `lives`
        is called when there are new marks."""
        mark_count, last_mark_s = 0, trio.current_time()
        last_run_s = last_mark_s
        while True:
            await trio.sleep(_LOOK_S)
            current_s = trio.current_time()
            if (new_count := self.process.count()) != mark_count or new_count == _RETIRED:
                mark_count, last_mark_s = new_count, current_s
                lives()
            if not self.process.stopped():
                last_run_s = current_s
            # Before its first mark a process loads its libraries and models, which has the time of a start.
            silence_limit_s = self.silent_s if mark_count else max(self.start_s, self.silent_s)
            # First, as it is the better reason: a stopped process does not mark either, and cannot write its stacks.
            if current_s - last_run_s >= self.stopped_s:
                hangs(f"was stopped for {self.stopped_s:g} s ({self.names[1]})")
                return
            if current_s - last_mark_s >= silence_limit_s:
                if mark_count:
                    self.process.dump()
                    await trio.sleep(_DUMP_S)
                problem = "came no further" if mark_count else "did not get ready"
                setting_name = self.names[0] if mark_count else "engine.start_deadline_s"
                hangs(f"{problem} for {silence_limit_s:g} s ({setting_name})")
                return
