"""Demonstrations of an environment's oracles: who acts in them, and that supervised training reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from typer.testing import CliRunner

import agentrl
from agentrl.cli.main import app
from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.checks.oracles import Oracle, say
from agentrl.errors import UsageError
from agentrl.models.resolve import model_dir, vocabulary
from agentrl.offline.demonstrations import read
from agentrl.offline.oracle_demonstrations import write
from agentrl_environments.calculator.arithmetic import evaluate, written

CALCULATOR = "agentrl/Calculator-v0"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_share_of_the_demonstrations_errs_and_training_reads_all(tmp_path: Path) -> None:
    file, again = tmp_path / "new" / "demos.jsonl", tmp_path / "again.jsonl"
    made = write(CALCULATOR, 20, file, mistakes=0.5, seed=3)
    lines = lines_of(file)
    assert [line["seed"] for line in lines] == list(range(3, 23)) and made.left_out == 0
    assert 4 < made.mistaken < 16 and made.mistaken == sum(line["outcome"] == 0.0 for line in lines)
    for line in lines:
        asked = next(one["content"] for one in line["messages"] if one["role"] == "user")
        question = asked.partition("What is ")[2].partition("?")[0]
        right = evaluate(question)
        calls = [one["tool_calls"][0] for one in line["messages"] if one["role"] == "assistant"]
        names = [call["function"]["name"] for call in calls]
        shown = calls[-1]["function"]["arguments"]["answer"]
        if line["oracle"] == "gold":
            assert names == ["calculate", "submit"] and shown == written(right)
            asks = calls[0]["function"]["arguments"]["expression"]
            assert asks == question  # not the answer, which the tool is there for
            *_, answer, _ = line["messages"]
            assert answer["role"] == "tool" and answer["tool_call_id"] == calls[0]["id"]
        else:  # never the silent one
            assert line["oracle"] == "off by one" and names == ["submit"] and shown == written(right + 1)
        assert {tool["function"]["name"] for tool in line["tools"]} >= set(names)
    write(CALCULATOR, 20, again, mistakes=0.5, seed=3)
    assert again.read_bytes() == file.read_bytes()
    folder = model_dir("agentrl/tiny-coder")
    found = read(file, Renderer(folder), vocab=vocabulary(folder), max_context=1 << 20)
    assert [len(one.turns) for one in found] == [2 if line["oracle"] == "gold" else 1 for line in lines]


class Taciturn(agentrl.Env):
    """Even tasks can be won; a loser says nothing. `broken`: nobody wins."""

    def __init__(self, oracles: bool = True, broken: bool = False) -> None:
        super().__init__()
        self._offers, self._broken = oracles, broken

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._even = not (seed or 0) % 2
        return ({"role": "user", "content": "?"},), {}

    def step(self, action: str) -> Any:
        return (), 0.0, True, False, {"outcome": float(action == "yes" and not self._broken)}

    def oracles(self) -> list[Oracle]:
        gold = [Oracle("gold", 1.0, say("yes"))] if self._even else []
        cheat = Oracle("cheat", 0.0, say("break it"), cheats=True)  # loses in words, and is never shown
        return [*gold, Oracle("no-op", 0.0, say("")), cheat] if self._offers else []


TACITURN = f"{__name__}:Taciturn"


def test_tasks_without_an_oracle_to_show_are_left_out(tmp_path: Path) -> None:
    made = write(TACITURN, 5, tmp_path / "demos.jsonl")
    assert [line["seed"] for line in lines_of(tmp_path / "demos.jsonl")] == [0, 2, 4, 6, 8]
    assert (made.demonstrations, made.mistaken, made.left_out) == (5, 0, 4)
    assert lines_of(tmp_path / "demos.jsonl")[0]["messages"][-1] == {"role": "assistant", "content": "yes"}


@each_case(
    ("kwargs", "mistakes", "says"),
    [
        ({"oracles": False}, 0.0, "offers no oracles: write a method"),
        ({}, 1.0, r"seeds 0 to 63: no oracle errs in words: leave out --mistakes"),
        ({"broken": True}, 0.0, "seed 0: 'gold' gets 0 and must get 1: see agentrl validate"),
    ],
)
def test_what_cannot_be_shown_is_said_and_leaves_no_file(
    tmp_path: Path, kwargs: dict[str, Any], mistakes: float, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        write(TACITURN, 3, tmp_path / "demos.jsonl", mistakes=mistakes, kwargs=kwargs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bubblewrap
def test_a_repair_is_shown_with_the_tools_that_it_takes(tmp_path: Path) -> None:
    write("agentrl/CodeRepair-v0", 24, tmp_path / "demos.jsonl", mistakes=0.4)
    shown: dict[str, list[str]] = {}
    for line in lines_of(tmp_path / "demos.jsonl"):
        turns = [one["tool_calls"] for one in line["messages"] if one["role"] == "assistant"]
        calls = ["+".join(call["function"]["name"] for call in turn) for turn in turns]
        assert shown.setdefault(line["oracle"], calls) == calls
    assert shown == {
        "gold": ["replace_line+submit"],
        "second try": ["replace_line+run_tests", "replace_line+submit"],
        "no-op": ["submit"],
        "wrong repair": ["replace_line+submit"],
    }


def test_a_mistake_that_the_environment_finds_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no sandboxes id 'nope' is registered"):
        write("agentrl/CodeRepair-v0", 1, tmp_path / "demos.jsonl", kwargs={"sandbox": "nope"})


def test_the_command_tells_how_far_it_is_and_replaces_only_when_told(tmp_path: Path) -> None:
    out = tmp_path / "demos.jsonl"
    command = ["demos", TACITURN, "--n", "4", "--out", str(out)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.stdout == f"4 demonstrations, 0 of them with mistakes: {out}; 3 tasks had none\n"
    assert done.stderr.splitlines()[-1] == "4 of 4"
    with pytest.raises(UsageError, match="exists: give another --out, or --overwrite"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    again = CliRunner().invoke(app, [*command, "--overwrite", "--seed", "2"], catch_exceptions=False)
    assert again.exit_code == 0 and lines_of(out)[0]["seed"] == 2
