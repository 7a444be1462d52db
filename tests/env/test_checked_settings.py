"""A setting of a wrong kind is named where it is given: field, value and mend, and no episode begins with it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

from agentrl.env import EpisodeLimits, ToolEnv
from agentrl.env.agent_programs.program_env import ProgramEnv
from agentrl.env.dataset_env import RowsEnv
from agentrl.errors import ConfigError, UsageError
from agentrl.protocols import Limits, SandboxSpec
from agentrl.testing.fake_sandbox import FakeSandbox
from agentrl_environments.code_repair import CodeRepair
from agentrl_environments.repo_repair import RepoRepair
from agentrl_environments.retrieval import Retrieval
from agentrl_environments.swe import SWE
from agentrl_tools.fetch import HttpFetch
from agentrl_tools.files import ListFiles
from agentrl_tools.mcp import McpServer
from agentrl_tools.python import Python
from agentrl_tools.search import Search
from agentrl_tools.shell import Shell

GOOD = f"{__name__}:good"


def good(prompt: Any, completion: str, row: Any) -> float:
    return 1.0


@each_case(
    ("field", "value", "mend"),
    [
        ("structural_retries", "2", "whole number from 0"),
        ("content_retries", -1, "whole number from 0"),
        ("content_retries", 2.0, "whole number from 0"),
        ("structural_retries", True, "whole number from 0"),
        ("structural_penalty", math.nan, "finite number from 0"),
        ("structural_penalty", math.inf, "finite number from 0"),
        ("content_penalty", "0.5", "finite number from 0"),
        ("content_penalty", -1.0, "finite number from 0"),
        ("content_penalty", True, "finite number from 0"),
        ("mask_structural", "false", "true or false"),
        ("mask_content", 1, "true or false"),
    ],
)
def test_a_parse_policy_names_what_is_wrong_with_it(field: str, value: Any, mend: str) -> None:
    class Env(ToolEnv):
        def prompt(self, task: Any) -> str:
            return "Go."

        def grade(self) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=rf"^parse_policy\.{field} = {re.escape(repr(value))}: give .*{mend}"):
        Env(parse_policy={field: value})
    Env(parse_policy={"structural_retries": 0, "content_penalty": 1, "mask_content": True})


@each_case("value", [True, math.nan, 0, -1, "8"])
def test_limits_are_numbers_above_0(value: Any) -> None:
    for name in ("turns", "tokens", "seconds", "tool_seconds"):
        with pytest.raises(ConfigError, match=rf"^limits\.{name} = "):
            EpisodeLimits(**{name: value})


@each_case("seconds", [-1, 0, math.nan, math.inf, "60", True, None])
def test_a_deadline_is_a_number_of_seconds_above_0(seconds: Any) -> None:
    box = FakeSandbox(SandboxSpec())
    makers: list[tuple[str, Any]] = [
        *(("timeout_s", lambda kind=kind: kind(box, timeout_s=seconds)) for kind in (Shell, Python, Search, ListFiles)),
        ("timeout_s", lambda: HttpFetch(["a"], timeout_s=seconds)),
        ("call_s", lambda: McpServer(command=["x"], call_s=seconds)),
        ("start_s", lambda: McpServer(command=["x"], start_s=seconds)),
        ("tests_s", lambda: SWE(tests_s=seconds)),
        ("shell_s", lambda: SWE(shell_s=seconds)),
    ]
    for name, make in makers:
        with pytest.raises(
            ConfigError, match=rf"^{name} = {re.escape(repr(seconds))}: give a number of seconds above 0$"
        ):
            make()


@each_case("entry", ["https://docs.python.org", "docs.python.org/3", "me@docs.python.org", "", "a b", 5])
def test_an_allowed_host_is_a_host_alone(entry: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^allow\[1\] = {re.escape(repr(entry))}: give a host alone"):
        HttpFetch(["*.example.org", entry])


@each_case(
    ("settings", "why"),
    [
        ({"rewards": GOOD}, rf"^rewards = '{GOOD}': give a list of functions"),
        ({"rewards": [5]}, r"^rewards = \[5\]: give a list of functions"),
        ({"weights": ["2"]}, r"^weights\[0\] = '2': give a finite number"),
        ({"weights": [math.nan]}, r"^weights\[0\] = nan: give a finite number"),
        ({"weights": 2.0}, r"^weights = 2.0: give one for each of the 1 rewards"),
        ({"weights": "2"}, r"^weights = '2': give one for each of the 1 rewards"),
        ({"success_from": "1"}, r"^success_from = '1': give a finite number"),
        ({"success_from": math.nan}, r"^success_from = nan: give a finite number"),
        ({"prompt": ["a"]}, r"^prompt = \['a'\]: give a text"),
        ({"system": 5}, r"^system = 5: give a text"),
    ],
)
def test_rewards_of_rows_and_their_weights_are_checked_before_a_row_is_asked(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        RowsEnv(**{"rewards": [GOOD], **settings})


def test_a_library_of_ones_own_is_checked_when_it_is_read(tmp_path: Path) -> None:
    rows = {
        '{"id": "a", "text": "b"}': r"corpus, row 1: title = None: give a text",
        '{"id": "a", "title": "b", "text": ["c"]}': r"corpus, row 1: text = \['c'\]: give a text",
        '{"id": 1, "title": "b", "text": "c"}\n{"id": "1", "title": "b", "text": "c"}': r"two texts have the id '1'",
    }
    for at, (row, why) in enumerate(rows.items()):
        file = tmp_path / str(at) / "corpus"
        file.parent.mkdir()
        file.write_text(row)
        with pytest.raises(UsageError, match=why):
            Retrieval(corpus=str(file))
    (questions := tmp_path / "questions").write_text('{"question": "a", "answers": ["b"]}')
    with pytest.raises(UsageError, match=r"questions, row 1: sources = None: give a list of texts"):
        Retrieval(questions=str(questions))
    with pytest.raises(UsageError, match=r"reset options: answers = \[\]: give a list of texts"):
        Retrieval().reset(options={"question": "a", "answers": []})
    for results in (0, "3", True):
        with pytest.raises(ConfigError, match=r"^results = .*: give a whole number above 0"):
            Retrieval(results=results)  # type: ignore[arg-type]


@each_case(
    ("limits", "why"),
    [
        ({"wall_s": -1}, r"^wall_s = -1: give a finite number above 0$"),
        ({"pids": 1.5}, r"^pids = 1.5: give a whole number above 0$"),
        ({"output_bytes": 0}, r"^output_bytes = 0: give a whole number above 0$"),
    ],
)
def test_limits_of_a_box_bound_something(limits: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Limits(**limits)


@each_case(
    ("make", "field"),
    [
        (lambda name: CodeRepair(sandbox=name), "sandbox"),
        (lambda name: RepoRepair(sandbox=name), "sandbox"),
        (lambda name: ProgramEnv(["true"], sandbox=name), "sandbox"),
        (lambda name: ToolEnv(box={"sandbox": name}), "box.sandbox"),
    ],
)
def test_a_sandbox_that_nobody_offers_is_refused_where_the_environment_is_made(make: Any, field: str) -> None:
    for name, fix in (("bubblewarp", "known: bubblewrap"), ("no_such_boxes.py:Mine", "no such file")):
        with pytest.raises(ConfigError) as error:
            make(name)
        assert (error.value.field, error.value.value) == (field, name)
        assert fix in error.value.hint
    make("docker")  # of which nothing is imported yet
