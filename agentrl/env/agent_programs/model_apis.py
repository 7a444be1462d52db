"""The model APIs that agent programs speak, translated: OpenAI's chat completions and responses, Anthropic's messages.

A request becomes a `Conversation` (messages and tools as our records have them), a `Reply` becomes the API's answer,
whole or as a stream of events. It knows neither episodes nor tokens: token counts are reported as zero.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentrl.env.chat_messages import text_of
from agentrl.env.spaces import ROLES, Messages
from agentrl.env.tools.calls import MAX_DEPTH, ToolCall, check_plain, dump, own_id
from agentrl.errors import StructuralParseError
from agentrl.records import Json, Message

Fields = Mapping[str, Any]


class UnservedRequest(Exception):
    """The request asks for something that is not served; the text names it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that a program asks to be continued. `tools` are function schemas in OpenAI's envelope."""

    messages: tuple[Message, ...]
    tools: tuple[Fields, ...] = ()
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer: text outside of its calls, and the calls. `id` is unique within the episode."""

    id: str
    text: str
    calls: tuple[ToolCall, ...] = field(default=())
    thoughts: str = ""

    def call_id(self, index: int) -> str:
        """The model's own, or nine letters and digits: what the strictest chat template takes."""
        return own_id(self.calls[index]) or f"c{self.id}{index:04d}"

    @property
    def message(self) -> Message:
        """As chat completions and our records write it."""
        message = Message(role="assistant", content=self.text)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": self.call_id(index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": dump(dict(call.arguments))},
                }
                for index, call in enumerate(self.calls)
            ]
        return message


class Api(ABC):
    """One API."""

    path: str

    def read(self, body: Fields) -> Conversation:
        """The conversation to continue. Raises UnservedRequest for a body of another shape, or one that no episode can
        record: what the policy made a program send is the program's to hear of, and no failure of the environment."""
        try:
            check_plain(body, MAX_DEPTH, "the request")
            read = self._read(body)
            names = [tool["function"]["name"] for tool in read.tools]
        except StructuralParseError as error:
            raise UnservedRequest(str(error)) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnservedRequest(f"no request as {self.path} takes it: {type(error).__name__}: {error}") from None
        if reason := _MESSAGES.why_not(read.messages):
            raise UnservedRequest(f"messages: {reason}")
        for role in {message["role"] for message in read.messages}.difference(ROLES):
            raise UnservedRequest(f"role {role!r} is none of {', '.join(ROLES)}")
        if not all(isinstance(name, str) for name in names):
            raise UnservedRequest("the name of a tool must be a text")
        stops = cast("tuple[Any, ...]", read.stops)
        if len(stops) > _MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
            raise UnservedRequest(f"stops must be texts, at most {_MOST_STOPS}")
        return read

    @abstractmethod
    def _read(self, body: Fields) -> Conversation: ...

    @abstractmethod
    def write(self, reply: Reply, body: Fields) -> Json: ...

    @abstractmethod
    def events(self, reply: Reply, body: Fields) -> list[tuple[str, Json]]:
        """The same as a stream: (event name or "", data)."""

    def remember(self, conversation: Conversation, reply: Reply) -> None:
        """Some APIs let a request go on from an earlier reply by its id; the others need not know."""
        return

    def error(self, text: str) -> Json:
        return {"error": {"message": text, "type": "invalid_request_error"}}


