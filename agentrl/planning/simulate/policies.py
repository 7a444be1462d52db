"""The policies that a simulation compares: ours, and four that other systems use.

All start episodes by the same admission. They differ in when a group closes, which groups the learner takes, and what
is thrown away.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.errors import UsageError
from agentrl.planning.simulate.memory import MemoryBuffer, SimulatedGroup
from agentrl.records import GroupState
from agentrl.store.buffer.closing import FULL, ClosePolicy, Quorum
from agentrl.tokens.staleness import lag_in_step, trains

_WINDOW = 0.3  # of windowed FIFO: share of the groups in flight, oldest first, from which the learner may take
_EXTRA = 0.25  # of first-G: so many more episodes are started than a group needs


class DiscardLate(MemoryBuffer):
    """A group with one token past the lag bound is dropped whole."""

    def _trains(self, group: SimulatedGroup, step: int, max_lag: int) -> bool:
        scored = [member for member in group.members if member.scored]
        return bool(scored) and all(trains(lag_in_step(step, member.oldest), max_lag) for member in scored)


class WindowedFifo(MemoryBuffer):
    """The learner takes finished groups only from a window of the oldest groups in flight; nothing beyond the window
    is taken before its head is (MiniMax Forge)."""

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: list[int] = []  # sorted ids of groups that the learner may still take

    def _start(self, size: int) -> SimulatedGroup:
        group = super()._start(size)
        self._in_flight.append(group.id)
        return group

    def _move(self, group: SimulatedGroup, state: GroupState) -> None:
        super()._move(group, state)
        if state not in (GroupState.RUNNING, GroupState.SCORED):
            del self._in_flight[bisect_left(self._in_flight, group.id)]

    def _choose(self, n: int) -> list[SimulatedGroup] | None:
        if n == 0:
            return []
        window = max(n, math.ceil(_WINDOW * len(self._in_flight)))
        if self._fresh[n - 1 : n] > self._in_flight[window - 1 : window]:
            return None
        return super()._choose(n)


class FirstOfMore(MemoryBuffer):
    """A group starts more members than it needs; those that still run when it closes are cancelled."""

    def _close(self, group: SimulatedGroup) -> None:
        super()._close(group)
        for member in group.members:
            if not member.ended:
                self._end(member)
                member.left = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a simulated run treats stragglers. `extra`: episodes started beyond the group's size. `wait`: of the time of
    the steps, so much at most the learner waits at the lag bound, where groups then close; None: it does neither."""

    name: str
    max_lag: int
    close: ClosePolicy = FULL
    buffer: Callable[[], MemoryBuffer] = MemoryBuffer
    extra: int = 0
    wait: float | None = None

    @property
    def quorum(self) -> int | None:
        """How many scored members close a group; None: all of them."""
        return None if self.close == FULL else self.close.at_least


def parse_close(text: str, group_size: int) -> tuple[str, ClosePolicy]:
    """`full`; `K/N`, the share of a group that closes it, or `K`, so many members; and `@S` for seconds that are then
    waited for the others. Raises UsageError."""
    if text == "full":
        return text, FULL
    found = re.fullmatch(r"(\d+)(?:/(\d+))?(?:@(\d+(?:\.\d*)?))?", text)
    if found is None or found[2] == "0":
        raise UsageError(f"--close {text!r} is not known: give full, 7/8, or 7/8@10 to wait 10 s more")
    share = found[2] is not None
    k = math.ceil(int(found[1]) * group_size / int(found[2])) if share else int(found[1])
    if share and k == group_size and int(found[1]) < int(found[2]):
        k -= 1  # a small group's quorum leaves one out as well
    if not 2 <= k <= group_size:
        raise UsageError(f"--close {text!r} makes a quorum of {k}: it must be from 2 to the group's {group_size}")
    after_s = float(found[3] or 0.0)
    return f"{k} of {group_size}" + (f" + {after_s:g} s" if after_s else ""), Quorum(k, after_s)


def others(max_lag: int, group_size: int) -> list[Policy]:
    """What other systems do."""
    extra = max(1, round(_EXTRA * group_size))
    return [
        Policy(name="synchronous", max_lag=0),
        Policy(name="discard late groups", max_lag=max_lag, buffer=DiscardLate),
        Policy(
            name=f"first {group_size} of {group_size + extra}",
            max_lag=max_lag,
            close=Quorum(group_size, 0.0),
            buffer=FirstOfMore,
            extra=extra,
        ),
        Policy(name="windowed FIFO 0.3", max_lag=max_lag, buffer=WindowedFifo),
    ]


def ours(max_lag: int, closes: list[tuple[str, ClosePolicy]], *, wait: float = math.inf) -> list[Policy]:
    """This project's policy, once for each way to close a group; `wait` as `buffer.wait_at_bound`."""
    return [Policy(name=f"ours, {name}", max_lag=max_lag, close=close, wait=wait) for name, close in closes]
