"""The environment of the real run of simulate.md: actions whose work takes heavy-tailed times, or never ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import trio

import agentrl
from agentrl.host.clocks import policy_time
from agentrl.records import Message

SIGMA = 1.5
HANGS = 1 / 64  # of the episodes: their last wait ends at the deadline
TURNS = 2


class Waiting(agentrl.Env):
    """Two turns. What each action asks for takes a lognormal time of `mean_s / 2` seconds in the mean, and in one
    episode of 64 for ever. The outcome is the share of vowels in what was written."""

    blocking = False
    replayable = True

    def __init__(self, mean_s: float = 4.0) -> None:
        super().__init__()
        self._mean_s = mean_s

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._texts: list[str] = []
        self._chance = random.Random()  # not of the seed: siblings wait apart
        return (Message(role="user", content=f"task {seed}"),), {}

    async def astep(self, action: str) -> Any:
        self._texts.append(action)
        last = len(self._texts) == TURNS
        with policy_time():
            if last and self._chance.random() < HANGS:
                await trio.sleep_forever()
            await trio.sleep(self._mean_s / TURNS * self._chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))
        if not last:
            return (Message(role="tool", content="done"),), 0.0, False, False, {}
        text = "".join(self._texts)
        return (), 0.0, True, False, {"outcome": sum(letter in "aeiou" for letter in text) / max(1, len(text))}
