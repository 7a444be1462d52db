"""How long to wait for stragglers: when a group closes, and how long the learner waits at the lag bound.

A group closes by itself once all its members have ended. A policy, a small object with one rule, may close it sooner;
the members that still run go on as late members, and a later step trains them against the group's record. A policy sees
only when the scored members ended; it never knows the store or a token.

`Patience` is the one rule by which the learner of a run, and that of a simulation, waits at the lag bound for episodes
that run (law 5). Never knows an episode, a clock or a store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ClosePolicy(Protocol):
    """Decides whether a group closes before all its members have ended."""

    @property
    def at_least(self) -> int:
        """A group with fewer scored members than this never closes early, and `closes` is not called."""
        ...

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        """Whether a group closes at `now`; `scored_s`: when its scored members ended, earliest first. Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """Wait for every member. Each member is judged against all its siblings; the slowest one sets the pace."""

    @property
    def at_least(self) -> int:
        return sys.maxsize

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Quorum:
    """Close once `k` members are scored and `after_s` seconds have passed since the k-th of them ended.

    The baseline then comes from the fast members: of each episode from the first `k` - 1 others that ended, so that it
    depends neither on the episode it judges nor on when that one ended, and leave-one-out stays unbiased (see
    `agentrl.algos.judging`). Late members are trained too, so no length is favoured."""

    k: int
    after_s: float

    @property
    def at_least(self) -> int:
        return self.k

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        # Counted from the k-th end, not from the last one: counted from the last, each further member would start the
        # wait again, and a steady trickle of ends would keep a group open for as long as its slowest member runs.
        return len(scored_s) >= self.k and now - scored_s[self.k - 1] >= self.after_s


FULL = Full()


def close_policy(quorum: int | None, *, after_s: float) -> ClosePolicy:
    """The policy of a run whose groups close with so many scored members (None: with the last one); `after_s` is the
    setting `buffer.quorum_after_s`."""
    return FULL if quorum is None else Quorum(quorum, after_s)


class Patience:
    """`wait` is `buffer.wait_at_bound`; inf waits for as long as episodes take."""

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._since_s: float | None = None
        self.left_s = math.inf if wait == math.inf else 0.0
        self.held_s = 0.0
        """Seconds waited, all together."""

    def worked(self, busy_s: float) -> None:
        """The learner has worked for `busy_s` seconds."""
        if self.left_s < math.inf:
            # Patience is earned by work, as a share of it, because no fixed number of seconds fits: ten seconds are
            # nothing for a learner whose step takes minutes, and ten steps for a tiny one. So waiting costs at most
            # that share of the run's speed, whatever the model (law 6 with its exception at the bound of law 5).
            self.left_s += self._wait * busy_s

    def holds(self, waits: bool, now: float) -> bool:
        """Whether the learner waits on at `now`, in seconds of a clock that never goes back. `waits`: it could go on,
        and that would lose an episode. Ask again whenever something may have changed, and at `ends_s`."""
        if waits and self._since_s is None:
            self._since_s = now
        if waits and now < self.ends_s:
            return True
        # The budget is paid when a wait ends, and at most what was left of it: a clock that was looked at late must not
        # leave a debt that forbids the next wait.
        if self._since_s is not None:
            waited_s = min(now - self._since_s, self.left_s)
            self.left_s, self.held_s, self._since_s = self.left_s - waited_s, self.held_s + waited_s, None
        return False

    @property
    def ends_s(self) -> float:
        """When patience ends; inf while the learner does not wait."""
        return math.inf if self._since_s is None else self._since_s + self.left_s
