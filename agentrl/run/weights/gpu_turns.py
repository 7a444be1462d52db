"""The learner's turns on a GPU that it shares with the run's engines (`engine.colocated`).

    engines sample ─► begin: the lock, every engine sleeps, the learner comes ─► a step ─► end: the learner leaves
                 ▲                                                                                  │
                 └────────────── the publisher wakes the engines with new weights ◄── the lock ─────┘

Owns the order of a turn, its lock and what a turn costs. The lock is the kernel's: if the learner dies in its turn, or
is ended because it hangs, the supervisor's watch gets it and wakes the engines. An engine that cannot sleep now, since
it died or hangs, is tried again for as long as a restart takes; meanwhile the lock is free, so that it can be
restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from agentrl.config import EngineSettings
from agentrl.engine import sleep
from agentrl.engine.client import EngineClient
from agentrl.engine.sleep import Level
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.engine.weight_sync.weight_lock import WeightLock, hold, name_of
from agentrl.errors import EngineError
from agentrl.learner.optimizers.offload import Parking
from agentrl.run.learning.background import TorchThread

_RETRY_S = 1.0


class _Call(Protocol):
    async def __call__(self, client: EngineClient, /, *, deadline_s: float) -> None: ...


class Turns:
    """`parking` is the learner's, once it is there; it computes on the thread `torch`. `level` says how deep engines
    sleep if weights follow: at 2 they forget theirs. `waits` is called while a turn waits to begin. Between `begin` and
    `end` the learner may use the GPU."""

    def __init__(
        self, engine: EngineSettings, locks: Path, torch: TorchThread, waits: Callable[[], None], *, level: Level = 2
    ) -> None:
        self._settings, self._locks, self._torch, self._waits = engine, locks, torch, waits
        self._level: Level = level
        self._held: WeightLock | None = None
        self._began = 0.0
        self._cost: dict[str, float] = {}
        self.parking: Parking | None = None

    async def begin(self, urls: Callable[[], Sequence[str]], *, weights_follow: bool = True) -> None:
        """Have the engines sleep, and the learner come back. With `weights_follow` the engines get all weights, or an
        adapter, before they wake. Raises NotDelivered if they do not sleep within `engine.mending_deadline_s`."""
        turn_began_s = trio.current_time()
        deadline = turn_began_s + self._settings.mending_deadline_s
        while True:
            self._held = await self._hold()
            self._began = trio.current_time()
            try:
                # Only if weights follow may engines forget theirs: while a learner loads its model, nobody could give
                # them back.
                sleep_level = self._level if weights_follow else 1
                await self._each(await trio.to_thread.run_sync(urls), partial(sleep.sleep, level=sleep_level))
                break
            except EngineError as error:
                # Given back between two attempts: an engine that died can only be started again by somebody who gets
                # the lock.
                self._held.let_go()
                if trio.current_time() > deadline:
                    failure_text = f"the engines did not sleep within {self._settings.mending_deadline_s:g} s"
                    raise NotDelivered(f"{failure_text}, so the learner has no room: {error}") from error
            self._waits()
            await trio.sleep(_RETRY_S)
        asleep_at_s = trio.current_time()
        if self.parking is not None:
            await self._torch.run(self.parking.back)
        self._cost = {"turn_wait_s": self._began - turn_began_s, "sleep_s": asleep_at_s - self._began}
        self._cost["restore_s"] = trio.current_time() - asleep_at_s

    async def begin_leaving(self) -> None:
        """Have the learner leave the GPU beside its last work there."""
        if self.parking is not None:
            await self._torch.run(self.parking.begin)

    async def end(self) -> WeightLock:
        """Have the learner leave the GPU. The holder of the returned lock may wake the engines."""
        assert self._held is not None and self.parking is not None
        leave_began_s = trio.current_time()
        await self._torch.run(self.parking.leave)
        self._cost |= {"park_s": trio.current_time() - leave_began_s, "swap_bytes": self.parking.bytes}
        return self._held

    def cost(self) -> dict[str, float]:
        """Return the cost of the last turn, once the engines are awake: seconds until the lock was free, until the
        engines slept, the learner had come and had left; the bytes that it took with it; and how long the engines
        slept, in all."""
        return self._cost | {"asleep_s": trio.current_time() - self._began}

    async def without_weights(self, urls: Callable[[], Sequence[str]]) -> None:
        """End a turn after which the engines go on with the weights they have. An engine that does not wake is left to
        the supervisor's watch."""
        weight_lock = await self.end()
        try:
            with suppress(EngineError):
                await self._each(await trio.to_thread.run_sync(urls), sleep.wake)
        finally:
            weight_lock.let_go()

    async def give_up(self) -> None:
        """Have the learner leave, wherever its turn was: it is saved, and ends."""
        if self.parking is not None:
            await self._torch.run(self.parking.leave)

    async def _hold(self) -> WeightLock:
        settings = self._settings
        deadline_s = settings.start_deadline_s + settings.admin_deadline_s  # of an engine that starts, or is fitted
        lock_name = name_of("", colocated=True)
        take_lock = partial(hold, self._locks, lock_name, deadline_s=deadline_s, waits=self._waits)
        return await trio.to_thread.run_sync(take_lock)

    async def _each(self, urls: Sequence[str], call: _Call) -> None:
        for engine_url in urls:
            async with aclosing(
                EngineClient(engine_url, api_key=self._settings.key_of(engine_url), kind=self._settings.kind)
            ) as client:
                await call(client, deadline_s=self._settings.admin_deadline_s)
