"""SIGKILL at every instant: finds the remains of an owner that died right after a call that made something (law 4).

    for owner in killed_after_each_call(lambda: trio.run(main)):
        print(owner)            # process ids, for `sweep` to look for their remains

It forks: call it in its own interpreter without other threads; `sweep` starts one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl.testing.sandbox.case import host_processes

MAKING = frozenset({"fork_exec", "mkdir", "chmod", "chown", "write"})
"""Built-in functions, by their names, after which something is there that was not there before."""

REPOSITORY = Path(__file__).resolve().parents[2]
"""Where the scripts find this module: it is not installed."""

_SWEEP_S = 500.0  # time for all forks of a sweep
_GONE_S = 120.0  # time for processes to end after their owner, by themselves or by a janitor


def sweep(script: str, marker: str, *arguments: str) -> int:
    """Run `script`, which prints each id of `killed_after_each_call`, in its own interpreter, and wait until nothing is
    left of these owners. Returns their number. `marker`, the script's first argument, is in the command lines of all
    processes that they start. Raises AssertionError with the remains."""
    command = [sys.executable, "-c", script, marker, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SWEEP_S, check=True, env=environment)
    owners = [int(line) for line in done.stdout.split()]
    deadline = time.monotonic() + _GONE_S
    while left := [found for owner in owners for found in left_by(owner, marker)]:
        assert time.monotonic() < deadline, left  # the end of other processes' children gives no event
        time.sleep(0.05)
    return len(owners)


def left_by(owner: int, marker: str) -> list[str]:
    """All that a dead process and its janitor left on this machine: processes, folders, control groups, mounts."""
    places = [Path("/dev/shm"), Path("/tmp"), Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")]
    found = [str(path) for place in places for path in place.glob(f"agentrl-boxes-*/{owner}.*")]
    found += [str(path) for place in places for path in place.glob(f"agentrl-boxes.{owner}.*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if f"/{owner}." in line]
    return found + [f"process {pid}" for pid in host_processes(marker) if pid != owner]


def killed_after_each_call(body: Callable[[], object], calls: Collection[str] = MAKING) -> Iterator[int]:
    """Run `body` in a fork that is killed right after its first call of one of `calls`, then in a fork that is killed
    after the second, and so on until `body` ends by itself. Yields the process id of each killed fork. Calls of all its
    threads count. Raises AssertionError if `body` fails."""
    killed = True
    number = 0
    while killed:
        number += 1
        sys.stdout.flush()
        owner = os.fork()
        if owner == 0:
            _die_after(number, calls)
            try:
                body()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(owner, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, f"the owner failed on its way to call {number}"
        if killed:
            yield owner


def _die_after(number: int, calls: Collection[str]) -> None:
    left = number

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event == "c_return" and getattr(argument, "__name__", "") in calls:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)
