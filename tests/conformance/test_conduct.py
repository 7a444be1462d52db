"""Trainers in child processes: killed and resumed, in a Python without agentrl, and through the command."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import agentrl

from agentrl.conformance.cases import CASES
from agentrl.conformance.conduct import conduct

DEADLINE_S = 60.0
PLAIN = "tests.conformance.plain_trainer"
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # an adapter is found in the working folder


@pytest.mark.medium
def test_a_trainer_is_killed_and_goes_on_from_its_checkpoint() -> None:
    (result,) = conduct(f"{PLAIN}:RIGHT", [BY_NAME["kill-resume"]]).results
    assert result.verdict.outcome == "holds", result.verdict.evidence
    assert result.verdict.evidence.startswith("went on from step 2; 4 groups, 32 turns, each trained once; 4 finished")


@pytest.mark.medium
def test_a_trainer_that_repeats_a_step_after_its_restart_breaks() -> None:
    (result,) = conduct(f"{PLAIN}:REPEATS", [BY_NAME["kill-resume"]]).results
    assert result.verdict.outcome == "breaks"
    assert result.verdict.evidence.startswith("trained more than once in the lineage of step 2: g1m0t0: 2 times")


def test_a_python_without_agentrl_runs_an_adapter(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.symlink_to(Path(sys.executable).resolve())
    cases = [BY_NAME["tokens"], BY_NAME["grader-fails"]]
    report = conduct(f"{PLAIN}:SCORES_FAILURES", cases, python=str(bare))
    assert [result.verdict.outcome for result in report.results] == ["holds", "breaks"]


@pytest.mark.medium
def test_the_command_prints_a_report_and_says_by_its_code_that_a_promise_is_broken() -> None:
    words = ("conformance", "--case", "grader-fails", "--trainer")
    done = agentrl(*words, f"{PLAIN}:SCORES_FAILURES", "--json")
    (row,) = json.loads(done.out)["results"]
    assert (done.code, row["case"], row["verdict"]) == (1, "grader-fails", "breaks")
    done = agentrl(*words, f"{PLAIN}:RIGHT")
    assert done.code == 0
    assert "holds" in done.out


def test_what_is_not_there_is_refused_in_one_line() -> None:
    done = agentrl("conformance", "--trainer", "nobody", "--case", "tokens")
    assert done.code == 2
    assert "no trainer 'nobody': give one of agentrl, trl, verifiers, or module:object of an adapter" in done.err
    done = agentrl("conformance", "--case", "nothing")
    assert done.code == 2
    assert "--case = 'nothing': give one of tokens, engine-dies" in done.err
    done = agentrl("conformance", "--python", "/nowhere/python")
    assert done.code == 2
    assert "--python = '/nowhere/python': give the path of a Python" in done.err


def test_law_4_a_trainer_ends_with_the_command() -> None:
    """Also with one that was killed: the trainer waits at its third step for a kill that no longer comes."""
    line = ("-c", "from agentrl.cli.main import main; main()", "conformance", "--case", "kill-resume")
    command = subprocess.Popen(
        [sys.executable, *line, "--trainer", f"{PLAIN}:WAITS"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    deadline = time.monotonic() + DEADLINE_S
    while not (ids := children.read_text().split()):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child = select.epoll()
    descriptor = os.pidfd_open(int(ids[0]))
    child.register(descriptor, select.EPOLLIN)
    command.kill()
    command.wait(DEADLINE_S)
    assert child.poll(DEADLINE_S), "the trainer goes on without its owner"
