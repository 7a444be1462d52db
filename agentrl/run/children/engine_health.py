"""Watches one running engine: does it answer, and does it have the current weights?

Owns these checks and the deadline of an engine's silence. An engine of ours that hangs is killed, so that
`WatchedEngine` restarts it. An engine that answers but lacks the current weights gets them: it missed a delivery, or
somebody else restarted it. So does an engine that is paused although nobody sends it weights: a pause should last only
while its pusher holds the engine's lock, which ends with the pusher, and nothing may sample from half-loaded weights.
An engine that sleeps is paused: it sleeps on for as long as the learner that put it to sleep lives and goes on.
If weights go from memory to memory, the learner sends them. It never starts a process.

At random moments the canary of the current version runs again: weights that somebody else sent between two syncs, under
the version that the engine had, would be sampled from until the next one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.weight_lock import exclusive, name_of
from agentrl.errors import AgentRLError, EngineError, StoreAway, StoreError, WrongWeights
from agentrl.run.children.engine_process import ServedWeights, fit, go_on, halts, prove
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks
from agentrl.store.run_values import PAUSED

CANARY_EVERY_S = 20.0  # in the mean: the probe is compared again, at moments that nobody knows
_LOOK_S = 1.0  # time between two checks
_PAUSED_LOOK_S = 5.0  # the same while the run is paused: nobody samples, and each check is three requests
_CHANCE = random.SystemRandom()  # which nobody foretells


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class EngineWatch:
    """Watches the engine at `url`. `weights` gives the weights that it has to serve, None for a model that does not
    learn; `locks` is the folder of the engines' locks. `trouble` is why the engine did not get its weights. `chance`
    gives numbers from 0 to 1, `say` gets a line about what somebody else did to the engine."""

    url: str
    config: RunConfig
    looks: Looks[RunStore]
    weights: Callable[[], Awaitable[ServedWeights]] | None
    locks: Path
    trouble: str = ""
    chance: Callable[[], float] = _CHANCE.random
    say: Callable[[str], None] = _say

    async def run(self, hangs: Callable[[str], None] | None = None, lives: Callable[[], None] = lambda: None) -> None:
        """Watch for ever. `lives` is called at each answer, `hangs` when the engine has been silent for
        `engine.liveness_deadline_s`.

        Raises WrongWeights if the engine took its weights but computes with others."""
        deadline_s = self.config.engine.liveness_deadline_s
        async with aclosing(self.client()) as client:
            last_answer_s = trio.current_time()
            next_check_s = last_answer_s + self._pause_s()
            while True:
                await trio.sleep(await self._look_s())
                # One request may wait for as long as the engine may be silent at all. With a short deadline for each
                # look, an engine that is busy with a long prefill would be asked again and again and never get to
                # answer.
                remaining_s = last_answer_s + deadline_s - trio.current_time() if hangs is not None else deadline_s
                served_version = await _served(client, max(_LOOK_S, remaining_s))
                current_s = trio.current_time()
                if served_version is not None:
                    last_answer_s = current_s
                    lives()
                    with suppress(StoreAway):  # then nobody knows which weights are current
                        is_paused = await self._halted(client)
                        if is_paused:
                            pause_cause = "by somebody else, or by a push of this run that broke off"
                            self.say(f"agentrl: {self.url} was left paused, {pause_cause}: it is made to go on")
                        if not await self._fits(served_version) or (is_paused and halts(self.config)):
                            await self._fit(served_version)
                        elif is_paused:
                            await self._go_on(client)
                        else:
                            self.trouble = ""
                            if current_s >= next_check_s:
                                await self._check()
                                next_check_s = trio.current_time() + self._pause_s()
                elif hangs is not None and current_s - last_answer_s >= deadline_s:
                    hangs(f"did not answer for {deadline_s:g} s (engine.liveness_deadline_s)")
                    last_answer_s = current_s

    async def _look_s(self) -> float:
        """Seconds until the next check."""
        # Bounded: what a store that does not answer takes would count as the engine's silence.
        with suppress(StoreError), trio.move_on_after(_LOOK_S):
            if await self.looks(lambda store: PAUSED.of(store.meta)):
                # Most of the deadline is left to the request itself, as for a check of a run that goes on.
                return max(_LOOK_S, min(_PAUSED_LOOK_S, self.config.engine.liveness_deadline_s / 4))
        return _LOOK_S

    def client(self) -> EngineClient:
        engine_key = self.config.engine.key_of(self.url)
        if self.weights is not None and self.config.sends_adapters:
            return AdapterClient(self.url, current=always(None), api_key=engine_key, kind=self.config.engine.kind)
        return EngineClient(self.url, api_key=engine_key, kind=self.config.engine.kind)

    async def _fits(self, version: int) -> bool:
        """Whether an engine that serves `version` needs no weights. A newer version than the store's is being delivered
        just now."""
        if self.weights is None or self.config.syncs_memory:
            return True
        return await self.looks(
            lambda store: store.versions.knows_version(version) and version >= store.versions.current_version().version
        )

    async def _halted(self, client: EngineClient) -> bool:
        """Whether it is paused, and no pusher of this run is at work: such a pusher has its lock. An engine that takes
        weights from memory may stay paused until the learner sends them."""
        if self.config.syncs_memory:
            return False
        deadline_s = self.config.engine.admin_deadline_s
        try:
            if not await client.paused(deadline_s=deadline_s):
                return False
            # Asked again under the pusher's lock. A pause that was seen without it may be that of a push that has just
            # begun, and to resume such an engine would let it sample from half of the new weights.
            async with self._lock():
                return await client.paused(deadline_s=deadline_s)
        except EngineError:  # the next check decides
            return False

    def _lock(self) -> AbstractAsyncContextManager[None]:
        lock_name = name_of(self.url, colocated=self.config.engine.colocated)
        return exclusive(self.locks, lock_name, deadline_s=self.config.engine.admin_deadline_s)

    async def _go_on(self, client: EngineClient) -> None:
        try:
            async with self._lock():
                await go_on(client, deadline_s=self.config.engine.admin_deadline_s)
            self.trouble = ""
        except EngineError as error:  # it is tried again
            self.trouble = str(error)

    def _pause_s(self) -> float:
        """Until the next canary: half to one and a half times the mean, so that nobody knows when."""
        # At a fixed interval somebody who sends weights between two probes, by a script that runs every minute for
        # example, could always fall between them.
        return CANARY_EVERY_S * (0.5 + self.chance())

    async def _check(self) -> None:
        """Ask the canary again. Raises WrongWeights."""
        if self.weights is None or not self.config.engine.canary:
            return
        try:
            async with self._lock():
                served_weights = await self.weights()
                await prove(self.url, self.url, served_weights, self.config, after="was sent weights by somebody else")
        except WrongWeights:
            raise
        except AgentRLError:  # it is away, or has other weights by now
            return

    async def _fit(self, served: int) -> None:
        assert self.weights is not None
        try:
            is_unknown = not await self.looks(lambda store: store.versions.knows_version(served))
            await fit(self.url, self.url, self.weights, self.config, self.locks, self._fits, fresh=is_unknown)
            self.trouble = ""
        except WrongWeights:
            raise
        except AgentRLError as error:  # it is tried again
            self.trouble = str(error)


async def _served(client: EngineClient, deadline_s: float) -> int | None:
    """The version that it serves, None if the server or the engine behind it does not answer."""
    with trio.move_on_after(deadline_s):
        try:
            if not await client.alive(deadline_s=deadline_s):
                return None
            return await client.served_version(deadline_s=deadline_s)
        except EngineError:
            return None
    return None
