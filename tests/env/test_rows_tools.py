"""Tools given as functions beside rows and reward functions, as TRL's `GRPOTrainer(tools=[f])` has them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from each_case import each_case
from transformers.utils import get_json_schema

import agentrl
from agentrl.env.dataset_env import RowsToolEnv
from agentrl.env.reward_functions import Answer
from agentrl.env.tools.tools import FunctionTool
from agentrl.errors import EnvError, ToolError, UsageError

HERE = __name__
TALK = [{"role": "user", "content": "What is 6 times 7?"}]


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    if b == 0:
        raise ToolError("b is 0")
    return a / b


@agentrl.tool(name="find")
def look_up(word: str) -> str:
    """Find a word.

    Args:
        word: The word.
    """
    return {"six": "6"}[word]


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    """Do something."""
    return a


def answered(prompt: Any, completion: str, row: Any) -> float:
    return float(completion == row["answer"])


def length(prompt: Any, completion: str, row: Any) -> float:
    return float(len(completion))


def from_trl(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(completion[-1]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


def texts(completions: list[Any], **kwargs: Any) -> list[float]:
    assert all(isinstance(completion, str) for completion in completions)
    return [1.0]


def abstains(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None]


def raises(prompt: Any, completion: str, row: Any) -> float:
    raise KeyError("missing")


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def env(*rewards: str, tools: Any = ("multiply", "async_add", "divide", "look_up"), **settings: Any) -> RowsToolEnv:
    references = [f"{HERE}:{name}" for name in tools]
    return RowsToolEnv(tools=references, rewards=[f"{HERE}:{name}" for name in rewards], processes=0, **settings)


async def played(one: RowsToolEnv, *actions: str, prompt: Any = TALK, answer: str = "42") -> list[Any]:
    """The steps of an episode."""
    async with one:
        await one.areset(seed=0, options={"prompt": prompt, "answer": answer})
        return [await one.astep(action) for action in actions]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """The answers that reward functions got."""
    answers: list[Answer] = []

    def score(self: Any, answer: Answer) -> float:
        answers.append(answer)
        return 1.0

    monkeypatch.setattr("agentrl.env.reward_functions.RewardFunction.__call__", score)
    return answers


@each_case("function", [multiply, async_add, divide])
def test_the_schema_is_that_of_transformers_which_trl_shows(function: Any) -> None:
    """But for `return`, and with a ban on arguments that are not there, as all our tools have it."""
    (ours,) = [dict(schema) for schema in env("length").schemas if schema["name"] == function.__name__]
    assert ours == FunctionTool(function).schema
    theirs = get_json_schema(function)["function"]
    theirs.pop("return", None)
    assert ours == {**theirs, "parameters": {**theirs["parameters"], "additionalProperties": False}}


async def test_the_first_turn_without_a_call_is_the_answer() -> None:
    one = env("answered", "length", weights=[1.0, 0.5], success_from=2.0)
    first, second, last = await played(one, called("multiply", a=6, b=7), called("async_add", a=40, b=2), "42")
    assert [step[0][0]["content"] for step in (first, second)] == ["42", "42"]
    assert not any(step[2] or step[3] for step in (first, second)) and last[2] and not last[3]
    assert last[4] == {
        "stop_reason": "done",
        "outcome": 2.0,
        "success": True,
        "scores": {f"{HERE}:answered": 1.0, f"{HERE}:length": 2.0},
    }


async def test_functions_of_trl_read_the_messages_as_trl_writes_them(judged: list[Answer]) -> None:
    """TRL's shape, `GRPOTrainer._tool_call_loop`: an assistant's message with `tool_calls`, whose arguments are an
    object, then one message of role tool for each, with the function's name."""
    thought = f"<think>\nsix times\n</think>\n\nLet me see.\n{called('multiply', a=6, b=7)}"
    await played(env("from_trl"), thought, called("find", word="six"), "42")
    (answer,) = judged
    assert answer.talk and answer.completion == "42" and list(answer.prompt) == TALK
    messages = [{key: value for key, value in each.items() if key != "tool_call_id"} for each in answer.messages]
    assert messages == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "six times",
            "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}],
        },
        {"role": "tool", "name": "multiply", "content": "42"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"word": "six"}}}],
        },
        {"role": "tool", "name": "find", "content": "6"},
        {"role": "assistant", "content": "42"},
    ]


