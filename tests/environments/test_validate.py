"""`agentrl validate`: a table of what each oracle got, and an exit code that says whether all of them held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import Finished

import agentrl_environments
from agentrl.env.checks.validate import validate
from agentrl.errors import UsageError

ENV = """
import agentrl
from agentrl.env.checks.oracles import Oracle, say

class Parity(agentrl.ToolEnv):
    '''Say whether the seed is odd; `wrong_for` is a seed whose key is wrong.'''
    limits = agentrl.env.EpisodeLimits(turns=1)
    blocking = False

    def __init__(self, *, wrong_for=-1, **settings):
        super().__init__(**settings)
        self.wrong_for = wrong_for

    async def areset(self, *, seed=None, options=None):
        self.seed = seed
        return await super().areset(seed=seed, options=options)

    def prompt(self, task):
        self.said = ""
        return "odd or even?"

    def on_text(self, text):
        self.said = text
        return ""

    def grade(self):
        key = self.seed % 2 if self.seed != self.wrong_for else 1 - self.seed % 2
        return self.said == ("even", "odd")[key]

    def oracles(self):
        right = ("even", "odd")[self.seed % 2]
        return [Oracle("gold", 1.0, say(right)), Oracle("no-op", 0.0, say("")), Oracle("both", 0.0, say("odd even"))]
"""


@pytest.fixture
def parity(tmp_path: Path) -> str:
    (tmp_path / "parity.py").write_text(ENV)
    return f"{tmp_path / 'parity.py'}:Parity"


def agentrl(*arguments: str) -> Finished:
    return commands.agentrl(*arguments, env={"COLUMNS": "120"})


def test_all_oracles_hold(parity: str) -> None:
    tallies = validate(parity, seeds=range(4), kwargs={}).tallies
    assert [(tally.name, tally.expected, tally.episodes, tally.held, tally.turns) for tally in tallies] == [
        ("gold", 1.0, 4, 4, 4),
        ("no-op", 0.0, 4, 4, 4),
        ("both", 0.0, 4, 4, 4),
    ]


def test_the_seeds_that_do_not_hold_are_named(parity: str) -> None:
    found = validate(parity, seeds=range(5, 9), kwargs={"wrong_for": 7})
    gold, *others = found.tallies
    assert [(fault.task, fault.reason[:37]) for fault in found.missed] == [
        ("seed 7", "the oracle gold got 0.0 instead of 1")
    ]
    assert (gold.held, gold.missed) == (3, {7: 0.0})
    assert [other.missed for other in others] == [{}, {}]


def test_an_environment_without_oracles_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="offers no oracles"):
        validate("agentrl/FrozenLake-v0", seeds=[0], kwargs={})


def test_an_environment_that_raises_is_named_with_its_seed(parity: str) -> None:
    path = Path(parity.rpartition(":")[0])
    path.write_text(ENV.replace("        return self.said == ", "        return 1 / 0 == "))
    line = 1 + next(at for at, text in enumerate(path.read_text().splitlines()) if "1 / 0" in text)
    (fault,) = validate(parity, seeds=[4], kwargs={}).failed
    assert fault.reason == f"{parity}, seed 4: raised ZeroDivisionError: division by zero ({path}:{line})"


def test_the_command(parity: str) -> None:
    good = agentrl("validate", parity, "--n", "3")
    assert good.code == 0, good.err
    assert [line.split("│")[4].strip() for line in good.out.splitlines() if "│" in line] == ["3", "3", "3"]
    bad = agentrl("validate", parity, "--n", "3", "--seed", "6", "--set", "wrong_for=7")
    assert bad.code == 1 and "7 (got 0.0)" in bad.out
    none = agentrl("validate", "agentrl/FrozenLake-v0", "--n", "1")
    assert none.code == 2 and "offers no oracles" in none.err


SET = """
import dataclasses
import agentrl
from agentrl.env.checks.oracles import Oracle, say
from agentrl.env.tool_env import Grade

@dataclasses.dataclass
class Bad:
    task: str
    reason: str

class Four(agentrl.ToolEnv):
    '''Four tasks: one is right, one has no image, one lists ids that its log lacks, one hangs in its grade.'''
    limits = agentrl.env.EpisodeLimits(turns=1)
    blocking = False
    task_count = 3
    bad_tasks = (Bad("rows:4", "rows:4 = 'x': no JSON"),)

    def make_task(self, options):
        return {"task": ("right", "no-image", "odd-ids")[self.task_seed() % 3]}

    def setup(self, task):
        if task["task"] == "no-image":
            raise agentrl.errors.SandboxUnavailable("task no-image: image 'x:1' is not there")

    def prompt(self, task):
        self.note(**task)
        return ""

    def on_text(self, text):
        self.said = text
        return ""

    def grade(self):
        odd = self.task["task"] == "odd-ids"
        info = {"tests": 5, "absent": 2, "absent_tests": ["It says so.", "b"]} if odd else {"tests": 4, "absent": 0}
        return Grade(outcome=float(self.said == "gold" and not odd), success=False, info=info)

    def oracles(self):
        return [Oracle("gold", 1.0, say("gold")), Oracle("no-op", 0.0, say(""))]
