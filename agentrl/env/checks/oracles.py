"""Oracles: scripted policies whose outcome is known beforehand, by which an environment's tasks are validated.

An environment offers them by a method `oracles()` that is called right after a reset: a gold policy that must get 1,
one that does nothing and must get 0, and whatever else its author knows to be right or wrong. Never imported by
training.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import trio

from agentrl.env import sync_async
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages

TURNS = 200  # of an episode; an oracle that needs more has lost its way


@dataclass(frozen=True, slots=True)
class Oracle:
    """`policy` maps what it reads next (the first messages, then each answer) to what it writes; it may be async.
    An episode that it plays must end with `outcome`. One that `cheats` attacks the tests or the task: it shows that the
    environment is sound, and is no demonstration for a model to learn from."""

    name: str
    outcome: float
    policy: Callable[[Messages], str | Awaitable[str]]
    cheats: bool = False


@runtime_checkable
class HasOracles(Protocol):
    """An environment that can be validated. Its oracles are those of the episode just reset."""

    def oracles(self) -> Sequence[Oracle]: ...


@runtime_checkable
class HasTasks(Protocol):
    """An environment whose seeds choose among `task_count` tasks of a set. `bad_tasks` are the parts of the set that
    make no task, each with its id or place (`task`) and its `reason`."""

    task_count: int
    bad_tasks: Sequence[UnplayableTask]


class UnplayableTask(Protocol):
    """A part of a set that makes no task."""

    @property
    def task(self) -> str: ...
    @property
    def reason(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The result of an oracle's episode: the outcome it must get, and the one it got (None: the environment set none).
    `info` is the last step's, `task` what the reset's info calls the task, `answers` what the oracle read of each
    action. `last_step_s` are the seconds of the last step, which grades."""

    name: str
    expected: float
    got: float | None
    turns: int
    task: str = ""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    answers: tuple[str, ...] = ()
    last_step_s: float = 0.0

    @property
    def holds(self) -> bool:
        return self.got == self.expected


async def judge(make: Callable[[], AsyncEnv], seed: int) -> list[OracleResult]:
    """Play every oracle of the task of `seed`, each in an environment of its own; nothing if there are none."""
    verdicts: list[OracleResult] = []
    oracle_index = 0
    # A fresh environment for each oracle, reset to the same seed: oracles close over the episode that was reset, and
    # what one has done to its box must not help or hinder the next.
    while True:
        oracle_env = make()
        try:
            messages, reset_info = await oracle_env.areset(seed=seed)
            episode_oracles = oracle_env.oracles() if isinstance(oracle_env, HasOracles) else ()
            if oracle_index >= len(episode_oracles):
                return verdicts
            verdicts.append(
                await play(oracle_env, episode_oracles[oracle_index], messages, str(reset_info.get("task", "")))
            )
        finally:
            await oracle_env.aclose()
        oracle_index += 1


async def play(env: AsyncEnv, oracle: Oracle, messages: Messages, task: str = "") -> OracleResult:
    """Play an oracle of the episode that was just reset, to its end; `messages` are what the reset gave."""
    turn_count, is_episode_over, answer_texts, step_began_s = 0, False, list[str](), 0.0
    step_info: Mapping[str, Json] = {}
    while not is_episode_over and turn_count < TURNS:
        action_text = await sync_async.call(oracle.policy, messages, blocking=False)
        step_began_s = trio.current_time()
        messages, _, terminated, truncated, step_info = await env.astep(action_text)
        turn_count, is_episode_over = turn_count + 1, terminated or truncated
        answer_texts += [str(answer_message.get("content") or "") for answer_message in messages]
    last_step_s, final_outcome = trio.current_time() - step_began_s, outcome_of(step_info)
    return OracleResult(
        oracle.name, oracle.outcome, final_outcome, turn_count, task, dict(step_info), tuple(answer_texts), last_step_s
    )


def outcome_of(info: Mapping[str, Json]) -> float | None:
    """The outcome that an info has, None where it has none."""
    raw_outcome: Any = info.get("outcome")
    return None if raw_outcome is None else float(raw_outcome)


def say(text: str) -> Callable[[Messages], str]:
    """A policy that writes the same whatever it reads: to do nothing, say."""
    return lambda messages: text


def script(*texts: str) -> Callable[[Messages], str]:
    """A policy that writes one text after the other, and the last one again from then on."""
    remaining_texts = list(texts)
    return lambda messages: remaining_texts.pop(0) if len(remaining_texts) > 1 else remaining_texts[0]
