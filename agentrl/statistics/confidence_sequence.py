"""A confidence sequence: an interval that may be looked at after every task, and still holds at its level.

A fixed interval that is computed again after each task excludes the truth sooner or later. This one is the set of means
against which nobody could have won much money by betting on the tasks as they came: the hedged capital process of
Waudby-Smith and Ramdas ("Estimating means of bounded random variables by betting", JRSSB 86, 2024, arXiv:2010.09686,
theorem 3 with the bets of equation 26). It needs differences between -1 and 1 and an order of tasks that does not
depend on their results. The price is width: about one and a half times that of a fixed interval.
"""

from __future__ import annotations

import math

import numpy as np

from agentrl.statistics.paired import Array

_MOST = 0.5
"""The largest share of its capital that a bet may lose, the paper's c."""


def sequence(differences: Array, *, alpha: float) -> tuple[Array, Array]:
    """Return both ends of the interval after the last task along the last axis. It is the intersection of the intervals
    after each task, so the true mean lies in it with probability 1 - alpha however often it was looked at."""
    unit_differences = (differences + 1) / 2
    return 2 * _lower_end(unit_differences, alpha) - 1, 1 - 2 * _lower_end(1 - unit_differences, alpha)


def decided_after(differences: Array, *, alpha: float) -> int | None:
    """Return the number of tasks after which the interval excluded zero; None if it does not."""
    unit_differences, unit_zero = (differences + 1) / 2, np.array([0.5])
    log_capital = np.maximum(
        _log_capital(unit_differences, unit_zero, alpha), _log_capital(1 - unit_differences, unit_zero, alpha)
    )
    crossed_tasks = np.flatnonzero(log_capital >= math.log(2 / alpha))
    return int(crossed_tasks[0]) + 1 if crossed_tasks.size else None


def _lower_end(shares: Array, alpha: float) -> Array:
    """Return the largest mean that a bet on larger values has ruled out. The capital of that bet falls as the mean that
    it is offered rises, so that bisection finds the end."""
    lower_mean, upper_mean = np.zeros((*shares.shape[:-1], 1)), np.ones((*shares.shape[:-1], 1))
    for _ in range(24):
        middle_mean = (lower_mean + upper_mean) / 2
        largest_capital = _log_capital(shares, middle_mean, alpha).max(axis=-1, keepdims=True)
        is_ruled_out = largest_capital >= math.log(2 / alpha)  # each of the two bets has half of the capital
        lower_mean = np.where(is_ruled_out, middle_mean, lower_mean)
        upper_mean = np.where(is_ruled_out, upper_mean, middle_mean)
    return lower_mean[..., 0]


def _log_capital(shares: Array, mean: Array, alpha: float) -> Array:
    """Return, after each task, the logarithm of the capital of somebody who began with 1 and bets on each task that its
    share exceeds `mean`, which is above 0. A bet depends on earlier tasks alone, and is the larger, the less these
    varied. Shares with that mean let the capital reach `2 / alpha` with probability `alpha / 2` at most (Ville)."""
    task_order = np.arange(1, int(shares.shape[-1]) + 1, dtype=np.float64)
    running_means = (0.5 + np.cumsum(shares, axis=-1)) / (task_order + 1)
    running_variances = (0.25 + np.cumsum((shares - running_means) ** 2, axis=-1)) / (task_order + 1)
    earlier_variances = np.concatenate([np.full((*shares.shape[:-1], 1), 0.25), running_variances[..., :-1]], axis=-1)
    bet_sizes = np.sqrt(2 * math.log(2 / alpha) / (earlier_variances * task_order * np.log(task_order + 1)))
    return np.cumsum(np.log1p(np.minimum(bet_sizes, _MOST / mean) * (shares - mean)), axis=-1)
