"""Environments and reward functions that fail, each in a way of its own, as those of users do."""

from __future__ import annotations

from typing import Any

import trio

import agentrl
from agentrl.errors import EnvError
from agentrl.records import Message


class Fine(agentrl.Env):
    """One question, one answer: the longer, the better."""

    blocking = False
    replayable = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed or 0
        return (Message(role="user", content=f"task {seed}"),), {}

    def step(self, action: str) -> Any:
        return (), 0.0, True, False, {"outcome": min(len(action), 20) / 20, "success": len(action) > 10}


class SomeTasksRaise(Fine):
    """The tasks of three seeds of twenty are broken: their step looks up what is not there."""

    def step(self, action: str) -> Any:
        if self.seed % 20 in (3, 4, 5):
            return {"known": 1}["missing"]
        return super().step(action)


class HalfRaises(Fine):
    def step(self, action: str) -> Any:
        if self.seed % 2:
            raise ValueError("an odd task")
        return super().step(action)


class ResetRaises(Fine):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise FileNotFoundError("tasks/17.json")


class StepRaises(Fine):
    def step(self, action: str) -> Any:
        return {"known": 1}["missing"]


class StepHangs(Fine):
    async def astep(self, action: str) -> Any:
        await trio.sleep_forever()


class AnswersNone(Fine):
    def step(self, action: str) -> Any:
        return None


class OutcomeIsNan(Fine):
    def step(self, action: str) -> Any:
        return (), 0.0, True, False, {"outcome": float("nan")}


class LaterResetRaises(Fine):
    """All but the first task."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed:
            raise FileNotFoundError(f"tasks/{seed}.json")
        return super().reset(seed=seed)


class HostIsDown(Fine):
    def step(self, action: str) -> Any:
        raise EnvError("the game server at 10.0.0.7 does not answer: start it")


class LongPrompt(Fine):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return (Message(role="user", content="word " * 3000),), {}


class ToolRaises(agentrl.ToolEnv):
    """Whatever is written calls a tool whose code has a bug."""

    blocking = False

    def prompt(self, task: Any) -> str:
        return "look"

    @agentrl.tool
    async def look(self) -> str:
        """Look it up."""
        return {"known": "1"}["missing"]

    async def astep(self, action: str) -> Any:
        return await super().astep('<tool_call>{"name": "look", "arguments": {}}</tool_call>')

    def grade(self) -> float:
        return 0.0


def raising_reward(trajectory: Any) -> float:
    return 1.0 / len(trajectory.turns[0].text[:0])


def row_reward(prompt: Any, completion: str, row: Any) -> float:
    return float(len(completion))
