"""Alarms: a step's measures against the thresholds of `[alarms]`, and what an alarm does.

Owns which measures are watched, and the lag bound while alarms lower it. Never knows the store, nor how a run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.sections import Action, Alarms, Watched

WATCHED: dict[Watched, tuple[str, str, str]] = {
    "mismatch": ("mismatch_mean", "above", "nats between engine and learner on fresh tokens"),
    "ess": ("ess", "below", "effective sample size over sample size"),
    "kl": ("kl_k3", "above", "KL behaviour to learner, in nats per token"),
    "entropy": ("entropy", "below", "entropy of the policy, in nats"),
    "clip": ("clip_fraction", "above", "share of clipped tokens"),
}
"""By alarm: the metric of the step, the side of the threshold that is wrong, and what the metric is."""

_NUMBERS = ("loss", "grad_norm", *(metric for metric, _, _ in WATCHED.values()))


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm: its name, its action, and one line on measure, value and threshold."""

    name: Watched
    action: Action
    text: str


def raised(row: Mapping[str, Any], alarms: Alarms) -> list[Raised]:
    """The alarms of a step by its metrics. A metric that the step does not have raises none."""
    thresholds: dict[Watched, float | None] = {
        "mismatch": alarms.mismatch_above,
        "ess": alarms.ess_below,
        "kl": alarms.kl_above,
        "entropy": alarms.entropy_below,
        "clip": alarms.clip_above,
    }
    found: list[Raised] = []
    for name, (metric, side, meaning) in WATCHED.items():
        value, threshold = row.get(metric), thresholds[name]
        if value is None or threshold is None or not math.isfinite(value):
            continue
        if value > threshold if side == "above" else value < threshold:
            text = f"{metric} = {value:.4g} ({meaning}) is {side} alarms.{name}_{side} = {threshold:g}"
            found.append(Raised(name, alarms.action(name), text))
    if skipped := row.get("skipped_updates"):
        text = f"skipped_updates = {skipped}: their gradient was not finite"
        found.append(Raised("non_finite", alarms.action("non_finite"), text))
    routing: Mapping[str, Any] | None = row.get("routing")
    if routing is not None and (missing := routing["missing"]):
        text = f"routing.missing = {missing}: tokens without journaled experts, whose experts the learner chose itself"
        found.append(Raised("routing", alarms.action("routing"), text))
    for metric in _NUMBERS:
        value = row.get(metric)
        if value is not None and not math.isfinite(value):
            found.append(Raised("non_finite", alarms.action("non_finite"), f"{metric} = {value} is not finite"))
    return found


def advice(alarms: Sequence[Raised], path: object) -> str:
    """One line for a run that alarms ended: why, and what to type next."""
    said = "; ".join(alarm.text for alarm in alarms)
    typed = " ".join(f"--set alarms.actions.{name}=warn" for name in dict.fromkeys(alarm.name for alarm in alarms))
    return f"{said}: the run is saved; to go on with a warning only, agentrl train --resume {path} {typed}"


@dataclass(slots=True)
class LagBound:
    """The lag bound in force: `full`, or half of it at each alarm that lowers it, down to 0. After
    `calm_steps` steps without such an alarm it rises to `full` again."""

    full: int
    calm_steps: int
    now: int
    calm: int = 0

    def after(self, alarms: Sequence[Raised]) -> int:
        """The bound for the next step, after a step with these alarms."""
        if any(alarm.action == "lower_lag" for alarm in alarms):
            self.now, self.calm = self.now // 2, 0
        elif self.now < self.full:
            self.calm += 1
            if self.calm >= self.calm_steps:
                self.now, self.calm = self.full, 0
        return self.now
