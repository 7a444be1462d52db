"""Checks the answers of an environment: they must have the contract's shape, and a record must be able to carry them.

If an answer breaks the contract, the environment is named here, at the boundary that the answer crossed: no driver has
to guess later what broke it. Here alone gymnasium's `info` is read; from here on its keys with a meaning are fields
of `records.Step`. Knows neither journal nor model; `agentrl.env.checks.check_env` looks closer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentrl.env import spaces
from agentrl.env.image_parts import with_images
from agentrl.errors import EnvError
from agentrl.protocols import AsyncEnv
from agentrl.records import LARGEST, Json, Messages, Step, StopReason, Task

_LEAST: Final = 64  # bytes that a message counts for beside its content
# The model's context says how long is too long.
_MESSAGES: Final = spaces.Messages(sys.maxsize, sys.maxsize, max_images=spaces.MOST_IMAGES)


async def start(env: AsyncEnv, task: Task, most: int | None = None) -> Step:
    """Reset for a task: what comes of it, in messages of at most about `most` bytes. Raises EnvError for an answer that
    breaks the contract."""
    call_name = f"{task.env}: reset"
    observation, reset_info = of_reset(await env.areset(seed=task.seed, options=dict(task.options)), call_name)
    return _step(call_name, observation, reset_info, most)


async def act(env: AsyncEnv, action: str, task: Task, most: int | None = None, turn: int | None = None) -> Step:
    """Step: what came of an action, in messages of at most about `most` bytes; numbers of numpy become Python's.
    Raises EnvError for an answer that breaks the contract; it names the `turn`."""
    call_name = f"{task.env}: step" if turn is None else f"{task.env}: step of turn {turn}"
    observation, reward, terminated, truncated, step_info = of_step(await env.astep(action), call_name)
    return _step(call_name, observation, step_info, most, reward, terminated, truncated)


async def end(env: AsyncEnv, reason: StopReason, task: Task) -> Step:
    """The environment's last result for an episode that its driver ends, without messages. Raises EnvError for a value
    that is no step result."""
    return _step(f"{task.env}: end", (), await env.aend(reason), None)


def joined(step: Step, last: Step) -> Step:
    """`step`, and over it the environment's answer when the episode was ended after it."""
    return replace(
        step,
        # `None` asks for an outcome, `or` for a reason or a table: an outcome of 0.0 and a success of False are
        # answers, and the common `last.outcome or step.outcome` would let the older one show through them.
        outcome=step.outcome if last.outcome is None else last.outcome,
        success=step.success if last.success is None else last.success,
        stop_reason=last.stop_reason or step.stop_reason,
        outcomes=last.outcomes or step.outcomes,
        rewards=last.rewards or step.rewards,
        masked=last.masked or step.masked,
        info={**step.info, **last.info},
    )


def of_reset(answer: Any, what: str) -> tuple[Any, ...]:
    """The two parts of a reset's answer. Raises EnvError."""
    return _parts(answer, what, "(messages, info)", 2)


def of_step(answer: Any, what: str) -> tuple[Any, ...]:
    """The five parts of a step's answer. Raises EnvError."""
    return _parts(answer, what, "(messages, reward, terminated, truncated, info)", 5)


def _parts(answer: Any, what: str, form: str, count: int) -> tuple[Any, ...]:
    if not isinstance(answer, tuple):
        raise EnvError(f"{what} returned a {type(answer).__name__}: return {form}")
    answer_parts = cast("tuple[Any, ...]", answer)
    if len(answer_parts) != count:
        raise EnvError(f"{what} returned {len(answer_parts)} values: return {form}")
    return answer_parts


def _messages(observation: Any, what: str) -> Messages:
    message_tuple: Any = tuple(cast("list[Any]", observation)) if isinstance(observation, list) else observation
    if reason := _MESSAGES.why_not(message_tuple):
        raise EnvError(f"{what}: {reason}")
    return message_tuple


def _step(
    what: str,
    observation: Any,
    info: Any,
    most: int | None,
    reward: Any = 0.0,
    terminated: Any = False,
    truncated: Any = False,
) -> Step:
    """A step from an environment's answer: what a run acts on as fields, the rest of the info as it is. Messages of
    more than `most` bytes lose their middle."""

    def named(name: str) -> str:
        return f"{what}: info[{name!r}]"

    if not isinstance(info, dict):
        raise EnvError(f"{what}: info is a {type(info).__name__}, not a dict")
    info_fields = dict(cast("dict[str, Any]", info))
    earned_reward = _number(reward, f"{what}: reward")
    observation, lost_bytes = _cut(_read(observation, f"{what}: observation"), most)
    # Numbers, tables and the JSON check below cost more than all the rest of a short step, and most steps of most
    # environments say nothing in their info.
    if not info_fields:  # most often
        return Step(
            observation=_messages(observation, f"{what}: observation"),
            reward=earned_reward,
            terminated=bool(terminated),
            truncated=bool(truncated),
            observation_cut=lost_bytes,
        )
    # Numbers leave the info before it is tried as JSON: an environment may hand over a scalar (float32 of numpy), which
    # `json.dumps` refuses and `_number` turns into a float. Only what has no meaning here must be JSON as it stands.
    outcome, unsettled = info_fields.pop("outcome", None), info_fields.pop("unsettled", None) or 0.0
    rewards, outcomes = info_fields.pop("rewards", None), info_fields.pop("outcomes", None)
    number_fields: dict[str, Any] = {
        "reward": earned_reward,
        "outcome": None if outcome is None else _number(outcome, named("outcome")),
        "rewards": _by_role(rewards, named("rewards")),
        "outcomes": _by_role(outcomes, named("outcomes")),
        "unsettled": _number(unsettled, named("unsettled")),
    }
    other_info = _plain(info_fields, what)
    history, lost_of_history = _cut(_read(other_info.pop("history", None), named("history")), most)
    # An environment that wraps another, or replays a recorded step, may hand these on. Left in, they would read like
    # statements of this driver about this step.
    for driver_key in ("observation_cut", "compaction"):  # the driver's to say
        other_info.pop(driver_key, None)
    continues = other_info.pop("continues", None)
    success, acting_role = other_info.pop("success", None), other_info.pop("role", None)
    return Step(
        observation=_messages(observation, f"{what}: observation"),
        terminated=bool(terminated),
        truncated=bool(truncated),
        success=None if success is None else bool(success),
        stop_reason=_reason(other_info.pop("stop_reason", None), named("stop_reason")),
        history=None if history is None else _messages(history, named("history")),
        continues=None if continues is None else int(_number(continues, named("continues"))),
        masked=bool(other_info.pop("masked", False)),
        role=None if acting_role is None else _text(acting_role, named("role")),
        observation_cut=lost_bytes + lost_of_history,
        info=other_info,
        **number_fields,
    )


