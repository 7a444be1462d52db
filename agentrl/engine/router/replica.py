"""One engine as a fleet sees it. Owns its states and counts; decides nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
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
    """A replica's state; see the diagram in `agentrl.engine.router.router`."""

    READY = "ready"
    BROKEN = "broken"
    STALE = "stale"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Replica:
    """One engine as the fleet sees it. `serves` is the last weight version seen; `running` counts our requests at it,
    `limit` bounds them once `Fleet.control` runs; `failures` counts failures since its last token, `trouble` describes
    the last one; `retry_at` is when a broken replica is asked again, `heard_at` when it last showed that it lives."""

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
