"""How long a learner waits at the lag bound for episodes that run (law 5). The one rule of a run and of its simulation.

Owns an account of seconds: every second of work adds `wait` seconds of patience, every second of waiting takes one. So
over a run the learner waits at the bound for at most `wait` times as long as it works, however long single episodes
take; their own deadlines bound each wait. Never knows an episode, a clock or a store.
"""

from __future__ import annotations

import math


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
            self.left_s += self._wait * busy_s

    def holds(self, waits: bool, now: float) -> bool:
        """Whether the learner waits on at `now`, in seconds of a clock that never goes back. `waits`: it could go on,
        and that would lose an episode. Ask again whenever something may have changed, and at `ends_s`."""
        if waits and self._since_s is None:
            self._since_s = now
        if waits and now < self.ends_s:
            return True
        if self._since_s is not None:
            held_s = min(now - self._since_s, self.left_s)
            self.left_s, self.held_s, self._since_s = self.left_s - held_s, self.held_s + held_s, None
        return False

    @property
    def ends_s(self) -> float:
        """When patience ends; inf while the learner does not wait."""
        return math.inf if self._since_s is None else self._since_s + self.left_s
