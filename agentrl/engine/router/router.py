"""Several engines as one: chooses the engine of a request, and another if that engine dies.

Owns routing, circuit breakers and the continuation of broken turns; a client owns the connection, and the process that
starts engines owns their lives. A replica is

    READY ──failure──► BROKEN ──answers, serves the newest version──► READY
      │                   └──answers, older weights──► STALE ──refit──► READY
      └──drain──► DRAINING ──undrain──► READY

The turns of a session go to the replica that has its prefix, unless that replica is much busier than another. When a
replica breaks off, the request goes on at another from the prompt and the tokens received: none is sampled again.
A silent replica is asked whether it lives before it is given up: a long prefill, a queue and a pause are silent too. A
replica that failed gets a single request at a time until it has brought a token. If a turn's first token is slow to
come, a second replica may be asked for it as well (see `hedging`). A request that a replica refuses is offered to one
other: if that takes it, the first is broken.

A chunk sampled under weights that are not the run's is refused: two runs at one engine would train on each other's
tokens. `Policies` sends each request to the engines of its role, which never hear of the others.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Self

import trio

from agentrl.config import EngineSettings
from agentrl.engine.generation import collect
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.hedging import Hedges, race
from agentrl.engine.router.replica import Homes, Wait
from agentrl.engine.router.replica import Replica as Replica
from agentrl.engine.router.replica import ReplicaState as ReplicaState
from agentrl.engine.router.replica import Servable as Servable
from agentrl.engine.router.turn_request import SEAM, Decode, TurnRequest
from agentrl.errors import ConfigError, EngineBroke, EngineError, EngineRefusal, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk, Engine, GenerateRequest
from agentrl.records import Generation, Json

Knows = Callable[[int], Awaitable[bool]]
"""Whether the run made a weight version."""


async def check_version(chunk: Chunk, url: str, knows: Knows) -> None:
    """Raises EngineBroke if tokens of a chunk come from weights that the run never made, EngineError if tokens before
    it do, which the turn has already."""
    for span in chunk.spans:
        if not await knows(span.version):
            kind = EngineBroke if span.start >= 0 else EngineError
            other = "does another run send it weights? Each run needs engines of its own (engine.urls)"
            raise kind(f"{url} samples from version {span.version}, which this run never made: {other}")


_ASK_S = 5.0  # deadline for a broken replica's answer; it is asked again later
_MUTE = "it does not answer"


class Fleet:
    """`protocols.Engine` over several clients. A replica that is silent for `stall_s` is asked whether it lives and has
    `probe_s` to answer; a broken one is asked again after `retry_s`, doubled with every failure up to `retry_max_s`;
    a turn leaves its session's replica if that runs over `slack` * (n + 4) requests, where the least busy one runs n.

    A request's own deadline counts only the time in which its tokens come. All other waiting of a turn is bounded by
    `outage_deadline_s`, a wait at one silent replica by half of it. A request that replicas took and failed
    `max_faults` times is given up: it may be the cause.

    `decode` gives the text of tokens: requests with stop texts need it. `fits` says whether a weight version may be
    sampled from (default: none older than the newest seen), `knows` whether the run made it at all (default: it did): a
    replica whose tokens come from another run's weights has failed their turn. After `hedge_after` times the median
    time to a first token a turn without one asks a second replica as well. With `preempt` a running turn leaves its
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
        self.replicas = [Replica(client, client.version) for client in clients]
        self._decode, self._fits, self._knows = decode, fits or self._is_newest, knows
        self._stall_s, self._probe_s, self._outage_deadline_s = stall_s, probe_s, outage_deadline_s
        self._retry_s, self._retry_max_s, self._max_faults = retry_s, retry_max_s, max_faults
        self._preempt, self.hedges, self._sleeps = preempt, Hedges(hedge_after), sleeps
        self._gone: list[Replica] = []
        self._homes = Homes(slack)
        self._newest = max(client.version for client in clients)
        self._changed = trio.Event()

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
            stall_s=settings.stall_s,
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
            nursery.start_soon(self._watch, wait)
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
        known = {replica.client.url: replica for replica in self.replicas}
        named = [url.rstrip("/") for url in urls]
        if not named or named == list(known):
            return
        for url in known.keys() - set(named):
            self.drain(url, move=True)
            self._gone.append(known[url])
        fresh = {url: client(url) for url in named if url not in known}
        # A new one is asked before it gets a turn.
        joined = {url: Replica(one, one.version, state=ReplicaState.BROKEN) for url, one in fresh.items()}
        self.replicas = [known.get(url) or joined[url] for url in named]
        self._announce()

    async def control(self, *, period_s: float = 1.0, start: Aimd | None = None) -> None:
        """Check the replicas for ever: start it in the nursery that owns the fleet. Idle ones are asked whether they
        live, broken ones whether they are back: without it broken ones are asked only when no other is ready. With
        `start`, this rule adapts each replica's limit to its metrics. Replicas that left are closed after their last
        request."""
        looked_after: list[Replica] = []
        async with trio.open_nursery() as nursery:
            while True:
                for replica in self.replicas:
                    if replica not in looked_after:
                        rule = None if start is None else replace(start)
                        nursery.start_soon(self._look_after, replica, rule, period_s)
                looked_after = list(self.replicas)
                for replica in [one for one in self._gone if not one.running]:
                    self._gone.remove(replica)
                    await replica.client.aclose()
                await trio.sleep(period_s)

    async def _look_after(self, replica: Replica, rule: Aimd | None, period_s: float) -> None:
        while replica in self.replicas:
            if replica.state is ReplicaState.READY:
                if not await self._lives(replica):
                    self._broke(replica, _MUTE)
                elif not await self._fits(replica.serves):  # it may have missed newer weights
                    await self._ask(replica)
                elif rule is not None:
                    await self._limit(replica, rule)
            elif replica.state is not ReplicaState.DRAINING and trio.current_time() >= replica.retry_at:
                await self._ask(replica)
            self._announce()
            await trio.sleep(period_s)

    async def _limit(self, replica: Replica, rule: Aimd) -> None:
        try:
            replica.limit = rule.look(await replica.client.metrics(), replica.running)
        except (EngineUnavailable, EngineTimeout):
            replica.heard_at = -math.inf  # the next look asks whether it lives
        except EngineError:
            return  # it has no metrics

    def gauges(self) -> dict[str, Json]:
        """The state of each replica, our requests at it, and the limit of these requests (None without a limit); how
        often a second replica was asked, and how often it answered first."""
        return {
            "state": [replica.state.value for replica in self.replicas],
            "running": [replica.running for replica in self.replicas],
            "limit": [replica.limit if math.isfinite(replica.limit) else None for replica in self.replicas],
            "hedges": {"asked": self.hedges.asked, "won": self.hedges.won},
        }

    # --- for operators ------------------------------------------------------------------------------------------

    def drain(self, url: str, *, move: bool = False) -> None:
        """Send nothing more to a replica; with `move`, its running requests go on elsewhere at once."""
        replica = self._of(url)
        replica.state = ReplicaState.DRAINING
        if move:
            for wait in list(replica.waits):
                wait.scope.cancel()

    def undrain(self, url: str) -> None:
        """Send requests to a drained replica again, once a check finds it well."""
        self._of(url).state = ReplicaState.BROKEN
        self._announce()

    def mark_refit(self, url: str, version: int) -> None:
        """Note that a replica now serves `version`: a stale one is ready again."""
        replica = self._of(url)
        replica.client.version = replica.serves = version
        self._newest = max(self._newest, version)
        if replica.state is ReplicaState.STALE:
            replica.state = ReplicaState.READY
            self._announce()

    # --- routing ------------------------------------------------------------------------------------------------

    async def _choose(self, turn: TurnRequest) -> Replica:
        """The replica for the next attempt; waits for one if none is ready."""
        started = trio.current_time()
        with trio.move_on_at(started + self._outage_deadline_s - turn.waited_s):
            while True:
                ready = self._ready(turn)
                roomy = [replica for replica in ready if replica.room > 0]
                if roomy:
                    turn.waited_s += trio.current_time() - started
                    return self._homes.choose(turn.request.session, roomy)
                if not ready and turn.refusals:  # nobody else can be asked any more
                    raise next(iter(turn.refusals.values()))
                changed = self._changed
                await (changed.wait() if ready else self._mend(changed))
        raise self._too_late(turn)

    def _too_late(self, turn: TurnRequest) -> EngineTimeout:
        states = [
            f"{replica.client.url} is {replica.state}" + (f" ({replica.trouble})" if replica.trouble else "")
            for replica in self.replicas
        ]
        return EngineTimeout(
            f"{turn.request.request_id!r} waited {self._outage_deadline_s:g} s for its engines, as long as a turn may "
            f"(engine.outage_deadline_s), and has {len(turn.received)} tokens: {', '.join(states)}"
        )

    def _ready(self, turn: TurnRequest) -> list[Replica]:
        return [one for one in self.replicas if one.state is ReplicaState.READY and one.client.url not in turn.refusals]

    async def _mend(self, changed: trio.Event) -> None:
        """Ask the broken replica that is due first, or wait until another task changes a replica's state."""
        broken = [replica for replica in self.replicas if replica.state in (ReplicaState.BROKEN, ReplicaState.STALE)]
        if not broken:
            await changed.wait()
            return
        first = min(broken, key=lambda replica: replica.retry_at)
        with trio.move_on_at(first.retry_at):
            await changed.wait()
            return
        if first.state in (ReplicaState.BROKEN, ReplicaState.STALE):
            first.retry_at = trio.current_time() + self._retry_s  # others wait while this one asks
            await self._ask(first)

    async def _ask(self, replica: Replica) -> None:
        """Ask whether a replica is back, and with which weights."""
        trouble, version = _MUTE, None
        try:
            if await replica.client.alive(deadline_s=min(_ASK_S, self._probe_s)):
                version = await replica.client.served_version()
        except EngineError as error:
            trouble = str(error)
        fits = version is not None and await self._fits(version)
        if replica.state is ReplicaState.DRAINING:
            return
        if version is None:
            self._put_off(replica, trouble)
            return
        replica.serves = version
        if fits:
            replica.state, replica.trouble = ReplicaState.READY, ""
            self._announce()
        else:
            replica.state, replica.trouble = ReplicaState.STALE, f"it serves version {version}"

    def _broke(self, replica: Replica, trouble: str) -> None:
        """Note a failure of a ready replica; it counts as one failure, however many turns it hit."""
        if replica.state is ReplicaState.READY:
            self._put_off(replica, trouble)

    def _put_off(self, replica: Replica, trouble: str) -> None:
        replica.state, replica.trouble = ReplicaState.BROKEN, trouble
        wait_s = min(self._retry_s * 2**replica.failures, self._retry_max_s)
        replica.failures = min(replica.failures + 1, 16)
        replica.retry_at = trio.current_time() + wait_s

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _outdated(self, versions: Sequence[int]) -> bool:
        return bool(versions) and not await self._fits(versions[-1])

    async def _is_newest(self, version: int) -> bool:
        return version >= self._newest

    def _of(self, url: str) -> Replica:
        for replica in self.replicas:
            if replica.client.url == url.rstrip("/"):
                return replica
        raise ValueError(f"no replica at {url!r}")

    # --- one turn -----------------------------------------------------------------------------------------------

    def _turn(self, request: GenerateRequest) -> TurnRequest:
        if request.sampling.stop and self._decode is None:
            hint = "give the fleet `decode`: a stop text may begin at one engine and end at another"
            raise ConfigError("sampling.stop", request.sampling.stop, hint)
        return TurnRequest(request, self._decode)

    async def _chunks(self, turn: TurnRequest, wait: Wait) -> AsyncGenerator[Chunk, None]:
        """All chunks of a turn."""
        while (last := turn.ending()) is None:
            replica, outdated = await self._choose(turn), False
            attempt = self._hedged if self.hedges.on else self._attempt
            async with aclosing(attempt(replica, turn, wait)) as chunks:
                async for replica, chunk in chunks:
                    for version in turn.versions(chunk):
                        replica.serves, self._newest = version, max(self._newest, version)
                    chunk = turn.take(chunk)
                    if chunk.token_ids or chunk.finish:
                        yield chunk
                    if chunk.finish:
                        return
                    if outdated := self._preempt and await self._outdated(turn.versions(chunk)):
                        break
            if outdated:
                await self._ask(replica)  # without the new weights it becomes stale and gets no turn
            yield SEAM
            if turn.waited_s >= self._outage_deadline_s:
                raise self._too_late(turn)
        yield last

    async def _hedged(
        self, replica: Replica, turn: TurnRequest, wait: Wait
    ) -> AsyncGenerator[tuple[Replica, Chunk], None]:
        """An attempt at `replica`, or at a second one if that brings the first token sooner."""
        began, waited_s, asked = trio.current_time(), turn.waited_s, 0

        def second() -> AsyncGenerator[tuple[Replica, Chunk], None] | None:
            nonlocal asked
            others = [one for one in self._ready(turn) if one is not replica and one.room > 0 and not one.failures]
            if not others or not self.hedges.allows(sum(one.running for one in self.replicas)):
                return None
            asked = 1
            self.hedges.asked, self.hedges.running = self.hedges.asked + 1, self.hedges.running + 1
            wait_there = Wait(watchers=wait.watchers)
            if wait.watchers is not None:
                wait.watchers.start_soon(self._watch, wait_there)
            return self._attempt(min(others, key=lambda one: one.running), turn, wait_there)

        def answers(item: tuple[Replica, Chunk]) -> bool:
            return bool(item[1].token_ids) or item[1].finish not in (None, "abort")

        first = self._attempt(replica, turn, wait)
        try:
            found = await race(first, second, wait_s=self.hedges.wait_s, answers=answers)
        finally:
            self.hedges.running -= asked
            turn.waited_s = waited_s + trio.current_time() - began  # once, however many waited
        if found is None:
            return
        chunks, item = found
        if chunks is not first:
            self.hedges.won += 1
            self._homes.move(turn.request.session, item[0])  # its prefix is there now
        async with aclosing(chunks):
            yield item
            async for item in chunks:
                yield item

    async def _attempt(
        self, replica: Replica, turn: TurnRequest, wait: Wait
    ) -> AsyncGenerator[tuple[Replica, Chunk], None]:
        """Chunks from one replica; ends early, without an error, if the turn should go on elsewhere."""
        replica.running += 1
        began = trio.current_time()
        sampling = False  # whether a token of this attempt has come
        try:
            async with aclosing(replica.client.stream(turn.rest())) as chunks:
                while True:
                    chunk = await self._next(chunks, replica, turn, wait, sampling=sampling)
                    if chunk is None:
                        return
                    if self._knows is not None and turn.request.version is None:  # else the turn is a past self's
                        await check_version(chunk, replica.client.url, self._knows)
                    if chunk.token_ids and not sampling:
                        sampling = True
                        self.hedges.took(trio.current_time() - began)
                        self._blame(turn)
                    yield replica, chunk
                    if chunk.finish == "abort":
                        self._broke(replica, "it aborts")
                    if chunk.finish is not None:
                        return
        except EngineRefusal as refused:
            if turn.received:
                self._failed(replica, turn, refused)  # another engine took it
            else:
                turn.refusals[replica.client.url] = refused
                if len(turn.refusals) > 1 or not self._ready(turn):
                    raise
        except EngineBroke as broke:
            self._failed(replica, turn, broke)
        except (EngineUnavailable, EngineTimeout) as gone:
            self._broke(replica, str(gone))
        except EngineError as wrong:  # the tokens that the turn has are no good
            self._broke(replica, str(wrong))
            raise
        finally:
            replica.running -= 1
            self._announce()

    async def _next(
        self, chunks: AsyncGenerator[Chunk, None], replica: Replica, turn: TurnRequest, wait: Wait, *, sampling: bool
    ) -> Chunk | None:
        """The next chunk; None if the replica hangs, is drained, or has no time left."""
        wait.replica, wait.since, wait.asleep_s = replica, trio.current_time(), 0.0
        left_s = min(self._outage_deadline_s - turn.waited_s, self._outage_deadline_s / 2)
        # Each wait has its own scope, cancelled when its replica hangs or is drained.
        wait.scope = trio.CancelScope(deadline=wait.since + left_s)
        replica.waits.add(wait)
        chunk: Chunk | None = None
        try:
            with wait.scope:
                chunk = await anext(chunks, None)
        finally:
            replica.waits.discard(wait)
            wait.replica = None
        now = trio.current_time()
        spent_s = replica.pace.sampling(now - wait.since) if sampling and chunk is not None else 0.0
        turn.spent_s += spent_s
        turn.waited_s += max(0.0, now - wait.since - spent_s - wait.asleep_s)
        if chunk is not None:
            replica.heard_at = now
            if replica.failures and chunk.token_ids:
                replica.failures = 0
                self._announce()
        elif replica.state is not ReplicaState.DRAINING:
            self._failed(replica, turn, EngineBroke(f"{replica.client.url} fell silent"))
        return chunk

    def _failed(self, replica: Replica, turn: TurnRequest, why: EngineError) -> None:
        """A replica took a request and failed it: the replica's fault, or the request's if other replicas fail too."""
        self._broke(replica, str(why))
        turn.faults += 1
        if turn.faults >= self._max_faults:
            id = turn.request.request_id
            raise EngineBroke(f"{id!r} was taken and failed {turn.faults} times; the last time: {why}") from why

    def _blame(self, turn: TurnRequest) -> None:
        """An engine took a request: the one that refused it is broken, and the request is not."""
        for replica in self.replicas:
            if (refusal := turn.refusals.pop(replica.client.url, None)) is not None:
                self._broke(replica, str(refusal))

    # --- silence ------------------------------------------------------------------------------------------------

    async def _watch(self, wait: Wait) -> None:
        """While a turn waits long at a replica, ask again and again whether the replica lives; leave it if not."""
        while True:
            since = wait.since if wait.replica is not None else trio.current_time()
            await trio.sleep_until(since + self._stall_s)
            replica = wait.replica
            if replica is None or wait.since != since:
                continue
            if await self._lives(replica):
                await self._forgive(wait, replica)
                await trio.sleep(self._stall_s)
                continue
            self._broke(replica, _MUTE)
            for other in list(replica.waits):
                if other.since <= since:
                    other.scope.cancel()

    async def _forgive(self, wait: Wait, replica: Replica) -> None:
        """Do not count a wait until now in which the replica sleeps."""
        since = wait.since
        with suppress(EngineError):
            if self._sleeps and await replica.client.paused(deadline_s=self._probe_s) and wait.since == since:
                slept_s = trio.current_time() - since
                wait.scope.deadline += slept_s - wait.asleep_s
                wait.asleep_s = slept_s

    async def _lives(self, replica: Replica) -> bool:
        """Whether a replica lives: it showed so recently, or it answers now. Others assume so until then."""
        asked = trio.current_time()
        if asked - replica.heard_at < self._stall_s:
            return True
        replica.heard_at = asked
        if await replica.client.alive(deadline_s=self._probe_s):
            replica.heard_at = trio.current_time()
            return True
        if replica.heard_at == asked:
            replica.heard_at = -math.inf
            return False
        return True  # a token came while it was asked


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
