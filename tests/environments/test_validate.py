"""`agentrl validate`: a table of what each oracle got, and an exit code that says whether all of them held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_environments
from agentrl.errors import EnvError, UsageError
from agentrl.runtime.validate import validate

ENV = """
import agentrl
from agentrl.env.oracles import Oracle, say

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


def agentrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from agentrl.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"COLUMNS": "120", "PATH": "/usr/bin:/bin"},
    )


def test_all_oracles_hold(parity: str) -> None:
    tallies = validate(parity, seeds=range(4), kwargs={})
    assert [(tally.name, tally.expected, tally.episodes, tally.held, tally.turns) for tally in tallies] == [
        ("gold", 1.0, 4, 4, 4),
        ("no-op", 0.0, 4, 4, 4),
        ("both", 0.0, 4, 4, 4),
    ]


def test_the_seeds_that_do_not_hold_are_named(parity: str) -> None:
    gold, *others = validate(parity, seeds=range(5, 9), kwargs={"wrong_for": 7})
    assert (gold.held, gold.missed) == (3, {7: 0.0})
    assert [other.missed for other in others] == [{}, {}]


def test_an_environment_without_oracles_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="offers no oracles"):
        validate("agentrl/FrozenLake-v0", seeds=[0], kwargs={})


def test_an_environment_that_raises_is_named_with_its_seed(parity: str) -> None:
    path = Path(parity.rpartition(":")[0])
    path.write_text(ENV.replace("        return self.said == ", "        return 1 / 0 == "))
    line = 1 + next(at for at, text in enumerate(path.read_text().splitlines()) if "1 / 0" in text)
    with pytest.raises(EnvError) as raised:
        validate(parity, seeds=[4], kwargs={})
    assert str(raised.value) == f"{parity}, seed 4: raised ZeroDivisionError: division by zero ({path}:{line})"


def test_the_command(parity: str) -> None:
    good = agentrl("validate", parity, "--n", "3")
    assert good.returncode == 0, good.stderr
    assert [line.split("│")[4].strip() for line in good.stdout.splitlines() if "│" in line] == ["3", "3", "3"]
    bad = agentrl("validate", parity, "--n", "3", "--seed", "6", "--set", "wrong_for=7")
    assert bad.returncode == 1 and "7 (got 0.0)" in bad.stdout
    none = agentrl("validate", "agentrl/FrozenLake-v0", "--n", "1")
    assert none.returncode == 2 and "offers no oracles" in none.stderr


SHIPPED = {
    "Calculator": "calculator",
    "CodeRepair": "code_repair",
    "Harbor": "swe",
    "Nim": "nim",
    "RepoRepair": "repo_repair",
    "Retrieval": "retrieval",
    "SWE": "swe",
    "TextGame": "text_game",
}
BOXED = {"CodeRepair", "Harbor", "RepoRepair", "SWE"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.bubblewrap] if name in BOXED else []) for name in SHIPPED]
)
def test_a_shipped_environment_is_validated_as_its_readme_says(name: str) -> None:
    command = ["validate", f"agentrl/{name}-v0", "--n"]
    readme = Path(agentrl_environments.__path__[0], SHIPPED[name], "README.md").read_text("utf-8")
    assert f"    agentrl {' '.join(command)} " in readme
    done = agentrl(*command, "2")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert len(told) >= 2 and all(row[2:4] == ["2", "2"] for row in told)
    assert all(f"| {oracle} | {outcome} |" in readme for oracle, outcome, *_ in told)
