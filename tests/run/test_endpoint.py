"""A served model on an environment: a chat server on this machine whose answers are known beforehand."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import commands
import httpx
import pytest
import trio
from each_case import each_case

import agentrl
from agentrl import notices
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.dataset_env import ID
from agentrl.errors import ConfigError, UsageError
from agentrl.host.clocks import policy_time
from agentrl.records import StopReason
from agentrl.run.evaluation import of_endpoint
from agentrl.run.evaluation.held_out import EvalResult
from agentrl_environments.calculator.arithmetic import evaluate, written

MODELS = ["some-model"]
Answer = Callable[[dict[str, Any]], dict[str, Any] | int]


def solves(request: dict[str, Any]) -> dict[str, Any]:
    """Submits the value of the expression it was asked for, by a tool call of the API."""
    assert {tool["function"]["name"] for tool in request["tools"]} >= {"calculate", "submit"}
    asked = next(message["content"] for message in request["messages"] if message["role"] == "user")
    expression = asked.partition("What is ")[2].partition("?")[0]
    last = request["messages"][-1]
    if last["role"] == "user":
        return called("calculate", expression=expression)
    assert last["role"] == "tool" and last["tool_call_id"] == request["messages"][-2]["tool_calls"][0]["id"]
    return called("submit", answer=written(evaluate(expression)))


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]], list[Answer]]]:
    """Address, requests so far, and what answers: the last of the list, a number being an HTTP status."""
    requests: list[dict[str, Any]] = []
    answers: list[Answer] = [solves]

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "key": self.headers.get("Authorization")})
            answer = answers[-1](request)
            body = {"error": "no"} if isinstance(answer, int) else {"choices": [{"message": answer}]}
            data = json.dumps(body).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            data = json.dumps({"data": [{"id": name} for name in MODELS]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}/v1", requests, answers
    listening.shutdown()
    thread.join()
    listening.server_close()


def run(url: str, *more: object, n: int = 3) -> tuple[int, str, str]:
    command = ["eval", "--endpoint", url, "--model", "some-model", "--env", "agentrl/Calculator-v0", "--n", n, "--json"]
    return commands.agentrl(*command, *more, env={"OPENAI_API_KEY": "secret"})


def test_show_prints_what_was_said(server: Any, tmp_path: Path) -> None:
    command = ["eval", "--endpoint", server[0], "--model", "m", "--env", "agentrl/Calculator-v0", "--n", "3"]
    code, out, err = commands.agentrl(*command, "--show", "2")
    assert code == 0, err
    assert out.count("    [user]") == 2 and out.count('    {"name": "submit", ') == 2
    assert "(done)" in out and "What is" in out
    code, _, err = run(server[0], "--show", "2")
    assert code == 2 and "--show prints texts, --json one document: leave out one of them" in err


def test_a_served_model_is_measured_and_what_was_played_is_not_played_again(server: Any, tmp_path: Path) -> None:
    url, requests, answers = server
    settings = ("--set", "rollout.temperature=0.5", "--set", "eval.temperature=0.25", "--set", "rollout.max_turns=2")
    code, out, err = run(url, "--out", tmp_path / "eval", *settings)
    assert code == 0, err
    (result,) = json.loads(out)
    assert (result["success"], result["turns"], result["n"], result["failed"]) == (1.0, 2.0, 3, 0)
    assert result["tokens"] is None  # this server counts none
    assert len(requests) == 6
    assert {(r["model"], r["temperature"], r["key"]) for r in requests} == {("some-model", 0.25, "Bearer secret")}
    results = tmp_path / "eval" / "results.jsonl"
    with results.open("a") as file:
        file.write('{"seed": 10000')  # a crash in the midst of a line
    answers.append(lambda _: {"role": "assistant", "content": "no idea"})
    code, out, err = run(url, "--out", tmp_path / "eval", *settings, n=4)
    assert code == 0, err
    (result,) = json.loads(out)
    assert (result["success"], result["n"]) == (0.75, 4)
    assert len(requests) == 8
    rows = [json.loads(line) for line in results.read_text().splitlines()[1:]]
    assert rows[-1]["stop_reason"] == "turn_limit" and rows[-1]["messages"][-2]["content"] == "no idea"
    code, _, err = run(url, "--out", tmp_path / "eval", *settings, "--set", "env.kwargs.terms=5")
    assert code == 2 and "another evaluation (kwargs differ): give another --out" in err


def test_a_model_that_plays_against_itself_is_named(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, _, answers = server
    answers.append(lambda _: {"role": "assistant", "content": "take 1 from A"})
    command = ["eval", "--endpoint", url, "--model", "m", "--env", "agentrl/NimTable-v0", "--n", "2", "--json"]
    code, _, err = commands.agentrl(*command)
    assert code == 0, err
    assert caplog.messages == ["roles: one model plays all of them: first, second (agentrl/NimTable-v0)"]


def test_what_the_server_failed_at_is_no_score_and_is_tried_again(server: Any, tmp_path: Path) -> None:
    url, requests, answers = server
    answers.append(lambda request: 400 if "+" in json.dumps(request["messages"]) else solves(request))
    answers.append(lambda _: 400)
    code, _, err = run(url, "--out", tmp_path / "eval", n=2)
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("agentrl: no episode could be played (")
    assert "answered 400" in err and len(requests) == 2 * 3
    answers.append(solves)
    code, out, err = run(url, "--out", tmp_path / "eval", n=2)
    assert (code, json.loads(out)[0]["success"]) == (0, 1.0), err


def test_an_address_at_which_nobody_listens_is_one_line_at_once(tmp_path: Path) -> None:
    """A server that dies later is asked again and again instead, for as long as a turn may take."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, out, err = run(url, "--out", tmp_path / "eval")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"agentrl: {url}.*: start the server, or give another --endpoint", err.strip()), err


