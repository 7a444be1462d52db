"""Oracles: scripted policies whose outcome is known beforehand, by which an environment's tasks are validated.

An environment offers them by a method `oracles()` that is asked right after a reset: a gold policy that must get 1, one
that does nothing and must get 0, and whatever else its author knows to be right or wrong. Never imported by training.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentrl.env import bridge
from agentrl.protocols import AsyncEnv
from agentrl.records import Messages

TURNS = 200  # of an episode; an oracle that needs more has lost its way


@dataclass(frozen=True, slots=True)
class Oracle:
    """`policy` maps what it reads next (the first messages, then each answer) to what it writes; it may be async.
    An episode that it plays must end with `outcome`."""

    name: str
    outcome: float
    policy: Callable[[Messages], str | Awaitable[str]]


@runtime_checkable
class HasOracles(Protocol):
    """An environment that can be validated. Its oracles are those of the episode just reset."""

    def oracles(self) -> Sequence[Oracle]: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an oracle's episode: the outcome it must get, and the one it got (None: none was given)."""

    name: str
    expected: float
    got: float | None
    turns: int

    @property
    def holds(self) -> bool:
        return self.got == self.expected


async def judge(make: Callable[[], AsyncEnv], seed: int) -> list[Verdict]:
    """Play every oracle of the task of `seed`, each in an environment of its own; nothing if there are none."""
    verdicts: list[Verdict] = []
    index = 0
    while True:
        env = make()
        try:
            messages, info = await env.areset(seed=seed)
            oracles = env.oracles() if isinstance(env, HasOracles) else ()
            if index >= len(oracles):
                return verdicts
            oracle, turns, over = oracles[index], 0, False
            while not over and turns < TURNS:
                text = await bridge.call(oracle.policy, messages, blocking=False)
                messages, _, terminated, truncated, info = await env.astep(text)
                turns, over = turns + 1, terminated or truncated
            got = info.get("outcome")
            verdicts.append(Verdict(oracle.name, oracle.outcome, None if got is None else float(got), turns))
        finally:
            await env.aclose()
        index += 1


def say(text: str) -> Callable[[Messages], str]:
    """A policy that writes the same whatever it reads: to do nothing, say."""
    return lambda messages: text


def script(*texts: str) -> Callable[[Messages], str]:
    """A policy that writes one text after the other, and the last one again from then on."""
    left = list(texts)
    return lambda messages: left.pop(0) if len(left) > 1 else left[0]
