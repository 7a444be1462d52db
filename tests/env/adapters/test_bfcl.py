"""BFCL's tasks, scored as the package's own runner scores them, and played as its inference plays them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from each_case import each_case
from gymnasium.error import ResetNeeded

import agentrl
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.adapters import bfcl_tasks
from agentrl.env.adapters.bfcl_tasks import BFCL, STEPS
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import EnvError, UsageError
from agentrl.host.clocks import policy_time
from agentrl.run.evaluation import of_endpoint
from agentrl.testing.hostile import check_nothing_dropped
from tests.parts.bfcl_answers import MULTI, SINGLE, Oracle, action, lines_of, played, right_turns, sample

pytestmark = pytest.mark.adapters

MEAN = ToolCall("mean", {"numbers": [1, 3]})


def calls(*made: ToolCall, dialect: str = "hermes") -> str:
    return get_format(dialect).write(*made)


def task_with(category: str, api: str) -> int:
    """The first task of a category with one of the package's APIs."""
    entries = lines_of(f"BFCL_v4_{category}.json")
    return next(index for index, entry in enumerate(entries) if api in entry["involved_classes"])


def results_of(env: BFCL, *made: ToolCall) -> list[str]:
    observation, _, terminated, _, _ = env.step(calls(*made))
    assert not terminated and {message["role"] for message in observation} == {"tool"}
    return [message["content"] for message in observation]


@pytest.mark.medium
def test_scores_are_those_of_the_packages_runner() -> None:
    answers = {category: sample(category, 8 if category in SINGLE else 4, seed=1) for category in (*SINGLE, *MULTI)}
    oracle = Oracle(answers)  # works while ours are played
    ours = {category: played(category, written) for category, written in answers.items()}
    theirs = oracle.scores(answers, 120)
    for category, written in answers.items():
        different = [
            (answer.id, answer.kind, own, score)
            for answer, own, score in zip(written, ours[category], theirs[category], strict=True)
            if own != score
        ]
        assert not different, (category, different)
    assert {score for scores in theirs.values() for score in scores} == {0.0, 1.0}


def test_every_right_answer_to_a_conversation_is_played_to_its_end_and_wins() -> None:
    for category in MULTI:
        env = BFCL(category)
        for index in range(0, 200, 40):
            observation, _ = env.reset(options={"index": index})
            turns = right_turns(category, index, random.Random(index))
            info: dict[str, Any] = {}
            for steps in turns:
                assert any(message["role"] == "user" for message in observation or info["history"])
                for step in steps:
                    observation, _, terminated, _, info = env.step(action(step))
                    assert "0x" not in json.dumps(observation), "an address differs when it is replayed"
            assert terminated and info["outcome"] == 1.0 and info["success"]
            with pytest.raises(ResetNeeded):
                env.step("more")


def test_results_are_those_of_the_packages_apis_and_mistakes_are_read() -> None:
    env = BFCL("multi_turn_base")
    env.reset(options={"index": 0})
    assert results_of(env, ToolCall("cd", {"folder": "document"})) == ['{"current_working_directory": "document"}']
    wrong = results_of(env, ToolCall("cd", {"path": 1}), ToolCall("mean", {}), ToolCall("open", {"file": "x"}))
    assert wrong[0].startswith("Error during execution: ") and "unexpected keyword argument 'path'" in wrong[0]
    assert wrong[1:] == [f"Error during execution: name '{name}' is not defined" for name in ("mean", "open")]


def test_withheld_functions_come_at_their_turn_with_the_whole_conversation() -> None:
    entry = lines_of("BFCL_v4_multi_turn_miss_func.json")[0]
    ((turn, names),) = entry["missed_function"].items()

    def offered() -> set[str]:
        return {str(schema["function"]["name"]) for schema in env.tool_schemas()}

    env = BFCL("multi_turn_miss_func")
    opening, _ = env.reset(options={"index": 0})
    assert not offered() & set(names)
    env.step(calls(ToolCall("ls", {}), ToolCall("pwd", {})))
    for _ in range(int(turn) - 1):
        observation, _, _, _, info = env.step("I cannot do that.")
        assert "history" not in info and observation[0]["role"] == "user"
    observation, _, _, _, info = env.step("I cannot do that either.")
    assert not observation and set(names) <= offered()
    roles = [message["role"] for message in info["history"]]
    assert roles == ["user", "assistant", "tool", "tool", *["assistant", "user"] * int(turn)]
    assert info["history"][0] == opening[0] and "updated some more functions" in info["history"][-1]["content"]
    made, *results = info["history"][1:4]
    assert [call["id"] for call in made["tool_calls"]] == [result["tool_call_id"] for result in results]


def test_a_turn_has_the_packages_bound_of_steps_and_one_more() -> None:
    env = BFCL("multi_turn_base")
    env.reset(options={"index": 0})
    for _ in range(STEPS):
        assert not env.step(calls(ToolCall("pwd", {})))[2]
    observation, _, terminated, _, info = env.step(calls(ToolCall("pwd", {})))
    assert terminated and observation and info["error_type"] == "multi_turn:force_terminated"
    from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT

    assert MAXIMUM_STEP_LIMIT == STEPS


