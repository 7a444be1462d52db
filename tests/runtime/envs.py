"""Environments that the run tests name by file: quick, replayable, and one that fails."""

from __future__ import annotations

from typing import Any

import trio

import agentrl
from agentrl.records import Message


class Vowels(agentrl.Env):
    """Three turns; the outcome is the share of vowels in what was written: any policy can learn it a little."""

    blocking = False
    replayable = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._texts: list[str] = []
        return (Message(role="user", content=f"task {seed}"),), {}

    def step(self, action: str) -> Any:
        self._texts.append(action)
        if len(self._texts) < 3:
            return (Message(role="user", content="more"),), 0.0, False, False, {}
        written = "".join(self._texts)
        outcome = sum(c in "aeiou" for c in written) / max(len(written), 1)
        return (), 0.0, True, False, {"outcome": outcome, "success": outcome > 0.2}


class Raising(Vowels):
    """Its step raises, as a bug in a user's code does."""

    def step(self, action: str) -> Any:
        raise KeyError("no such tool")


class Hanging(Vowels):
    """Its reset never returns."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await trio.sleep_forever()


def length_reward(trajectory: Any) -> float:
    """A reward function that a user passes to Trainer."""
    return float(sum(len(turn.text) for turn in trajectory.turns))
