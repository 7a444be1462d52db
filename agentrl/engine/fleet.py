"""Several engines as one: where a request goes, what happens when an engine dies under it.

Owns routing, breakers and the continuation of broken turns; a client owns the connection, and whoever starts engines
owns their lives. A replica is

    READY ──failure──► BROKEN ──answers, serves the newest version──► READY
      │                   └──answers, older weights──► STALE ──refit──► READY
      └──drain──► DRAINING ──undrain──► READY

The turns of a session go to the replica that has its prefix, unless that one is much busier than another. When a
replica breaks off, the request goes on at another from the prompt and the tokens received: none is sampled again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import trio

from agentrl.engine.client import collect
from agentrl.engine.concurrency import Aimd
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, Json


class Servable(Protocol):
    """What a fleet needs of a client: `EngineClient` is one. `version` is the weight version last known. Requests come
    with an infinite deadline: the fleet bounds each wait for a chunk itself."""

    url: str
    version: int

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...
    async def served_version(self) -> int: ...
    async def metrics(self) -> Mapping[str, float]: ...
    async def aclose(self) -> None: ...


_SESSIONS = 65_536  # sessions whose replica is remembered


class State(StrEnum):
    """Where a replica stands; see the module's picture."""

    READY = "ready"
    BROKEN = "broken"
    STALE = "stale"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Replica:
    """One engine as the fleet sees it. `running` counts our requests at it, `limit` bounds them once `Fleet.control`
    runs; `retry_at` is when a broken one is asked again."""

    client: Servable
    state: State = State.READY
    running: int = 0
    limit: float = math.inf
    failures: int = 0
    retry_at: float = 0.0
    scopes: set[trio.CancelScope] = field(default_factory=set[trio.CancelScope])


