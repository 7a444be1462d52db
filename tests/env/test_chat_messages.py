"""Messages as other people's data sets write them: each key is honoured, refused, or kept for a template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from each_case import each_case

from agentrl.env.chat_messages import (
    is_trained,
    plain_message,
    plain_messages,
    plain_tools,
    without_padded_arguments,
)

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"path": "a"}}}
SHOWN = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"path": "a"}}}]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@each_case(
    ("message", "plain"),
    [
        # vLLM from 0.16 on and OpenRouter; gpt-oss; OpenRouter's details, alone and beside the text that they repeat
        ({"role": "assistant", "content": "4", "reasoning": "hm"}, {"content": "4", "reasoning_content": "hm"}),
        ({"role": "assistant", "content": "4", "thinking": "hm"}, {"content": "4", "reasoning_content": "hm"}),
        (
            {"role": "assistant", "content": "4", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
            {"content": "4", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "hm", "reasoning_content": "hm"},
            {"content": "4", "reasoning_content": "hm"},
        ),
        # Anthropic's parts of thoughts, the Responses API's parts of text
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]},
            {"content": "4", "reasoning_content": "hm"},
        ),
        # Mistral's parts of thoughts, the Responses API's summaries, OpenRouter's details as Parquet's texts
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "4"]},
            {"content": "4", "reasoning_content": "hm"},
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, "4"],
            },
            {"content": "4", "reasoning_content": "hm"},
        ),
        (
            {
                "role": "assistant",
                "content": "4",
                "reasoning_details": '[{"type": "reasoning.summary", "summary": "hm"}]',
            },
            {"content": "4", "reasoning_content": "hm"},
        ),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "4"}]}, {"content": "4"}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
        # Arrow pads parts, too
        ({"role": "user", "content": [{"type": "text", "text": "q", "image_url": None}]}, {"content": "q"}),
        # OpenAI's format of 2023
        (
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"path": "a"}'}},
            {"content": "", "tool_calls": [{"type": "function", "function": CALL["function"]}]},
        ),
        ({"role": "function", "name": "look", "content": "r"}, {"role": "tool", "name": "look", "content": "r"}),
        # calls as JSON text, arguments as JSON text
        ({"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}, {"content": "", "tool_calls": SHOWN}),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
            },
            {"content": "a", "images": [{"at": 1, "url": PIXEL}]},
        ),
        # unknown keys stay: a template may read them
        ({"role": "user", "content": "q", "channel": "x"}, {"content": "q", "channel": "x"}),
    ],
)
def test_a_spelling_of_others_is_read(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert plain_message(message) == {"role": message["role"], **plain}


@each_case(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": "4", "reasoning": "a", "thinking": "b"}, "reasoning and thinking differ"),
        ({"role": "assistant", "content": "4", "reasoning": ["a"]}, "reasoning is a list"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}, "type 'tool_result'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "type 'input_audio'"),
        ({"role": "user", "content": 4}, "content is a int"),
        ({"role": "assistant", "content": "", "tool_calls": [{"type": "custom", "custom": {}}]}, "type 'custom'"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}, "name = None"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "tool_calls is a dict"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "look", "parameters": {}}]}, "'parameters'"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": {"a": 1}}]}, "thinking is a dict"),
        ({"role": "assistant", "content": "4", "reasoning_details": [{"type": "x"}]}, "has no text"),
        ({"role": "assistant", "content": "", "tool_calls": "look"}, "no JSON"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": {}}, "beside tool_calls"),
        ({"from": "human", "value": "q"}, "'from' in the place of 'role'"),
        (["user", "q"], "a message is a list"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_number_of_its_message(message: Any, reason: str) -> None:
    with pytest.raises(TypeError, match="message 1: ") as refusal:
        plain_messages([{"role": "user", "content": "q"}, message])
    assert reason in str(refusal.value)


@each_case("mark", ["weight", "train", "trainable", "learns", "loss"])
def test_a_mark_says_whether_a_message_is_trained(mark: str) -> None:
    assert [is_trained({mark: value}) for value in (0, 1, False, True, 0.0, 1.0, None)] == [
        False, True, False, True, False, True, True,
    ]  # fmt: skip
    for odd in (0.5, 2, -1, "0", "no"):
        with pytest.raises(ValueError, match=f"{mark} = "):
            is_trained({mark: odd})
    with pytest.raises(ValueError, match="disagree"):
        is_trained({mark: 0, "weight" if mark != "weight" else "train": 1})


@each_case("key", ["mask", "loss_mask", "train_detail", "ignore_loss", "Weight"])
def test_a_key_that_reads_like_a_mark_is_not_guessed(key: str) -> None:
    with pytest.raises(ValueError, match="reads like a mark"):
        is_trained({"role": "assistant", "content": "4", key: 1})


def function(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": properties}, **more},
    }


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


def test_nulls_that_arrow_pads_schemas_with_go_and_nulls_with_a_meaning_stay() -> None:
    padded = function(
        {"path": {"type": "string", "enum": None, "default": None}, "line": None, "mode": None}, strict=None
    )
    assert plain_tools([padded]) == [function({"path": {"type": "string"}})]
    meant = function({"name": NULLABLE, "level": {"type": "integer", "enum": [1, None]}})
    assert plain_tools([meant]) == [meant]
    assert plain_tools(json.dumps([meant])) == [meant]
    assert plain_tools([json.dumps(meant)]) == [meant]


@each_case(
    "tools",
    [
        *("look", 5, [5], [{"type": "function", "function": {}}], {"name": "look"}),
        *(
            [{"name": "look", "input_schema": {"type": "object"}}],
            [{"name": "look", "inputSchema": {"type": "object"}}],
        ),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(TypeError, match="tools"):
        plain_tools(tools)


def test_padded_arguments_go_and_meant_ones_stay() -> None:
    def calls(arguments: dict[str, Any], name: str = "look") -> tuple[Any, ...]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return ({"role": "assistant", "content": "", "tool_calls": [call]},)

    nested = {"type": "object", "properties": {"x": {"type": "number"}}}
    edits = {"anyOf": [{"type": "array", "items": nested}, {"type": "null"}]}
    properties = {"path": {"type": "string"}, "name": NULLABLE, "at": nested, "any": {}, "edits": edits}
    tools = plain_tools([function(properties)])
    arguments = {"path": "a", "line": None, "name": None, "at": {"x": None, "y": None}, "any": None}
    arguments["edits"] = [{"x": 1, "y": None}, {"x": None}]
    plain = without_padded_arguments(calls(arguments), tools)
    assert plain == calls({"path": "a", "name": None, "at": {}, "any": None, "edits": [{"x": 1}, {}]})
    unknown = calls({"line": None}, "another")
    assert without_padded_arguments(unknown, tools) == unknown
