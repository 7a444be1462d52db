"""What fails is told: in which task, why, where and how often, while it happens and at the end. With real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer

from . import failing_envs
from .test_run import DEADLINE_S, assert_nothing_remains, command, run_file

ENVS = Path(failing_envs.__file__)
TINY: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_running": 8, "max_tokens_per_turn": 4},
    "train": {"steps": 2},
}


def line_of(text: str, after: str = "") -> int:
    source = ENVS.read_text()
    at = source.index(text, source.index(after))
    return 1 + source[:at].count("\n")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S)


def train(tmp_path: Path, env: str, reward: str = "", **sections: Any) -> subprocess.CompletedProcess[str]:
    merged = {name: {**values, **sections.pop(name, {})} for name, values in {**TINY, "eval": {"sets": []}}.items()}
    file = run_file(tmp_path, f"{ENVS}:{env}", **merged, **sections)
    return run("train", file, "--out", tmp_path / "run", *(["--set", f"env.reward={reward}"] if reward else []))


MISSING = 'return {"known": 1}["missing"]'


@pytest.mark.slow
def test_an_evaluation_in_which_every_episode_fails_says_how_many_why_and_where_and_exits_1(tmp_path: Path) -> None:
    said = run("eval", "agentrl/tiny-coder", "--env", f"{ENVS}:StepRaises", "--n", 4)
    assert said.returncode == 1
    assert "KeyError: 'missing'" in said.stdout and f"{ENVS}:{line_of(MISSING, 'class StepRaises')}" in said.stdout
    assert said.stdout.rstrip().endswith("with tracebacks: --out FOLDER keeps the episodes and the logs")
    row = said.stdout.splitlines()[3].split("│")
    assert [cell.strip() for cell in row if cell.strip()] == ["tasks", "0", "-", "-", "-", "-", "4"]
    said = run("eval", "agentrl/tiny-coder", "--env", f"{ENVS}:StepRaises", "--n", 4, "--json")
    assert said.returncode == 1
    (found,) = json.loads(said.stdout)
    assert (found["n"], found["failed"], found["success"]) == (0, 4, None)
    assert {one["seed"] for one in found["failed_tasks"]} and sum(one["times"] for one in found["failed_tasks"]) == 4


@pytest.mark.long
def test_a_run_made_of_rows_without_held_out_ones_is_not_evaluated_on_none(tmp_path: Path) -> None:
    Trainer(
        model="agentrl/tiny-coder",
        dataset=[{"prompt": f"count to {n}"} for n in range(4)],
        reward_funcs=[f"{ENVS}:row_reward"],
        config={**TINY, "engine": {"kv_cache_mb": 64}, "buffer": {"groups_per_step": 2}},
        out=tmp_path / "run",
    ).train()
    said = run("eval", tmp_path / "run", "--n", 2)
    assert said.returncode == 2
    assert "has no held-out rows" in said.stderr and "--set env.kwargs.rows=" in said.stderr
    rows = tmp_path / "held_out.jsonl"
    rows.write_text('{"prompt": "count to nine"}\n')
    said = run("eval", tmp_path / "run", "--n", 2, "--set", f"env.kwargs.rows={json.dumps(str(rows))}", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)[0]["n"] == 2


@pytest.mark.slow
def test_broken_tasks_are_told_while_the_run_goes_on_and_in_a_table_at_its_end(tmp_path: Path) -> None:
    """Three of twenty tasks raise: the run ends well, and names them; a run that skips them has no failure."""
    said = train(tmp_path, "SomeTasksRaise", train={"steps": 6}, rollout={"max_replays": 0})
    assert said.returncode == 0, said.stderr
    place = f"{ENVS}:{line_of(MISSING, 'class SomeTasksRaise')}"
    lines = said.stdout.splitlines()
    told = next(at for at, line in enumerate(lines) if line.startswith("failed: seed "))
    assert "KeyError: 'missing'" in lines[told] and place in lines[told]
    assert told < next(at for at, line in enumerate(lines) if line.startswith("step    6")), "while it happened"
    assert "episodes that failed through no doing of the policy" in said.stdout
    assert "Traceback" in (RunDir(tmp_path / "run").logs / "worker-0.log").read_text()
    listed = run("tasks", tmp_path / "run", "--failed", "--json")
    rows = json.loads(listed.stdout)
    assert {row["seed"] for row in rows} == {3, 4, 5}
    assert all(row["place"] == place and row["times"] == 2 for row in rows)
    ids = json.dumps([row["id"] for row in rows])
    table = run("tasks", tmp_path / "run", "--failed").stdout
    assert "rollout.skip_tasks" in table and all(row["id"] in table for row in rows)
    status = run("status", tmp_path / "run").stdout
    assert status.count("dropped (env_failed)") == 1 and " failed," not in status, "groups are counted once"
    other = tmp_path / "other"
    other.mkdir()
    said = train(other, "SomeTasksRaise", train={"steps": 6}, rollout={"skip_tasks": json.loads(ids)})
    assert said.returncode == 0, said.stderr
    assert "failed: " not in said.stdout
    assert_nothing_remains(RunDir(tmp_path / "run"))


LONG = pytest.mark.long  # the others show the same lines
FAILING = [
    pytest.param("LaterResetRaises", {}, "reset raised FileNotFoundError: tasks/", marks=LONG),
    ("StepRaises", {}, "step raised KeyError: 'missing'"),
    pytest.param("HalfRaises", {"train": {"steps": 200}}, "by an exception (rollout.failure_budget = 0.2)", marks=LONG),
    pytest.param("StepHangs", {"rollout": {"step_deadline_s": 3}}, "step took over 3 s", marks=LONG),
    pytest.param("AnswersNone", {}, "step of turn 0 returned a NoneType", marks=LONG),
    pytest.param("OutcomeIsNan", {}, "info['outcome'] = nan: give a finite number", marks=LONG),
    pytest.param("HostIsDown", {}, "the game server at 10.0.0.7 does not answer: start it", marks=LONG),
    pytest.param("ToolRaises", {}, "KeyError: 'missing'", marks=LONG),
    pytest.param("Fine", {"reward": f"{ENVS}:raising_reward"}, "reward raised ZeroDivisionError", marks=LONG),
    pytest.param(
        "StepRaises",
        {"eval": {"sets": [{"name": "held_out", "n": 3}]}},
        "all 3 episodes of the held-out set 'held_out'",
        marks=LONG,
    ),
]


@pytest.mark.slow
def test_an_environment_whose_first_task_cannot_begin_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said = train(tmp_path, "ResetRaises")
    assert said.returncode == 2
    line = line_of('raise FileNotFoundError("tasks/17.json")')
    assert said.stderr.strip().endswith(f"reset raised FileNotFoundError: tasks/17.json ({ENVS}:{line})")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("env", "sections", "words"), FAILING)
def test_an_environment_that_fails_ends_the_run_with_why_and_where(
    tmp_path: Path, env: str, sections: dict[str, Any], words: str
) -> None:
    said = train(tmp_path, env, **sections)
    assert said.returncode == 1, said.stdout + said.stderr
    last = said.stderr.strip().splitlines()[-1]
    assert words in last
    assert f"agentrl tasks {tmp_path / 'run'} --failed" in last
    first = next(line for line in said.stdout.splitlines() if line.startswith("failed: seed "))
    assert "episode " in first, "and a line while it happened"
    rows = json.loads(run("tasks", tmp_path / "run", "--failed", "--json").stdout)
    assert rows and all(row["environment"] == f"{ENVS}:{env}" for row in rows)
    raised = "raised" in words or "exception" in words or "KeyError" in words or "held_out" in words
    assert all(row["place"].startswith(str(ENVS)) for row in rows) == raised
    log = (RunDir(tmp_path / "run").logs / "worker-0.log").read_text()
    assert log and (("Traceback" in log) or not raised)
