"""Law 3 in `agentrl validate --out`: a grader whose machine fails scores nobody, and a set whose grader does is named.

The graders run `true` in a box of this machine; they differ in what they make of a machine that failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.env.checks.tasks.check_set import SetPlan, SetVerdict, check_set
from agentrl.env.checks.tasks.hindrance import LOAD, busy_processors

GRADERS = """
import warnings
from pathlib import Path
import agentrl
from agentrl.env.checks.oracles import Oracle, say
from agentrl.errors import AgentRLError, HostBusy, SandboxLost
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.shared_backend import once_a_loop, shared

@once_a_loop
def verdicts():
    return {}

def busy():
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return any(line.rstrip(b"\\0").endswith(b"agentrl-load") for line in lines)

class Graded(agentrl.ToolEnv):
    '''One task for each grader of `graders`.'''
    limits = agentrl.env.EpisodeLimits(turns=2)
    blocking = False
    bad_tasks = ()
    text = ""

    def __init__(self, *, graders):
        self.graders, self.task_count = graders, len(graders)
        super().__init__()

    def make_task(self, options):
        return {"task": self.graders[self.task_seed() % len(self.graders)]}

    def prompt(self, task):
        self.note(**task)
        return ""

    def on_text(self, text):
        self.text += text
        if text != "go":
            self.finish()
        return ""

    async def grade(self):
        grader = self.task["task"]
        if grader.startswith("slow") and busy():
            return False
        known = verdicts() if "remembers" in grader else {}
        if self.text in known:
            return known[self.text]
        with warnings.catch_warnings(action="ignore"):
            boxes = shared("local-unsafe")
        await boxes.enter()
        try:
            box = await boxes.create(SandboxSpec())
            try:
                result = await box.exec(["true"], timeout_s=30.0)
            finally:
                await box.close()
        except SandboxLost:
            if not grader.startswith("loses when killed"):
                raise
            return False
        except HostBusy:
            if grader not in ("loses when starved", "wins without a result"):
                raise
            return grader == "wins without a result"
        finally:
            await boxes.leave()
        if grader == "loses when slowed":
            return not result.timed_out and self.text == "gogold"
        known[self.text] = not own_time_out(result) and self.text == "gogold"
        return known[self.text]

    def oracles(self):
        turns = ["go", "gold"]
        return [Oracle("gold", 1.0, lambda messages: turns.pop(0)), Oracle("no-op", 0.0, say(""))]
"""


@pytest.fixture
def graders(tmp_path: Path) -> str:
    (tmp_path / "graders.py").write_text(GRADERS)
    return f"{tmp_path / 'graders.py'}:Graded"


@pytest.fixture(autouse=True)
def no_warning_of_the_sandbox() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings(action="ignore"):
        yield


def checked(env: str, out: Path, *graders: str, loaded: int = 0) -> SetVerdict:
    plan = SetPlan(env_id=env, kwargs={"graders": list(graders)}, seeds=None, out=out, skip=out / "skip", loaded=loaded)
    return check_set(plan)


def test_law3_a_grader_that_scores_a_failure_of_its_machine_is_named(graders: str, tmp_path: Path) -> None:
    names = (
        "right",
        "loses when killed",
        "loses when killed, remembers",
        "loses when slowed",
        "loses when starved",
        "wins without a result",
    )
    found = checked(graders, tmp_path / "out", *names)
    evidence = {task.task: [(finding.reason, finding.evidence) for finding in task.findings] for task in found.tasks}
    assert evidence == {
        "right": [],
        "loses when killed": [("host-scored", "with its grader killed: the solution got 0")],
        "loses when killed, remembers": [("host-scored", "with its grader killed: the solution got 0")],
        "loses when slowed": [("host-scored", "with its grader slowed: the solution got 0")],
        "loses when starved": [("host-scored", "with its grader starved: the solution got 0")],
        "wins without a result": [("host-scored", "with its grader starved: everything got 1")],
    }
    assert found.by_verdict == {"ok": 1, "flaky": 5}
    assert found.tasks[0].hindered == {"killed": None, "slowed": None, "starved": None}, "all were tried, none scored"


@pytest.mark.medium
def test_a_grader_is_timed_alone_and_on_a_busy_machine(graders: str, tmp_path: Path) -> None:
    names = ("right", "slow", "right too", "slow")
    found = checked(graders, tmp_path / "out", *names, loaded=4)
    assert {task.task: [finding.reason for finding in task.findings] for task in found.tasks} == {
        "right": [],
        "slow": ["host-scored"],
        "right too": [],
    }
    assert all(task.alone_s is not None and task.loaded_s is not None for task in found.tasks)
    again = checked(graders, tmp_path / "out", *names, loaded=4)
    assert [task.alone_s for task in again.tasks] == [task.alone_s for task in found.tasks], "measured once"


@pytest.mark.medium
def test_the_load_is_that_of_a_sample_and_only_where_it_is_requested(graders: str, tmp_path: Path) -> None:
    found = checked(graders, tmp_path / "out", "slow", "slow 1", "slow 2", "slow 3", loaded=2)
    assert [task.loaded_s is not None for task in found.tasks] == [True, False, True, False]
    line = ["validate", graders, "--all", "--set", 'graders=["right"]', "--out", str(tmp_path / "other")]
    quiet = CliRunner().invoke(app, line)
    assert quiet.exit_code == 0 and "processors busy" not in quiet.output
    loaded = CliRunner().invoke(app, [*line, "--load", "1"])
    assert loaded.exit_code == 0 and "s with all processors busy" in loaded.output


def test_law4_the_load_ends_with_its_block() -> None:
    def pids() -> set[int]:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return {int(pid) for pid in children if LOAD.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()}

    with pytest.raises(KeyError), busy_processors():
        assert len(pids()) >= 2
        raise KeyError
    assert not pids()
