"""One engine as a fleet sees it: its states and counts, and which replica has a session's prefix.

Owns the memory of both, and when a turn leaves its replica for a less busy one; the router decides all else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import trio

from agentrl.engine.router.turn_request import TokenPace
from agentrl.protocols import Chunk, GenerateRequest


class Servable(Protocol):
    """The interface of a fleet's clients, such as `EngineClient`. `version` is the last known weight version. Requests
    come with an infinite deadline: the fleet itself bounds each wait for a chunk."""

    url: str
    version: int

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...
    async def alive(self, *, deadline_s: float) -> bool: ...
    async def paused(self, *, deadline_s: float) -> bool: ...
    async def served_version(self) -> int: ...
    async def metrics(self) -> Mapping[str, float]: ...
    async def aclose(self) -> None: ...


class ReplicaState(StrEnum):
    """A replica's state; see the diagram in `agentrl.engine.router.health`."""

    READY = "ready"
    BROKEN = "broken"
    STALE = "stale"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Replica:
    """One engine as the fleet sees it. `serves` is the last weight version seen; `running` counts our requests at it,
    `limit` bounds them once `Fleet.control` runs; `failures` counts failures since its last token, `trouble` describes
    the last one; `retry_at` is when a broken replica is probed again, `heard_at` when it last showed that it lives."""

    client: Servable
    serves: int
    state: ReplicaState = ReplicaState.READY
    running: int = 0
    limit: float = math.inf
    failures: int = 0
    trouble: str = ""
    retry_at: float = 0.0
    heard_at: float = -math.inf
    pace: TokenPace = field(default_factory=TokenPace)
    waits: set[Wait] = field(default_factory=set["Wait"])

    @property
    def room(self) -> float:
        """How many more requests it may have."""
        # One request at a time until a token has come
        # (`test_a_replica_that_failed_gets_one_request_until_it_brings_a_token`): an engine that answers its health
        # check and breaks every turn would otherwise break a whole limit's worth each time it returns.
        return (min(1, self.limit) if self.failures else self.limit) - self.running


@dataclass(slots=True, eq=False)
class Wait:
    """A turn's wait for its next chunk: the replica, None while it waits at none, and the start of the wait. The tasks
    in `watchers`, if there are any, ask whether a silent replica lives. `asleep_s` of it the replica slept."""

    replica: Replica | None = None
    since: float = 0.0
    asleep_s: float = 0.0
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    watchers: trio.Nursery | None = None


# Sessions end without a word to the router. Forgetting the oldest costs a prefill at the worst.
_SESSIONS = 65_536  # number of sessions whose replica is remembered


class Homes:
    """A turn leaves its session's replica if that runs over `slack` * (n + 4) requests, where the least busy one runs
    n."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._homes: OrderedDict[str, Replica] = OrderedDict()

    def choose(self, session: str, roomy: Sequence[Replica]) -> Replica:
        """The replica for a session's next turn, of those that have room; from now on its home."""
        idlest_replica = min(roomy, key=lambda replica: replica.running)
        home_replica = self._homes.pop(session, idlest_replica)
        # The 4 keeps small numbers from moving sessions about: 3 requests against 1 is three times as many, and no
        # reason to compute a prefix again.
        if home_replica not in roomy or home_replica.running > self._slack * (idlest_replica.running + 4):
            home_replica = idlest_replica
        self.move(session, home_replica)
        return home_replica

    def move(self, session: str, home: Replica) -> None:
        """A session's prefix is at this replica now."""
        self._homes[session] = home
        if len(self._homes) > _SESSIONS:
            self._homes.popitem(last=False)
