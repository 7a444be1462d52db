"""Oracles: each plays an episode of its own, and what it got is said beside what it must get."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import trio

import agentrl
from agentrl.env.checks.oracles import Oracle, judge, say, script
from agentrl.records import Messages


class Echo(agentrl.Env):
    """Say the seed, in two halves: outcome 1."""

    blocking = False
    made = 0

    def __init__(self) -> None:
        Echo.made += 1
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._seed, self._said = str(seed), ""
        return ({"role": "user", "content": f"say {seed}"},), {}

    def step(self, action: str) -> Any:
        self._said += action
        over = len(self._said) >= len(self._seed)
        info = {"outcome": float(self._said == self._seed)} if over else {}
        return ({"role": "user", "content": "go on"},), 0.0, over, False, info

    def oracles(self) -> list[Oracle]:
        async def reads(messages: Messages) -> str:
            await trio.lowlevel.checkpoint()
            return messages[-1]["content"].removeprefix("say ")

        half = len(self._seed) // 2
        return [
            Oracle("gold", 1.0, script(self._seed[:half], self._seed[half:])),
            Oracle("reader", 1.0, reads),
            Oracle("wrongly trusted", 1.0, say("x" * 9)),
            Oracle("silent", 0.0, say("")),
        ]


async def test_every_oracle_is_judged_in_an_environment_of_its_own() -> None:
    Echo.made = 0
    verdicts = await judge(Echo, 4321)
    assert [astuple(verdict)[:4] for verdict in verdicts] == [
        ("gold", 1.0, 1.0, 2),
        ("reader", 1.0, 1.0, 1),
        ("wrongly trusted", 1.0, 0.0, 1),
        ("silent", 0.0, None, 200),
    ]
    assert [verdict.holds for verdict in verdicts] == [True, True, False, False]
    assert Echo.made == 5, "four, and the one that was asked for a fifth"


async def test_an_environment_without_oracles_has_no_verdicts() -> None:
    class Plain(agentrl.Env):
        blocking = False

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return (), {}

    assert await judge(Plain, 0) == []
