"""Bounds of one episode, the meter that watches them, the cost of broken calls. Knows no environment, no engine."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeGuard, TypeVar

from agentrl.errors import ConfigError
from agentrl.host.clocks import CallDeadlines, watch
from agentrl.records import Json, StopReason

T = TypeVar("T")
Fault = Literal["structural", "content"]


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, infinity among them: neither a truth value nor NaN."""
    # `True` is an int in Python, and `turns = true` in a run file would be a limit of one turn.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_penalty(value: object) -> bool:
    return _is_number(value) and 0 <= value < inf


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def finite(field: str, value: object) -> float:
    """The value, a finite number. Raises ConfigError."""
    if not (_is_number(value) and -inf < value < inf):
        raise ConfigError(field, value, "give a finite number")
    return value


def positive_seconds(field: str, value: object) -> float:
    """The value, a time. Raises ConfigError."""
    if not (_is_number(value) and 0 < value < inf):
        raise ConfigError(field, value, "give a number of seconds above 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """When an episode is truncated; None means that this environment sets no such bound (the run still does)."""

    turns: int | None = None
    tokens: int | None = None  # sampled tokens, as far as the driver reports them with `charge_tokens`
    seconds: float | None = None  # of its steps; what model and host took is not in them
    tool_seconds: float | None = None  # spent inside of tool calls, parallel ones added up

    def __post_init__(self) -> None:
        for limit_name in ("turns", "tokens", "seconds", "tool_seconds"):
            limit_value = getattr(self, limit_name)
            if limit_value is not None and not (_is_number(limit_value) and limit_value > 0):
                raise ConfigError(f"limits.{limit_name}", limit_value, "give a number above 0, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsePolicy:
    """The cost of a turn with a broken call. *Structural*: the envelope is broken, or there is no call where one is
    due. *Content*: it is sound, but names an unknown tool or arguments that do not fit.

    `*_retries`: turns with such a failure in a row that the model may correct; one more ends the episode with
    `PARSE_FAILURE`; None leaves that to the other limits. `*_penalty`: taken off the turn's process reward.
    `mask_*`: the turn is marked (`info["masked"]`) to be left out of the loss."""

    structural_retries: int | None = None
    content_retries: int | None = None
    structural_penalty: float = 0.0
    content_penalty: float = 0.0
    mask_structural: bool = False
    mask_content: bool = False

    def __post_init__(self) -> None:
        for fault_kind in ("structural", "content"):
            for setting_name, is_sound, correction in (
                (f"{fault_kind}_retries", _is_count, "give a whole number from 0 on, or leave it out"),
                (f"{fault_kind}_penalty", _is_penalty, "give a finite number from 0 on: it is taken off the reward"),
                (f"mask_{fault_kind}", _is_truth, "give true or false"),
            ):
                if not is_sound(setting_value := getattr(self, setting_name)):
                    raise ConfigError(f"parse_policy.{setting_name}", setting_value, correction)

    def retries(self, fault: Fault) -> int | None:
        return self.structural_retries if fault == "structural" else self.content_retries

    def penalty(self, fault: Fault) -> float:
        return self.structural_penalty if fault == "structural" else self.content_penalty

    def masks(self, fault: Fault) -> bool:
        return self.mask_structural if fault == "structural" else self.mask_content


class FaultCount:
    """Counts the turns in a row of an episode that had a broken call, and charges each by the `policy`."""

    def __init__(self, policy: ParsePolicy) -> None:
        self._policy = policy
        self._in_a_row: dict[Fault, int] = {"structural": 0, "content": 0}

    def charge(self, faults: Collection[Fault], reward: float, info: dict[str, Json]) -> float:
        """Count the kinds of broken calls of one turn. Returns its `reward` less their penalties, and marks the turn
        in its `info`."""
        for fault_kind in self._in_a_row:
            # Counted in a row: a model that makes a mistake now and then may go on, one that cannot stop making it
            # ends.
            if fault_kind not in faults:
                self._in_a_row[fault_kind] = 0
                continue
            self._in_a_row[fault_kind] += 1
            reward -= self._policy.penalty(fault_kind)
            info.setdefault("parse_failure", fault_kind)
            if self._policy.masks(fault_kind):
                info["masked"] = True
        return reward

    @property
    def exhausted(self) -> bool:
        """Whether the broken calls have used up the retries of their kind."""
        counts_and_retries = (
            (turn_count, self._policy.retries(fault_kind)) for fault_kind, turn_count in self._in_a_row.items()
        )
        return any(retries is not None and turn_count > retries for turn_count, retries in counts_and_retries)


class Meter:
    """Counts what an episode has used so far."""

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._before_s = 0.0
        self._step: CallDeadlines | None = None
        self.turns = 0
        self.tokens = 0
        self.tool_seconds = 0.0

    @contextmanager
    def step(self) -> Generator[None]:
        """Time a step of the episode."""
        with watch() as self._step:
            try:
                yield
            finally:
                self._before_s, self._step = self.seconds, None

    @property
    def used(self) -> tuple[float, float, float]:
        """Tokens, seconds and tool seconds so far, for `resume` of another instance."""
        return float(self.tokens), self.seconds, self.tool_seconds

    def resume(self, tokens: float, seconds: float, tool_seconds: float) -> None:
        """Go on from where another meter stood."""
        self.tokens, self._before_s, self.tool_seconds = int(tokens), seconds, tool_seconds

    @property
    def seconds(self) -> float:
        """The seconds that its steps have taken."""
        return self._before_s + (self._step.seconds if self._step is not None else 0.0)

    def exceeded(self) -> StopReason | None:
        """The first bound that is used up, None while there is room on all."""
        episode_limits = self._limits
        # In a fixed order, so that an episode that reaches two bounds in one turn ends for the same reason in a replay.
        if episode_limits.turns is not None and self.turns >= episode_limits.turns:
            return StopReason.TURN_LIMIT
        if episode_limits.tokens is not None and self.tokens >= episode_limits.tokens:
            return StopReason.TOKEN_LIMIT
        if episode_limits.seconds is not None and self.seconds >= episode_limits.seconds:
            return StopReason.TIME_LIMIT
        if episode_limits.tool_seconds is not None and self.tool_seconds >= episode_limits.tool_seconds:
            return StopReason.TOOL_TIME_LIMIT
        return None

    def tool_seconds_left(self) -> float:
        """Seconds until `seconds` or `tool_seconds` runs out; infinity where neither is set."""
        episode_limits, seconds_left = self._limits, float("inf")
        if episode_limits.seconds is not None:
            seconds_left = min(seconds_left, episode_limits.seconds - self.seconds)
        if episode_limits.tool_seconds is not None:
            seconds_left = min(seconds_left, episode_limits.tool_seconds - self.tool_seconds)
        return max(0.0, seconds_left)


def settings_as(kind: type[T], field: str, value: Any) -> T:
    """`value` as a `kind`, also where it comes as a table. Raises ConfigError."""
    if isinstance(value, kind):
        return value
    try:
        return kind(**value)
    except TypeError as field_error:
        field_names = ", ".join(inspect.signature(kind).parameters)
        raise ConfigError(field, value, f"give fields of {kind.__name__} ({field_names})") from field_error
