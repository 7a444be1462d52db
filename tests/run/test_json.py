"""`--json`: every command that reports has it, prints one JSON value, with the keys of docs/reference/json.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from agentrl.canary.examine import Report
from agentrl.cli.command_groups import GROUPS
from agentrl.cli.main import app
from agentrl.conformance.conduct import Report as Conformance
from agentrl.offline.retrain_step import Retrained
from agentrl.run.evaluation.held_out import EvalResult
from agentrl.view.recorded_run import recorded_run

ROOT = Path(__file__).parents[2]
ACTIONS = {
    *("train", "demo", "sft", "demos", "export", "submit"),  # they train or write, and say what came of it
    *("view", "metrics", "serve", "record", "play", "bench", "vllm-plugin"),  # they serve, play, or are another program
    *("scale", "pause", "resume", "set", "stop"),  # they steer a run
    *("trace", "rescore", "fork", "export-episodes", "store", "new"),  # they write
}
AGAIN = Retrained(
    step=1,
    begun=Path("checkpoints/0"),
    groups=1,
    episodes=2,
    metrics={"loss": float("nan")},
    recorded=None,
    tensors=1,
    compared=(1,),
    difference=None,
    settings=(),
    notes=(),
    out=None,
)
MEASURED = EvalResult(name="held_out", success=0.5, outcome=0.5, turns=1.0, tokens=None, n=4, failed=0)


def documented() -> dict[str, list[str]]:
    """The keys of each command's value, or of each object of its list."""
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    without_inner = [(name, re.sub(r"\([^)]*\)|of a run .*|;.*", "", keys)) for name, keys in rows]
    return {name: re.findall(r"`(\w+)`", keys) for name, keys in without_inner}


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    with recorded_run() as folder:
        (folder / "logs").mkdir()
        line = {
            "time": "2026-01-01T00:00:00.000Z",
            "level": "info",
            "process": "worker-0",
            "message": "m",
            "episode": 3,
        }
        (folder / "logs" / "worker-0.log").write_text(json.dumps(line) + "\nplain \x1b[31m text\n\n")
        yield folder


def printed(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def value(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_command_that_reports_has_json_and_is_documented() -> None:
    commands: Any = typer.main.get_command(app)
    with_json = {
        name for name, command in commands.commands.items() if any("--json" in param.opts for param in command.params)
    }
    every = {name for group in GROUPS.values() for name in group}
    assert with_json == every - ACTIONS, "give it --json and a row in docs/reference/json.md, or name it an action"
    assert {name.split()[0] for name in documented()} == with_json


LINES: dict[str, str] = {
    "status FOLDER": "status {run}/.. --json",
    "status": "status {run} --json",
    "health": "health {run} --json",
    "tasks": "tasks {run} --json",
    "tasks --failed": "tasks {run} --failed --json",
    "rewards": "rewards {run} --json",
    "audit": "audit {run} --json",
    "simulate --json -": "simulate {file} --episode lognormal:1 --step-s 1 --slots 8 --close full --steps 2 --json -",
    "plan": "plan {file} --json",
    "eval": "eval {run} --json",
    "canary": "canary http://127.0.0.1:1 --model agentrl/tiny-coder --json",
    "conformance": "conformance --json",
    "compare": "compare {run}:before {run}:after --json",
    "compare --plan": "compare --plan 100 --json",
    "retrain": "retrain {run} --step 1 --json",
    "validate": "validate agentrl/Calculator-v0 --n 2 --json",
    "validate --out": "validate agentrl/Calculator-v0 --n 2 --out {run}/verdicts --json",
    "list": "list algorithms --json",
    "show": "show agentrl/Calculator-v0 --json",
    "keys": "keys env.id --json",
    "doctor": "doctor --json",
}


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is not done: its results are given."""
    give: Callable[[Any], Callable[..., Any]] = lambda result: lambda *_, **__: result  # noqa: E731
    monkeypatch.setattr("agentrl.offline.retrain_step.retrain", give(AGAIN))
    monkeypatch.setattr("agentrl.cli.main._evaluate_model", give([MEASURED]))
    monkeypatch.setattr(
        "agentrl.conformance.conduct.conduct", give(Conformance(trainer="agentrl", versions={}, results=[]))
    )
    monkeypatch.setattr("agentrl.canary.examine.examine", give(Report(way="generate", name=None, dtype="float32")))


@pytest.mark.parametrize("name", LINES)
def test_a_report_is_one_json_value_with_the_documented_keys(name: str, run: Path, light: None) -> None:
    line = LINES[name].format(run=run, file=ROOT / "examples" / "tiny_coder.toml")
    found = value(printed(*line.split()))
    keys = documented()[name]
    for each in found if isinstance(found, list) else [found]:
        optional = {"error"} if name == "status FOLDER" else set[str]()
        assert set(keys) - optional <= (each.keys() if isinstance(each, dict) else set()), each
    assert found or name == "tasks --failed"


def test_logs_are_an_object_a_line_also_those_of_text(run: Path) -> None:
    rows = [value(line) for line in printed("logs", run, "--json").splitlines()]
    assert [row["message"] for row in rows] == ["m", "plain \x1b[31m text"]
    assert rows[0]["episode"] == 3 and {row["process"] for row in rows} == {"worker-0"}
    assert set(documented()["logs"]) == {"process", "message"}


def test_a_report_of_something_wrong_is_json_too_and_its_exit_code_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.offline.retrain_step.retrain", lambda *_, **__: replace(AGAIN, compared=()))
    assert value(printed("retrain", run, "--step", 1, "--json", code=1))["equal"] is False