def test_a_call_with_broken_arguments_reaches_the_environment_as_text(server: Any, tmp_path: Path) -> None:
    url, _, answers = server
    broken = called("submit")
    broken["tool_calls"][0]["function"]["arguments"] = "{not json"
    answers.append(lambda _: broken)
    code, out, err = run(url, "--out", tmp_path / "eval", "--set", "rollout.max_turns=1", n=1)
    assert code == 0, err
    assert json.loads(out)[0]["failed"] == 0
    _, row = map(json.loads, (tmp_path / "eval" / "results.jsonl").read_text().splitlines())
    *_, said, heard = row["messages"]
    assert "tool_calls" not in said and heard["role"] == "user" and "no tool call found" in heard["content"]


class Ladder(agentrl.Env):
    """Seeds that are even are climbed in one turn; the others in none, and are worth half at a limit. A turn on which
    the climb goes on takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._even = not (seed or 0) % 2
        return ({"role": "user", "content": f"task {seed}"},), {}

    async def astep(self, action: str) -> Any:
        if self._seconds and not self._even:
            with policy_time():
                await trio.sleep(self._seconds)
        info = {"outcome": 1.0} if self._even else {}
        return ({"role": "user", "content": "no"},), 0.0, self._even, False, info

    async def aend(self, reason: StopReason) -> dict[str, Any]:
        return {"outcome": 0.5, "success": False}


def measured(
    handler: Callable[[dict[str, Any]], httpx.Response],
    out: Path,
    *settings: str,
    n: int = 2,
    url: str = "http://h",
    env: str = f"{__name__}:Ladder",
) -> EvalResult:
    config = of_endpoint.configured("m", env, settings)
    transport = httpx.MockTransport(
        lambda request: handler(json.loads(request.content)) if request.method == "POST" else httpx.Response(404)
    )
    client = ScoringClient(url, model="m", transport=transport, deadline_s=60)
    served = of_endpoint.Endpoint(client=client, options=of_endpoint.sampling(config))
    return of_endpoint.evaluate(config, served, n, out, on_result=lambda _: None)


def says(content: str, **usage: int) -> httpx.Response:
    body = {"choices": [{"message": {"role": "assistant", "content": content}}], **({"usage": usage} if usage else {})}
    return httpx.Response(200, json=body)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()[1:]]


def test_a_server_that_takes_no_tools_is_told_of_them_as_text(tmp_path: Path) -> None:
    """As a vLLM without a parser of calls refuses them; its words are vLLM's."""
    asked: list[dict[str, Any]] = []

    def without(request: dict[str, Any]) -> httpx.Response:
        asked.append(request)
        if "tools" in request:
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            return httpx.Response(400, json={"error": {"message": message}})
        return says('I try.\n{"name": "submit", "arguments": {"answer": "12"}}')

    with pytest.warns(UserWarning, match="reads the tools as text"):
        result = measured(without, tmp_path, n=1, env="agentrl/Calculator-v0")
    assert (result.n, result.failed) == (1, 0)
    taught = asked[1]["messages"]
    assert taught[0]["role"] == "system" and "submit" in taught[0]["content"] and "calculate" in taught[0]["content"]
    (row,) = rows_of(tmp_path)
    assert row["turns"] == 1 and row["stop_reason"] == "done"  # the environment took the answer as a call


