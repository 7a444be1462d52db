"""Whose time is it? Deadlines that run while a call waits for the policy's action, and stop while it waits for a host.

    HostClock       a trio clock that leaves out the time in which the process was stopped
    watch(...)      a call with two deadlines: one for its own code, one for the policy's actions
    policy_time()   inside it, the call waits for the policy: a tool that it called, its code in a box
    host_time(...)  inside it, the call waits for the host: a slot, a queue, a box that is being made
    credit_host(s)  the last `s` seconds were the host's, as it turned out later

A task inherits whose time it is from the task that started it. If tasks of a watch run side by side, the time is the
policy's as long as one of them waits for the policy, else the host's as long as one waits for the host. Never knows
episodes, environments or boxes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from enum import IntEnum
from math import inf
from types import TracebackType
from typing import Final

import trio
from trio.lowlevel import current_clock, current_trio_token, in_trio_run

from agentrl.errors import HostBusy

HOST_DEADLINE_S: Final = 600.0
"""How long anything waits for the host at most."""

_LONGEST_S: Final = 1.0  # longest time between two looks at the clock that counts; time beyond it is the host's
_LOOK_S: Final = _LONGEST_S / 4


class HostClock(trio.abc.Clock):
    """The clock of a loop whose deadlines must not pass while its process is stopped, or its machine suspended.

    The loop reads it at least every `_LOOK_S`. If two reads are further apart than `_LONGEST_S`, the process did not
    run in between: only `_LONGEST_S` is counted. `now` gives seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self._time = 0.0

    def start_clock(self) -> None:
        self._last = self._now()

    def current_time(self) -> float:
        clock_time_s = self._now()
        # Stopped by SIGSTOP, a debugger or a laptop's lid: with the plain clock all deadlines would be over at the
        # first look afterwards, and every episode that was alive would be lost at once.
        self._time += min(max(clock_time_s - self._last, 0.0), _LONGEST_S)
        self._last = clock_time_s
        return self._time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # A loop that sleeps until its next deadline looks at the clock only then, and a sleep of ten seconds could not
        # be told from a stop of ten seconds.
        return min(deadline - self.current_time(), _LOOK_S)


class Whose(IntEnum):
    """The side that a call waits for; numbers, as it is looked up at each call."""

    OWN = 0  # the code that is watched
    POLICY = 1
    HOST = 2


_whose: ContextVar[Whose] = ContextVar("agentrl_whose", default=Whose.OWN)
_watches: ContextVar[tuple[CallDeadlines, ...]] = ContextVar("agentrl_watches", default=())


