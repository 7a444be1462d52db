"""The learner's time and speed: of the wall clock, and of tokens that changed the weights."""

from __future__ import annotations

import pytest

from agentrl.run.reporting import step_rates


def test_time_that_is_neither_work_nor_wait_counts() -> None:
    """Two steps of 10 s and 30 s, in which the learner waited 2 s and 3 s, and worked 4 s and 5 s."""
    rows = [
        {"wall_s": 10.0, "idle_s": 2.0, "busy_s": 4.0, "tokens_scored": 100, "updated": True},
        {"wall_s": 30.0, "idle_s": 3.0, "busy_s": 5.0, "tokens_scored": 700, "updated": False},
    ]
    assert step_rates.idle_share(rows) == pytest.approx(5 / 40)
    assert step_rates.trained_per_s(rows) == pytest.approx(100 / 40)  # the second step changed no weight
    assert [step_rates.trained_tokens(row) for row in rows] == [100, 0]


def test_no_step_has_no_share() -> None:
    assert (step_rates.idle_share([]), step_rates.trained_per_s([])) == (0.0, 0.0)
