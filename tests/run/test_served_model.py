"""What goes between a served model and an environment: answers as public servers write them, over two turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from each_case import each_case

import agentrl
from agentrl import notices
from tests.run.test_endpoint import measured, rows_of

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
DONE: dict[str, Any] = {"role": "assistant", "content": "done"}


class TwoTurns(agentrl.ToolEnv):
    """Writes down what it reads, and whether the turn was cut."""

    limits = agentrl.EpisodeLimits(turns=2)
    seen: ClassVar[list[tuple[str, bool]]] = []

    def prompt(self, task: Any) -> str:
        self.seen.clear()
        return "look, then say done"

    @agentrl.tool
    def look(self, path: str) -> str:
        """Look."""
        self.seen.append((f"looked at {path}", self.action_cut))
        return "a file"

    def on_text(self, text: str) -> str:
        self.seen.append((text, self.action_cut))
        return "go on"

    def grade(self) -> float:
        return 1.0


def said(message: dict[str, Any], finish: str | None = "stop") -> httpx.Response:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return httpx.Response(200, json={"choices": [choice]})


def refused(message: str, **fields: Any) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message, "code": 400, **fields}})


Second = Callable[[dict[str, Any]], httpx.Response]


def played(first: httpx.Response, out: Path, second: Second = lambda _: said(DONE)) -> tuple[Any, list[Any]]:
    """The result of one episode, and the messages of all requests."""
    asked: list[Any] = []

    def answer(request: dict[str, Any]) -> httpx.Response:
        asked.append(request["messages"])
        has_acted = any(message["role"] == "assistant" for message in request["messages"])
        return second(request) if has_acted else first

    return measured(answer, out, n=1, env=f"{__name__}:TwoTurns"), asked


THOUGHTS = {
    "vllm": {"reasoning": "I must look"},
    "deepseek": {"reasoning_content": "I must look"},
    "openrouter": {"reasoning_details": [{"type": "reasoning.encrypted", "data": "xyz"}]},
    "litellm": {"thinking_blocks": [{"type": "thinking", "thinking": "I must look", "signature": "s"}]},
}


@each_case("server", THOUGHTS)
def test_thoughts_go_back_to_the_server_under_its_own_name(server: str, tmp_path: Path) -> None:
    first = said({"content": None, "tool_calls": [CALL], **THOUGHTS[server]}, "tool_calls")
    _, asked = played(first, tmp_path)
    assert asked[1][1] == {"role": "assistant", "content": "", "tool_calls": [CALL], **THOUGHTS[server]}
    assert asked[1][2] == {"role": "tool", "content": "a file", "tool_call_id": "c1"}
    assert TwoTurns.seen == [("looked at a", False), ("done", False)]  # the environment reads no thoughts
    assert rows_of(tmp_path)[0]["messages"][1] == asked[1][1]


def test_content_in_parts_is_text_for_the_environment_and_goes_back_as_it_came(tmp_path: Path) -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "I am "}]
    parts += [{"type": "text", "text": "done"}, {"type": "sound", "data": "x"}]
    before = notices.OF_PROCESS.totals().keys()
    _, asked = played(said({"content": parts}), tmp_path)
    assert TwoTurns.seen[0] == ("I am done", False)
    assert asked[1][1] == {"role": "assistant", "content": parts}
    assert any("'sound'" in kind for _, kind in notices.OF_PROCESS.totals().keys() - before)


def test_a_server_that_refuses_thoughts_plays_without_them_and_that_is_named(tmp_path: Path) -> None:
    def strict(request: dict[str, Any]) -> httpx.Response:
        if any("reasoning" in message for message in request["messages"]):
            return refused("property 'reasoning' is unsupported")
        return said(DONE)

    result, asked = played(said({"tool_calls": [CALL], "reasoning": "hm"}), tmp_path, strict)
    assert (result.n, result.failed, len(asked)) == (1, 0, 3)
    assert any("refuses its model's thoughts" in kind for _, kind in notices.OF_PROCESS.totals())


@each_case(("finish", "is_cut"), [("length", True), ("model_length", True), ("stop", False), ("content_filter", False)])
def test_the_environment_and_the_results_know_that_a_turn_was_cut(finish: str, is_cut: bool, tmp_path: Path) -> None:
    played(said({"content": "I begin to look at the"}, finish), tmp_path)
    assert TwoTurns.seen == [("I begin to look at the", is_cut), ("done", False)]
    assert rows_of(tmp_path)[0]["cut_turns"] == int(is_cut)
    known = any(f"'{finish}'" in kind for _, kind in notices.OF_PROCESS.totals())
    assert known is (finish == "content_filter")


def test_a_refusal_is_a_score_only_for_a_conversation_that_is_too_long(tmp_path: Path) -> None:
    first = said({"tool_calls": [CALL]})
    with pytest.raises(agentrl.errors.RunFailed, match="role tool is not supported by this model"):
        played(first, tmp_path / "other", lambda _: refused("role tool is not supported by this model"))
    assert [row["error"][-40:] for row in rows_of(tmp_path / "other")] == ["role tool is not supported by this model"]
    result, _ = played(first, tmp_path / "long", lambda _: refused("no", code="context_length_exceeded"))
    assert (result.outcome, rows_of(tmp_path / "long")[0]["stop_reason"]) == (1.0, "context_limit")
    with pytest.raises(agentrl.errors.RunFailed, match="'abort'"):
        played(first, tmp_path / "abort", lambda _: said({"content": "d"}, "abort"))


@pytest.mark.parametrize("arguments", [{"path": "a"}, '{"path": "a"}'])
def test_arguments_may_be_an_object_or_its_text_and_a_call_without_an_id_gets_one(
    arguments: Any, tmp_path: Path
) -> None:
    _, asked = played(said({"tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}), tmp_path)
    assert TwoTurns.seen[0] == ("looked at a", False)
    (call,) = asked[1][1]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"path": "a"}'}
    assert call["id"] == asked[1][2]["tool_call_id"] and call["type"] == "function"


def test_no_answer_of_a_model_ends_the_evaluation(tmp_path: Path) -> None:
    """Lone surrogates, deep nesting and other things that no request can carry."""
    deep: Any = "[" * 5_000
    calls = [{"id": "c", "function": {"name": "look", "arguments": deep}}, {"function": None}, 7, CALL]
    body = b'{"choices": [{"message": {"content": "\\ud800", "reasoning": "\\udfff", "tool_calls": %b}}]}'
    first = httpx.Response(200, content=body % json.dumps(calls).encode())
    result, _ = played(first, tmp_path)
    assert (result.n, result.failed) == (1, 0)
    assert TwoTurns.seen[0] == ("looked at a", False)
