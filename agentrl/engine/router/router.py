"""Several engines as one: each turn at one of them, and at another if that engine dies.

A client owns the connection, and the process that starts engines owns their lives. A fleet has three parts:

    health.py    the state of each replica, and the checks that change it
    choice.py    the replica for a turn's next attempt
    attempts.py  one attempt: its chunks, and whose fault a failure is

When a replica breaks off, the request goes on at another from the prompt and the tokens received: none is sampled
again. A replica that failed gets a single request at a time until it has brought a token. If a turn's first token is
slow to come, a second replica may get the turn as well (see `hedging`).

A chunk sampled under weights that are not the run's is refused: two runs at one engine would train on each other's
tokens. `Policies` sends each request to the engines of its role, which never hear of the others.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Self

import trio

from agentrl.config import EngineSettings
from agentrl.engine.generation import collect
from agentrl.engine.router.attempts import Attempts, Knows
from agentrl.engine.router.choice import Choice
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.health import Health
from agentrl.engine.router.hedging import Hedges
from agentrl.engine.router.replica import Homes, Wait
from agentrl.engine.router.replica import Replica as Replica
from agentrl.engine.router.replica import ReplicaState as ReplicaState
from agentrl.engine.router.replica import Servable as Servable
from agentrl.engine.router.turn_request import SEAM, Decode, TurnRequest
from agentrl.errors import ConfigError
from agentrl.protocols import Chunk, Engine, GenerateRequest
from agentrl.records import Generation, Json


class Fleet:
    """`protocols.Engine` over several clients. A replica that is silent for `stall_s` is probed and has `probe_s` to
    answer; a broken one is probed again after `retry_s`, doubled with every failure up to `retry_max_s`; a turn leaves
    its session's replica if that runs over `slack` * (n + 4) requests, where the least busy one runs n.

    A request's own deadline counts only the time in which its tokens come. All other waiting of a turn is bounded by
    `outage_deadline_s`, a wait at one silent replica by half of it. A request that replicas accepted and then failed
    `max_faults` times is abandoned: it may be the cause.

    `decode` gives the text of tokens: requests with stop texts need it. `fits` says whether a weight version may be
    sampled from (default: none older than the newest seen), `knows` whether the run made it at all (default: it did): a
    replica whose tokens come from another run's weights has failed their turn. After `hedge_after` times the median
    time to a first token a turn without one goes to a second replica as well. With `preempt` a running turn leaves its
    engine when its weight version no longer `fits`, and goes on under one that does: the engine computes its context
    anew. If engines sleep while a learner has their GPU (`sleeps`), a turn's wait for one that is paused counts against
    no deadline."""

    def __init__(
        self,
        clients: Sequence[Servable],
        *,
        decode: Decode | None = None,
        fits: Callable[[int], Awaitable[bool]] | None = None,
        knows: Knows | None = None,
        stall_s: float = 30.0,
        probe_s: float = 30.0,
        outage_deadline_s: float = 600.0,
        retry_s: float = 0.25,
        retry_max_s: float = 10.0,
        max_faults: int = 4,
        slack: float = 1.5,
        preempt: bool = False,
        hedge_after: float | None = None,
        sleeps: bool = False,
    ) -> None:
        if not clients:
            raise ValueError("a fleet needs at least one engine")
        self._decode, self._preempt, self.hedges = decode, preempt, Hedges(hedge_after)
        self._health = Health(
            [Replica(client, client.version) for client in clients],
            fits=fits,
            stall_s=stall_s,
            probe_s=probe_s,
            retry_s=retry_s,
            retry_max_s=retry_max_s,
            sleeps=sleeps,
        )
        self._choice = Choice(self._health, Homes(slack), outage_deadline_s=outage_deadline_s)
        self._attempts = Attempts(
            self._health,
            self._choice,
            self.hedges,
            knows=knows,
            outage_deadline_s=outage_deadline_s,
            max_faults=max_faults,
        )
        self._gone: list[Replica] = []
        """Replicas that left the fleet; each is closed after its last request."""

    @property
    def replicas(self) -> list[Replica]:
        """The engines as the fleet sees them."""
        return self._health.replicas

    @classmethod
    def configured(
        cls,
        clients: Sequence[Servable],
        settings: EngineSettings,
        *,
        decode: Decode,
        fits: Callable[[int], Awaitable[bool]] | None = None,
        knows: Knows | None = None,
        preempt: bool = False,
    ) -> Self:
        """A fleet with the deadlines of the table `[engine]`."""
        return cls(
            clients,
            decode=decode,
            fits=fits,
            knows=knows,
            stall_s=settings.admin_deadline_s,
            probe_s=settings.admin_deadline_s,
            outage_deadline_s=settings.outage_deadline_s,
            preempt=preempt,
            hedge_after=settings.hedge_after,
            sleeps=settings.colocated,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole turn. Raises as `stream` does, and any error of `on_chunk`."""
        turn, wait = self._turn(request), Wait()
        failure: Exception | None = None
        generation: Generation | None = None
        async with trio.open_nursery() as nursery:
            wait.watchers = nursery
            nursery.start_soon(self._health.watch, wait)
            try:
                generation = await collect(self._chunks(turn, wait), request.on_chunk)
            except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
        if generation is None:
            assert failure is not None
            raise failure
        return generation

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks of one turn, from as many replicas as needed, with an empty chunk each time the turn leaves a replica;
        the last has `finish="length"` if the request's own deadline ends it. Only `generate` asks silent replicas
        whether they live: here the turn leaves a silent replica at its deadline.

        Raises EngineTimeout after a wait of `outage_deadline_s` for engines, EngineRefusal if two refuse the request
        itself, or the only one, EngineBroke if too many failed it, ConfigError for stop texts without `decode`."""
        async with aclosing(self._chunks(self._turn(request), Wait())) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aclose(self) -> None:
        """Close every client."""
        for replica in (*self.replicas, *self._gone):
            await replica.client.aclose()

    def follow(self, urls: Sequence[str], client: Callable[[str], Servable]) -> None:
        """Have the engines at these URLs from now on, with new ones by `client`. The running turns of one that is gone
        go on elsewhere."""
        current_replicas = {replica.client.url: replica for replica in self.replicas}
        addresses = [engine_url.rstrip("/") for engine_url in urls]
        # No address at all is a moment in which nothing is known, and no fleet without engines: to forget them all
        # would end every turn.
        if not addresses or addresses == list(current_replicas):
            return
        for engine_url in current_replicas.keys() - set(addresses):
            # The engine's host may be gone already: its turns should not wait until silence proves it.
            self.drain(engine_url, move=True)
            self._gone.append(current_replicas[engine_url])
        new_clients = {engine_url: client(engine_url) for engine_url in addresses if engine_url not in current_replicas}
        # A new one is probed before it gets a turn.
        joined_replicas = {
            engine_url: Replica(new_client, new_client.version, state=ReplicaState.BROKEN)
            for engine_url, new_client in new_clients.items()
        }
        self._health.replicas = [
            current_replicas.get(engine_url) or joined_replicas[engine_url] for engine_url in addresses
        ]
        self._health.announce()

    async def control(self, *, period_s: float = 1.0, start: Aimd | None = None) -> None:
        """Check the replicas for ever: start it in the nursery that owns the fleet. It probes idle ones for life,
        broken ones for their return: without it broken ones are probed only when no other is ready. With `start`, this
        rule adapts each replica's limit to its metrics. Replicas that left are closed after their last request."""
        watched_replicas: list[Replica] = []
        async with trio.open_nursery() as nursery:
            while True:
                for replica in self.replicas:
                    if replica not in watched_replicas:
                        limit_rule = None if start is None else replace(start)
                        nursery.start_soon(self._health.look_after, replica, limit_rule, period_s)
                watched_replicas = list(self.replicas)
                for replica in [replica for replica in self._gone if not replica.running]:
                    self._gone.remove(replica)
                    await replica.client.aclose()
                await trio.sleep(period_s)

    def gauges(self) -> dict[str, Json]:
        """The state of each replica, our requests at it, and the limit of these requests (None without a limit); how
        often a second replica got a turn, and how often it answered first."""
        return {
            "state": [replica.state.value for replica in self.replicas],
            "running": [replica.running for replica in self.replicas],
            "limit": [replica.limit if math.isfinite(replica.limit) else None for replica in self.replicas],
            "hedges": {"asked": self.hedges.opened, "won": self.hedges.won},
        }

    # --- for operators ------------------------------------------------------------------------------------------

    def drain(self, url: str, *, move: bool = False) -> None:
        """Send nothing more to a replica; with `move`, its running requests go on elsewhere at once."""
        replica = self._health.replica(url)
        replica.state = ReplicaState.DRAINING
        if move:
            for wait in list(replica.waits):
                wait.scope.cancel()

    def undrain(self, url: str) -> None:
        """Send requests to a drained replica again, once a check finds it well."""
        self._health.replica(url).state = ReplicaState.BROKEN
        self._health.announce()

    def mark_refit(self, url: str, version: int) -> None:
        """Note that a replica now serves `version`: a stale one is ready again."""
        self._health.refitted(self._health.replica(url), version)

    # --- one turn -----------------------------------------------------------------------------------------------

    def _turn(self, request: GenerateRequest) -> TurnRequest:
        if request.sampling.stop and self._decode is None:
            hint = "give the fleet `decode`: a stop text may begin at one engine and end at another"
            raise ConfigError("sampling.stop", request.sampling.stop, hint)
        return TurnRequest(request, self._decode)

    async def _chunks(self, turn: TurnRequest, wait: Wait) -> AsyncGenerator[Chunk, None]:
        """All chunks of a turn, from one attempt after the other."""
        health = self._health
        while (last_chunk := turn.ending()) is None:
            replica, is_outdated = await self._choice.first(turn), False
            async with aclosing(self._attempts.at(replica, turn, wait)) as chunks:
                async for replica, chunk in chunks:
                    for version in turn.versions(chunk):
                        health.saw_version(replica, version)
                    chunk = turn.take(chunk)
                    if chunk.token_ids or chunk.finish:
                        yield chunk
                    if chunk.finish:
                        return
                    chunk_versions = turn.versions(chunk) if self._preempt else []
                    # By the chunk's last version: a swap in the midst of it has brought the new weights, and the turn
                    # may stay.
                    if is_outdated := bool(chunk_versions) and not await health.fits(chunk_versions[-1]):
                        break
            if is_outdated:
                await health.ask(replica)  # without the new weights it becomes stale and gets no turn
            # At this empty chunk a worker journals the tokens so far: the next engine's first one may be minutes
            # away, and a death until then would lose them.
            yield SEAM
            self._choice.check_time(turn)
        yield last_chunk


class Policies:
    """`protocols.Engine` over the engines of roles with a model of their own, by role, and those of all others. It
    raises what these do."""

    def __init__(self, shared: Engine, own: Mapping[str, Engine]) -> None:
        self._shared, self._own = shared, own

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._of(request).stream(request)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._of(request).generate(request)

    async def aclose(self) -> None:
        for engine in (self._shared, *self._own.values()):
            await engine.aclose()

    def _of(self, request: GenerateRequest) -> Engine:
        return self._shared if request.policy is None else self._own.get(request.policy, self._shared)