@each_case("status", [400, 413, 422])
def test_a_conversation_that_outgrew_the_servers_context_is_scored(tmp_path: Path, status: int) -> None:
    def small(asked: dict[str, Any]) -> httpx.Response:
        return says("go on") if len(asked["messages"]) < 5 else httpx.Response(status, json={"error": "too long"})

    result = measured(small, tmp_path, n=4)
    assert (result.success, result.outcome, result.n, result.failed) == (0.5, 0.75, 4, 0)
    assert {row["stop_reason"] for row in rows_of(tmp_path) if row["seed"] % 2} == {"context_limit"}


class Forgetful(agentrl.Env):
    """Rewrites the history after the first turn, and owes a reward for every turn that does not end the episode."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._turns = 0
        return ({"role": "user", "content": "begin"},), {}

    def step(self, action: str) -> Any:
        self._turns += 1
        info: dict[str, Any] = {"unsettled": 0.25}
        if self._turns == 1:
            info["history"] = ({"role": "user", "content": "anew"},)
        return ({"role": "user", "content": "on"},), 1.0, False, False, info


def test_a_server_sees_a_rewritten_history_and_what_is_due_is_paid_at_its_limit(tmp_path: Path) -> None:
    asked: list[list[Any]] = []

    def refuses_the_third(request: dict[str, Any]) -> httpx.Response:
        asked.append(request["messages"])
        return says("go on") if len(asked) < 3 else httpx.Response(400, json={"error": "too long"})

    measured(refuses_the_third, tmp_path, n=1, env=f"{__name__}:Forgetful")
    (row,) = rows_of(tmp_path)
    assert (row["stop_reason"], row["turns"], row["reward"]) == ("context_limit", 2, 2.25)
    said = [{"role": "user", "content": "anew"}, {"role": "assistant", "content": "go on"}]
    assert asked[1] == said[:1] and asked[2] == [*said, {"role": "user", "content": "on"}]


def test_results_under_other_settings_or_of_another_server_are_not_mixed(tmp_path: Path) -> None:
    measured(lambda _: says("go on"), tmp_path, "rollout.max_turns=2")
    others = {
        "sampling": ("rollout.max_turns=2", "eval.temperature=0"),
        "limits": ("rollout.max_turns=3",),
        "image": ("rollout.max_turns=2", "sandbox.docker.image=other"),
    }
    for differs, settings in others.items():
        with pytest.raises(UsageError, match=rf"\({differs} differ\): give another --out"):
            measured(lambda _: says("go on"), tmp_path, *settings)
    with pytest.raises(UsageError, match=r"\(url differ\)"):
        measured(lambda _: says("go on"), tmp_path, "rollout.max_turns=2", url="http://other")


def test_sampling_is_that_of_evaluation_and_what_no_chat_server_takes_is_refused() -> None:
    given = ["rollout.temperature=0.5", "rollout.top_p=0.9", "eval.temperature=0", "rollout.max_tokens_per_turn=9000"]
    config = of_endpoint.configured("m", "e", [*given, 'rollout.stop=["END"]'])
    assert of_endpoint.sampling(config) == {"temperature": 0.0, "top_p": 0.9, "max_tokens": 9000, "stop": ["END"]}
    for field in ("rollout.top_k", "rollout.max_context", "train.steps"):
        with pytest.raises(ConfigError, match=f"^{field} = .*leave it out"):
            of_endpoint.configured("m", "e", [f"{field}=7"])


@pytest.mark.medium
def test_an_episode_has_its_deadline_and_its_most_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ("rollout.episode_deadline_s=3", "env.kwargs.seconds=600")
    result = measured(lambda _: says("go on"), tmp_path / "slow", *limits)
    assert (result.outcome, result.failed) == (0.75, 0)
    assert [row["stop_reason"] for row in rows_of(tmp_path / "slow") if row["seed"] % 2] == ["time_limit"]
    monkeypatch.setattr(of_endpoint, "_MOST_TURNS", 7)
    measured(lambda _: says("go on"), tmp_path / "endless")
    assert [row["turns"] for row in rows_of(tmp_path / "endless") if row["seed"] % 2] == [7]


def test_tokens_are_those_that_the_server_counts(tmp_path: Path) -> None:
    counted = measured(lambda _: says("go on", completion_tokens=5), tmp_path / "a", "rollout.max_turns=3")
    assert counted.tokens == (5 + 3 * 5) / 2
    assert measured(lambda _: says("go on"), tmp_path / "b", "rollout.max_turns=3").tokens is None


@each_case("arguments", [["--model", "m"], ["--env", "e"], ["some/folder", "--model", "m", "--env", "e"]])
def test_what_goes_with_an_endpoint_is_said(arguments: list[str]) -> None:
    code, _, err = commands.agentrl("eval", "--endpoint", "http://127.0.0.1:9", *arguments)
    assert code == 2
    assert err == "agentrl: --endpoint URL goes with --model NAME and --env ID, and with no run and no folder\n"


def test_what_is_of_an_endpoint_alone_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.cli import main

    given = ["eval", "some/run", "--model", "m", "--concurrency", "4", "--key-variable", "K"]
    monkeypatch.setattr("sys.argv", ["agentrl", *given])
    with pytest.raises(UsageError, match=r"^--model, --key-variable, --concurrency: only with --endpoint URL"):
        main.app(standalone_mode=False)


def test_from_python_a_url_is_enough_for_a_server_with_one_model(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests, _ = server
    (result,) = agentrl.evaluate(url, "agentrl/Calculator-v0", 2, out=tmp_path / "eval", api_key="secret")
    assert (result.success, result.turns, result.n) == (1.0, 2.0, 2)
    assert {(asked["model"], asked["key"]) for asked in requests} == {("some-model", "Bearer secret")}
    monkeypatch.setattr(sys.modules[__name__], "MODELS", ["one", "other"])
    with pytest.raises(UsageError, match="has the models one, other: give one of them, name="):
        agentrl.evaluate(url, "agentrl/Calculator-v0", 2)
    with pytest.raises(UsageError, match="is a server: name the environment"):
        agentrl.evaluate(url)
    with pytest.raises(UsageError, match="name and api_key are for a server's URL"):
        agentrl.evaluate("agentrl/tiny-coder", "agentrl/Calculator-v0", name="x")

    async def inside() -> None:
        agentrl.evaluate(url, "agentrl/Calculator-v0", 2)

    with pytest.raises(UsageError, match=r"agentrl.evaluate starts an event loop of trio's"):
        trio.run(inside)


def length(prompt: Any, completion: str, row: Any) -> float:
    return float(len(completion))


@pytest.mark.parametrize(("n", "expected", "lines"), [(None, 2, 0), (3, 3, 1)])
def test_a_server_is_asked_each_row_once_and_more_are_named(
    n: int | None, expected: int, lines: int, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, _, answers = server
    answers.append(lambda request: {"role": "assistant", "content": "four"})
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = [
        f'env.kwargs.rewards=["{Path(__file__)}:length"]',
        f'env.kwargs.rows="{rows}"',
        "env.kwargs.processes=0",
    ]
    notices.OF_PROCESS.forget()
    (result,) = agentrl.evaluate(url, ID, n, out=tmp_path / "eval", settings=settings)
    assert (result.n, sum("asks 2 rows more than once" in message for message in caplog.messages)) == (expected, lines)
