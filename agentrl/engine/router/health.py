"""The states of a fleet's replicas, and the checks that change them.

    READY ──failure──► BROKEN ──answers, serves the newest version──► READY
      │                   └──answers, older weights──► STALE ──refit──► READY
      └──drain──► DRAINING ──undrain──► BROKEN, until it answers

A silent replica is probed before it counts as broken: a long prefill, a queue and a pause are silent too. A broken one
is probed again after `retry_s`, doubled with every failure up to `retry_max_s`. Knows no tokens, and chooses no
replica.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.replica import Replica, ReplicaState, Wait
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable

_ASK_S: Final = 5.0  # deadline for a broken replica's answer; it is probed again later
_MUTE: Final = "it does not answer"


class Health:
    """The replicas of a fleet and their states. `fits` says whether a weight version may be sampled from; without it
    none may be older than the newest seen."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        fits: Callable[[int], Awaitable[bool]] | None,
        stall_s: float,
        probe_s: float,
        retry_s: float,
        retry_max_s: float,
        sleeps: bool,
    ) -> None:
        self.replicas = list(replicas)
        self.fits = fits or self._is_newest
        self.changed = trio.Event()
        """Set, and replaced, once a replica may take a request that it could not take before."""
        self._stall_s, self._probe_s, self._sleeps = stall_s, probe_s, sleeps
        self._retry_s, self._retry_max_s = retry_s, retry_max_s
        self._newest = max(replica.serves for replica in replicas)

    def replica(self, url: str) -> Replica:
        """The replica at a URL. Raises ValueError if there is none."""
        for replica in self.replicas:
            if replica.client.url == url.rstrip("/"):
                return replica
        raise ValueError(f"no replica at {url!r}")

    # --- what others saw

    def announce(self) -> None:
        """Wake all that wait for a change."""
        # Replaced and not cleared (trio's events have no `clear`): a waiter that wakes late holds the old one, which
        # stays set, so that no change is lost.
        self.changed.set()
        self.changed = trio.Event()

    def saw_version(self, replica: Replica, version: int) -> None:
        """Note that a replica sampled tokens under a weight version."""
        replica.serves, self._newest = version, max(self._newest, version)

    def refitted(self, replica: Replica, version: int) -> None:
        """Note that a replica took a weight version: a stale one is ready again."""
        replica.client.version = version
        self.saw_version(replica, version)
        if replica.state is ReplicaState.STALE:
            replica.state = ReplicaState.READY
            self.announce()

    def heard(self, replica: Replica, *, token: bool) -> None:
        """Note that a replica sent a chunk. One that failed before has proved itself with a `token`."""
        replica.heard_at = trio.current_time()
        if replica.failures and token:
            replica.failures = 0
            self.announce()

    def broke(self, replica: Replica, trouble: str) -> None:
        """Note a failure of a ready replica; it counts as one failure, however many turns it hit."""
        # A hundred turns that an engine's death hits at once would double its `retry_s` a hundred times.
        if replica.state is ReplicaState.READY:
            self._put_off(replica, trouble)

    def _put_off(self, replica: Replica, trouble: str) -> None:
        replica.state, replica.trouble = ReplicaState.BROKEN, trouble
        wait_s = min(self._retry_s * 2**replica.failures, self._retry_max_s)
        # Bounded, since 2**failures is computed before `retry_max_s` cuts it.
        replica.failures = min(replica.failures + 1, 16)
        replica.retry_at = trio.current_time() + wait_s

    async def _is_newest(self, version: int) -> bool:
        return version >= self._newest

    # --- broken replicas

    async def ask(self, replica: Replica) -> None:
        """Ask whether a replica is back, and with which weights."""
        trouble, served_version = _MUTE, None
        try:
            if await replica.client.alive(deadline_s=min(_ASK_S, self._probe_s)):
                served_version = await replica.client.served_version()
        except EngineError as error:
            trouble = str(error)
        serves_right_weights = served_version is not None and await self.fits(served_version)
        # An operator's word holds, also where it came while the engine was being asked.
        if replica.state is ReplicaState.DRAINING:
            return
        if served_version is None:
            self._put_off(replica, trouble)
            return
        replica.serves = served_version
        if serves_right_weights:
            replica.state, replica.trouble = ReplicaState.READY, ""
            self.announce()
        else:
            replica.state, replica.trouble = ReplicaState.STALE, f"it serves version {served_version}"

    async def ask_next(self) -> None:
        """Ask the broken replica that is due first, or wait until another task changes a replica's state."""
        changed = self.changed
        broken_replicas = [
            replica for replica in self.replicas if replica.state in (ReplicaState.BROKEN, ReplicaState.STALE)
        ]
        if not broken_replicas:
            await changed.wait()
            return
        first_due = min(broken_replicas, key=lambda replica: replica.retry_at)
        with trio.move_on_at(first_due.retry_at):
            await changed.wait()
            return
        if first_due.state in (ReplicaState.BROKEN, ReplicaState.STALE):
            first_due.retry_at = trio.current_time() + self._retry_s  # others wait while this one asks
            await self.ask(first_due)

    # --- checks beside the turns

    async def look_after(self, replica: Replica, rule: Aimd | None, period_s: float) -> None:
        """Check a replica as long as it is one of the fleet's; with `rule`, adapt its limit to its metrics."""
        while replica in self.replicas:
            if replica.state is ReplicaState.READY:
                if not await self._lives(replica):
                    self.broke(replica, _MUTE)
                elif not await self.fits(replica.serves):  # it may have missed newer weights
                    await self.ask(replica)
                elif rule is not None:
                    await self._limit(replica, rule)
            elif replica.state is not ReplicaState.DRAINING and trio.current_time() >= replica.retry_at:
                await self.ask(replica)
            self.announce()
            await trio.sleep(period_s)

    async def _limit(self, replica: Replica, rule: Aimd) -> None:
        try:
            replica.limit = rule.look(await replica.client.metrics(), replica.running)
        except (EngineUnavailable, EngineTimeout):
            replica.heard_at = -math.inf  # the next look asks whether it lives
        except EngineError:
            return  # it has no metrics

    async def watch(self, wait: Wait) -> None:
        """While a turn waits long at a replica, ask again and again whether the replica lives; leave it if not."""
        while True:
            waiting_since = wait.since if wait.replica is not None else trio.current_time()
            await trio.sleep_until(waiting_since + self._stall_s)
            replica = wait.replica
            if replica is None or wait.since != waiting_since:
                continue
            if await self._lives(replica):
                # Alive and silent: a long prefill, a queue, or a pause. Of these only a sleep is taken off the clock,
                # since it is the run's own learner that has the GPU.
                await self._forgive(wait, replica)
                await trio.sleep(self._stall_s)
                continue
            self.broke(replica, _MUTE)
            for other_wait in list(replica.waits):
                # Requests that began to wait later have not been silent as long: they are judged by a look of their
                # own.
                if other_wait.since <= waiting_since:
                    other_wait.scope.cancel()

    async def _forgive(self, wait: Wait, replica: Replica) -> None:
        """Do not count a wait until now in which the replica sleeps."""
        waiting_since = wait.since
        with suppress(EngineError):
            # `since` again after the await: the chunk may have come meanwhile, and another wait has begun in the same
            # object.
            if self._sleeps and await replica.client.paused(deadline_s=self._probe_s) and wait.since == waiting_since:
                slept_s = trio.current_time() - waiting_since
                wait.scope.deadline += slept_s - wait.asleep_s
                wait.asleep_s = slept_s

    async def _lives(self, replica: Replica) -> bool:
        """Whether a replica lives: it showed so recently, or it answers now. Others assume so until then."""
        checked_at = trio.current_time()
        if checked_at - replica.heard_at < self._stall_s:
            return True
        # Set before the probe, so that the other turns waiting here take it for alive and do not probe as well:
        # `test_an_engine_that_answers_is_not_asked_by_each_turn`.
        replica.heard_at = checked_at
        if await replica.client.alive(deadline_s=self._probe_s):
            replica.heard_at = trio.current_time()
            return True
        if replica.heard_at == checked_at:
            replica.heard_at = -math.inf
            return False
        return True  # a token came while it was probed
