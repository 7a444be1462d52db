"""The sweep over staleness: every token is as old as it says, and the page is that of the rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import staleness

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


def test_siblings_are_shown_the_same_letters_and_may_stop(tmp_path: Any) -> None:
    player = staleness.Player(staleness.new_model(tmp_path, 1), 1)
    first, second = player.play(2, 8, first=3, version=7)
    assert (first.id, second.id, first.size) == (3, 4, 8)
    shown = {tuple(turn.prompt_ids[0] for turn in member.turns) for member in first.trajectories}
    assert len({letters[0] for letters in shown}) == 1 and len({len(letters) for letters in shown}) > 1
    for member in (*first.trajectories, *second.trajectories):
        said = [turn.token_ids[0] for turn in member.turns]
        assert staleness.STOP not in said[:-1] and len(said) <= staleness.TURNS
        right = sum(token + staleness.LETTERS == turn.prompt_ids[0] for token, turn in zip(said, member.turns))  # noqa: B905
        assert member.outcome == right / staleness.TURNS


@pytest.mark.parametrize("name", staleness.CORRECTIONS)
def test_each_correction_is_a_run_that_can_begin(name: str) -> None:
    document: dict[str, Any] = {"model": "m", "env": {"id": "letters"}}
    for setting in (*staleness.COMMON, *staleness.CORRECTIONS[name]):
        config.apply_override(document, setting)
    assert config.parse(document).train.steps == staleness.STEPS


def test_the_tables_have_medians_and_ranges_and_say_what_was_not_run() -> None:
    settings = [*staleness.COMMON, *staleness.CORRECTIONS["grpo, token"]]
    rows = [
        {"settings": settings, "lag": 4, "seed": seed, "after": after, "mean": 0.5}
        for seed, after in enumerate((0.9, 0.2, 0.6))
    ]
    lines = list(staleness.table([*rows, {**rows[0], "settings": ["train.lr=1"], "after": 0.0}]))
    (of_end, of_all) = [line.split(" | ") for line in lines if line.startswith("| grpo, token |")]
    at = 1 + staleness.LAGS.index(4)
    assert (of_end[at], of_all[at], of_end[at - 1]) == ("0.60 (0.20 to 0.90)", "0.50 (0.50 to 0.50)", "not run")
    assert lines[-1] == "Seeds: 0 to 3; the rest was not run."


def test_the_page_is_that_of_the_rows() -> None:
    rows = json.loads((staleness.HERE / "staleness.json").read_text())
    between = staleness.PAGE.read_text().split(staleness.BEGIN)[1].split(staleness.END)[0].strip()
    assert between.splitlines() == list(staleness.table(rows))
