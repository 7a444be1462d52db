"""The statistics of `agentrl compare`: intervals hold as often as they say, tests agree with other packages, and power
is what a plan said.

Numbers come from statsmodels 0.15.0 and from the code of the authors of the confidence sequence (confseq, `betting_cs`
with a running intersection and a grid of 4,000 means).
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from each_case import each_case

from agentrl.errors import UsageError
from agentrl.statistics.confidence_sequence import decided_after, sequence
from agentrl.statistics.paired import Array, holm, mcnemar, over_seeds, over_tasks
from agentrl.statistics.power import Design

DRAWS = 10_000


def draw(design: Design, difference: float, draws: int = DRAWS) -> tuple[Array, Array]:
    """Success of two models as `Design` describes it, of shape (draws, tasks, samples). An episode takes a number that
    the task has for its model, or draws one; the model takes that of the task, or draws one. It succeeds below the
    model's rate."""
    rng = np.random.default_rng(11)
    rates = design.base_rate, design.base_rate + difference
    shape = (draws, design.tasks, 1)
    # Of two successes below the same number, the rarer implies the other: this is their correlation.
    agreement = np.sqrt(rates[0] * (1 - rates[1]) / (rates[1] * (1 - rates[0])))
    shares = min(1.0, np.sqrt(design.across / (design.correlation * agreement)))
    common = rng.random(shape)
    sides: list[Array] = []
    for rate in rates:
        of_model = np.where(rng.random(shape) < shares, common, rng.random(shape))
        size = (draws, design.tasks, design.samples)
        numbers = np.where(rng.random(size) < np.sqrt(design.correlation), of_model, rng.random(size))
        sides.append((numbers < rate).astype(float))
    return sides[0], sides[1]


CASES = [
    (Design(tasks=100, base_rate=0.5), 0.0),
    (Design(tasks=100, base_rate=0.3, across=0.3), 0.05),
    (Design(tasks=100, samples=4, base_rate=0.5), 0.05),
    (Design(tasks=200, samples=4, base_rate=0.2, correlation=0.3, across=0.2), 0.05),
    (Design(tasks=500, base_rate=0.304, across=0.45), 0.008),
]


@pytest.mark.slow
@each_case(("design", "difference"), CASES)
def test_the_interval_holds_the_true_difference_in_95_of_100_draws(design: Design, difference: float) -> None:
    a, b = draw(design, difference)
    interval = over_tasks((b - a).mean(axis=-1), is_success=True)
    held = np.mean((interval.low <= difference) & (difference <= interval.high))
    assert held == pytest.approx(0.95, abs=0.01)


@pytest.mark.slow
def test_with_many_samples_of_few_tasks_the_interval_of_success_is_a_little_too_wide() -> None:
    a, b = draw(Design(tasks=100, samples=8, correlation=0.2, across=0.1), 0.0)
    interval = over_tasks((b - a).mean(axis=-1), is_success=True)
    assert 0.95 <= np.mean((interval.low <= 0) & (interval.high >= 0)) <= 0.97


def test_the_interval_of_a_mean_without_bounds_holds_in_95_of_100_draws() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.lognormal(5.0, 0.7, size=(2, DRAWS, 100))
    interval = over_tasks(tokens[1] - tokens[0], is_success=False)
    assert np.mean((interval.low <= 0) & (interval.high >= 0)) == pytest.approx(0.95, abs=0.01)


@pytest.mark.slow
@each_case(("design", "difference"), [CASES[0], CASES[2]])
def test_the_sequence_holds_though_somebody_looks_after_each_task(design: Design, difference: float) -> None:
    a, b = draw(design, difference)
    low, high = sequence((b - a).mean(axis=-1), alpha=0.05)
    assert np.mean((low <= difference) & (difference <= high)) >= 0.95


def test_a_fixed_interval_does_not_hold_if_somebody_looks_after_each_task() -> None:
    a, b = draw(CASES[0][0], 0.0, draws=1000)
    differences = (b - a).mean(axis=-1)
    holds = np.ones(1000, dtype=bool)
    for n in range(2, 101):
        interval = over_tasks(differences[:, :n], is_success=True)
        holds &= (interval.low <= 0) & (interval.high >= 0)
    assert holds.mean() < 0.9, "else the test of the sequence would show nothing"


def test_the_sequence_is_that_of_the_authors() -> None:
    differences = np.array([(t % 3 == 0) - float(t % 7 == 0) for t in range(1, 121)])
    assert sequence(differences, alpha=0.05) == pytest.approx((0.0320, 0.3555), abs=6e-4)
    assert sequence(differences[:40], alpha=0.05) == pytest.approx((-0.0830, 0.4675), abs=6e-4)
    assert decided_after(differences, alpha=0.05) == 81 and decided_after(differences[:80], alpha=0.05) is None
    assert decided_after(-differences, alpha=0.05) == 81


