"""Alarms: a step's measures against the thresholds of `[alarms]`, and what an alarm does.

Owns which measures are watched, and the lag bound while alarms lower it. If the last steps of a run changed no weight,
`no_signal` gives the likely cause and advice. Never knows the store, nor how a run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
    raised_alarms: list[Raised] = []
    for alarm_name, (metric, limit_side, meaning) in WATCHED.items():
        measured, threshold = row.get(metric), thresholds[alarm_name]
        # A value that is not finite raises no threshold alarm: comparisons with NaN are false on both sides, so it
        # would pass for healthy. The loop over `_NUMBERS` below names it as what it is.
        if measured is None or threshold is None or not math.isfinite(measured):
            continue
        if measured > threshold if limit_side == "above" else measured < threshold:
            limit_text = f"alarms.{alarm_name}_{limit_side} = {threshold:g}"
            alarm_text = f"{metric} = {measured:.4g} ({meaning}) is {limit_side} {limit_text}"
            raised_alarms.append(Raised(alarm_name, alarms.action(alarm_name), alarm_text))
    if skipped_updates := row.get("skipped_updates"):
        alarm_text = f"skipped_updates = {skipped_updates}: their gradient was not finite"
        raised_alarms.append(Raised("non_finite", alarms.action("non_finite"), alarm_text))
    routing: Mapping[str, Any] | None = row.get("routing")
    if routing is not None and (missing_count := routing["missing"]):
        missing_text = "tokens without journaled experts, whose experts the learner chose itself"
        alarm_text = f"routing.missing = {missing_count}: {missing_text}"
        raised_alarms.append(Raised("routing", alarms.action("routing"), alarm_text))
    for metric in _NUMBERS:
        measured = row.get(metric)
        if measured is not None and not math.isfinite(measured):
            raised_alarms.append(
                Raised("non_finite", alarms.action("non_finite"), f"{metric} = {measured} is not finite")
            )
    return raised_alarms


def advice(alarms: Sequence[Raised], path: object) -> str:
    """One line for a run that alarms ended: why, and what to type next."""
    problems = "; ".join(alarm.text for alarm in alarms)
    override_options = " ".join(
        f"--set alarms.actions.{alarm_name}=warn" for alarm_name in dict.fromkeys(alarm.name for alarm in alarms)
    )
    return (
        f"{problems}: the run is saved; to go on with a warning only, agentrl train --resume {path} {override_options}"
    )


CALM_STEPS = 10  # enough that a bound does not swing with the alarm that lowers it


@dataclass(slots=True)
class LagBound:
    """The lag bound in force: `full`, or half of it at each alarm that lowers it, down to 0. After
    `CALM_STEPS` steps without such an alarm it rises to `full` again."""

    full: int
    now: int
    calm: int = 0

    def resize(self, full: int) -> int:
        """Another bound of the settings; returns the bound in force, which may be a lowered one."""
        # A bound that an alarm has lowered stays lowered when its user changes the setting: the new number says how far
        # it may rise again, not that the alarm is over.
        self.now = full if self.now == self.full else min(self.now, full)
        self.full = full
        return self.now

    def after(self, alarms: Sequence[Raised]) -> int:
        """The bound for the next step, after a step with these alarms."""
        if any(alarm.action == "lower_lag" for alarm in alarms):
            # Halved at once and raised only after many calm steps. A bound that rose as quickly as it falls would
            # swing: a lower lag calms the measure, the bound rises, and the alarm comes back.
            self.now, self.calm = self.now // 2, 0
        elif self.now < self.full:
            self.calm += 1
            if self.calm >= CALM_STEPS:
                self.now, self.calm = self.full, 0
        return self.now


_NOISE = 1e-6  # by which equal rewards differ, as they are sums of floats
PATIENCE = 3
"""Steps in a row without an update after which a run in progress says so: one is nothing unusual."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """The last `steps` steps changed no weight. `cause` is the reason by their rows, `advice` the remedy to try."""

    steps: int
    cause: str
    advice: str

    def __str__(self) -> str:
        steps_text = "in the last step" if self.steps == 1 else f"in the last {self.steps} steps"
        when_text = f" {steps_text}" if self.steps else ", as no step was trained"
        return f"nothing learned{when_text}: {self.cause}. Try: {self.advice}"


def moved(row: Mapping[str, Any]) -> bool:
    """Whether the step changed the weights."""
    return bool(row["updated"] and row["grad_norm"])


def no_signal(rows: Sequence[Mapping[str, Any]], patience: int = PATIENCE, *, skipped: int = 0) -> NoSignal | None:
    """The finding for a run with these rows, the newest last; None if one of the last `patience` steps changed the
    weights, or there are fewer steps. A run without a step may have `skipped` all its groups."""
    if not rows and skipped:
        advice = "tasks that are sometimes solved, a larger rollout.group_size, or buffer.skip_without_signal = false"
        return NoSignal(0, f"in each of {skipped} groups all members earned the same", advice)
    idle_rows = list(takewhile(lambda row: not moved(row), reversed(rows)))
    return NoSignal(len(idle_rows), *_why(idle_rows)) if idle_rows and len(idle_rows) >= patience else None


def _why(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The likely cause and a remedy; the most certain causes are checked first."""

    def total(name: str) -> int:
        return sum(step_row[name] for step_row in rows)

    episode_count, group_count = total("episodes"), total("group_count")
    # The order of these cases is the point: each is a cause of the ones below it. Without scored tokens there is
    # nothing to compare, with one episode a group there are no siblings, and so on; the first that holds is the one to
    # fix.
    if any(step_row["updated"] for step_row in rows):
        return "the gradient was zero although advantages were not", "check train.lr, algo.clip_low and algo.clip_high"
    if not episode_count and total("episodes_left_out"):
        return (
            "every episode failed through no doing of the policy",
            "read what failed in the run's logs folder, and run agentrl doctor",
        )
    if not total("tokens_scored"):
        if total("tokens_stale"):
            return "every token was older than buffer.max_lag", "raise it, or lower rollout.max_running"
        return "no token was sampled by the policy", "agentrl play ENV shows what an episode looks like"
    if episode_count <= group_count:
        return (
            "no group had two episodes to compare",
            "read why episodes failed in the run's logs folder, or raise rollout.group_size",
        )
    lowest_rewards, highest_rewards = (
        [step_row[metric_name] for step_row in rows if step_row.get(metric_name) is not None]
        for metric_name in ("reward_min", "reward_max")
    )
    if any((step_row.get("group_spread") or 0.0) > _NOISE for step_row in rows):
        return (
            "episodes of one group earned differently, but not by what advantages count",
            "algo.process_weight=1 counts step rewards; without them only outcomes that differ within a group teach",
        )
    if not lowest_rewards or max(highest_rewards) - min(lowest_rewards) > _NOISE:
        return (
            "episodes of one group always earned the same" + (", only tasks differed" if lowest_rewards else ""),
            "raise rollout.group_size or rollout.temperature, or take tasks that are sometimes solved ([curriculum])",
        )
    successes = [step_row["success_mean"] for step_row in rows if step_row["success_mean"] is not None]
    if successes and min(successes) == 1:
        return "every episode succeeded", "take harder tasks: the model can do these"
    return (
        f"every episode earned the same, {lowest_rewards[0]:g}",
        "agentrl validate ENV (does a right answer earn more?), agentrl play ENV (is it doable?), easier tasks, "
        "rewards on the way, a larger rollout.max_turns or rollout.max_tokens_per_turn, a stronger model",
    )
