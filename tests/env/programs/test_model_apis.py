"""What a request asks for and what an answer says, in each API: refused by name, named once, or honoured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from each_case import each_case

from agentrl.env.agent_programs.branches import Branches
from agentrl.env.agent_programs.model_apis import (
    AnthropicMessages,
    Api,
    ChatCompletions,
    Conversation,
    Reply,
    Responses,
    reply_of,
)
from agentrl.env.agent_programs.model_endpoint import apis
from agentrl.env.agent_programs.request_checks import MOST_MESSAGES, MOST_TOOL_PARTS, UnservedRequest
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.notices import OF_PROCESS

USER = {"role": "user", "content": "q"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": [USER], "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [USER], "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
}
CHAT, RESPONSES, ANTHROPIC = SOUND
TEXT = "/v1/completions"
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
REFUSED = [
    (CHAT, "n", 2),
    (CHAT, "response_format", FORM),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "functions", [FUNCTION]),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "logprobs", True),
    (CHAT, "guided_regex", "a+"),
    (CHAT, "modalities", ["text", "audio"]),
    (RESPONSES, "text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
    (RESPONSES, "tool_choice", "required"),
    (RESPONSES, "conversation", "conv_1"),
    (RESPONSES, "prompt", {"id": "p"}),
    (RESPONSES, "background", True),
    (ANTHROPIC, "tool_choice", {"type": "any"}),
    (ANTHROPIC, "tool_choice", {"type": "tool", "name": "f"}),
    (ANTHROPIC, "output_config", {"format": {"type": "json_schema", "schema": {}}}),
    (ANTHROPIC, "mcp_servers", [{"url": "http://x"}]),
    (TEXT, "prompt", ["a", "b"]),
    (TEXT, "prompt", [1, 2]),
    (TEXT, "prompt", [[1, 2]]),
    (TEXT, "prompt", ""),
    (TEXT, "n", 2),
    (TEXT, "best_of", 2),
    (TEXT, "suffix", "end"),
    (TEXT, "logprobs", 0),
    (TEXT, "echo", "yes"),
    (TEXT, "stream_options", 5),
    (TEXT, "guided_regex", "a+"),
]
SERVED = [
    (CHAT, "n", 1),
    (CHAT, "response_format", {"type": "text"}),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "logprobs", False),
    (CHAT, "functions", []),
    (RESPONSES, "text", {"format": {"type": "text"}, "verbosity": "low"}),
    (RESPONSES, "include", ["reasoning.encrypted_content"]),
    (ANTHROPIC, "tool_choice", {"type": "auto"}),
    (ANTHROPIC, "output_config", {"effort": "low"}),
]


def read(path: str, **more: Any) -> Conversation:
    return apis()[path].read({**SOUND.get(path, {"prompt": "q"}), **more})


@each_case(("path", "key", "value"), REFUSED)
def test_what_an_answer_cannot_honour_is_refused_by_name(path: str, key: str, value: Any) -> None:
    with pytest.raises(UnservedRequest, match=f"^{key} = "):
        read(path, **{key: value})


@each_case(("path", "key", "value"), SERVED)
def test_what_asks_for_nothing_special_is_served(path: str, key: str, value: Any) -> None:
    assert len(read(path, **{key: value}).tools) == 1


def test_a_text_is_a_conversation_without_a_template() -> None:
    said = {"role": "user", "content": "<|im_start|>q", "raw": True}
    for prompt in ("<|im_start|>q", ["<|im_start|>q"]):
        conversation = read(TEXT, prompt=prompt, stop="end", echo=False, n=1, best_of=1, suffix="", logprobs=None)
        assert conversation.is_raw and conversation == Conversation((said,), stops=("end",))  # pyright: ignore[reportArgumentType]
    call = get_format("hermes").write(ToolCall("f", {}))
    reply = reply_of(get_format("hermes"), f"<think>t</think>{call}", conversation, id="1", is_cut=False)
    assert (reply.text, reply.calls, reply.thoughts) == (f"<think>t</think>{call}", (), "")


@each_case("path", SOUND)
def test_no_tool_is_on_offer_where_the_request_forbids_calls(path: str) -> None:
    assert read(path, tool_choice={"type": "none"} if path == ANTHROPIC else "none").tools == ()


def noticed(what: str) -> int:
    return sum(tally.count for (_, text), tally in OF_PROCESS.totals().items() if what in text)


@each_case("path", SOUND)
def test_what_has_no_effect_is_named(path: str) -> None:
    for key, value, what in (
        ("temperature", 0.5, "temperature has no effect"),
        ("a_key_of_tomorrow", 1, "a key that is not known"),
        ("tools", [{"type": "web_search"}], "tools that are no functions"),
    ):
        before = noticed(what)
        read(path, **{key: value})
        assert noticed(what) == before + 1, key
    before = noticed("a key of a message")
    read(CHAT, messages=[{**USER, "weight": 1}])
    assert noticed("a key of a message") == before + 1


NO_TOOLS = [
    {"name": "f", "parameters": 5},
    {"name": "f", "parameters": {"properties": 5}},
    {"name": "f", "parameters": {"properties": {"a": {"type": [{}]}}}},
    {"name": "f", "parameters": {"properties": {"a": {"enum": 5}}}},
    {"name": "f", "parameters": {"$schema": "http://[", "type": 5}},
    {"name": "f", "parameters": {"default": float("nan")}},
    {"name": "f", "parameters": {"anyOf": [{}] * MOST_TOOL_PARTS}},
    {"name": "f" * 1_000},
    {"name": "", "parameters": {}},
    {"name": "f", "description": {"a": 1}},
]


@each_case("function", NO_TOOLS)
def test_law_3_a_tool_whose_schema_is_none_is_refused_at_the_door(function: dict[str, Any]) -> None:
    with pytest.raises(UnservedRequest, match=r"tools|JSON"):
        read(CHAT, tools=[{"type": "function", "function": function}])
    with pytest.raises(UnservedRequest, match=r"tools|JSON"):
        read(RESPONSES, tools=[{"type": "function", **function}])


@each_case(
    "message",
    [
        {},
        {"role": "user", "content": 5},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": {}, "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        {"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": ""}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "tool", "content": "x", "tool_call_id": [1]},
    ],
)
def test_a_message_of_another_shape_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UnservedRequest):
        read(CHAT, messages=[USER, message])


def test_a_conversation_has_a_length() -> None:
    assert len(read(CHAT, messages=[USER] * MOST_MESSAGES).messages) == MOST_MESSAGES
    for path in SOUND:
        with pytest.raises(UnservedRequest, match="at most"):
            read(path, **{"input" if path == RESPONSES else "messages": [USER] * (MOST_MESSAGES + 1)})
        with pytest.raises(UnservedRequest):
            read(path, **{"input" if path == RESPONSES else "messages": []})


# --- thoughts


def test_the_thoughts_of_earlier_answers_stay() -> None:
    """vLLM from 0.16 on calls them `reasoning`, others `reasoning_content`; templates read the latter."""
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "two and two"}]}
    thinking = {"type": "thinking", "thinking": "two and two", "signature": ""}
    for conversation in (
        read(CHAT, messages=[USER, {"role": "assistant", "content": "4", "reasoning": "two and two"}]),
        read(CHAT, messages=[USER, {"role": "assistant", "content": "4", "reasoning_content": "two and two"}]),
        read(RESPONSES, input=[USER, summary, {"role": "assistant", "content": "4"}]),
        read(RESPONSES, input=[USER, summary, call]),
        read(ANTHROPIC, messages=[USER, {"role": "assistant", "content": [thinking, {"type": "text", "text": "4"}]}]),
    ):
        message: Any = conversation.messages[-1]
        assert (message["role"], message["reasoning_content"]) == ("assistant", "two and two")


def test_the_thoughts_of_an_answer_reach_its_client_and_come_back() -> None:
    reply = Reply("1", "4", thoughts="two and two")
    spoken, thinking = AnthropicMessages(), {"thinking": {"type": "adaptive"}}
    block: Any = spoken.write(reply, thinking)
    assert [part["type"] for part in block["content"]] == ["thinking", "text"]
    events: list[Any] = [data for _, data in spoken.events(reply, thinking)]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "two and two"}
    again = read(ANTHROPIC, messages=[USER, {"role": "assistant", "content": block["content"]}])
    assert again.messages[1].get("reasoning_content") == "two and two"
    before = noticed("thoughts are not given")
    plain: Any = spoken.write(reply, {})
    assert [part["type"] for part in plain["content"]] == ["text"] and noticed("thoughts are not given") == before + 1

    api = Responses()
    items: Any = api.write(reply, {})
    sent_back = api.read({"input": [USER, *items["output"]]})
    api.remember(Conversation((USER,)), reply)  # pyright: ignore[reportArgumentType]
    by_id = api.read({"input": [USER], "previous_response_id": items["id"]})
    assert sent_back.messages[1].get("reasoning_content") == by_id.messages[1].get("reasoning_content") == "two and two"


def test_an_answer_that_is_a_refusal_or_thoughts_alone_is_no_empty_one() -> None:
    refused = read(CHAT, messages=[USER, {"role": "assistant", "content": None, "refusal": "No."}])
    assert refused.messages[1]["content"] == "No."
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    thought: Any = read(ANTHROPIC, messages=[USER, {"role": "assistant", "content": [thinking]}]).messages[1]
    assert (thought["content"], thought["reasoning_content"]) == ("", "hm")


CALLS = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
GIVES = {"type": "function_call_output", "call_id": "c", "output": "y"}
USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "y"}
DETAILS = [{"type": "reasoning.text", "text": "hm"}]


@each_case(
    ("path", "body", "what"),
    [
        (ANTHROPIC, {"messages": [USER, USES, {"role": "user", "content": [{**RESULT, "is_error": True}]}]}, "a block"),
        (ANTHROPIC, {"system": [{"type": "text", "text": "s", "new": 1}]}, "a key of a part"),
        (ANTHROPIC, {"system": [{"type": "image", "source": {}}]}, "parts that are no text"),
        (RESPONSES, {"input": [USER, {**CALLS, "new": 1}, GIVES]}, "a key of an item"),
        (RESPONSES, {"input": [USER, CALLS, {**GIVES, "new": 1}]}, "a key of an item"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]}, "an item"),
        (RESPONSES, {"input": [{"type": "reasoning", "content": DETAILS}, USER]}, "reasoning without an answer"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}, USER]}, "audio of a message"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "reasoning_details": DETAILS}]}, "reasoning_details"),
        (CHAT, {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]}, "beside another"),
        (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}, "sampled freely"),
        (RESPONSES, {"tools": [{"type": "function", **FUNCTION, "strict": True}]}, "sampled freely"),
    ],
)
def test_what_a_message_or_tool_has_and_no_template_shows_is_named(path: str, body: dict[str, Any], what: str) -> None:
    before = noticed(what)
    read(path, **body)
    assert noticed(what) == before + 1


def test_a_client_that_repeats_some_thoughts_and_leaves_out_others_makes_no_fork() -> None:
    said = {"role": "assistant", "content": "4"}
    before = read(CHAT, messages=[USER, {**said, "reasoning_content": "t"}, USER])
    now = read(CHAT, messages=[USER, said, USER, {**said, "reasoning": "u"}, {"role": "user", "content": "on"}])
    branches = Branches()
    branches.add(before, Reply("1", "4", thoughts="u"))
    news, info = branches.following(now)
    assert [message["content"] for message in news] == ["on"] and not info


# --- answers


CUT = Reply("1", "I lo", (ToolCall("f", {"a": 1}),), is_cut=True)
WHOLE = Reply("1", "I look", (ToolCall("f", {"a": 1}),))
STOPPED = Reply("1", "I look", stop="Observation:")


def finish(api: Api, reply: Reply) -> tuple[Any, Any]:
    """How an answer says that it ended: whole, and as a stream."""
    answer: Any = api.write(reply, {})
    events: list[Any] = [data for _, data in api.events(reply, {})]
    if isinstance(api, ChatCompletions):
        return answer["choices"][0]["finish_reason"], events[-2]["choices"][0]["finish_reason"]
    if isinstance(api, Responses):
        return answer["status"], events[-1]["type"].removeprefix("response.")
    last = next(event for event in events if event["type"] == "message_delta")
    return (answer["stop_reason"], answer["stop_sequence"]), tuple(last["delta"].values())


@each_case(
    ("api", "reply", "expected"),
    [
        (ChatCompletions(), CUT, "length"),
        (ChatCompletions(), WHOLE, "tool_calls"),
        (ChatCompletions(), STOPPED, "stop"),
        (Responses(), CUT, "incomplete"),
        (Responses(), WHOLE, "completed"),
        (AnthropicMessages(), CUT, ("max_tokens", None)),
        (AnthropicMessages(), WHOLE, ("tool_use", None)),
        (AnthropicMessages(), STOPPED, ("stop_sequence", "Observation:")),
    ],
)
def test_an_answer_says_how_it_ended_whole_and_as_a_stream(api: Api, reply: Reply, expected: Any) -> None:
    assert finish(api, reply) == (expected, expected)
    if isinstance(api, Responses) and reply.is_cut:
        whole: Any = api.write(reply, {})
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.adapters
@pytest.mark.parametrize(
    "reply", [WHOLE, Reply("1", "", (ToolCall("f", {}), ToolCall("f", {"a": "é"}))), Reply("1", "x", thoughts="t")]
)
def test_openais_client_assembles_the_events_of_responses_to_the_whole_answer(reply: Reply) -> None:
    from openai import omit
    from openai._models import construct_type
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import ResponseStreamEvent

    api = Responses()
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    seen: list[str] = []
    snapshot: Any = None
    for name, data in api.events(reply, {}):
        event: Any = construct_type(type_=ResponseStreamEvent, value=json.loads(json.dumps(data)))
        state.handle_event(event)
        snapshot = state._ResponseStreamState__current_snapshot
        seen.append(name)
    whole: Any = api.write(reply, {})
    texts = [part.text for item in snapshot.output if item.type == "message" for part in item.content]
    calls = [(item.name, item.arguments, item.call_id) for item in snapshot.output if item.type == "function_call"]
    assert texts == ([reply.text] if reply.text else [])
    assert calls == [
        (item["name"], item["arguments"], item["call_id"])
        for item in whole["output"]
        if item["type"] == "function_call"
    ]
    added = [name for name in seen if name.endswith(".added")]
    done = [name.replace(".done", ".added") for name in seen if name.endswith(("item.done", "part.done"))]
    assert sorted(added) == sorted(done) and seen[:2] == ["response.created", "response.in_progress"]
    assert seen[-1] == "response.completed"
