"""The sweep over staleness: every token is as old as it says, and the page is that of the rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import staleness
from each_case import each_case

from agentrl import config
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport


@pytest.mark.parametrize("lag", [0, 2])
def test_every_token_is_as_old_as_the_sweep_says(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[StepReport] = []
    whole = Learner.step

    def step(learner: Learner, *given: Any, **named: Any) -> StepReport:
        reports.append(whole(learner, *given, **named))
        return reports[-1]

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setattr(staleness, "STEPS", 5)
    monkeypatch.setattr(staleness, "TASKS", 8)
    played = staleness.learn(lag, ("algo.importance=none",), seed=1)
    assert len(played) == 6 and all(0 <= outcome <= 1 for outcome in played)
    assert [report.lag_mean for report in reports] == [min(lag, at) for at in range(5)]
    assert {report.episodes for report in reports} == {staleness.GROUPS * staleness.GROUP_SIZE}
    assert ((reports[-1].ess or 0) > 1 - 1e-6) == (lag == 0)  # who sampled is who learns, or is another


@each_case("name", staleness.CORRECTIONS)
def test_each_correction_is_a_run_that_can_begin(name: str) -> None:
    document: dict[str, Any] = {"model": "m", "env": {"id": "letters"}}
    for setting in (*staleness.COMMON, *staleness.CORRECTIONS[name]):
        config.apply_override(document, setting)
    assert config.parse(document).train.steps == staleness.STEPS


def test_the_page_is_that_of_the_rows() -> None:
    rows = json.loads((staleness.HERE / "staleness.json").read_text())
    between = staleness.PAGE.read_text().split(staleness.BEGIN)[1].split(staleness.END)[0].strip()
    assert between.splitlines() == list(staleness.table(rows))
