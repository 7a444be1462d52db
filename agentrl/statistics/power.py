"""The smallest difference in success that a comparison can show, before anything is spent.

Each model is sampled `samples` times on each of `tasks` tasks. Two samples of a model on one task are correlated
(`correlation`: some tasks are hard), and so are samples of the two models (`across`: most of these are hard for both).
The variance of a task's difference follows, as in Miller 2024 (arXiv:2411.00640, section 5); the power is that of the
test that `agentrl compare` makes, McNemar's exact one for a single sample and the t test over tasks for several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.errors import UsageError
from agentrl.statistics.paired import LEVEL
from agentrl.statistics.scipy_stats import scipy_stats

POWER = 0.8
"""The probability with which a plan's difference is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The sizes of a comparison and the assumptions about its tasks. `base_rate` is the success of the first model; the
    second one is better."""

    tasks: int
    samples: int = 1
    base_rate: float = 0.5
    correlation: float = 0.5
    """Correlation of two samples of one model on the same task."""
    across: float = 0.4
    """Correlation of a sample of each model on the same task."""

    def __post_init__(self) -> None:
        if self.tasks < 2 or self.samples < 1:
            raise UsageError(f"{self.tasks} tasks x {self.samples} samples: give 2 tasks and 1 sample or more")
        if not 0 < self.base_rate < 1:
            raise UsageError(f"base rate {self.base_rate:g}: give the success of the first model, between 0 and 1")
        if not 0 <= self.across <= self.correlation <= 1:
            correction = "both lie between 0 and 1, and two models agree no more than one with itself"
            raise UsageError(f"correlation {self.correlation:g}, across {self.across:g}: {correction}")

    def power(self, difference: float) -> float:
        """Return the probability that a second model, better by `difference`, is shown to be."""
        success_rates = np.array([self.base_rate, self.base_rate + difference])
        variances = success_rates * (1 - success_rates)
        only_first = self.base_rate * (1 - success_rates[1])  # solves it and the second does not, were they independent
        only_second = success_rates[1] * (1 - self.base_rate)
        # Two rates that differ cannot be correlated as highly as one rate with itself. The second bound is the
        # covariance of models to which the same tasks are hard.
        covariance = float(min(self.across * math.sqrt(variances[0] * variances[1]), self.correlation * only_first))
        if self.samples == 1:
            return self._mcnemar_power(float(only_second) - covariance, float(only_first) - covariance)
        # The mean of several samples has this share of one sample's variance.
        variance_share = self.correlation + (1 - self.correlation) / self.samples
        task_variance = max(0.0, variance_share * float(variances.sum()) - 2 * covariance)
        return self._t_power(difference, task_variance)

    def _t_power(self, difference: float, spread: float) -> float:
        """Return the power of the t test over tasks; `spread` is the variance of a task's difference."""
        scipy_module: Any = scipy_stats()
        # Agresti and Min's additional tasks, as in `paired.over_tasks`.
        adjusted_count = self.tasks + 2
        adjusted_mean = difference * self.tasks / adjusted_count
        sum_of_squares = self.tasks * (spread + difference**2) + 1
        standard_error = math.sqrt(
            (sum_of_squares - adjusted_count * adjusted_mean**2) / (adjusted_count - 1) / adjusted_count
        )
        least_difference = float(scipy_module.t.ppf(0.5 + LEVEL / 2, self.tasks - 1)) * standard_error
        return float(
            scipy_module.norm.sf(
                (least_difference - adjusted_mean) / math.sqrt(self.tasks * spread / adjusted_count**2 + 1e-12)
            )
        )

    def _mcnemar_power(self, won: float, lost: float) -> float:
        """Return the power if the second model alone solves a task with probability `won`, the first with `lost`."""
        scipy_module: Any = scipy_stats()
        differing_counts = np.arange(self.tasks + 1)
        # The test rejects if the first model alone solved at most `most_lost` of the differing tasks.
        most_lost = scipy_module.binom.ppf((1 - LEVEL) / 2, differing_counts, 0.5)
        most_lost -= scipy_module.binom.cdf(most_lost, differing_counts, 0.5) > (1 - LEVEL) / 2
        rejection_chances = scipy_module.binom.cdf(most_lost, differing_counts, lost / (won + lost))
        return float(scipy_module.binom.pmf(differing_counts, self.tasks, won + lost) @ rejection_chances)

    def smallest_difference(self) -> float | None:
        """Return the smallest difference that is shown with probability `POWER`; None if not even the largest is."""
        lower_end, upper_end = 0.0, 1.0 - self.base_rate
        if self.power(upper_end) < POWER:
            return None
        for _ in range(30):
            midpoint = (lower_end + upper_end) / 2
            lower_end, upper_end = (lower_end, midpoint) if self.power(midpoint) >= POWER else (midpoint, upper_end)
        return upper_end
