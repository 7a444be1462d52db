"""One rollout worker: claims episodes from the run store, and runs as many side by side as its share allows.

It owns the leases of its episodes and the nursery they run in; it never talks to the learner and never knows a
weight or a task that nobody has admitted. When nothing may start, it waits until something is written to the store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import trio

from agentrl.config import Rollout
from agentrl.env import sync_async
from agentrl.errors import DiskFull, WornOut
from agentrl.host.disk_space import wait_for_space
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.drain import HandedBack
from agentrl.rollout.episode import play
from agentrl.store import TRAIN, Claim, LeaseLost
from agentrl.store.episodes.endings import FAILURES
from agentrl.store.interfaces import RolloutStore
from agentrl.store.run_values import PHASE

_LOOK_S = 1.0  # a worker looks so often for expired leases, which no write signals
_DISK_S = 1.0  # between two tries to renew leases on a full disk
_AT_ONCE = 16  # episodes that start before the loop's other tasks run again


@dataclass(slots=True)
class Worker:
    """Runs episodes until `stop` is set in the store, or it has to `leave`, by the settings of `context`. `ahead` is
    the most groups, of those that are not trained, that it plays at (None: all that were admitted). `now` is the wall
    clock of its leases; `sharing` is the number of workers that share `rollout.max_running`, if it is not that of the
    settings. `on_end` gets the id of each episode that ended here, `ended` counts them, `failed` those that
    infrastructure ended."""

    name: str
    store: RolloutStore
    context: RolloutContext
    ahead: int | None = None
    now: Callable[[], float] = time.time
    sharing: int | None = None
    on_end: Callable[[int], None] = lambda _: None
    ended: int = 0
    failed: int = 0
    _running: dict[int, Claim] = field(default_factory=dict[int, Claim])
    _scopes: dict[int, trio.CancelScope] = field(default_factory=dict[int, trio.CancelScope])
    _idle: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the wait for work
    _ended: trio.Event = field(default_factory=trio.Event)

    @property
    def capacity(self) -> int:
        """Episodes this worker runs at once: its share of `rollout.max_running`."""
        return math.ceil(self.context.settings.max_running / (self.sharing or self.context.settings.workers))

    def leave(self) -> None:
        """Have `run` hand its episodes back and return: others go on with them at once, from the tokens they have."""
        self.context.gate.break_off()
        self._idle.cancel()

    def pause(self, *, now: bool) -> None:
        """Begin neither an episode nor a turn until `go_on`; with `now` turns under way stop, too, and keep their
        tokens. Leases are kept."""
        self.context.gate.pause(now=now)

    def retune(self, settings: Rollout, ahead: int | None) -> None:
        """Episodes that begin from now on have these settings; more or fewer at once than before."""
        self.context, self.ahead = replace(self.context, settings=settings), ahead
        self._idle.cancel()

    @property
    def paused(self) -> bool:
        return self.context.gate.paused

    def go_on(self) -> None:
        """End a pause."""
        self.context.gate.go_on()
        self._idle.cancel()

    async def run(self) -> None:
        """Claim and play until the store's phase is `stop`, or `leave` was called. Raises StoreError when the journal
        stays unwritable, and WornOut once environments hang in half of its threads. A worker that leaves or is worn out
        hands its episodes back first."""
        is_worn_out = is_leaving = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_leases)
            while await PHASE.awaited(self.store.meta) != "stop":
                self._idle = trio.CancelScope()  # a place that frees from here on ends the wait, also before it begins
                # A thread that runs an author's blocking code cannot be ended from outside. Once half of them hang, the
                # process has to go; its episodes are handed back first, so that none of them counts a death.
                is_worn_out, is_leaving = sync_async.worn_out(), self.context.gate.leaving
                if is_worn_out or is_leaving:
                    await self._end_turns()
                    break
                if not await self._fill(nursery):
                    with self._idle:
                        await self.store.wait_for_work("rollout", _LOOK_S)
            nursery.cancel_scope.cancel()
        handed_back = await self.store.hand_back(self.name) if is_worn_out or is_leaving else 0
        if is_worn_out:
            raise WornOut(
                f"{self.name}: environments hang in half of its threads; {handed_back} episodes go on elsewhere"
            )

    async def _end_turns(self) -> None:
        """Have every episode stop before its next turn. Steps under way end first, by their own deadlines at the
        latest: an episode whose environment hangs fails here, and cannot hang another worker."""
        self.context.gate.leave()
        # Three step deadlines: a step under way, its judging and its closing may each take one. What is still running
        # then is cut off with the process, and goes on elsewhere by its lease.
        with trio.move_on_after(3 * self.context.settings.step_deadline_s):
            while self._running:
                self._ended = trio.Event()
                await self._ended.wait()

    async def _fill(self, nursery: trio.Nursery) -> bool:
        """Start some of the episodes that may start, so that those that run are not kept waiting; returns whether any
        did."""
        if self.context.pinned is None:
            new_claims = await self._claimed(len(self._running), None)
        else:  # evaluation has engines of its own, and takes no place of training
            evaluating = sum(new_claim.purpose != TRAIN for new_claim in self._running.values())
            new_claims = await self._claimed(evaluating, True)
            new_claims += await self._claimed(len(self._running) - evaluating, False)
        for new_claim in new_claims:
            if new_claim.episode_id in self._scopes:  # we lost it, and claim it again before we noticed
                self._scopes[new_claim.episode_id].cancel()
            self._running[new_claim.episode_id] = new_claim
            nursery.start_soon(self._play, new_claim)
        return bool(new_claims)

    async def _claimed(self, running: int, evaluation: bool | None) -> list[Claim]:
        """Claims for the places that `running` episodes leave: of evaluations alone, of training alone, or of both."""
        # A few at a time: each start makes an environment, often in synchronous code, and a hundred in a row would hold
        # up the streams and the deadlines of all episodes that run.
        free_places = min(self.capacity - running, _AT_ONCE)
        if free_places <= 0 or self.paused:
            await trio.lowlevel.checkpoint()
            return []
        claim_options = {} if evaluation is None else {"evaluation": evaluation}
        try:
            return await self.store.claim(
                self.name,
                free_places,
                lease_s=self.context.settings.lease_s,
                now=self.now(),
                ahead=self.ahead,
                **claim_options,
            )
        except DiskFull:  # the next look tries again
            return []

    async def _play(self, claim: Claim) -> None:
        try:
            with trio.CancelScope() as episode_scope:
                self._scopes[claim.episode_id] = episode_scope
                stop_cause = await play(claim, self.context)
                self.ended += 1
                self.failed += stop_cause.stop_reason in FAILURES
                self.on_end(claim.episode_id)
        except HandedBack:
            pass  # it goes on elsewhere once this worker has left
        except LeaseLost:
            pass  # another worker has it, or its group expired: nothing of it is ours to write
        finally:
            if self._running.get(claim.episode_id) is claim:
                del self._running[claim.episode_id]
                self._scopes.pop(claim.episode_id, None)
            self._idle.cancel()
            self._ended.set()

    async def _keep_leases(self) -> None:
        """Renew at a third of the lease; an episode whose lease was lost is cancelled."""
        lease_s = self.context.settings.lease_s
        while True:
            # A third: two renewals may fail, or one come late by a third of the lease, before anybody else may claim.
            await trio.sleep(lease_s / 3)
            held_claims = dict(self._running)  # claims that come meanwhile are not among those renewed
            renewed_ids = await wait_for_space(  # nobody else can claim on a full disk either
                lambda: self.store.renew(self.name, lease_s=lease_s, now=self.now()),
                every_s=min(lease_s / 3, _DISK_S),
            )
            for episode_id, held_claim in held_claims.items():
                episode_scope = self._scopes.get(episode_id)
                # Compared by identity: this worker may have lost the episode and claimed it anew while the renewal was
                # under way, and must not cancel the new claim for the old one's sake.
                if (
                    episode_id not in renewed_ids
                    and self._running.get(episode_id) is held_claim
                    and episode_scope is not None
                ):
                    episode_scope.cancel()
