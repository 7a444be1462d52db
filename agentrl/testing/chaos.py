"""SIGKILL at every instant: what is left of an owner that died right after any call that made something (law 4).

    for owner in killed_after_each_call(lambda: trio.run(main)):
        print(owner)            # process ids, for whoever looks for what they left

It forks: call it in an interpreter of its own that has no other threads. Knows nothing of what is owned.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

MAKING = frozenset({"fork_exec", "mkdir", "chmod", "chown", "write"})
"""Built-in functions, by their names, after which something is there that was not there before."""


def killed_after_each_call(body: Callable[[], object], calls: Collection[str] = MAKING) -> Iterator[int]:
    """Run `body` in a fork that is killed right after its first call of one of `calls`, in the next one after its
    second, and so on until `body` ends by itself; the process id of each that was killed. The calls of all its threads
    count. Raises AssertionError if `body` fails."""
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