class ChatCompletions(Api):
    """OpenAI's `/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def _read(self, body: Fields) -> Conversation:
        if body.get("n", 1) not in (1, None):
            raise UnservedRequest("n must be 1: an episode has one continuation")
        messages = tuple(_chat_message(message) for message in _list(body, "messages"))
        stop = body.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Conversation(messages, tuple(_chosen(body)), stops)

    def write(self, reply: Reply, body: Fields) -> Json:
        message = {**_chat_reply(reply), "content": reply.text or None}
        finish = "tool_calls" if reply.calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return {**_chat_head(reply, body, "chat.completion"), "choices": [choice], "usage": _USAGE}

    def events(self, reply: Reply, body: Fields) -> list[tuple[str, Json]]:
        head = _chat_head(reply, body, "chat.completion.chunk")
        delta = _chat_reply(reply)
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        finish = "tool_calls" if reply.calls else "stop"
        chunks: list[Json] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        ]
        if cast("Fields", body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": _USAGE})
        return [("", chunk) for chunk in chunks] + [("", _DONE)]


class Responses(Api):
    """OpenAI's `/v1/responses`, with `previous_response_id`."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self._earlier: dict[str, tuple[Message, ...]] = {}

    def _read(self, body: Fields) -> Conversation:
        given: Any = body.get("input", [])
        items = [{"role": "user", "content": given}] if isinstance(given, str) else cast("list[Fields]", given)
        before: tuple[Message, ...] = ()
        earlier = body.get("previous_response_id")
        if earlier is not None:
            if earlier not in self._earlier:
                raise UnservedRequest(f"no response with id {earlier!r} in this episode")
            before = tuple(message for message in self._earlier[earlier] if message["role"] != "system")
        system = body.get("instructions")
        opening = (Message(role="system", content=str(system)),) if system else ()
        tools = [
            {"type": "function", "function": {key: tool[key] for key in _FUNCTION if key in tool}}
            for tool in cast("list[Fields]", body.get("tools") or [])
            if tool.get("type") == "function"
        ]
        return Conversation((*opening, *before, *_merged(items)), tuple(tools))

    def remember(self, conversation: Conversation, reply: Reply) -> None:
        self._earlier[f"resp_{reply.id}"] = (*conversation.messages, reply.message)

    def write(self, reply: Reply, body: Fields) -> Json:
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": 0,
            "status": "completed",
            "model": str(body.get("model", "policy")),
            "output": self._output(reply),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": list(body.get("tools") or []),
            "usage": {
                "input_tokens": 0,
                "output_tokens": 0,
                "total_tokens": 0,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def events(self, reply: Reply, body: Fields) -> list[tuple[str, Json]]:
        whole: Any = self.write(reply, body)
        empty: dict[str, Any] = {**whole, "output": []}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": empty}]
        for index, item in enumerate(whole["output"]):
            events.append({"type": "response.output_item.added", "output_index": index, "item": item})
            if item["type"] == "message":
                where = {"item_id": item["id"], "output_index": index, "content_index": 0}
                spoken: dict[str, Any] = {**where, "logprobs": list[Json]()}
                events.append({"type": "response.output_text.delta", **spoken, "delta": reply.text})
                events.append({"type": "response.output_text.done", **spoken, "text": reply.text})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": "response.completed", "response": whole})
        return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = []
        if reply.text or not reply.calls:
            content: list[Json] = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
            message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
            output.append({**message, "content": content})
        for index, call in enumerate(reply.calls):
            identity = {"type": "function_call", "id": f"fc_{reply.id}_{index}", "call_id": reply.call_id(index)}
            output.append(
                {**identity, "name": call.name, "arguments": dump(dict(call.arguments)), "status": "completed"}
            )
        return output


class AnthropicMessages(Api):
    """Anthropic's `/v1/messages`."""

    path = "/v1/messages"

    def _read(self, body: Fields) -> Conversation:
        system = body.get("system")
        opening = (Message(role="system", content=text_of(system)),) if system else ()
        messages = [part for message in _list(body, "messages") for part in _anthropic_parts(message)]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in cast("list[Fields]", body.get("tools") or [])
            if "input_schema" in tool
        ]
        return Conversation((*opening, *messages), tuple(tools), tuple(body.get("stop_sequences") or ()))

    def write(self, reply: Reply, body: Fields) -> Json:
        content: list[Json] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
        for index, call in enumerate(reply.calls):
            use = {"type": "tool_use", "id": reply.call_id(index), "name": call.name}
            content.append({**use, "input": dict(call.arguments)})
        return {**self._head(reply, body), "content": content, "stop_reason": "tool_use" if reply.calls else "end_turn"}

    def events(self, reply: Reply, body: Fields) -> list[tuple[str, Json]]:
        whole: Any = self.write(reply, body)
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**self._head(reply, body), "content": [], "stop_reason": None}}
        ]
        for index, block in enumerate(whole["content"]):
            empty: dict[str, Any]
            if block["type"] == "text":
                empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {"type": "tool_use", "id": block["id"], "name": block["name"], "input": dict[str, Json]()}
                delta = {"type": "input_json_delta", "partial_json": dump(block["input"])}
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
            events.append({"type": "content_block_stop", "index": index})
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": 0}})
        events.append({"type": "message_stop"})
        return [(event["type"], event) for event in events]

    def error(self, text: str) -> Json:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": text}}

    def _head(self, reply: Reply, body: Fields) -> dict[str, Any]:
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model", "policy")),
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def apis() -> dict[str, Api]:
    """All of them by path, fresh for one episode."""
    return {api.path: api for api in (ChatCompletions(), Responses(), AnthropicMessages())}


