"""Failed tasks as rows and lines, over a real store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agentrl.config import RunConfig, TaskTable
from agentrl.records import StopReason, Task
from agentrl.run.reporting.failed_tasks import FailureLines, as_rows, id_of, skip_hint, skips
from agentrl.run.reporting.live_view import LiveView, Warnings
from agentrl.run.reporting.reward_figures import by_function
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import MEASURING, Supervisor
from agentrl.run.trainer import Trainer
from agentrl.store import Ending, RunStore
from agentrl.task_ids import row_id, task_id

PLACE = "/home/me/env.py:12"
DETAIL = f"my/Env: step raised KeyError: 'a' ({PLACE})"
CONFIG = RunConfig.model_validate({"model": "m", "env": {"id": "my/Env"}})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "store.sqlite", "{}") as opened:
        opened.versions.confirm_version(opened.versions.mint_version(0))
        yield opened


def play(store: RunStore, task: Task, endings: list[tuple[StopReason, str]]) -> None:
    store.groups.add_groups([task], size=len(endings), purpose="train")
    for claim, (reason, detail) in zip(store.leases.claim("w", len(endings), lease_s=1e9), endings, strict=True):
        outcome = 1.0 if reason.by_policy else None
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=reason, outcome=outcome, success=None, detail=detail)
        )


def task(seed: int) -> Task:
    return Task(index=seed, env="my/Env", seed=seed)


def test_failures_of_one_task_and_reason_are_one_row_with_the_place_apart(store: RunStore) -> None:
    play(store, task(3), [(StopReason.ENV_FAILED, DETAIL)] * 2 + [(StopReason.ENGINE_FAILED, "gone")])
    play(store, task(4), [(StopReason.DONE, ""), (StopReason.ENV_FAILED, DETAIL)])
    rows = as_rows(store.metrics.failed_tasks(), CONFIG)
    assert [(row["seed"], row["times"], row["kind"], row["place"]) for row in rows] == [
        (3, 2, "env_failed", PLACE),
        (3, 1, "engine_failed", ""),
        (4, 1, "env_failed", PLACE),
    ]
    assert rows[0]["reason"] == "my/Env: step raised KeyError: 'a'"
    assert store.metrics.failed_tasks("eval:none:now") == []


def test_what_is_to_be_typed_to_skip_them_names_each_task_once(store: RunStore) -> None:
    play(store, task(3), [(StopReason.ENV_FAILED, DETAIL), (StopReason.ENV_FAILED, "other")])
    line = skip_hint(as_rows(store.metrics.failed_tasks(), CONFIG), "runs/mine")
    assert f"agentrl train --resume runs/mine --set 'rollout.skip_tasks=[\"{task_id(task(3))}\"]'" in line


def test_a_row_of_a_data_set_is_skipped_in_every_epoch_and_a_seed_alone() -> None:
    epochs = [Task(index=n, env="my/Env", seed=n, options={"prompt": "2 + 2"}) for n in (1, 2)]
    assert all(skips(one, [row_id(epochs[0])]) for one in epochs)
    assert skips(task(3), [task_id(task(3))]) and not skips(task(4), [task_id(task(3))])
    rows = CONFIG.model_copy(update={"tasks": [TaskTable(rows="rows.jsonl")]})
    assert id_of(epochs[1], rows) == row_id(epochs[0])


def test_the_first_failure_of_each_kind_is_a_line_at_once_and_then_only_the_doubled_count(store: RunStore) -> None:
    now = [0.0]
    told = FailureLines("runs/mine", now=lambda: now[0])
    assert list(told.lines(store)) == []
    play(store, task(3), [(StopReason.ENV_FAILED, DETAIL)])
    first = list(told.lines(store))
    assert first[0] == f"failed: seed 3, episode 1: {DETAIL}"
    assert first[1].startswith("failed: 1 of 1 episodes so far") and "agentrl tasks runs/mine --failed" in first[1]
    play(store, task(4), [(StopReason.ENV_FAILED, DETAIL)])
    assert list(told.lines(store)) == [], "not more often than every two seconds"
    now[0] = 3.0
    (count,) = told.lines(store)
    assert count.startswith("failed: 2 of 2 episodes so far"), "the same kind is no line of its own"
    now[0] = 6.0
    assert list(told.lines(store)) == []


def test_an_exception_counts_by_itself_and_an_outage_once(store: RunStore) -> None:
    play(store, task(1), [(StopReason.DONE, "")])
    play(store, task(2), [(StopReason.ENV_FAILED, DETAIL)] * 4)
    play(store, task(3), [(StopReason.SANDBOX_FAILED, "no host")] * 4)
    found = store.metrics.failures()
    assert (found.failed, found.raised, found.outages, found.well) == (8, 4, 1, 1)


def test_an_evaluation_names_no_folder_that_is_gone_when_it_ends(
    store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    play(store, task(3), [(StopReason.ENV_FAILED, DETAIL)])
    seen = SimpleNamespace(run=SimpleNamespace(path="/tmp/x"), store=store, config=CONFIG, phase=MEASURING)
    with caplog.at_level(logging.WARNING), Warnings() as view:
        view.tick(cast("Supervisor", seen))
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"failed: seed 3, episode 1: {DETAIL}"
    assert said[1:] == ["failed: 1 of 1 episodes so far, through no doing of the policy"]


def test_a_quiet_run_still_logs_failures_and_alarms(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    play(store, task(3), [(StopReason.ENV_FAILED, DETAIL)])
    store.metrics.record(
        "step", 1, {"alarms": ["kl_k3 = 9 is above alarms.kl_above = 1"], "updated": True, "grad_norm": 1.0}
    )
    config = SimpleNamespace(rewards=[])
    seen = SimpleNamespace(run=SimpleNamespace(path="runs/mine"), store=store, config=config, phase="")
    with caplog.at_level(logging.WARNING), Warnings() as view:
        view.tick(cast("Supervisor", seen))
        view.tick(cast("Supervisor", seen))
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"failed: seed 3, episode 1: {DETAIL}"
    assert said[2:] == ["alarm: kl_k3 = 9 is above alarms.kl_above = 1"], "each once"


@pytest.mark.parametrize(("arguments", "kind"), [({}, LiveView), ({"quiet": True}, Warnings)])
def test_a_run_from_python_shows_what_the_command_line_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, bool], kind: type
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("agentrl.run.trainer.finish_training", lambda run, view, callbacks: shown.append(view) or {})
    monkeypatch.setattr("agentrl.run.trainer.resume_overrides.change", lambda run, settings: None)
    RunDir.create(tmp_path / "run", CONFIG)
    Trainer.resume(tmp_path / "run", **arguments)
    assert isinstance(shown[0], kind)


def test_the_means_of_each_reward_function_are_those_of_the_first_and_the_last_ten_steps() -> None:
    """0 to 11 by hand: the first ten have the mean 4.5, the last ten 6.5. `form` came later and abstained
    mostly: 1 over three episodes and 0 over one are 0.75 of four."""
    steps = [
        {"reward_functions": {"right": float(n)}, "reward_functions_judged": {"right": 4}, "reward_functions_late": {}}
        for n in range(12)
    ]
    for step, (mean, count) in zip(steps[10:], ((1.0, 3), (0.0, 1)), strict=True):
        step["reward_functions"]["form"], step["reward_functions_judged"]["form"] = mean, count
    steps[0]["reward_functions_late"] = {"right": 2}
    assert by_function([*steps, {}]) == {
        "right": {"first": 4.5, "last": 6.5, "judged": 48, "late": 2},
        "form": {"first": 0.75, "last": 0.75, "judged": 4, "late": 0},
    }
