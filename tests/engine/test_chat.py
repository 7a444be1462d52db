"""Chat completions of the embedded engine: tokens by the model's own template, shapes as OpenAI has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded.batching import Emission
from agentrl.engine.embedded.chat import Chat, fresh, parser_at
from agentrl.engine.embedded.requests import BadRequest
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.http_client import TrioTransport, socket_of
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import UsageError
from agentrl.models.resolve import model_dir
from agentrl.records import Message

FOLDER = model_dir("agentrl/tiny-coder")
PARSER = "agentrl.env.tools.parsers:Hermes"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
ASKED: list[Message] = [{"role": "user", "content": "Mend it."}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(FOLDER)


@pytest.fixture
async def chat() -> AsyncIterator[httpx.AsyncClient]:
    settings = EngineSettings(kv_cache_mb=64, max_batch=4, stream_tokens=3)
    async with launch_embedded(FOLDER, settings, tool_parser=PARSER, name="tiny", max_context=256) as engine:
        transport = TrioTransport(socket=socket_of(engine.url))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            yield client


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.medium
async def test_a_chat_is_the_same_tokens_with_the_same_log_probs(chat: httpx.AsyncClient, renderer: Renderer) -> None:
    """Greedy, beside the same prompt as tokens; whole, and streamed."""
    ids = list(renderer.start(ASKED))
    params = {"max_tokens": 24, "temperature": 0, "stop_token_ids": list(renderer.stop_token_ids)}
    plain = (await chat.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": params})).json()
    tokens = plain["choices"][0]["token_ids"]
    numbers = [entry["logprob"] for entry in plain["choices"][0]["logprobs"]["content"]]
    asked = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 24, "logprobs": True}
    answer = (await chat.post("/v1/chat/completions", json=asked)).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": renderer.decode(tokens)}
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(numbers, abs=1e-5)
    assert choice["finish_reason"] == ("length" if plain["choices"][0]["finish_reason"] == "length" else "stop")
    sampled = len(tokens)
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": sampled, "total_tokens": len(ids) + sampled
    }  # fmt: skip
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")

    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events((await chat.post("/v1/chat/completions", json=streamed)).text)
    assert last["usage"] == answer["usage"] and last["choices"] == []
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] and len(parts) > 3
    said = [entry["logprob"] for part in parts for entry in part["choices"][0].get("logprobs", {}).get("content", [])]
    assert said == pytest.approx(numbers, abs=1e-5)

    # Tools are in the prompt, as the template writes them, and such an answer comes at its end.
    with_tools = (await chat.post("/v1/chat/completions", json={**asked, "tools": [TOOL]})).json()
    assert with_tools["usage"]["prompt_tokens"] == len(renderer.start(ASKED, [TOOL])) > len(ids)
    *parts, last = events((await chat.post("/v1/chat/completions", json={**streamed, "tools": [TOOL]})).text)
    assert (
        "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        == (with_tools["choices"][0]["message"]["content"])
    )
    # What cannot be served is refused in one line, and nothing runs on.
    for wrong, why in (
        ({"messages": []}, "messages"),
        ({"messages": ASKED, "temperature": -1}, "temperature"),
        ({"messages": ASKED, "model": "gpt-9"}, "does not exist"),
        ({"messages": ASKED, "n": 2}, "n: "),
        ({"messages": ASKED, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "leave no room to generate"),
    ):
        refused = await chat.post("/v1/chat/completions", json=wrong)
        status = 404 if "model" in wrong else 400  # as vLLM's server
        assert refused.status_code == status and why in refused.json()["error"]["message"]


def answered(text: str, finish: str = "stop", **asked: Any) -> dict[str, Any]:
    """The answer to a chat in which the model wrote `text`."""
    found = Chat(FOLDER, parser_at(PARSER))
    ids = list(Renderer(FOLDER).tokens(text))
    given = found.parse({"messages": ASKED, "tools": [TOOL], **asked}, name="tiny", length=256)
    return found.answer(given, Emission(ids, [-1.0] * len(ids), [], finish, []), 3)["choices"][0]


def test_calls_of_tools_are_read() -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    choice = answered(text)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    assert (call["type"], call["function"]["name"]) == ("function", "add") and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
    cut = answered(text + " and now I", "length")
    assert cut["finish_reason"] == "length" and len(cut["message"]["tool_calls"]) == 1
    broken = text.replace('"arguments"', "arguments")
    assert answered(broken)["message"] == {"role": "assistant", "content": broken}
    assert answered(text, tool_choice="none")["message"] == {"role": "assistant", "content": text}


def test_a_model_without_tools_is_taught_a_text_format() -> None:
    found = Chat(FOLDER, parser_at("agentrl.env.tools.parsers:PlainJson"))
    asked = found.parse({"messages": ASKED, "tools": [TOOL]}, name="tiny", length=4096)
    prompt = Renderer(FOLDER).decode(json.loads(asked.generate)["token_ids"])
    assert "add" in prompt and "Mend it." in prompt


def test_messages_are_taken_as_clients_write_them(renderer: Renderer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Mend"}, {"type": "text", "text": " it."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    as_read: list[Any] = [
        {"role": "user", "content": "Mend it."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    asked = Chat(FOLDER, None).parse({"messages": history}, name="tiny", length=4096)
    assert json.loads(asked.generate)["token_ids"] == list(renderer.start(as_read))
    for wrong in (
        {"messages": [{"content": "x"}]},
        {"messages": ASKED, "tools": [TOOL]},
        {"messages": ASKED, "tools": 1},
    ):
        with pytest.raises(BadRequest):
            Chat(FOLDER, None).parse(wrong, name="tiny", length=64)


def test_half_a_character_waits() -> None:
    assert fresh("ab\N{REPLACEMENT CHARACTER}", "a") == "" and fresh("abé", "ab") == "é"


def test_a_parser_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"--tool-parser nowhere:Nothing: no such parser"):
        parser_at("nowhere:Nothing")


@pytest.mark.medium
async def test_the_engine_client_still_gets_its_tokens(chat: httpx.AsyncClient) -> None:
    async with aclosing(EngineClient("http://localhost", transport=chat._transport)) as client:
        assert await client.healthy(deadline_s=60)
