"""What an environment answers, as its driver takes it: of the contract's shape, and such that a record can carry it.

An environment whose answer is not of the contract is named here, at the boundary that the answer crossed: no driver
has to guess what broke it later. Knows neither journal nor model; `agentrl.env.checker` looks closer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.env import spaces
from agentrl.errors import EnvError
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages, Step, StopReason, Task

_LEAST: Final = 64  # bytes that a message counts for beside its content
_MESSAGES: Final = spaces.Messages(sys.maxsize, sys.maxsize)  # how much is too much, the model's context says


async def start(env: AsyncEnv, task: Task, most: int | None = None) -> tuple[Messages, dict[str, Json]]:
    """Reset for a task: the first messages, of at most about `most` bytes, and the info. Raises EnvError for an answer
    that is none."""
    what = f"{task.env}: reset"
    observation, info = of_reset(await env.areset(seed=task.seed, options=dict(task.options)), what)
    observation, info = _bounded(observation, info, most)
    return _messages(observation, f"{what}: observation"), _info(info, what)


async def act(env: AsyncEnv, action: str, task: Task, most: int | None = None) -> Step:
    """Step: what came of an action, in messages of at most about `most` bytes; numbers of numpy become Python's.
    Raises EnvError for an answer that is none."""
    what = f"{task.env}: step"
    observation, reward, terminated, truncated, info = of_step(await env.astep(action), what)
    observation, info = _bounded(observation, info, most)
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


def _bounded(observation: Any, info: Any, most: int | None) -> tuple[Any, Any]:
    """Both with what is too much cut out, and `info["observation_cut"]` the bytes that were. What is no message is left
    as it is, for a check to find."""
    if most is None:
        return observation, info
    observation, lost = _cut(observation, most)
    given: Any = dict(cast("dict[str, Json]", info)) if isinstance(info, dict) else info
    if isinstance(info, dict) and "history" in given:
        given["history"], more = _cut(given["history"], most)
        lost += more
    if isinstance(info, dict) and lost:
        given["observation_cut"] = lost
    return observation, given


def _cut(messages: Any, most: int) -> tuple[Any, int]:
    """Messages of about `most` bytes, and how many they lost. Each may have an equal share, and what others leave of
    theirs; of more messages than could have a share, the last ones go."""
    given = list(cast("Sequence[Any]", messages)) if isinstance(messages, list | tuple) else []
    sizes = [_size(message) for message in given]
    if sum(sizes) <= most:
        return cast(Any, messages), 0
    kept = given[: max(1, most // _LEAST)]
    left, limits = most, dict[int, int]()
    for place, at in enumerate(sorted(range(len(kept)), key=lambda at: sizes[at])):
        limits[at] = min(sizes[at], left // (len(kept) - place))
        left -= limits[at]
    cut = [_shortened(message, sizes[at], limits[at]) for at, message in enumerate(kept)]
    return tuple(cut), sum(sizes) - sum(limits.values())


def _size(message: Any) -> int:
    content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
    return _LEAST + (len(content.encode("utf-8", "surrogatepass")) if isinstance(content, str) else 0)


def _shortened(message: Any, size: int, limit: int) -> Any:
    """The message with head and tail of its content, and a note between them."""
    if size <= limit:
        return message
    content = message["content"].encode("utf-8", "surrogatepass")
    half = max(0, limit - _LEAST) // 2
    head, tail = content[:half].decode(errors="ignore"), content[len(content) - half :].decode(errors="ignore")
    return {**message, "content": f"{head}\n[cut: {2 * half} of {len(content)} bytes shown]\n{tail}"}


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
