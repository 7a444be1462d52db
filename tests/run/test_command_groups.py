"""The command line as a whole: groups, examples, completion; `agentrl status` of a folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from each_case import each_case
from rich.console import Console
from store.play import Clock, admit, serve
from typer.testing import CliRunner

from agentrl.cli.command_groups import GROUPS
from agentrl.cli.completion import environment_ids, episode_numbers, run_folders
from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.run.reporting.live_view import LiveView
from agentrl.run.reporting.status import duration
from agentrl.run.run_folder import RunDir
from agentrl.store import EpisodeFilter, RunStore

EXAMPLES = [
    pytest.param(name, line, id=line)
    for group in GROUPS.values()
    for name, lines in group.items()
    for line in lines
    if not line.endswith("--help")
]


PROGRAM: Any = typer.main.get_command(app)


@each_case(("name", "line"), EXAMPLES)
def test_an_example_is_a_line_that_the_command_takes(name: str, line: str) -> None:
    first, *words = line.split()
    assert first == name
    command = PROGRAM.commands[name]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(name, words, resilient_parsing=False)


def test_help_lists_every_command_in_a_group_and_ends_with_examples() -> None:
    commands = set(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    grouped = {name for group in GROUPS.values() for name in group}
    assert commands == grouped, "give each command a group and an example in agentrl/cli/command_groups.py"
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    titles = [listed.index(f" {group} ") for group in GROUPS]
    assert titles == sorted(titles), "the commands of a user's week come first"
    own = CliRunner().invoke(app, ["trace", "--help"], env={"COLUMNS": "100"}).output
    assert own.index("Examples:") < own.index("agentrl trace runs/mine")


HALVES = ("outcome_mean", "success_mean", "lag_mean", "kl_k3", "mismatch_mean", "ess", "clip_fraction", "grad_norm")
ROW: dict[str, Any] = {
    **dict.fromkeys(HALVES, 0.5),
    **dict.fromkeys(("lag_max", "tokens_scored", "busy_s", "idle_s"), 1),
    "updated": True,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number, name in enumerate(("first", "second")):
        settings = {"name": name, "model": "m", "env": {"id": "test/Env-v0"}, "train": {"steps": 4}}
        run = RunDir.create(tmp_path / "runs" / name, parse(settings))
        with RunStore.open(run.store_path) as store:
            serve(store, 0)
            for step in range(1, 1 + number):
                store.metrics.record("step", step, {"success_mean": 0.25, "outcome_mean": 0.5, "lag_mean": 0.0})
        os.utime(run.path / "config.json", (number, number))
    (tmp_path / "runs" / "spoilt").mkdir()
    (tmp_path / "runs" / "spoilt" / "store.sqlite").write_text("no store")
    os.utime(tmp_path / "runs" / "spoilt" / "store.sqlite", (0, 0))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_status_lists_the_runs_of_a_folder_the_newest_first_and_one_that_cannot_be_read(folder: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["status", "--json"]).output)
    assert [row["id"] for row in found[:2]] == ["second", "first"] and "error" in found[2]
    assert (found[0]["step"], found[0]["steps"], found[0]["success"]) == (1, 4, 0.25)
    told = CliRunner().invoke(app, ["status", "runs"]).output
    (line,) = [line for line in told.splitlines() if "second" in line]
    assert "1/4" in line and "0.25" in line and "test/Env-v0" in line and "not under way" in line
    assert "cannot be read" in told
    both = json.loads(CliRunner().invoke(app, ["status", "runs/first", "runs/second", "--json"]).output)
    assert {row["id"] for row in both} == {"first", "second"}
    assert json.loads(CliRunner().invoke(app, ["status", "runs/second", "--json"]).output)["step"] == 1
    assert "no runs are here" in CliRunner().invoke(app, ["status", "other"]).output
    assert isinstance(CliRunner().invoke(app, ["status", "nowhere"]).exception, UsageError)


def test_the_shell_completes_folders_of_runs_and_ids(folder: Path) -> None:
    assert run_folders("") == ["runs/", "runs/first", "runs/second", "runs/spoilt"]
    assert run_folders("sec") == ["runs/second"] and run_folders("runs/f") == ["runs/first"]
    assert run_folders(f"{folder}/runs/s") == [f"{folder}/runs/second", f"{folder}/runs/spoilt"]
    (folder / "runs" / "f$(touch x)").mkdir()
    assert run_folders("runs/f") == ["runs/first"] and run_folders("nowhere/") == []
    assert "agentrl/Calculator-v0" in environment_ids("agentrl/C") and environment_ids("zz") == []


def test_the_shell_completes_the_episodes_of_the_run_that_the_line_names(folder: Path) -> None:
    with RunStore.open(folder / "runs" / "first" / "store.sqlite") as store:
        admit(store, limit=6)
        ids = sorted(row.id for row in store.search.find_episodes(EpisodeFilter(), limit=1000))

    def offered(path: str | None, incomplete: str) -> list[str]:
        context: Any = SimpleNamespace(params={} if path is None else {"path": Path(path)})
        return episode_numbers(context, incomplete)

    assert offered("runs/first", "") == [str(id) for id in reversed(ids)] != []
    assert offered("runs/first", "1") == [str(id) for id in reversed(ids) if str(id).startswith("1")] != []
    for path, incomplete in (("runs/first", "1%"), ("runs/spoilt", ""), ("runs/nowhere", ""), ("\0", ""), (None, "")):
        assert offered(path, incomplete) == []
    assert not (folder / "runs" / "nowhere").exists()


@pytest.mark.parametrize(("line", "answer"), [("status runs/f", ["runs/first"]), ("fork runs/first 2", ["2"])])
def test_bash_is_answered_by_the_program(folder: Path, line: str, answer: list[str]) -> None:
    with RunStore.open(folder / "runs" / "first" / "store.sqlite") as store:
        admit(store, limit=2)
    code = "import sys; sys.argv[0] = 'agentrl'; from agentrl.cli.main import main; main()"
    at = str(len(line.split()))
    asked = {"_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": f"agentrl {line}", "COMP_CWORD": at}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == answer


@each_case(("seconds", "said"), [(44.6, "45 s"), (60, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_a_duration_is_said_in_two_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_live_view_tells_the_time_that_is_left(tmp_path: Path) -> None:
    config = parse({"model": "m", "env": {"id": "test/Env-v0"}, "train": {"steps": 5}})
    run = RunDir.create(tmp_path / "run", config)
    clock, stream = Clock(1000.0), io.StringIO()
    with RunStore.open(run.store_path, clock=clock) as store:
        for number in (1, 2, 3):
            store.metrics.record("step", number, ROW)
            clock.now += 60.0
        supervisor: Any = SimpleNamespace(phase="train", config=config, store=store, started_s=time.time(), run=run)
        with LiveView(console=Console(file=stream, width=200, force_terminal=True)) as view:
            view.tick(supervisor)
    assert "3/5" in stream.getvalue() and "2 min 00 s left" in stream.getvalue()