def _read(messages: Any, what: str) -> Any:
    """Messages with their images beside their texts; a value that is no message is left as it is, for a check to find.
    Raises EnvError for a content of other parts."""
    if not isinstance(messages, list | tuple):
        return messages
    converted = list(cast("Sequence[Any]", messages))
    for message_index, message in enumerate(converted):
        try:
            converted[message_index] = (
                with_images(cast("dict[str, Any]", message)) if isinstance(message, dict) else message
            )
        except ValueError as content_error:
            raise EnvError(f"{what}: message {message_index}: {content_error}") from None
    return tuple(converted)


def _cut(messages: Any, most: int | None) -> tuple[Any, int]:
    """Messages of about `most` bytes, and how many they lost. Each may have an equal share, and what others leave of
    theirs; of more messages than could have a share, the last ones go. A value that is no message is left as it is, for
    a check to find."""
    listed_messages = list(cast("Sequence[Any]", messages)) if isinstance(messages, list | tuple) else []
    message_sizes = [_size(message) for message in listed_messages]
    if most is None or sum(message_sizes) <= most:
        return cast(Any, messages), 0
    # The shares go from the smallest message to the largest: whoever needs less than an equal share leaves the rest to
    # the larger ones. Cutting each to `most / n` instead would shorten one long tool result beside many short ones
    # although the sum had room for it.
    remaining = listed_messages[: max(1, most // _LEAST)]
    bytes_left, limit_by_index = most, dict[int, int]()
    for share_index, message_index in enumerate(
        sorted(range(len(remaining)), key=lambda number: message_sizes[number])
    ):
        limit_by_index[message_index] = min(message_sizes[message_index], bytes_left // (len(remaining) - share_index))
        bytes_left -= limit_by_index[message_index]
    cut_messages = [
        _shortened(message, message_sizes[message_index], limit_by_index[message_index])
        for message_index, message in enumerate(remaining)
    ]
    return tuple(cut_messages), sum(message_sizes) - sum(limit_by_index.values())


def _size(message: Any) -> int:
    content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
    return _LEAST + (len(content.encode("utf-8", "surrogatepass")) if isinstance(content, str) else 0)


def _shortened(message: Any, size: int, limit: int) -> Any:
    """The message with head and tail of its content, and a note between them."""
    if size <= limit:
        return message
    # Head and tail both: a program's error stands at the end of its output and the command's echo at the start.
    # `errors="ignore"` drops the half of a character that a cut between bytes leaves at either edge.
    content_bytes = message["content"].encode("utf-8", "surrogatepass")
    half_size = max(0, limit - _LEAST) // 2
    head_text = content_bytes[:half_size].decode(errors="ignore")
    tail_text = content_bytes[len(content_bytes) - half_size :].decode(errors="ignore")
    cut_note = f"[cut: {2 * half_size} of {len(content_bytes)} bytes shown]"
    return {**message, "content": f"{head_text}\n{cut_note}\n{tail_text}"}


def _number(value: Any, what: str) -> float:
    try:
        float_value = float(value)
    # `float` of a Python integer above 1e308 raises, and the message must not print the number: its digits may be a
    # million.
    except OverflowError:  # of an integer
        raise EnvError(f"{what}: give a number within {LARGEST:g} of 0") from None
    except (TypeError, ValueError):
        float_value = math.nan
    if not math.isfinite(float_value):
        raise EnvError(f"{what} = {value!r}: give a finite number")
    if abs(float_value) > LARGEST:
        raise EnvError(f"{what} = {float_value:g}: give a number within {LARGEST:g} of 0")
    return float_value


def _reason(value: Any, what: str) -> StopReason | None:
    if value is None:
        return None
    if value not in list(StopReason):
        raise EnvError(f"{what} = {value!r}: give one of {', '.join(StopReason)}")
    return StopReason(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{what} = {value!r}: give a text")
    return value


def _by_role(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values or {}, Mapping):
        raise EnvError(f"{what} = {values!r}: give a number for each role")
    value_by_role = cast("Mapping[str, Any]", values or {})
    return {
        str(role_name): _number(role_value, f"{what}[{role_name!r}]") for role_name, role_value in value_by_role.items()
    }


def _plain(info: dict[str, Json], what: str) -> dict[str, Json]:
    """An info. Raises EnvError for what JSON cannot carry."""
    if info:
        try:
            json.dumps(info, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as json_error:
            raise EnvError(f"{what}: info is not JSON-safe: {json_error}") from json_error
    return info
