"""The choice of the replica for a turn's next attempt, and the wait for one if none is ready.

The turns of a session go to the replica that has its prefix, unless that replica is much busier than another. Asks no
engine itself.
"""

from __future__ import annotations

import trio

from agentrl.engine.router.health import Health
from agentrl.engine.router.replica import Homes, Replica, ReplicaState
from agentrl.engine.router.turn_request import TurnRequest
from agentrl.errors import EngineTimeout


class Choice:
    """Chooses replicas. All waiting of a turn for engines is bounded by `outage_deadline_s`."""

    def __init__(self, health: Health, homes: Homes, *, outage_deadline_s: float) -> None:
        self._health, self._homes, self._outage_deadline_s = health, homes, outage_deadline_s

    async def first(self, turn: TurnRequest) -> Replica:
        """The replica for the next attempt; waits for one if none is ready. Raises EngineTimeout; EngineRefusal if all
        that are ready refuse the request."""
        started_at = trio.current_time()
        # The deadline belongs to the turn and not to this wait: waits at several engines add up in `waited_s`, or a
        # flapping fleet could hold a turn for ever (law 4).
        with trio.move_on_at(started_at + self._outage_deadline_s - turn.waited_s):
            while True:
                ready_replicas = self.ready(turn)
                replicas_with_room = [replica for replica in ready_replicas if replica.room > 0]
                if replicas_with_room:
                    turn.waited_s += trio.current_time() - started_at
                    return self._homes.choose(turn.request.session, replicas_with_room)
                if not ready_replicas and turn.refusals:  # no other replica is left to try
                    raise next(iter(turn.refusals.values()))
                # Ready engines without room only have to finish something. Without any ready one, whoever waits asks
                # the broken ones: a fleet works without a background task too.
                await (self._health.changed.wait() if ready_replicas else self._health.ask_next())
        raise self._too_late(turn)

    def second(self, turn: TurnRequest, first: Replica) -> Replica | None:
        """A second replica, beside `first`, that may race for a turn's first token; None if no other has room."""
        other_replicas = [
            replica
            for replica in self.ready(turn)
            # A replica that failed last time is on probation with one request, and that one should not be a race's.
            if replica is not first and replica.room > 0 and not replica.failures
        ]
        return min(other_replicas, key=lambda replica: replica.running, default=None)

    def move(self, session: str, replica: Replica) -> None:
        """Note that the prefix of a session is at `replica` now."""
        self._homes.move(session, replica)

    def ready(self, turn: TurnRequest) -> list[Replica]:
        """The replicas that may take a turn: those that are ready and have not refused it."""
        return [
            replica
            for replica in self._health.replicas
            if replica.state is ReplicaState.READY and replica.client.url not in turn.refusals
        ]

    def check_time(self, turn: TurnRequest) -> None:
        """Raise EngineTimeout if a turn has waited for engines as long as it may."""
        if turn.waited_s >= self._outage_deadline_s:
            raise self._too_late(turn)

    def _too_late(self, turn: TurnRequest) -> EngineTimeout:
        replica_states = [
            f"{replica.client.url} is {replica.state}" + (f" ({replica.trouble})" if replica.trouble else "")
            for replica in self._health.replicas
        ]
        return EngineTimeout(
            f"{turn.request.request_id!r} waited {self._outage_deadline_s:g} s for its engines, as long as a turn may "
            f"(engine.outage_deadline_s), and has {len(turn.received)} tokens: {', '.join(replica_states)}"
        )
