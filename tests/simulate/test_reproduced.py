"""A simulation that does not reproduce its run says so, and gives no advice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from agentrl.planning.simulate.sweep import SweepRow, not_reproduced


@pytest.mark.parametrize(
    ("simulated", "measured", "says"), [(0.46, 0.70, True), (0.46, 0.55, False), (0.6, 0.45, True)]
)
def test_an_idle_share_that_is_further_than_a_tenth_of_the_time_from_the_runs_own_is_said(
    simulated: float, measured: float, says: bool
) -> None:
    own = SimpleNamespace(case=SimpleNamespace(present=True), result=SimpleNamespace(idle=simulated))
    other = SimpleNamespace(case=SimpleNamespace(present=False), result=SimpleNamespace(idle=measured))
    line = not_reproduced(cast("list[SweepRow]", [other, own]), measured)
    assert bool(line) == says
    assert not says or ("does not reproduce its run" in line and f"{measured:.0%}" in line and "No advice" in line)
