"""Whether a run learns: if its last steps changed no weight, the likely cause and advice.

Reads the rows that the learner records of its steps. Never knows the store, nor how the result is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

PATIENCE = 3
"""Steps in a row without an update after which a run in progress says so: one is nothing unusual."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """The last `steps` steps changed no weight. `cause` is the reason by their rows, `advice` the remedy to try."""

    steps: int
    cause: str
    advice: str

    def __str__(self) -> str:
        count = "in the last step" if self.steps == 1 else f"in the last {self.steps} steps"
        when = f" {count}" if self.steps else ", as no step was trained"
        return f"nothing learned{when}: {self.cause}. Try: {self.advice}"


def moved(row: Mapping[str, Any]) -> bool:
    """Whether the step changed the weights."""
    return bool(row["updated"] and row["grad_norm"])


def no_signal(rows: Sequence[Mapping[str, Any]], patience: int = PATIENCE, *, skipped: int = 0) -> NoSignal | None:
    """The finding for a run with these rows, the newest last; None if one of the last `patience` steps changed the
    weights, or there are fewer steps. A run without a step may have `skipped` all its groups."""
    if not rows and skipped:
        advice = "tasks that are sometimes solved, a larger rollout.group_size, or buffer.skip_without_signal = false"
        return NoSignal(0, f"in each of {skipped} groups all members earned the same", advice)
    idle = list(takewhile(lambda row: not moved(row), reversed(rows)))
    return NoSignal(len(idle), *_why(idle)) if idle and len(idle) >= patience else None


def _why(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The likely cause and a remedy; the most certain causes are checked first."""

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    episodes, groups = total("episodes"), total("group_count")
    if any(row["updated"] for row in rows):
        return "the gradient was zero although advantages were not", "check train.lr, algo.clip_low and algo.clip_high"
    if not episodes and total("episodes_left_out"):
        return (
            "every episode failed through no doing of the policy",
            "read what failed in the run's logs folder, and run agentrl doctor",
        )
    if not total("tokens_scored"):
        if total("tokens_stale"):
            return "every token was older than buffer.max_lag", "raise it, or lower rollout.max_running"
        return "no token was sampled by the policy", "agentrl play ENV shows what an episode looks like"
    if episodes <= groups:
        return (
            "no group had two episodes to compare",
            "read why episodes failed in the run's logs folder, or raise rollout.group_size",
        )
    lows, highs = ([row[name] for row in rows if row.get(name) is not None] for name in ("reward_min", "reward_max"))
    if not lows or min(lows) != max(highs):
        return (
            "episodes of one group always earned the same, only tasks differed",
            "raise rollout.group_size or rollout.temperature, or take tasks that are sometimes solved ([curriculum])",
        )
    successes = [row["success_mean"] for row in rows if row["success_mean"] is not None]
    if successes and min(successes) == 1:
        return "every episode succeeded", "take harder tasks: the model can do these"
    return (
        f"every episode earned the same, {lows[0]:g}",
        "agentrl validate ENV (does a right answer earn more?), agentrl play ENV (is it doable?), easier tasks, "
        "rewards on the way, a larger rollout.max_turns or rollout.max_tokens_per_turn, a stronger model",
    )
