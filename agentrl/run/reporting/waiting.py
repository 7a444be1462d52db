"""Whether the learner takes what there is to take: if no step comes, who is waited for, while it happens.

Reads the store. Never knows a process: a learner that hangs is seen by what it does not take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.records import GroupState
from agentrl.run.supervisor import TRAINING, Supervisor
from agentrl.store.run_values import LEARNER_WAITS

_LOOK_S = 2.0
_LONG_S = 30.0  # without a step, then twice as long each time


@dataclass(slots=True)
class WaitLines:
    """A line when nothing was trained for long, though groups are scored or should be; again at each doubling."""

    now: Callable[[], float] = time.monotonic
    _state: tuple[int, bool] = (-1, False)
    _looked: float = float("-inf")
    _since: float = 0.0
    _next_s: float = _LONG_S

    def lines(self, supervisor: Supervisor) -> Iterator[str]:
        """What is new since the last call."""
        store, now = supervisor.store, self.now()
        if supervisor.phase != TRAINING or now - self._looked < _LOOK_S:
            return
        self._looked = now
        step, ready = store.current_version().step, store.counts().get(GroupState.SCORED, 0)
        enough = ready >= supervisor.config.buffer.groups_per_step
        state = (step, enough)
        if state != self._state:
            self._state, self._since, self._next_s = state, now, _LONG_S
        if now - self._since < self._next_s:
            return
        waited_s, self._next_s = now - self._since, 2 * self._next_s
        sources = ", ".join(
            f"reward source {source!r} has to score turns of {count} ended episodes"
            for source, count in store.episodes_unscored().items()
        )
        logs = f"agentrl logs {supervisor.run.path}"
        if named := LEARNER_WAITS.of(store.meta):
            yield f"warning: no step for {waited_s:.0f} s: {named}" + (f"; {sources}" if sources else "")
        elif enough and not store.stands_beyond(step):
            yield (
                f"warning: {ready} groups are scored, and the learner takes none for {waited_s:.0f} s, nor does it say "
                f"that it waits: {logs} learner"
            )
        elif sources and not enough and not store.stands_beyond(step):
            yield f"warning: no step for {waited_s:.0f} s: {sources}: {logs} worker-0"
