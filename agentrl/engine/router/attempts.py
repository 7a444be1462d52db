"""One attempt at a turn: chunks from one replica, or from two until one brings the first token.

Names whose fault a failure is. A replica that fails a request is broken. A request that a replica refuses is offered to
one other: if that takes it, the first is broken. A request that several replicas accepted and then failed is abandoned:
it may be the cause. Chooses no replica.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import trio

from agentrl.engine.router.choice import Choice
from agentrl.engine.router.health import Health
from agentrl.engine.router.hedging import Hedges, race
from agentrl.engine.router.replica import Replica, ReplicaState, Wait
from agentrl.engine.router.turn_request import TurnRequest
from agentrl.errors import EngineBroke, EngineError, EngineRefusal, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk

Knows = Callable[[int], Awaitable[bool]]
"""Whether the run made a weight version."""

Chunks = AsyncGenerator[tuple[Replica, Chunk], None]
"""Chunks, each with the replica that it comes from."""


async def check_version(chunk: Chunk, url: str, knows: Knows) -> None:
    """Raises EngineBroke if tokens of a chunk come from weights that the run never made, EngineError if tokens before
    it do, which the turn has already."""
    for span in chunk.spans:
        if not await knows(span.version):
            # As in `EngineClient._heard`: tokens that the turn has already cannot be taken back, so it ends; new ones
            # are left out, and it goes on.
            error_type = EngineBroke if span.start >= 0 else EngineError
            question = "does another run send it weights? Each run needs engines of its own (engine.urls)"
            raise error_type(f"{url} samples from version {span.version}, which this run never made: {question}")


# Why a broken turn goes on elsewhere, and who is blamed for it.
#
# A turn of some thousand tokens may take minutes, so an engine that dies in the middle of it must not cost what it has
# sampled. Sampling the turn anew would be simpler. It would also prefer short turns: a long one meets a death more
# often, and what is sampled again has another length. So the tokens that came stay (law 1), the next engine gets the
# prompt with them behind it, and each token keeps the log-probability and the version of the weights that made it.
#
# Whose fault a failure is cannot be seen from one attempt. An engine that breaks off may be ill, or the request may
# have killed it. The answer decides what happens to the episode: the policy must not be able to turn its own failure
# into one of the infrastructure (law 3), and one ill engine must not end healthy episodes. So three outcomes differ:
#
#   taken and failed     The engine is broken and leaves the fleet until it answers again. The turn goes on at another.
#                        After `max_faults` such failures the turn is abandoned: it may be the cause.
#   refused (400, 422)   The engine says that the request is at fault. One other engine gets it. If it refuses too,
#                        the request is at fault. If it takes the request, the first engine was, and is broken.
#   gone or silent       Nobody took the request, so it cannot be at fault. The engine leaves the fleet, and the wait
#                        counts against `outage_deadline_s`, never against the turn.
#
# Silence is not death: a long prefill, a queue and a pause for new weights are silent as well. A silent engine is
# probed before it counts as broken (`health.py`), and no wait is longer than half of the deadline, so that
# one engine that hangs leaves time to try another. `tests/engine/test_failover.py` has a case for each line above.
class Attempts:
    """Makes attempts at turns. A wait at one silent replica is bounded by half of `outage_deadline_s`. `knows` says
    whether the run made a weight version; None: it made all."""

    def __init__(
        self,
        health: Health,
        choice: Choice,
        hedges: Hedges,
        *,
        knows: Knows | None,
        outage_deadline_s: float,
        max_faults: int,
    ) -> None:
        self._health, self._choice, self._hedges, self._knows = health, choice, hedges, knows
        self._outage_deadline_s, self._max_faults = outage_deadline_s, max_faults

    def at(self, replica: Replica, turn: TurnRequest, wait: Wait) -> Chunks:
        """The chunks of an attempt at `replica`, or at a second one if that brings the first token sooner. They end
        early, without an error, if the turn should go on elsewhere."""
        attempt = self._hedged if self._hedges.on else self._single
        return attempt(replica, turn, wait)

    async def _hedged(self, replica: Replica, turn: TurnRequest, wait: Wait) -> Chunks:
        hedges, began_at, waited_s, second_count = self._hedges, trio.current_time(), turn.waited_s, 0

        def second() -> Chunks | None:
            nonlocal second_count
            other_replica = self._choice.second(turn, replica)
            if other_replica is None or not hedges.allows(sum(replica.running for replica in self._health.replicas)):
                return None
            second_count = 1
            # Counted when it is opened, and not when it answers: the bound of `allows` is one of load.
            hedges.opened, hedges.running = hedges.opened + 1, hedges.running + 1
            second_wait = Wait(watchers=wait.watchers)
            if wait.watchers is not None:
                wait.watchers.start_soon(self._health.watch, second_wait)
            return self._single(other_replica, turn, second_wait)

        def answers(item: tuple[Replica, Chunk]) -> bool:
            # An abort is no answer. An engine that ends every request at once would otherwise win every race.
            return bool(item[1].token_ids) or item[1].finish not in (None, "abort")

        first_stream = self._single(replica, turn, wait)
        try:
            winning_stream = await race(first_stream, second, wait_s=hedges.wait_s, answers=answers)
        finally:
            hedges.running -= second_count
            turn.waited_s = waited_s + trio.current_time() - began_at  # once, however many waited
        if winning_stream is None:
            return
        chunks, replica_chunk = winning_stream
        if chunks is not first_stream:
            hedges.won += 1
            self._choice.move(turn.request.session, replica_chunk[0])
        async with aclosing(chunks):
            yield replica_chunk
            async for replica_chunk in chunks:
                yield replica_chunk

    async def _single(self, replica: Replica, turn: TurnRequest, wait: Wait) -> Chunks:
        """Yield the chunks of one attempt at `replica`, each with that replica. A fault of the replica is noted, and
        ends the chunks early without an error: the turn goes on elsewhere. Raises EngineError where another attempt
        would not help: the request itself is refused or fails too often, or the tokens so far are wrong."""
        replica.running += 1
        began_at = trio.current_time()
        is_sampling = False  # whether a token of this attempt has come
        try:
            async with aclosing(replica.client.stream(turn.rest())) as chunks:
                while True:
                    chunk = await self._next(chunks, replica, turn, wait, sampling=is_sampling)
                    if chunk is None:
                        return
                    if self._knows is not None and turn.request.version is None:  # else the turn is a past self's
                        await check_version(chunk, replica.client.url, self._knows)
                    if chunk.token_ids and not is_sampling:
                        is_sampling = True
                        self._hedges.took(trio.current_time() - began_at)
                        # With the first token, and not with the first chunk: an engine that accepts and then refuses
                        # inside the stream has sampled nothing, and proves nothing about those that refused.
                        self._blame_refusers(turn)
                    yield replica, chunk
                    # Somebody aborts requests there, a restart in order say. It leaves the fleet for `retry_s`,
                    # doubled each time, so that a turn does not come back to it in a tight loop
                    # (`test_an_engine_that_aborts_at_once_is_asked_ever_more_rarely`).
                    if chunk.finish == "abort":
                        self._health.broke(replica, "it aborts")
                    if chunk.finish is not None:
                        return
        except EngineRefusal as refused:
            if turn.received:
                self._failed(replica, turn, refused)  # another engine took it
            else:
                turn.refusals[replica.client.url] = refused
                # Two engines of two minds cannot both be ill by chance. Offered to the whole fleet, a broken request
                # would go through every engine of it
                # (`test_a_request_that_two_engines_refuse_is_refused_and_tours_no_fleet`).
                if len(turn.refusals) > 1 or not self._choice.ready(turn):
                    raise
        except EngineBroke as broke:
            self._failed(replica, turn, broke)
        except (EngineUnavailable, EngineTimeout) as gone:
            self._health.broke(replica, str(gone))
        except EngineError as wrong:  # the tokens that the turn has are no good
            self._health.broke(replica, str(wrong))
            raise
        finally:
            replica.running -= 1
            self._health.announce()

    async def _next(
        self, chunks: AsyncGenerator[Chunk, None], replica: Replica, turn: TurnRequest, wait: Wait, *, sampling: bool
    ) -> Chunk | None:
        """The next chunk; None if the replica hangs, is drained, or has no time left."""
        wait.replica, wait.since, wait.asleep_s = replica, trio.current_time(), 0.0
        # Half: an engine that hangs without a word uses up half of the deadline at most, and another one has the
        # rest.
        allowed_s = min(self._outage_deadline_s - turn.waited_s, self._outage_deadline_s / 2)
        # Each wait has its own scope, cancelled when its replica hangs or is drained.
        wait.scope = trio.CancelScope(deadline=wait.since + allowed_s)
        replica.waits.add(wait)
        chunk: Chunk | None = None
        try:
            with wait.scope:
                chunk = await anext(chunks, None)
        finally:
            replica.waits.discard(wait)
            wait.replica = None
        gap_s = trio.current_time() - wait.since
        # Time before the first token is queue and prefill, which are the engines'. Counted to the turn, a busy fleet
        # would cut long turns short and score them as if the policy had been slow (law 3).
        spent_s = replica.pace.sampling(gap_s) if sampling and chunk is not None else 0.0
        turn.spent_s += spent_s
        # Never below 0: a sleep is measured by asking, at other moments than the gap.
        turn.waited_s += max(0.0, gap_s - spent_s - wait.asleep_s)
        if chunk is not None:
            self._health.heard(replica, token=bool(chunk.token_ids))
        elif replica.state is not ReplicaState.DRAINING:
            self._failed(replica, turn, EngineBroke(f"{replica.client.url} fell silent"))
        return chunk

    def _failed(self, replica: Replica, turn: TurnRequest, why: EngineError) -> None:
        """A replica took a request and failed it: the replica's fault, or the request's if other replicas fail too."""
        self._health.broke(replica, str(why))
        turn.faults += 1
        if turn.faults >= self._max_faults:
            request_id = turn.request.request_id
            raise EngineBroke(f"{request_id!r} was taken and failed {turn.faults} times; the last time: {why}") from why

    def _blame_refusers(self, turn: TurnRequest) -> None:
        """Note that another replica took a request: a replica that refused it is at fault, and the request is not."""
        for replica in self._health.replicas:
            if (refusal := turn.refusals.pop(replica.client.url, None)) is not None:
                self._health.broke(replica, str(refusal))
