"""pass@k and pass^k: the probability that of k episodes of a task at least one succeeds, and that all of them do.

Of a task with c successes in n episodes, 1 - C(n - c, k) / C(n, k) is unbiased for 1 - (1 - p)^k (Chen et al. 2021,
arXiv:2107.03374, eq. 1), and C(c, k) / C(n, k) for p^k (Yao et al. 2024, tau-bench, arXiv:2406.12045). The estimate is
the mean over tasks, and its interval is over tasks, as these were drawn: Wilson's score interval (Wilson 1927) with
95%. That is meant for shares of yes and no. A task's estimate lies between 0 and 1, so its variance is at most that of
a yes or no of the same mean, and the interval is, if anything, too wide. Unlike one of resampled tasks it does not
shrink to nothing where all tasks agree. Standard library only: reports use it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from statistics import NormalDist, fmean

_Z = NormalDist().inv_cdf(0.975)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The chance that one of `k` of `n` episodes, drawn without replacement, succeeded."""
    # In whole numbers, whose quotient is rounded once.
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_all_k(n: int, successes: int, k: int) -> float:
    """The chance that all of `k` of `n` episodes, drawn without replacement, succeeded."""
    return math.comb(successes, k) / math.comb(n, k)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's interval of a share in `n` draws, with 95%."""
    shrink = 1 + _Z**2 / n
    midpoint = (share + _Z**2 / (2 * n)) / shrink
    half_width = _Z / shrink * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, midpoint - half_width), min(1.0, midpoint + half_width)


def pass_at(tasks: Collection[tuple[int, int]]) -> dict[str, Mapping[str, float]]:
    """By k = 1, 2, 4 and so on: `value`, and `low` and `high`, the ends of its interval, over the tasks with so many
    (episodes, successes) that have k episodes or more."""
    return _over_tasks(tasks, pass_at_k, first_k=1)


def pass_all(tasks: Collection[tuple[int, int]]) -> dict[str, Mapping[str, float]]:
    """pass^k as `pass_at` gives pass@k, from k = 2 on: for a single episode both are the same."""
    return _over_tasks(tasks, pass_all_k, first_k=2)


def _over_tasks(
    tasks: Collection[tuple[int, int]], estimate: Callable[[int, int, int], float], *, first_k: int
) -> dict[str, Mapping[str, float]]:
    estimates: dict[str, Mapping[str, float]] = {}
    k = first_k
    while pass_rates := [estimate(n, c, k) for n, c in tasks if n >= k]:
        lower_end, upper_end = wilson(fmean(pass_rates), len(pass_rates))
        estimates[str(k)] = {"value": fmean(pass_rates), "low": lower_end, "high": upper_end}
        k *= 2
    return estimates
