"""What an environment answers, as its driver takes it: of the contract's shape, and such that a record can carry it.

An environment whose answer is not of the contract is named here, at the boundary that the answer crossed: no driver
has to guess what broke it later. Knows neither journal nor model; `agentrl.env.checker` looks closer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, cast

from agentrl.env import spaces
from agentrl.errors import EnvError
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages, Step, StopReason, Task

_MESSAGES: Final = spaces.Messages(sys.maxsize, sys.maxsize)  # how much is too much, the model's context says


async def start(env: AsyncEnv, task: Task) -> tuple[Messages, dict[str, Json]]:
    """Reset for a task: the first messages and the info. Raises EnvError for an answer that is none."""
    what = f"{task.env}: reset"
    observation, info = of_reset(await env.areset(seed=task.seed, options=dict(task.options)), what)
    return _messages(observation, f"{what}: observation"), _info(info, what)


async def act(env: AsyncEnv, action: str, task: Task) -> Step:
    """Step: what came of an action; numbers of numpy become Python's. Raises EnvError for an answer that is none."""
    what = f"{task.env}: step"
    observation, reward, terminated, truncated, info = of_step(await env.astep(action), what)
    return Step(
        observation=_messages(observation, f"{what}: observation"),
        reward=_number(reward, f"{what}: reward"),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_info(info, what),
    )


async def end(env: AsyncEnv, reason: StopReason, task: Task) -> dict[str, Json]:
    """The last info of an episode that its driver ends. Raises EnvError for what is none."""
    return _info(await env.aend(reason), f"{task.env}: end")


def of_reset(answer: Any, what: str) -> tuple[Any, ...]:
    """The two parts of a reset's answer. Raises EnvError."""
    return _parts(answer, what, "(messages, info)", 2)


def of_step(answer: Any, what: str) -> tuple[Any, ...]:
    """The five parts of a step's answer. Raises EnvError."""
    return _parts(answer, what, "(messages, reward, terminated, truncated, info)", 5)


def _parts(answer: Any, what: str, form: str, count: int) -> tuple[Any, ...]:
    if not isinstance(answer, tuple):
        raise EnvError(f"{what} returned a {type(answer).__name__}: return {form}")
    parts = cast("tuple[Any, ...]", answer)
    if len(parts) != count:
        raise EnvError(f"{what} returned {len(parts)} values: return {form}")
    return parts


def _messages(observation: Any, what: str) -> Messages:
    messages: Any = tuple(cast("list[Any]", observation)) if isinstance(observation, list) else observation
    if reason := _MESSAGES.why_not(messages):
        raise EnvError(f"{what}: {reason}")
    return messages


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{what} = {value!r}: give a finite number")
    return number


def _info(info: Any, what: str) -> dict[str, Json]:
    if not isinstance(info, dict):
        raise EnvError(f"{what}: info is a {type(info).__name__}, not a dict")
    given = cast("dict[str, Json]", info)
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"{what}: info is not JSON-safe: {error}") from error
    for name in ("outcome", "unsettled"):
        if given.get(name) is not None:
            _number(given[name], f"{what}: info[{name!r}]")
    outcomes: Any = given.get("outcomes") or {}
    if not isinstance(outcomes, Mapping):
        raise EnvError(f"{what}: info['outcomes'] = {outcomes!r}: give a number for each role")
    for role, outcome in cast("Mapping[str, Any]", outcomes).items():
        _number(outcome, f"{what}: info['outcomes'][{role!r}]")
    if given.get("history") is not None:
        _messages(given["history"], f"{what}: info['history']")
    return given
