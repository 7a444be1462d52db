"""A run that learns nothing: told from one that does, while it goes on and afterwards, with what to try."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.learner.learner import Learner
from agentrl.records import Group, StopReason
from agentrl.run.alarms import no_signal
from agentrl.run.reporting import live_view, report
from agentrl.run.reporting.live_view import LiveView
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from tests.learner.making import episode, group_of, run_config, tiny_qwen3, turn

FAILED = StopReason.ENGINE_FAILED


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner(run_config().learner, tiny_qwen3(tmp_path_factory.mktemp("model")))


def group(*outcomes: float, id: int = 1, stop: StopReason = StopReason.DONE, version: int = 1) -> Group:
    members = [
        episode(n, [turn(0, [1, 2], [3, 4 + n], version=version)], outcome, stop=stop, group=id)
        for n, outcome in enumerate(outcomes)
    ]
    return group_of(members, id=id)


def step(learner: Learner, *groups: Group, made_at: int | None = None) -> dict[str, Any]:
    """The row that the learner itself records of such a step."""
    now = learner.step_index if made_at is None else made_at
    row = asdict(learner.step(groups, step_of=lambda _: now))
    return {**row, "idle_s": 0.0, "busy_s": 0.1, "pause_s": 0.0}


@pytest.mark.parametrize(
    ("groups", "cause", "advice"),
    [
        ([group(0.0, 0.0), group(0.0, 0.0, id=2)], "every episode earned the same, 0", "easier tasks"),
        ([group(1.0, 1.0)], "every episode succeeded", "harder tasks"),
        ([group(0.0, 0.0), group(1.0, 1.0, id=2)], "only tasks differed", r"rollout\.temperature"),
        ([group(1.0, 0.0, stop=FAILED)], "through no doing of the policy", "agentrl doctor"),
        ([group(1.0)], "no group had two episodes", r"rollout\.group_size"),
    ],
)
def test_steps_that_move_nothing_say_why_and_what_to_try(
    learner: Learner, groups: Sequence[Group], cause: str, advice: str
) -> None:
    rows = [step(learner, *groups) for _ in range(3)]
    assert no_signal(rows[:2]) is None
    found = no_signal(rows)
    assert found is not None and found.steps == 3
    assert cause in found.cause
    assert re.search(advice, found.advice)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"reward_min": 0.3, "reward_max": 0.1 + 0.2}, "every episode earned the same, 0.3"),
        ({"reward_min": None, "reward_max": None}, "episodes of one group always earned the same"),
        ({"reward_min": 0.0, "reward_max": 1.0}, "episodes of one group always earned the same, only tasks differed"),
        ({"reward_max": 1.0, "group_spread": 0.5}, "episodes of one group earned differently, but not by what"),
    ],
)
def test_only_tasks_differed_is_said_where_they_did(learner: Learner, changes: dict[str, Any], cause: str) -> None:
    """A constant rewarder differs by the rounding of sums, or by step rewards that nothing counts."""
    found = no_signal([{**step(learner, group(0.0, 0.0)), **changes}] * 3)
    assert found is not None
    assert found.cause.startswith(cause) and ("only tasks" in found.cause) == ("only tasks" in cause)


def test_steps_whose_tokens_are_all_stale_name_the_bound(learner: Learner) -> None:
    rows = [step(learner, group(0.0, 1.0), made_at=-100) for _ in range(3)]
    found = no_signal(rows)
    assert found is not None and "buffer.max_lag" in found.cause


def test_a_run_whose_every_group_left_without_signal_says_so() -> None:
    """A data set of fewer tasks than a step takes, all of which are solved: no step is trained."""
    assert no_signal([], patience=0) is None
    assert str(no_signal([], patience=0, skipped=5)).startswith(
        "nothing learned, as no step was trained: in each of 5 groups all members earned the same. Try: "
    )


def test_a_run_that_learns_is_left_in_peace(learner: Learner) -> None:
    nothing, something = step(learner, group(0.0, 0.0)), step(learner, group(0.0, 1.0))
    assert no_signal([nothing] * 9 + [something]) is None
    assert no_signal([something, nothing, nothing]) is None
    found = no_signal([something] + [nothing] * 4)
    assert found is not None and found.steps == 4


def lines(rows: Sequence[dict[str, Any]], *, made_before: int = 0, checkpoint: int | None = None) -> list[str]:
    """What a view without a terminal prints, ticking after each step. So many steps stand in the store when it begins,
    and the newest checkpoint is of step `checkpoint`."""
    stream = io.StringIO()
    view = LiveView(console=Console(file=stream, width=80))
    known = [SimpleNamespace(step=number, values=rows[0]) for number in range(1, made_before + 1)]

    def values(kind: str, after: int = -1) -> list[Any]:
        return [row for row in known if row.step > after]

    store = SimpleNamespace(
        metrics=SimpleNamespace(
            values=values, failures=lambda: SimpleNamespace(failed=0), failed_tasks=lambda after_s: ()
        ),
        lineage=SimpleNamespace(
            latest_checkpoint=lambda: None if checkpoint is None else SimpleNamespace(step=checkpoint)
        ),
    )
    run = SimpleNamespace(path=Path("run"))
    supervisor: Any = SimpleNamespace(
        phase="train", store=store, started_s=time.time(), run=run, config=SimpleNamespace(rewards=[])
    )
    for number, values in enumerate(rows, made_before + 1):
        known.append(SimpleNamespace(step=number, values=values))
        view.tick(supervisor)
    return stream.getvalue().splitlines()


def test_a_line_has_the_columns_that_there_are_and_no_control_characters(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**step(learner, group(0.0, 1.0)), "alarms": ["\x1b[31mred\x1b[0m\nof two lines " + "宽" * 40]}
    monkeypatch.delenv("COLUMNS", raising=False)
    step_whole = lines([row])[1]
    monkeypatch.setenv("COLUMNS", "60")
    phase, step_line, alarm = lines([row])
    assert phase == "[0:00] train"
    assert len(step_line) == 60 and step_line.startswith("step    1  reward 0.500") and step_line.endswith("…")
    assert alarm == "alarm: \\x1b[31mred\\x1b[0m\\x0aof two lines " + "宽" * 40, "what went wrong is never cut"
    monkeypatch.setenv("COLUMNS", "no number")
    assert lines([row])[1] == step_whole


def test_a_resumed_run_prints_no_step_that_was_printed_before(learner: Learner) -> None:
    """A run of 10,000 steps printed all of them again. Steps after the checkpoint are made again, and so are news."""
    printed = lines([step(learner, group(0.0, 1.0))], made_before=40, checkpoint=38)
    assert printed[1] == "goes on after step 38; earlier steps: run/metrics.jsonl"
    assert [line[:9] for line in printed[2:]] == ["step   39", "step   40", "step   41"]


def test_it_is_said_while_it_happens_and_rarer_as_it_goes_on(learner: Learner) -> None:
    nothing, something = step(learner, group(0.0, 0.0)), step(learner, group(0.0, 1.0))
    warned = [line for line in lines([nothing] * 13) if line.startswith("warning: ")]
    assert [line.partition(":")[2][:42] for line in warned] == [
        " nothing learned in the last 3 steps: ever",
        " nothing learned in the last 6 steps: ever",
        " nothing learned in the last 12 steps: eve",
    ]
    again = [nothing, nothing, nothing, something, nothing, nothing, nothing]
    assert sum(line.startswith("warning: ") for line in lines(again)) == 2
    assert not any(line.startswith("warning: ") for line in lines([nothing, something] * 4))


@pytest.mark.parametrize("learns", [False, True])
def test_the_summary_of_a_run_that_learned_nothing_says_so(
    learns: bool, learner: Learner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config()
    run = RunDir.create(tmp_path / "run", config)
    with RunStore.open(run.store_path) as store:
        for number in (1, 2):
            store.metrics.record("step", number, step(learner, group(0.0, float(learns))))
        summary = report.summarise(run, config, store, restarts={})
    report.show(Console(), run.path, summary)
    printed = " ".join(capsys.readouterr().out.split())
    assert summary["steps_updated"] == (2 if learns else 0)
    assert summary["tokens_trained"] == (8 if learns else 0)
    if learns:
        assert summary["no_signal"] is None and "warning" not in printed
    else:
        assert "nothing learned in the last 2 steps" in summary["no_signal"]
        assert "warning: nothing learned in the last 2 steps: every episode earned the same, 0. Try:" in printed
        assert "0 of 2" in printed


def test_the_live_view_shows_it_beside_the_curves(learner: Learner, tmp_path: Path) -> None:
    config = run_config()
    run = RunDir.create(tmp_path / "run", config)
    stream = io.StringIO()
    with RunStore.open(run.store_path) as store:
        supervisor: Any = SimpleNamespace(phase="train", config=config, store=store, started_s=time.time(), run=run)
        for number in (1, 2, 3):
            with LiveView(console=Console(file=stream, width=200, force_terminal=True)) as view:
                view.tick(supervisor)
            assert "no signal" not in stream.getvalue()
            store.metrics.record("step", number, step(learner, group(0.0, 0.0)))
        with LiveView(console=Console(file=stream, width=200, force_terminal=True)) as view:
            view.tick(supervisor)
    assert "no signal" in stream.getvalue() and "easier tasks" in stream.getvalue()


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_has_a_live_table_where_it_can_be_drawn_and_lines_elsewhere(
    widgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Console] = []
    live = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(live_view, "Live", lambda console, **_: started.append(console) or live)
    monkeypatch.setattr(live_view, "find_spec", lambda name: (widgets and name == "ipywidgets") or None)
    console = Console(file=io.StringIO(), force_jupyter=True)
    with LiveView(console=console):
        assert started == ([console] if widgets else [])
