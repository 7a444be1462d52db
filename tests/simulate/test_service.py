"""Given distributions: their means, their forms, and what is not one."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from agentrl.errors import UsageError
from agentrl.planning.simulate.policies import parse_close
from agentrl.planning.simulate.service import parse_episodes
from agentrl.store import FULL, Quorum


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("lognormal:1", 1.0),
        ("lognormal:0.5:4", 4.0),
        ("pareto:3:2", 2.0),
        ("constant:7", 7.0),
        ("constant:2*pareto:4", 2),
    ],
)
def test_a_distribution_has_the_mean_that_was_asked_for(text: str, mean: float) -> None:
    found = parse_episodes(text)
    assert found.mean_s == pytest.approx(mean)
    assert fmean(play.duration_s for play in found.group(40_000, Random(1))) == pytest.approx(mean, rel=0.03)


def test_an_episode_is_cut_at_its_deadline_and_never_without_a_token() -> None:
    plays = parse_episodes("pareto:1.5", deadline_s=3.0).group(5000, Random(1))
    assert max(play.duration_s for play in plays) == 3.0
    assert min(play.tokens for play in plays) >= 1


@pytest.mark.parametrize(
    "text", ["weibull:1", "lognormal", "lognormal:x", "pareto:2:1:3", "pareto:1", "constant:0", "lognormal:60", ""]
)
def test_what_is_no_distribution_is_one_line_that_says_what_to_give(text: str) -> None:
    with pytest.raises(UsageError, match=r"--episode .*(give lognormal:SIGMA|give one above 1)"):
        parse_episodes(text)


@pytest.mark.parametrize(
    ("text", "size", "policy"),
    [
        ("full", 8, FULL),
        ("7/8", 8, Quorum(7, 0.0)),
        ("6/8@2.5", 16, Quorum(12, 2.5)),
        ("5", 8, Quorum(5, 0.0)),
        ("7/8", 4, Quorum(3, 0.0)),
    ],
)
def test_ways_to_close_a_group(text: str, size: int, policy: object) -> None:
    assert parse_close(text, size)[1] == policy


@pytest.mark.parametrize("text", ["half", "9/8", "1", "7/0", "7/8@", ""])
def test_what_is_no_way_to_close_a_group_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--close"):
        parse_close(text, 8)