def test_samples_of_a_task_are_a_cluster_as_in_statsmodels() -> None:
    """`OLS(differences, 1).fit(cov_type="cluster", use_t=True)`, of 12 tasks with three samples each."""
    a = np.array([[(3 * t + s) % 7 for s in range(3)] for t in range(12)], dtype=float)
    b = np.array([[(5 * t + 2 * s + 1) % 8 for s in range(3)] for t in range(12)], dtype=float)
    interval = over_tasks((b - a).mean(axis=1), is_success=False)
    assert interval == pytest.approx((0.47222222, -0.59041113, 1.53485557, 0.34904952))


def test_seeds_are_compared_as_in_statsmodels() -> None:
    """`CompareMeans(b, a)` with unequal variances."""
    interval = over_seeds([0.50, 0.55, 0.47, 0.52], [0.58, 0.61, 0.55])
    assert interval == pytest.approx((0.07, 0.0068843877, 0.1331156123, 0.0360493504))


@each_case(
    ("a_alone", "b_alone", "p"),
    [(4, 0, 0.125), (0, 6, 0.03125), (12, 25, 0.04703102744), (30, 30, 1.0), (100, 140, 0.01166409232), (0, 0, 1.0)],
)
def test_mcnemars_test_is_that_of_statsmodels(a_alone: int, b_alone: int, p: float) -> None:
    assert mcnemar(a_alone, b_alone) == pytest.approx(p)


def test_holms_correction_is_that_of_statsmodels() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_few_tasks_that_differ_show_nothing() -> None:
    """4 of 500: sums 4 and 4, with two tasks more 4 and 5; centre 4/502, spread (5 - 16/502)/501."""
    differences = np.repeat([1.0, 0.0], [4, 496])
    half = 1.9647 * ((5 - 16 / 502) / 501 / 502) ** 0.5
    assert over_tasks(differences, is_success=True)[1:3] == pytest.approx((4 / 502 - half, 4 / 502 + half), abs=1e-6)
    equal = over_tasks(np.zeros(100), is_success=True)
    assert equal.low < -0.01 and equal.high > 0.01 and equal.p == 1.0, "tasks that agree prove no equality"


def test_differences_that_are_all_equal_have_the_p_of_the_sign_test() -> None:
    interval = over_tasks(np.full(5, 0.1), is_success=False)
    assert interval == pytest.approx((0.1, 0.1, 0.1, 2 * 0.5**5))
    assert over_tasks(np.zeros(5), is_success=False) == pytest.approx((0.0, 0.0, 0.0, 1.0))
    assert over_seeds([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]) == pytest.approx((1.0, 1.0, 1.0, 2 / 20))
    assert over_seeds([1.0, 1.0], [1.0, 1.0]).p == 1.0


@pytest.mark.slow
@each_case(
    "design",
    [
        Design(tasks=100),
        Design(tasks=400, base_rate=0.3),
        Design(tasks=200, samples=4),
        Design(tasks=150, samples=8, base_rate=0.2, correlation=0.3, across=0.1),
    ],
)
def test_the_smallest_difference_of_a_plan_is_shown_in_80_of_100_draws(design: Design) -> None:
    difference = design.smallest_difference()
    assert difference is not None
    a, b = draw(design, difference, draws=3000)
    differences = (b - a).mean(axis=-1)
    is_shown = over_tasks(differences, is_success=True).low > 0
    if design.samples == 1:
        pairs = zip((differences < 0).sum(axis=1), (differences > 0).sum(axis=1), strict=True)
        is_shown &= np.array([mcnemar(int(a_alone), int(b_alone)) < 0.05 for a_alone, b_alone in pairs])
    assert is_shown.mean() == pytest.approx(0.8, abs=0.03)


def test_more_tasks_and_more_samples_show_smaller_differences() -> None:
    sizes = [
        Design(tasks=tasks, samples=samples).smallest_difference() for tasks, samples in ((100, 1), (400, 1), (400, 4))
    ]
    assert None not in sizes and sizes == sorted(sizes, key=lambda size: -(size or 0.0))
    assert Design(tasks=3).smallest_difference() is None, "three tasks prove nothing in McNemar's exact test"


@each_case(
    "settings",
    [{"tasks": 1}, {"tasks": 9, "samples": 0}, {"tasks": 9, "base_rate": 1.0}, {"tasks": 9, "across": 0.9}],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Design(**settings)  # pyright: ignore[reportArgumentType]


def test_without_scipy_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UsageError, match=r"pip install .*\[compare\]"):
        mcnemar(1, 2)