async def test_a_prompt_that_is_a_text_is_answered_with_the_last_text() -> None:
    *_, last = await played(env("texts", "answered"), called("multiply", a=6, b=7), "42", prompt="6 times 7?")
    assert last[4]["outcome"] == 2.0


async def test_a_limit_has_the_last_text_judged_and_not_what_a_tool_wrote(judged: list[Answer]) -> None:
    """Else a policy whose last call gives the answer would be paid for the tool's words."""
    last_call = called("multiply", a=6, b=7)
    (*_, step) = await played(env("answered", limits={"turns": 2}), called("find", word="six"), last_call)
    (answer,) = judged
    assert step[3] and step[4]["stop_reason"] == "turn_limit" and step[0][0]["content"] == "42"
    assert answer.completion == last_call
    assert [message["role"] for message in answer.messages] == ["assistant", "tool", "assistant"]


async def test_an_episode_that_ends_before_it_has_begun_is_judged_by_nothing_said(judged: list[Answer]) -> None:
    async with env("answered") as one:
        await one.areset(seed=0, options={"prompt": TALK, "answer": ""})
        await one.aend(agentrl.records.StopReason.CONTEXT_LIMIT)
    assert (judged[0].completion, list(judged[0].messages)) == ("", [])


async def test_what_a_policy_gets_wrong_it_reads_and_goes_on(judged: list[Answer]) -> None:
    broken = "<tool_call>\n{'name': broken\n</tool_call>"
    actions = [
        called("divide", a=1, b=0),
        called("multiply", a="__import__('os')", b=1),
        called("rm", path="/"),
        broken,
    ]
    *steps, last = await played(env("answered"), *actions, "42")
    assert [step[0][0]["content"].partition(":")[0] for step in steps] == [
        "error",
        "wrong arguments",
        "invalid call",
        "malformed call",
    ]
    assert last[2]
    assert judged[0].messages[-3] == {"role": "assistant", "content": broken}, "as in TRL, where it is text"


async def test_what_a_tool_does_wrong_fails_the_episode() -> None:
    """As in any ToolEnv (law 3): a KeyError may be a bug of the tool. TRL would show it to the policy."""
    with pytest.raises(KeyError, match="seven"):
        await played(env("answered"), called("find", word="seven"))


@pytest.mark.medium
async def test_judging_is_that_of_rows_env(caplog: pytest.LogCaptureFixture) -> None:
    *_, last = await played(env("abstains", "answered"), "42")
    assert last[4]["scores"] == {f"{HERE}:answered": 1.0}
    with pytest.raises(EnvError, match=r"the reward function '.*:raises' raised KeyError: 'missing'"):
        await played(env("raises"), "42")
    one = RowsToolEnv(tools=[f"{HERE}:multiply"], rewards=[f"{HERE}:hangs"], reward_s=0.5, processes=1)
    *_, last = await played(one, "42")
    assert (last[4]["outcome"], last[4]["scores_late"]) == (0.0, [f"{HERE}:hangs"])


def hangs(prompt: Any, completion: str, row: Any) -> float:
    while True:
        pass


@each_case(
    ("settings", "message"),
    [
        ({"tools": ["no_docstring"]}, "tool 'no_docstring' needs a docstring"),
        ({"tools": ["no_hint"]}, "tool 'no_hint': parameter 'a' needs a type hint"),
        ({"tools": ["multiply", "multiply"]}, "multiply"),
        ({"tools": []}, r"tools = \[\]: give a list of functions"),
        ({"weights": [1.0, 2.0]}, "give one for each of the 1 rewards"),
    ],
)
def test_what_cannot_be_called_or_judged_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        env("length", **settings)


async def test_held_out_rows_are_asked_by_seed(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{at}", "answer": str(at)}) + "\n" for at in range(3)))
    async with env("answered", rows=str(file), system="be brief") as one:
        asked, _ = await one.areset(seed=4)
        assert [message["content"] for message in asked] == ["be brief", "q1"]
        assert (await one.astep("1"))[4]["outcome"] == 1.0