def test_a_dialect_that_no_template_knows_is_taught_by_text() -> None:
    env = BFCL("multi_turn_miss_func", tool_format="json")
    opening, _ = env.reset(options={"index": 0})
    assert env.tool_schemas() == [] and '"name": "mv"' in opening[0]["content"]
    observation, *_ = env.step(calls(ToolCall("pwd", {}), dialect="json"))
    assert observation[0]["role"] == "user" and "current_working_directory" in observation[0]["content"]
    info: dict[str, Any] = {}
    while "history" not in info:
        *_, info = env.step("No.")
    assert info["history"][0]["content"] != opening[0]["content"] and info["history"][2]["content"].startswith("{")


HOSTILE = [
    ToolCall("agentrl_ground_truth_eval_multi_turn_base_0_MathAPI_instance.add", {"a": 1, "b": 2}),
    ToolCall("mean", {"numbers=__import__('os').getcwd()": 1}),
    ToolCall("mean", {"numbers=[1]) or exit(code": 1}),
    ToolCall("mean", {"": [1]}),
    ToolCall("_load_scenario", {"scenario": {}}),
    ToolCall("mean.__class__", {}),
    ToolCall("", {}),
    ToolCall("a" * 100_000, {}),
    ToolCall("exit", {}),
]


def test_nothing_but_methods_with_literals_is_ever_called(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    hostile_calls = [*HOSTILE, ToolCall("__import__('os').system", {"command": f"touch {reached}"})]
    env = BFCL("multi_turn_base")
    env.reset(options={"index": task_with("multi_turn_base", "MathAPI")})
    for hostile in hostile_calls:
        if hostile.name:
            (result,) = results_of(env, hostile)
            assert result.startswith("Error during execution: "), (hostile, result)
    assert results_of(env, MEAN) == ['{"result": 2.0}']
    assert not reached.exists()


@pytest.mark.medium
def test_a_call_that_does_not_end_is_the_policys_and_the_episode_goes_on() -> None:
    env = BFCL("multi_turn_base", call_s=1.0)
    env.reset(options={"index": task_with("multi_turn_base", "MathAPI")})
    endless = ToolCall("power", {"base": 7, "exponent": 10**12})
    late = "Error during execution: not ended within 1 s"
    assert results_of(env, MEAN, endless) == [late, late], "the package gives the results of a step together"
    too_large = ToolCall("square_root", {"number": 7, "precision": 10**10})
    assert results_of(env, MEAN, too_large) == ['{"result": 2.0}', "Error during execution: "]


def test_no_call_changes_what_a_later_one_reads_of_a_long_context() -> None:
    """The package adds the same cards to each object: 5,000 euros, and 400 for the booking."""
    index = task_with("multi_turn_long_context", "TravelAPI")
    token = lines_of("BFCL_v4_multi_turn_long_context.json")[index]["initial_config"]["TravelAPI"]["access_token"]
    cancel = ToolCall("cancel_booking", {"access_token": token, "booking_id": "booking_901"})
    balance = ToolCall("get_credit_card_balance", {"access_token": token, "card_id": "1234567812345678"})
    env = BFCL("multi_turn_long_context")
    for _ in range(2):
        env.reset(options={"index": index})
        assert results_of(env, cancel) == ['{"cancel_status": true}']
        assert results_of(env, balance) == ['{"card_balance": 5400.0}']


def test_an_answer_on_which_the_checker_raises_is_worth_0() -> None:
    """An integer that no float can be, for a parameter that is a float."""
    entries = lines_of("BFCL_v4_simple_python.json")
    index, function, name = next(
        (index, entry["function"][0], name)
        for index, entry in enumerate(entries)
        for name, parameter in entry["function"][0]["parameters"]["properties"].items()
        if parameter["type"] == "float" and entry["function"][0]["parameters"]["required"] == [name]
    )
    env = BFCL("simple_python")
    env.reset(options={"index": index})
    huge = ToolCall(function["name"].replace(".", "_"), {name: 10**400})
    *_, terminated, _, info = env.step(calls(huge))
    assert terminated and info["outcome"] == 0.0 and info["error_type"] == "the checker raised OverflowError"


@each_case("category", ["parallel", "multi_turn_miss_func"])
async def test_no_action_drops_an_episode(category: str) -> None:
    await check_nothing_dropped(
        lambda: BFCL(category, call_s=2.0), seeds=(1,), turns=8, actions=[calls(*HOSTILE), calls(MEAN)]
    )


def test_a_process_that_the_host_ended_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    env = BFCL("irrelevance")
    env.reset(seed=0)
    with bfcl_tasks._processes().borrowed() as child:  # the next request has it again
        pid = child._process.pid

    def kills() -> Any:
        os.kill(pid, signal.SIGKILL)
        return policy_time()

    with monkeypatch.context() as patched:
        patched.setattr(bfcl_tasks, "policy_time", kills)
        with pytest.raises(EnvError, match="the process of bfcl-eval ended"):
            env.step("No function fits.")
    env.reset(seed=0)
    assert env.step("No function fits.")[4]["outcome"] == 1.0


@each_case(
    "categories, problem",
    [
        ("memory_kv", "'memory_kv' is not played here: it needs sentence-transformers"),
        (["simple_python", "web_search"], "'web_search.*' is not played here: it searches the web"),
        ("format_sensitivity", "is not played here: it is for models that write calls as text"),
        ("simple", "'simple' is none of bfcl-eval's: give simple_python, "),
        ([], "categories is empty"),
    ],
)
def test_categories_that_are_not_played_are_refused_by_name(categories: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        BFCL(categories)


def test_indices_are_the_tasks_in_the_packages_order_and_groups_are_the_packages() -> None:
    env = BFCL(["simple_javascript", "live_parallel"])
    assert env.task_count == 66
    ids = {0: "simple_javascript_0", 49: "simple_javascript_49", 50: "live_parallel_0-0-0", 67: "simple_javascript_1"}
    for index, id in ids.items():
        assert env.reset(options={"index": index})[1]["task"] == id
    assert BFCL("single_turn").task_count == sum(len(lines_of(f"BFCL_v4_{name}.json")) for name in SINGLE)
    with pytest.raises(UsageError, match="index = 'x': give the number of a task, 0 to 65"):
        env.reset(options={"index": "x"})


def test_few_tasks_of_a_group_are_of_all_its_categories_and_no_task_comes_twice() -> None:
    env = BFCL(["simple_javascript", "live_parallel"])
    seen = [env.reset(seed=10**9 + number)[1] for number in range(66)]
    assert len({info["task"] for info in seen}) == 66
    early = [info["category"] for info in seen[:12]]
    assert 2 <= early.count("live_parallel") <= 4, "16 of 66 tasks are a quarter"


@pytest.mark.medium
def test_a_missing_package_is_one_line_with_its_remedy() -> None:
    program = "import sys; sys.modules['bfcl_eval'] = None; from agentrl.env.adapters.bfcl_package import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as child:
        assert child.stdout is not None
        answer = json.loads(child.stdout.readline())
    assert answer["usage"] and answer["error"].startswith(
        "BFCL needs the package 'bfcl-eval': pip install --no-deps bfcl-eval, and filelock, mpmath and tenacity"
    )


@pytest.mark.medium
def test_a_replay_reads_the_same() -> None:
    written = [answer for category in MULTI for answer in sample(category, 3, seed=5)]
    seen: list[list[Any]] = [[], []]
    for observations in seen:
        for answer in written:
            env = BFCL(answer.id.rpartition("_")[0])
            observations.append(env.reset(options={"index": answer.index}))
            for step in (step for steps in answer.turns for step in steps):
                observations.append(env.step(action(step)))
    assert seen[0] == seen[1]


def served(request: dict[str, Any], answers: dict[str, list[Any]]) -> httpx.Response:
    """A chat server that answers the conversations it knows by their first message, step by step."""
    messages = request["messages"]
    first = next(message["content"] for message in messages if message["role"] == "user")
    step = answers[first][sum(message["role"] == "assistant" for message in messages)]
    if isinstance(step, str):
        message: dict[str, Any] = {"role": "assistant", "content": step}
    else:
        tool_calls = [
            {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for at, (name, arguments) in enumerate(step)
        ]
        offered = {tool["function"]["name"] for tool in request["tools"]}
        assert {name for name, _ in step} <= offered
        message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    return httpx.Response(200, json={"choices": [{"message": message}]})


def test_a_served_model_is_evaluated(tmp_path: Path) -> None:
    """Right answers to conversations whose functions come late, over the API of a chat server."""
    category = "multi_turn_miss_func"
    entries = lines_of(f"BFCL_v4_{category}.json")
    settings = (f"env.kwargs.categories={category}",)
    config = of_endpoint.configured("m", "agentrl/BFCL-v0", settings)
    answers = {
        entry["question"][0][0]["content"]: [
            step for steps in right_turns(category, index, random.Random(0)) for step in steps
        ]
        for index, entry in enumerate(entries)
    }
    transport = httpx.MockTransport(
        lambda request: (
            served(json.loads(request.content), answers) if request.method == "POST" else httpx.Response(404)
        )
    )
    client = ScoringClient("http://h", model="m", transport=transport, deadline_s=60)
    endpoint = of_endpoint.Endpoint(client=client, options=of_endpoint.sampling(config))
    result = of_endpoint.evaluate(config, endpoint, 4, tmp_path, on_result=lambda _: None)
    assert (result.success, result.n, result.failed) == (1.0, 4, 0)


def test_it_passes_our_checker() -> None:
    agentrl.check_env(partial(BFCL, "multi_turn_base"))
