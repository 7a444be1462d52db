"""Bounds of one episode and the meter that watches them. Knows neither environment nor engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.records import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """When an episode is truncated; None means that this environment sets no such bound (the run still does)."""

    turns: int | None = None
    tokens: int | None = None  # sampled tokens, as far as the driver reports them with `charge_tokens`
    seconds: float | None = None  # since reset, on the monotonic clock
    tool_seconds: float | None = None  # spent inside of tool calls, parallel ones added up

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds", "tool_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"limits.{name}", value, "give a number above 0, or leave it out")


class Meter:
    """What an episode has used so far."""

    def __init__(self, limits: EpisodeLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._started = clock()
        self.turns = 0
        self.tokens = 0
        self.tool_seconds = 0.0

    def exceeded(self) -> StopReason | None:
        """The first bound that is used up, None while there is room on all."""
        limits = self._limits
        if limits.turns is not None and self.turns >= limits.turns:
            return StopReason.TURN_LIMIT
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return StopReason.TOKEN_LIMIT
        if limits.seconds is not None and self._clock() - self._started >= limits.seconds:
            return StopReason.TIME_LIMIT
        if limits.tool_seconds is not None and self.tool_seconds >= limits.tool_seconds:
            return StopReason.TOOL_TIME_LIMIT
        return None

    def tool_seconds_left(self) -> float:
        """Seconds until `seconds` or `tool_seconds` runs out; infinity where neither is set."""
        limits, left = self._limits, float("inf")
        if limits.seconds is not None:
            left = min(left, limits.seconds - (self._clock() - self._started))
        if limits.tool_seconds is not None:
            left = min(left, limits.tool_seconds - self.tool_seconds)
        return max(0.0, left)