_MESSAGES: Final = Messages(sys.maxsize, sys.maxsize)
_MOST_STOPS: Final = 64  # each is looked for in the whole of a reply
_DONE: Final = "[DONE]"
_USAGE: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_FUNCTION: Final = ("name", "description", "parameters", "strict")


def event_text(data: Json) -> str:
    """The data of one event as it is written to the wire."""
    return data if data == _DONE else json.dumps(data)


def _list(body: Fields, key: str) -> list[Fields]:
    value = body.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise UnservedRequest(f"{key} must be a list of objects")
    return cast("list[Fields]", value)


def _chat_head(reply: Reply, body: Fields, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": 0, "model": str(body.get("model", "policy"))}


def _chat_reply(reply: Reply) -> dict[str, Any]:
    """With the thoughts where servers of open models put them."""
    return {**reply.message, "reasoning_content": reply.thoughts} if reply.thoughts else dict(reply.message)


def _chosen(body: Fields) -> Iterable[Fields]:
    """The tools on offer; none where the request forbids calls."""
    if body.get("tool_choice") == "none":
        return []
    return [tool for tool in cast("list[Fields]", body.get("tools") or []) if tool.get("type") == "function"]


def _chat_message(message: Fields) -> Message:
    role = str(message.get("role", "user"))
    read = Message(role="system" if role == "developer" else role, content=text_of(message.get("content")))
    if message.get("tool_calls"):
        read["tool_calls"] = [dict(call) for call in cast("list[Fields]", message["tool_calls"])]
    for key in ("tool_call_id", "name"):
        if message.get(key):
            read[key] = str(message[key])
    return read


def _merged(items: Sequence[Fields]) -> list[Message]:
    """Items of the responses API as messages; calls join the assistant's message before them."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(Message(role="assistant", content=""))
            call = {"name": item["name"], "arguments": item.get("arguments", "{}")}
            calls = messages[-1].get("tool_calls", [])
            messages[-1]["tool_calls"] = [*calls, {"id": item.get("call_id"), "type": "function", "function": call}]
        elif kind == "function_call_output":
            text = text_of(item.get("output"))
            messages.append(Message(role="tool", content=text, tool_call_id=str(item.get("call_id"))))
        elif kind == "message":
            messages.append(_chat_message(item))
    return messages


def _anthropic_parts(message: Fields) -> Iterable[Message]:
    """One of Anthropic's messages as ours: tool results are messages of their own, before the text beside them."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [Message(role=str(message.get("role", "user")), content=content)]
    blocks = cast("list[Fields]", content or [])
    results = [
        Message(role="tool", content=text_of(block.get("content")), tool_call_id=str(block.get("tool_use_id")))
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    rest = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use", "thinking")]
    if not rest and not uses:
        return results
    spoken = Message(role=str(message.get("role", "user")), content=text_of(rest))
    if uses:
        spoken["tool_calls"] = [
            {
                "id": use["id"],
                "type": "function",
                "function": {"name": use["name"], "arguments": dump(dict(use.get("input") or {}))},
            }
            for use in uses
        ]
    return [*results, spoken]
