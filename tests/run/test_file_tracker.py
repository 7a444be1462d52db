"""The file of a tracker has each event once: over kills, undone steps, torn lines and disks without space."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import FileTracker
from agentrl.errors import UsageError
from agentrl.run.callbacks.callback import EvalEnded, RunStarted, StepEnded

START = RunStarted(path=Path("run"), config={}, step=0, attempt=1)


def step(number: int, attempt: int = 1, **values: Any) -> StepEnded:
    return StepEnded(
        id=f"step:{attempt}:{number}",
        step=number,
        attempt=attempt,
        time_s=float(number),
        values=values or {"loss": 0.5},
    )


def evaluation(number: int) -> EvalEnded:
    means = {"success": 0.25, "outcome": 0.5, "turns": 2.0, "tokens": None}
    return EvalEnded(
        id=f"eval:{number}:8", name="tasks", when="during", step=number, n=8, failed=0, time_s=float(number), **means
    )


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tell(tracker: FileTracker, *events: Any) -> None:
    """As a start of a run tells everything from its first step on."""
    tracker.on_start(START)
    for event in events:
        getattr(tracker, "on_step" if isinstance(event, StepEnded) else "on_eval")(event)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_start_after_a_kill_adds_what_is_missing_and_mends_a_torn_line(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "logs" / f"run.{ending}"
    tell(FileTracker(path), step(1), evaluation(1), step(2))
    assert [row["id"] for row in rows(path)] == ["step:1:1", "eval:1:8", "step:1:2"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    tell(FileTracker(path), step(1), evaluation(1), step(2), step(3))
    assert [row["id"] for row in rows(path)] == ["step:1:1", "eval:1:8", "step:1:2", "step:1:3"]
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_undone_steps_leave_the_file_when_they_are_trained_again(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{ending}"
    tell(FileTracker(path), step(1), step(2), step(3), step(2, attempt=2))
    assert [row["id"] for row in rows(path)] == ["step:1:1", "step:2:2"]


def test_a_csv_gets_wider_and_holds_tables_as_json(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    tell(FileTracker(path), step(1, loss=0.5), step(2, loss=None, alarms=['kl,\n"high"'], rewards={"a": 1}))
    first, second = rows(path)
    assert (first["loss"], first["alarms"], first["rewards"]) == ("0.5", "", "")
    assert (second["loss"], json.loads(second["alarms"]), json.loads(second["rewards"])) == (
        "",
        ['kl,\n"high"'],
        {"a": 1},
    )
    assert list(first)[:5] == ["kind", "id", "step", "attempt", "time_s"]


def test_what_no_disk_took_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    tracker = FileTracker(path)
    tell(tracker, step(1))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space left"):
            tracker.on_step(step(2))
    tracker.on_step(step(3))
    assert [row["id"] for row in rows(path)] == ["step:1:1", "step:1:2", "step:1:3"]


def test_a_file_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for name, text in (("a.csv", "step,loss\n1,2\n"), ("b.jsonl", '{"step": 1}\n'), ("c.csv", "step,loss\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match="is no file of FileTracker"):
            FileTracker(tmp_path / name)
        assert (tmp_path / name).read_text() == text
    with pytest.raises(UsageError, match="give it the ending"):
        FileTracker(tmp_path / "run.txt")
    with pytest.raises(UsageError, match="give some of step, eval, episode, weights"):
        FileTracker(tmp_path / "run.csv", events=("steps",))  # pyright: ignore[reportArgumentType]