class Fleet:
    """`protocols.Engine` over several clients. `stall_s` without a token makes a replica count as hung; a broken one
    is asked again after `retry_s`, doubled with every failure up to `retry_max_s`; `slack` is how many times busier
    than the least busy replica a session's own may be before its turn goes elsewhere."""

    def __init__(
        self,
        clients: Sequence[Servable],
        *,
        stall_s: float = 30.0,
        retry_s: float = 0.25,
        retry_max_s: float = 10.0,
        slack: float = 1.5,
    ) -> None:
        if not clients:
            raise ValueError("a fleet needs at least one engine")
        self.replicas = [Replica(client) for client in clients]
        self._stall_s, self._retry_s, self._retry_max_s, self._slack = stall_s, retry_s, retry_max_s, slack
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._newest = max(client.version for client in clients)
        self._changed = trio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole turn. Raises as `stream` does."""
        return await collect(self.stream(request))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks of one turn, from as many replicas as it takes.

        Raises EngineTimeout at the request's deadline, EngineError where an engine refuses the request itself."""
        deadline = trio.current_time() + request.deadline_s
        received: list[int] = []
        attempt = 0
        while True:
            replica = await self._choose(request, deadline)
            finished = False
            async with aclosing(self._attempt(replica, _rest(request, received, attempt), deadline)) as chunks:
                async for chunk in chunks:
                    received += chunk.token_ids
                    for span in chunk.spans:
                        self._newest = max(self._newest, span.version)
                    if chunk.finish == "abort":  # the engine was paused or drained with abort: not the caller's wish
                        chunk = replace(chunk, finish=None)
                    finished = chunk.finish is not None
                    if chunk.token_ids or finished:
                        yield chunk
            if finished:
                return
            last = _ending(request, received)
            if last is not None:
                yield last
                return
            if trio.current_time() >= deadline:
                raise EngineTimeout(
                    f"{replica.client.url} did not finish {request.request_id!r} within {request.deadline_s:g} s"
                )
            attempt += 1

    async def aclose(self) -> None:
        """Close every client."""
        for replica in self.replicas:
            await replica.client.aclose()

    async def control(self, *, period_s: float = 1.0, start: Aimd | None = None) -> None:
        """Adapt each replica's limit to its metrics and look after broken ones, for ever: start it in the nursery that
        owns the fleet. Without it nothing is limited, and a broken replica is asked again only when no other is
        ready. `start` holds the rule's settings."""
        rules = {id(replica): replace(start or Aimd()) for replica in self.replicas}
        while True:
            for replica in self.replicas:
                rule = rules[id(replica)]
                if replica.state is State.READY:
                    with suppress(EngineError):  # a request that meets the same failure acts on it
                        replica.limit = rule.look(await replica.client.metrics(), replica.running)
                elif replica.state is not State.DRAINING and trio.current_time() >= replica.retry_at:
                    await self._ask(replica)
            self._announce()
            await trio.sleep(period_s)

    def gauges(self) -> dict[str, Json]:
        """How the fleet stands, replica by replica: its state, our requests at it, and how many it may have (None where
        nothing limits them)."""
        return {
            "state": [replica.state.value for replica in self.replicas],
            "running": [replica.running for replica in self.replicas],
            "limit": [replica.limit if math.isfinite(replica.limit) else None for replica in self.replicas],
        }

    # --- what operators do --------------------------------------------------------------------------------------

    def drain(self, url: str, *, move: bool = False) -> None:
        """Send nothing more to a replica; with `move`, its running requests go on elsewhere at once."""
        replica = self._of(url)
        replica.state = State.DRAINING
        if move:
            for scope in list(replica.scopes):
                scope.cancel()

    def undrain(self, url: str) -> None:
        """Send requests to a drained replica again, once it is seen to be well."""
        self._of(url).state = State.BROKEN
        self._announce()

    def mark_refit(self, url: str, version: int) -> None:
        """Say that a replica now serves `version`: a stale one is ready again."""
        replica = self._of(url)
        replica.client.version = version
        self._newest = max(self._newest, version)
        if replica.state is State.STALE:
            replica.state = State.READY
            self._announce()

    # --- routing ------------------------------------------------------------------------------------------------

    async def _choose(self, request: GenerateRequest, deadline: float) -> Replica:
        """The replica for the next attempt; waits for one if none is ready."""
        while True:
            ready = [replica for replica in self.replicas if replica.state is State.READY]
            roomy = [replica for replica in ready if replica.running < replica.limit]
            if roomy:
                return self._home(request.session, roomy)
            changed = self._changed
            with trio.move_on_at(deadline) as scope:
                await (changed.wait() if ready else self._mend(changed))
            if scope.cancelled_caught:
                states = ", ".join(f"{replica.client.url} is {replica.state}" for replica in self.replicas)
                raise EngineTimeout(f"no engine took {request.request_id!r} within {request.deadline_s:g} s: {states}")

    def _home(self, session: str, roomy: list[Replica]) -> Replica:
        least = min(roomy, key=lambda replica: replica.running)
        home = self._homes.pop(session, least)
        if home not in roomy or home.running > self._slack * (least.running + 4):
            home = least
        self._homes[session] = home
        if len(self._homes) > _SESSIONS:
            self._homes.popitem(last=False)
        return home

    async def _mend(self, changed: trio.Event) -> None:
        """Ask the broken replica that is due first, or wait until somebody else changed something."""
        broken = [replica for replica in self.replicas if replica.state in (State.BROKEN, State.STALE)]
        if not broken:
            await changed.wait()
            return
        first = min(broken, key=lambda replica: replica.retry_at)
        with trio.move_on_at(first.retry_at):
            await changed.wait()
            return
        if first.state in (State.BROKEN, State.STALE):
            first.retry_at = trio.current_time() + self._retry_s  # others wait while this one asks
            await self._ask(first)

    async def _ask(self, replica: Replica) -> None:
        """Is a broken replica back, and with which weights?"""
        try:
            version = await replica.client.served_version()
        except EngineError:
            self._broke(replica)
            return
        replica.client.version = version
        if version >= self._newest:
            replica.state, replica.failures = State.READY, 0
            self._announce()
        else:
            replica.state = State.STALE

    def _broke(self, replica: Replica) -> None:
        if replica.state is State.DRAINING:
            return
        replica.state = State.BROKEN
        wait_s = min(self._retry_s * 2**replica.failures, self._retry_max_s)
        replica.failures = min(replica.failures + 1, 16)
        replica.retry_at = trio.current_time() + wait_s

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _of(self, url: str) -> Replica:
        for replica in self.replicas:
            if replica.client.url == url.rstrip("/"):
                return replica
        raise ValueError(f"no replica at {url!r}")

    # --- one attempt --------------------------------------------------------------------------------------------

    async def _attempt(
        self, replica: Replica, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks from one replica; ends early, without an error, at the deadline and where the request should go on
        elsewhere."""
        replica.running += 1
        finish: str | None = None
        try:
            async with aclosing(replica.client.stream(request)) as chunks:
                while finish is None:
                    # One scope a wait: for the request's deadline, a replica that hangs, and one that is drained.
                    scope = trio.CancelScope(deadline=min(deadline, trio.current_time() + self._stall_s))
                    replica.scopes.add(scope)
                    chunk: Chunk | None = None
                    try:
                        with scope:
                            chunk = await anext(chunks, None)
                    finally:
                        replica.scopes.discard(scope)
                    if scope.cancelled_caught and trio.current_time() < deadline:
                        self._broke(replica)
                    if chunk is None:
                        return
                    replica.failures = 0
                    finish = chunk.finish
                    yield chunk
        except (EngineUnavailable, EngineTimeout):
            self._broke(replica)
        finally:
            replica.running -= 1
            if replica.limit < math.inf:
                self._announce()


def _rest(request: GenerateRequest, received: Sequence[int], attempt: int) -> GenerateRequest:
    """What is still to be sampled, as a request of its own. The fleet bounds its waits."""
    if not attempt:
        return replace(request, deadline_s=math.inf)
    return replace(
        request,
        request_id=f"{request.request_id}~{attempt}",
        token_ids=(*request.token_ids, *received),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(received)),
        deadline_s=math.inf,
    )


def _ending(request: GenerateRequest, received: Sequence[int]) -> Chunk | None:
    """The last chunk, if a replica broke off between a turn's last token and the word that it was the last."""
    if received and received[-1] in request.sampling.stop_token_ids:
        return Chunk(token_ids=(), logprobs=(), spans=(), finish="stop")
    if len(received) >= request.sampling.max_tokens:
        return Chunk(token_ids=(), logprobs=(), spans=(), finish="length")
    return None
