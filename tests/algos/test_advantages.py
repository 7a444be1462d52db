"""Baselines and scales against hand computations."""

from __future__ import annotations

import math

import pytest
import torch
from each_case import each_case

from agentrl.algos.advantages import STD_FLOOR, centred, spread

ALL = torch.ones(4, dtype=torch.bool)
RETURNS = torch.tensor([1.0, 0.0, 0.0, 3.0], dtype=torch.float64)


def test_leave_one_out_by_hand() -> None:
    # 1 - (0+0+3)/3, 0 - (1+0+3)/3, the same, 3 - (1+0+0)/3
    expected = torch.tensor([0.0, -4 / 3, -4 / 3, 8 / 3], dtype=torch.float64)
    torch.testing.assert_close(centred(RETURNS, ALL, "leave_one_out"), expected)


def test_group_mean_by_hand() -> None:
    torch.testing.assert_close(
        centred(RETURNS, ALL, "group_mean"), torch.tensor([0.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    )


def test_without_a_baseline_returns_stay() -> None:
    torch.testing.assert_close(centred(RETURNS, ALL, "none"), RETURNS)


@each_case("kind", ["leave_one_out", "group_mean", "none"])
def test_members_that_are_not_scored_neither_judge_nor_are_judged(kind: str) -> None:
    scored = torch.tensor([True, False, True, True])
    with_failure = torch.tensor([1.0, 1e9, 0.0, 3.0], dtype=torch.float64)
    got = centred(with_failure, scored, kind)
    alone = centred(with_failure[scored], torch.ones(3, dtype=torch.bool), kind)
    assert got[1] == 0
    torch.testing.assert_close(got[scored], alone)


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean"])
def test_a_lone_member_has_no_baseline_and_no_advantage(kind: str) -> None:
    scored = torch.tensor([False, True, False, False])
    assert centred(RETURNS + 5, scored, kind).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean"])
def test_equal_returns_give_exactly_zero(kind: str) -> None:
    """A group without signal must be one in floating point too, where the mean of equal numbers may be another."""
    values = [0.1, 0.3, 1.1, 2.7]
    assert any(sum([value] * n) / n != value for value in values for n in range(2, 12))
    for value in values:
        for n in range(2, 12):
            returns = torch.full((n,), value, dtype=torch.float64)
            assert centred(returns, torch.ones(n, dtype=torch.bool), kind).tolist() == [0.0] * n


def test_spread_is_the_sample_standard_deviation_of_the_scored() -> None:
    scored = torch.tensor([True, True, False, True])
    # returns 1, 0, 3: mean 4/3, squares (1 + 16 + 25)/9 over n - 1 = 2
    assert spread(RETURNS, scored, "std")[scored].tolist() == pytest.approx([(42 / 9 / 2) ** 0.5 + STD_FLOOR] * 3)
    assert spread(RETURNS, scored, "none").tolist() == [1] * 4
    assert spread(RETURNS, torch.tensor([True, False, False, False]), "std").tolist() == [math.inf] * 4


def test_a_late_member_is_compared_with_all_that_judge_and_changes_nothing_for_them() -> None:
    """Judges 1, 0, 3; late 10 and 4."""
    returns = torch.tensor([1.0, 10.0, 0.0, 3.0, 4.0], dtype=torch.float64)
    judges = torch.tensor([True, False, True, True, False])
    everyone = torch.ones(5, dtype=torch.bool)
    got = centred(returns, everyone, "leave_one_out", judges)
    alone = centred(returns[judges], everyone[:3], "leave_one_out")
    assert got[judges].tolist() == alone.tolist() == [1 - 3 / 2, 0 - 4 / 2, 3 - 1 / 2]
    torch.testing.assert_close(got[~judges], torch.tensor([10 - 4 / 3, 4 - 4 / 3], dtype=torch.float64))
    mean = centred(returns, everyone, "group_mean", judges)
    torch.testing.assert_close(mean, returns - 4 / 3)


def test_late_members_of_nobody_that_judges_get_nothing() -> None:
    nobody = torch.zeros(4, dtype=torch.bool)
    assert centred(RETURNS, ALL, "leave_one_out", nobody).tolist() == [0.0] * 4
