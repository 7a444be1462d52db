"""What a run that ended shows: its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from matplotlib import pyplot

from agentrl import config as configuration
from agentrl.run.reporting import report
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore


@each_case(
    ("outcomes", "limits"), [([0.2, 0.7], (0, 1)), ([-2.0, -0.5], (-2, 1)), ([0.4, 1.1], (0, 1.1)), ([], (0, 1))]
)
def test_the_plot_has_room_for_rewards_below_zero_and_above_one(
    outcomes: list[float], limits: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    config = configuration.parse({"model": "m", "env": {"id": "e"}, "eval": {"every": 0, "sets": []}})
    run = RunDir.create(tmp_path / "run", config)
    with RunStore.open(run.store_path) as store:
        for step, outcome in enumerate(outcomes, start=1):
            store.metrics.record("step", step, {"outcome_mean": outcome, "lag_mean": 0.0, "idle_s": 1.0, "busy_s": 1.0})
        assert report.plot(run, config, store).read_bytes().startswith(b"\x89PNG")
    assert figures[0].axes[0].get_ylim() == pytest.approx(limits)
