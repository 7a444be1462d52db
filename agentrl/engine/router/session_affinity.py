"""Which replica has a session's prefix. Owns the memory of it, and when a turn leaves for a less busy one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from agentrl.engine.router.replica import Replica

_SESSIONS = 65_536  # number of sessions whose replica is remembered


class Homes:
    """A turn leaves its session's replica if that runs over `slack` * (n + 4) requests, where the least busy one runs
    n."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._homes: OrderedDict[str, Replica] = OrderedDict()

    def choose(self, session: str, roomy: Sequence[Replica]) -> Replica:
        """The replica for a session's next turn, of those that have room; from now on its home."""
        least = min(roomy, key=lambda replica: replica.running)
        home = self._homes.pop(session, least)
        if home not in roomy or home.running > self._slack * (least.running + 4):
            home = least
        self.move(session, home)
        return home

    def move(self, session: str, home: Replica) -> None:
        """A session's prefix is at this replica now."""
        self._homes[session] = home
        if len(self._homes) > _SESSIONS:
            self._homes.popitem(last=False)