class CallDeadlines:
    """The two deadlines of a call; at most one of them runs at a time. `over` says whose time ran out, None if no time
    did. A class of its own and no generator, since each call into an environment has one."""

    def __init__(self, *, own_s: float, policy_s: float) -> None:
        self.over: Whose | None = None
        self._used = 0.0
        self._clock, self._token = current_clock(), current_trio_token()
        # Both by `Whose`: the seconds left to each side, where the host has no deadline, and how many tasks of this
        # watch wait for it.
        self._left = [own_s, policy_s, inf]
        self._tasks = [0, 0, 0]
        self._tasks[_whose.get()] = 1
        self._outer: tuple[CallDeadlines, ...] = ()

    def __enter__(self) -> CallDeadlines:
        self._since, self._running = self._clock.current_time(), self._now()
        self._scope = trio.CancelScope(deadline=self._since + self._left[self._running])
        self._scope.__enter__()
        self._outer = _watches.get()
        _watches.set((*self._outer, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.end()
        _watches.set(self._outer)
        return self._scope.__exit__(kind, error, trace)

    @property
    def seconds(self) -> float:
        """The seconds used so far: its own and the policy's."""
        return self._used + (0.0 if self._running is Whose.HOST else self._passed())

    def left(self, whose: Whose) -> float:
        """The seconds left to `whose` deadline."""
        return max(0.0, self._left[whose] - (self._passed() if whose is self._running else 0.0))

    def turn(self, before: Whose, after: Whose) -> None:
        """Note that one of its tasks, maybe in another thread's loop, changed the side that it waits for."""
        if in_trio_run() and current_trio_token() is self._token:
            self._turn(before, after)
        else:
            with suppress(trio.RunFinishedError):
                # A watch belongs to the loop that made it. Another loop's thread may be in the middle of its own
                # counting.
                self._token.run_sync_soon(self._turn, before, after)

    def credit(self, seconds: float) -> None:
        """Count `seconds` that have passed as the host's, to whichever side they were counted."""
        if in_trio_run() and current_trio_token() is self._token:
            self._credit(seconds)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._credit, seconds)

    def end(self) -> None:
        """Stop counting."""
        self._settle()
        self._running = Whose.HOST

    def _passed(self) -> float:
        return self._clock.current_time() - self._since

    def _settle(self) -> None:
        # Noted at the first look after the cancellation: what the code does while it unwinds may be for another side.
        if self._scope.cancel_called and self.over is None and self._running is not Whose.HOST:
            self.over = self._running
        passed_s = self._passed()
        self._left[self._running] -= passed_s
        if self._running is not Whose.HOST:
            self._used += passed_s
        self._since += passed_s

    def _turn(self, before: Whose, after: Whose) -> None:
        self._settle()
        self._tasks[before] -= 1
        self._tasks[after] += 1
        self._begin(self._now())

    def _credit(self, seconds: float) -> None:
        if self._running is Whose.HOST:
            return
        self._settle()
        self._left[self._running] += seconds
        self._used = max(0.0, self._used - seconds)
        self._begin(self._running)

    def _begin(self, whose: Whose) -> None:
        self._running = whose
        self._scope.deadline = self._since + self._left[whose]

    def _now(self) -> Whose:
        _, policy_tasks, host_tasks = self._tasks
        return Whose.POLICY if policy_tasks > 0 else Whose.HOST if host_tasks > 0 else Whose.OWN


def watch(*, own_s: float = inf, policy_s: float = inf) -> CallDeadlines:
    """Cancel the block when it has used `own_s` seconds for itself, or waited `policy_s` seconds for the policy;
    `CallDeadlines.over` then says which. The host's time counts in neither."""
    return CallDeadlines(own_s=own_s, policy_s=policy_s)


@contextmanager
def policy_time() -> Generator[None]:
    """Time in the block is the policy's: a tool that it called, its code in a box, the judging of its work."""
    with _time_of(Whose.POLICY):
        yield


@contextmanager
def host_time(what: str, *, deadline_s: float = HOST_DEADLINE_S) -> Generator[None]:
    """Time in the block is the host's, and counts for neither the policy nor the environment.

    Raises HostBusy, which names `what`, after `deadline_s`."""
    with trio.move_on_after(deadline_s) as time_scope, _time_of(Whose.HOST):
        yield
    if time_scope.cancelled_caught:
        raise HostBusy(f"waited {deadline_s:g} s for {what}: this machine has too much to do")


@contextmanager
def host_time_in_thread() -> Generator[None]:
    """`host_time` for blocking code in a thread that trio started. It has no deadline: the block needs its own."""
    with _time_of(Whose.HOST):
        yield


def credit_host(seconds: float) -> None:
    """Count `seconds` that a call has waited for the policy as the host's: its program got no processor then."""
    for call_watch in _watches.get():
        call_watch.credit(seconds)


@asynccontextmanager
async def granted(slots: trio.CapacityLimiter, what: str) -> AsyncGenerator[None]:
    """Hold one of the host's slots; the wait for it is the host's time. Raises HostBusy."""
    with host_time(what):
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


@contextmanager
def unwatched() -> Generator[None]:
    """For tasks that outlive the call that starts them: time of tasks started in the block does not count for it."""
    outer_watches, outer_side = _watches.get(), _whose.get()
    _watches.set(())
    _whose.set(Whose.OWN)
    try:
        yield
    finally:
        _watches.set(outer_watches)
        _whose.set(outer_side)


def policy_seconds_left() -> float:
    """The least time in seconds left to the policy by all watches around this code; infinity without a watch."""
    return min((call_watch.left(Whose.POLICY) for call_watch in _watches.get()), default=inf)


@contextmanager
def _time_of(whose: Whose) -> Generator[None]:
    outer_side, call_watches = _whose.get(), _watches.get()
    # The same side within itself, which is the commonest case (a tool that calls a box), changes nothing and costs
    # nothing.
    if outer_side is whose:
        yield
        return
    for call_watch in call_watches:
        call_watch.turn(outer_side, whose)
    _whose.set(whose)
    try:
        yield
    finally:
        _whose.set(outer_side)
        for call_watch in call_watches:
            call_watch.turn(whose, outer_side)
