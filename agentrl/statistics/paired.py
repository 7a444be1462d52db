"""Differences between two models on the same tasks: intervals and tests over tasks, and over seeds of training.

The task is the unit. Several samples of a task share its difficulty, so they are one cluster: a task contributes a
single difference of means, and the interval is that of the mean of independent differences. With as many samples in
each task this is the cluster-robust interval.

A t interval alone is wrong where few tasks differ. If 4 of 500 tasks are won by one model and none by the other, it
excludes zero, though chance does that in one of eight cases; if no task differs, it has no width. Differences of
success lie between -1 and 1, so they get what Agresti and Min (2005, Statistics in Medicine 24, p. 729) add to paired
proportions: half a task won, half a task lost, and one that is equal. The interval is then a little too wide for many
samples of few tasks. Where no more than a handful of tasks differ, McNemar's exact test is the one to trust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl.statistics.scipy_stats import scipy_stats

Array = np.ndarray[Any, np.dtype[np.float64]]

LEVEL = 0.95
"""The level of every interval."""


class Interval(NamedTuple):
    """Mean differences with the ends of their intervals and two-sided p-values: numbers, or arrays of them."""

    estimate: Any
    low: Any
    high: Any
    p: Any


def over_tasks(differences: Array, *, is_success: bool) -> Interval:
    """Return the interval of the mean of independent differences along the last axis, which holds two tasks or more.
    `is_success` says that they are differences of probabilities, between -1 and 1."""
    scipy_module = scipy_stats()
    task_count = differences.shape[-1]
    added_tasks = 2 if is_success else 0
    adjusted_count = task_count + added_tasks
    estimate = differences.mean(axis=-1)
    adjusted_mean = estimate * task_count / adjusted_count
    sum_of_squares = (differences**2).sum(axis=-1) + added_tasks / 2
    # Differences that are all equal have no spread but that of rounding.
    variance = np.maximum(sum_of_squares - adjusted_count * adjusted_mean**2, 0.0) / (adjusted_count - 1)
    standard_error = np.sqrt(np.where(variance <= 1e-12 * sum_of_squares, 0.0, variance) / adjusted_count)
    half_width = scipy_module.t.ppf(0.5 + LEVEL / 2, task_count - 1) * standard_error
    with np.errstate(divide="ignore", invalid="ignore"):
        p_value = 2 * scipy_module.t.sf(np.abs(adjusted_mean) / standard_error, task_count - 1)
    # Without spread there is no t. n differences of one sign have this p in the sign test.
    p_value = np.where(standard_error > 0, p_value, np.where(estimate == 0, 1.0, 0.5 ** (task_count - 1)))
    lower_end, upper_end = adjusted_mean - half_width, adjusted_mean + half_width
    if is_success:
        lower_end, upper_end = np.maximum(lower_end, -1.0), np.minimum(upper_end, 1.0)
    return Interval(estimate, lower_end, upper_end, p_value)


def over_seeds(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return Welch's interval of the difference b - a between two algorithms, each trained with two seeds or more.
    `a` and `b` hold the mean of each trained model over the same tasks."""
    estimate = float(np.mean(b) - np.mean(a))
    if np.ptp(a) + np.ptp(b) < 1e-12:  # no spread: only an exchange of the seeds tells how likely this is
        p_value = 1.0 if estimate == 0 else min(1.0, 2 / math.comb(len(a) + len(b), len(a)))
        return Interval(estimate, estimate, estimate, p_value)
    welch_test = scipy_stats().ttest_ind(b, a, equal_var=False)
    lower_end, upper_end = welch_test.confidence_interval(LEVEL)
    return Interval(estimate, float(lower_end), float(upper_end), float(welch_test.pvalue))


def mcnemar(a_alone: int, b_alone: int) -> float:
    """Return the p-value of McNemar's exact test from the numbers of tasks that only one of the models solved."""
    differing = a_alone + b_alone
    return float(scipy_stats().binomtest(b_alone, differing, 0.5).pvalue) if differing else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm's step-down method, in the order in which they came."""
    adjusted_ps, largest_p = [1.0] * len(p_values), 0.0
    for p_rank, p_index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest_p = max(largest_p, min(1.0, (len(p_values) - p_rank) * p_values[p_index]))
        adjusted_ps[p_index] = largest_p
    return adjusted_ps