"""


def test_a_task_that_fails_hinders_no_other_and_is_dropped_into_a_list(tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(SET)
    env, drop = f"{tmp_path / 'four.py'}:Four", tmp_path / "bad.jsonl"
    found = validate(env, seeds=None, kwargs={})
    assert (found.tasks, found.played, found.absent, found.tests) == (3, 3, 2, 9)
    assert [(fault.task, fault.absent) for fault in found.faults] == [("rows:4", 0), ("no-image", 0), ("odd-ids", 2)]
    done = agentrl("validate", env, "--all", "--drop", str(drop))
    assert done.code == 1, done.err
    said = " ".join(done.out.split())
    for words in (
        "test ids: 2 of 9 are not in the log of the gold patch",
        "no task: rows:4 = 'x': no JSON",
        "failed: task no-image: image 'x:1' is not there",
        "missed: odd-ids: the oracle gold got 0.0 instead of 1; 2 of 5 test ids are not in the log of its test run, "
        "as 'It says so.'",
        "3 tasks are in",
    ):
        assert words in said, (words, said)
    rows = [json.loads(line) for line in drop.read_text().splitlines()]
    assert [(row["task"], row["absent"], row["tests"]) for row in rows] == [
        ("rows:4", 0, 0),
        ("no-image", 0, 0),
        ("odd-ids", 2, 5),
    ]


def test_no_list_is_written_where_every_task_failed(tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(SET.replace('task["task"] == "no-image"', "True"))
    with pytest.raises(UsageError, match="is not written, as every task failed"):
        validate(f"{tmp_path / 'four.py'}:Four", seeds=None, kwargs={}).drop(tmp_path / "bad.jsonl")
    assert not (tmp_path / "bad.jsonl").exists()


def test_an_environment_that_is_no_set_has_no_all(parity: str) -> None:
    with pytest.raises(UsageError, match="says not how many tasks it has: give --n"):
        validate(parity, seeds=None, kwargs={})


ROW: dict[str, Any] = {
    "repo": "one",
    "problem_statement": "x",
    "patch": "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n",
    "test_patch": "--- /dev/null\n+++ b/tests/t.py\n@@ -0,0 +1 @@\n+x\n",
    "FAIL_TO_PASS": ["t.py::a"],
    "test_command": "echo PASSED t.py::a",
}


@pytest.mark.medium
@pytest.mark.bubblewrap
def test_the_reason_of_a_missed_outcome_is_shown(tmp_path: Path) -> None:
    """A patch that does not fit, a deadline, a runner that is not there, a contradiction: none is just "got 0"."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one/m.py").write_text("x = 1\n")
    changes: dict[str, dict[str, Any]] = {
        "misfit": {"patch": "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-y = 1\n+y = 2\n", "test_command": "cat m.py"},
        "late": {"test_command": "sleep 100"},
        "no-runner": {"test_command": "python3 -S -m no_such_pytest {tests}"},
        "contradiction": {"test_command": "echo PASSED t.py::a; exit 3"},
    }
    rows = [json.dumps({**ROW, "instance_id": id, **change}) for id, change in changes.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    kwargs: dict[str, Any] = {"tasks": str(tmp_path / "rows.jsonl"), "repositories": str(tmp_path), "tests_s": 5.0}
    reasons = {fault.task: fault.reason for fault in validate("agentrl/SWE-v0", seeds=None, kwargs=kwargs).missed}
    for id, words in (
        ("misfit", "hunk 1 does not fit m.py"),
        ("late", "the test run was ended at its deadline of 5 s"),
        ("no-runner", "No module named no_such_pytest"),
        ("contradiction", "exit code 3, and no test of the log has failed"),
    ):
        assert words in reasons[id], reasons


SHIPPED = {
    "Calculator": "calculator",
    "Calls": "calls",
    "CodeRepair": "code_repair",
    "Harbor": "swe",
    "Nim": "nim",
    "RepoRepair": "repo_repair",
    "Retrieval": "retrieval",
    "SWE": "swe",
    "Service": "service",
    "TextGame": "text_game",
}
BOXED = {"CodeRepair", "Harbor", "RepoRepair", "SWE"}


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.bubblewrap] if name in BOXED else []) for name in SHIPPED]
)
def test_a_shipped_environment_is_validated_as_its_readme_says(name: str) -> None:
    command = ["validate", f"agentrl/{name}-v0", "--n"]
    readme = Path(agentrl_environments.__path__[0], SHIPPED[name], "README.md").read_text("utf-8")
    assert f"    agentrl {' '.join(command)} " in readme
    done = agentrl(*command, "2")
    assert done.code == 0, done.out + done.err
    told = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if "│" in line]
    assert len(told) >= 2 and all(row[2:4] == ["2", "2"] for row in told)
    assert all(f"| {oracle} | {outcome} |" in readme for oracle, outcome, *_ in told)
