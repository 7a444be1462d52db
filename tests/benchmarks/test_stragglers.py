"""The benchmark of stragglers, where its numbers can be worked out by hand."""

from __future__ import annotations

from itertools import cycle, repeat
from pathlib import Path

import pytest
import stragglers

from agentrl.store.closing import FULL, Quorum


def test_a_synchronous_run_of_equal_episodes_waits_for_each_of_them(tmp_path: Path) -> None:
    """Ten waits of 1 s, and nine steps of 2 s between them."""
    found = stragglers.simulate(repeat(1.0), max_lag=0, steps=10, policy=FULL, folder=tmp_path)
    assert found.idle == pytest.approx(10 / 28)
    assert (found.groups_dropped, found.members_dropped, found.tokens_dropped, found.unavoidable) == (0, 0, 0, 0)


def test_with_a_step_ahead_only_the_first_episodes_are_waited_for(tmp_path: Path) -> None:
    found = stragglers.simulate(repeat(1.0), max_lag=1, steps=10, policy=FULL, folder=tmp_path)
    assert found.idle == pytest.approx(1 / 19)
    assert found.tokens_dropped == 0


@pytest.mark.parametrize(("policy", "waits"), [(FULL, True), (Quorum(7, 0.0), False)])
def test_one_slow_member_in_eight_is_waited_for_or_trained_late(tmp_path: Path, policy: object, waits: bool) -> None:
    """It takes 20 s, which are ten steps: at a lag of one all but its last two steps' tokens are too old."""
    durations = cycle([*[1.0] * 7, 20.0])
    found = stragglers.simulate(durations, max_lag=1, steps=12, policy=policy, folder=tmp_path)
    assert (found.idle > 0.5) is waits
    if not waits:
        assert found.members_dropped == 0
        assert found.trained_s == found.played_s == pytest.approx((7 + 20) / 8)
