"""The time limit of a command in a box: how many seconds it has, and a deadline that waits for a busy machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import trio

from agentrl.host.clocks import credit_host
from agentrl.host.cpu_time import CpuTime
from agentrl.protocols import Limits
from agentrl.sandbox.check_command import CommandRefused

_FIRST_LOOK_S, _LAST_LOOK_S = 1.0, 10.0  # pauses between two looks grow from the one to the other
_LEAST_S = 0.001  # less than that is no time left


def checked_wall_s(timeout_s: float | None, limits: Limits) -> float:
    """The seconds that a command may take. Raises CommandRefused."""
    if timeout_s is None:
        return limits.wall_s
    if not timeout_s >= 0:  # NaN too
        raise CommandRefused(f"timeout_s = {timeout_s!r}: give 0 seconds or more")
    return timeout_s


# Why a deadline counts what the machine gave, and neither seconds of a clock nor seconds of CPU time.
#
# A deadline by the clock is the simple way. On a machine with too much to do it ends a command because other programs
# took the processors, and the policy is scored for it (law 3). The reward would then depend on how many boxes run side
# by side. A limit of CPU time is fair in this respect, but it never ends a program that sleeps or waits for a lock.
#
# So the clock counts, less the seconds in which some thread of the command was ready to run and got no processor
# (`agentrl.host.cpu_time` says how they are measured). These seconds are known only afterwards. A scope with a deadline
# would cancel first and learn the reason later; so a task looks, and cancels when what is left is used up. It looks
# after one second at first and after ten at most, and when the rest of the time is over. Each look reads /proc for
# every thread of the command: more of them would slow down the machine whose slowness they measure.
#
# The seconds extend the deadlines around the command too (`credit_host`). Otherwise the step of the episode would
# time out while its command may still run. Patience ends as well (law 4): after `HOST_DEADLINE_S` starved seconds the
# clock alone counts, and a command that then times out raises HostBusy, for which nobody is scored.
#
# The price: a command may take longer by the clock than its limit says. And threads that start and end between two
# looks are not seen, so a command of many short ones may get back less than it lost. `tests/host/test_cpu_time.py`
# fails if the clock alone counts, and also if a program that sleeps gets time back.
class FairDeadline:
    """A deadline that waits for this machine. `passed` says that it ended its block."""

    def __init__(self, timeout_s: float, used: CpuTime) -> None:
        self._left_s, self._used = timeout_s, used
        self._scope, self._keeper = trio.CancelScope(), trio.CancelScope()
        self._paused_at: float | None = None
        self._returned_s = 0.0  # by pauses since the last look

    @property
    def passed(self) -> bool:
        return self._scope.cancelled_caught

    @contextmanager
    def running(self, nursery: trio.Nursery) -> Generator[None]:
        """Run a block under the deadline. The looks run in `nursery` and end with the block."""
        with self._scope:
            nursery.start_soon(self._keep)
            try:
                yield
            finally:
                self._keeper.cancel()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stand still in the block, for a wait that is not the program's. Not to be nested."""
        self._paused_at = trio.current_time()
        try:
            yield
        finally:
            self._take_pause()
            self._paused_at = None

    async def _keep(self) -> None:
        """Cancel the block when its time is over. The scope has no deadline of its own: on a machine with too much to
        do that one would pass before anybody had looked why."""
        pause_s = _FIRST_LOOK_S
        with self._keeper:
            while True:
                look_began = trio.current_time()
                await trio.sleep(max(0.0, min(pause_s, self._left_s)))
                # In a thread: to read /proc of many processes on a busy machine would hold up every other task of the
                # loop.
                starved_s = 0.0 if self._used.starved_out else await trio.to_thread.run_sync(self._used.look)
                if starved_s:
                    credit_host(starved_s)
                self._take_pause()
                self._left_s -= max(0.0, trio.current_time() - look_began - starved_s - self._returned_s)
                self._returned_s = 0.0
                if self._left_s <= _LEAST_S:
                    self._scope.cancel()
                    return
                pause_s = min(1.5 * pause_s, _LAST_LOOK_S)

    def _take_pause(self) -> None:
        if self._paused_at is not None:
            current_time = trio.current_time()
            self._returned_s += current_time - self._paused_at
            self._paused_at = current_time


@contextmanager
def fair_deadline(nursery: trio.Nursery, timeout_s: float, used: CpuTime) -> Generator[FairDeadline]:
    """Cancel the block after `timeout_s` seconds, without those in which this machine starved the processes of `used`.

    Starved seconds are taken off the deadlines of `agentrl.host.clocks` around the block, too. After HOST_DEADLINE_S of
    them no more are taken off: `used.starved_out` then says so."""
    deadline = FairDeadline(timeout_s, used)
    with deadline.running(nursery):
        yield deadline
