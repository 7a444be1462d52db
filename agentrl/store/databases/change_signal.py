"""Says when a process of the run should look at the store again, in place of looking all the time.

A signal has the database's own watch, on a connection of its own. So it sees the writes of every process, its own too,
and misses none, whoever is killed. If somebody has written, a role may have a mark, a small row that changes with what
it waits for: neither learner nor workers look again because a turn was journaled. Never says what there is to do.
"""

from __future__ import annotations

from typing import Literal

from agentrl.store.databases.driver import ChangeWatch, Row
from agentrl.store.run_values import PAUSED, PHASE

Role = Literal["rollout", "learner", "control", "reward"]
"""The role of a process that waits: a worker for episodes, the learner for members, admission for room, a reward source
for turns."""

# SQLite has no notification between processes, and a change of the file's size or time shows a commit neither always
# nor at once. Its counter of commits is exact and costs microseconds to read, so it is polled: a millisecond after
# something changed, since changes come in bursts, and ever more seldom down to fifty times a second. While nobody
# writes at all, a descriptor of the log ends the sleep (`sqlite.CommitCounter`).
_LEAST_S, _MOST_S = 0.001, 0.02
_GROWTH = 1.5
_WAKES_S = 1.0  # where a descriptor signals writes
_REMOTE_WAKES_S = 0.25  # the same for a server's, which may lose a notification

# A mark is what a role waits for, in one row that costs no table scan: sums over the tables of counts, and look-ups
# with a limit. It may change without there being work, and then somebody looks in vain. It must never stay the same
# when there is work, since that is a process asleep beside it: `tests/store/test_signal.py` has a case for each reason
# to wake.
_STATE = ", ".join(f"(SELECT value FROM meta WHERE key = '{state.key}')" for state in (PHASE, PAUSED))
_ENDED = "(SELECT TOTAL(n) FROM ending_counts)"
_NEWEST = "(SELECT MAX(version) FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL)"
_MARKS: dict[Role, str | None] = {
    # Groups that came, or left the window that workers play in; what was handed back. A worker looks each second
    # anyway, so it misses little if a hundred wait all the time.
    "rollout": f"SELECT {_STATE}, (SELECT TOTAL(n) FROM group_counts), (SELECT COUNT(*) FROM leases),"
    " (SELECT TOTAL(n) FROM group_counts WHERE purpose = 'train' AND state IN"
    " ('waiting', 'running', 'scored')),"
    " (SELECT COUNT(*) FROM (SELECT 1 FROM episodes WHERE state = 'waiting' LIMIT 100) waiting),"
    f" {_NEWEST}",
    "reward": None,
    "learner": f"SELECT {_STATE}, {_ENDED},"
    " (SELECT TOTAL(n) FROM group_counts WHERE purpose = 'train' AND state = 'scored')",
    "control": f"SELECT {_STATE}, {_ENDED}, (SELECT COUNT(*) FROM endings), (SELECT COUNT(*) FROM quarantine),"
    " (SELECT TOTAL(n) FROM group_counts WHERE purpose = 'train' AND state IN ('expired', 'failed')),"
    f" {_NEWEST}",
}


class Signal:
    """Shows one waiting role that the store has changed. The first look is a change."""

    def __init__(self, watch: ChangeWatch, role: Role, *, remote: bool = False) -> None:
        """`remote`: a look asks a server, which may answer late."""
        self.remote = remote
        self._watch, self._mark_of = watch, _MARKS[role]
        self._mark: Row | None = None
        self._pause_s = _LEAST_S

    @property
    def pause_s(self) -> float:
        """How long to sleep before the next look: a moment after a change, longer while there is none."""
        if self.wakes is None:
            return self._pause_s
        return _REMOTE_WAKES_S if self.remote else _WAKES_S

    @property
    def wakes(self) -> int | None:
        """A file descriptor whose becoming readable ends that sleep; None if there is none."""
        return self._watch.wakes

    def changed(self) -> bool:
        """Whether there may be work that was not there when this was last true."""
        was_still, has_changed = self.wakes is not None, self._watch.written()
        if has_changed and self._mark_of is not None:
            previous_mark, self._mark = self._mark, self._watch.row(self._mark_of)
            has_changed = previous_mark != self._mark
        # A commit that leaves the mark as it was does not shorten the pause. A hundred episodes commit all the time,
        # and a learner that waits would otherwise ask a thousand times a second for a step's worth of ends.
        # After a still time the first write does shorten it: the look may have come before the commit could be read.
        is_stirred = was_still and self.wakes is None
        self._pause_s = _LEAST_S if has_changed or is_stirred else min(_MOST_S, self._pause_s * _GROWTH)
        return has_changed

    def close(self) -> None:
        """Close the watch."""
        self._watch.close()
