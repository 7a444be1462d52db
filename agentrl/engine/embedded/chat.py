"""OpenAI's `/v1/chat/completions` on the embedded engine: a conversation to tokens, and sampled tokens to an answer.

Owns the API's shapes. Rendering is the model's own template, through `agentrl.engine.rendering.renderer`; how calls of
tools are read is a parser that the server was started with. Never samples: `Batcher` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast
from uuid import uuid4

from agentrl.engine.embedded.batching import Emission
from agentrl.engine.embedded.requests import BadRequest
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import ModelError, UsageError
from agentrl.records import Json, Message

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
)
# Byte-level tokenizers split a character over tokens. Sent at once, the half would reach the client as a replacement
# character that no later event can take back (`test_half_a_character_waits`).
_NOT_WHOLE = "\N{REPLACEMENT CHARACTER}"  # at a text's end: the rest of a character is yet to come


class ParsedAnswer(Protocol):
    """The result of parsing an answer: the text outside of calls, and the calls, of which those that are well-formed
    have `name` and `arguments`."""

    @property
    def text(self) -> str: ...
    @property
    def calls(self) -> Sequence[Any]: ...


class ToolParser(Protocol):
    """How a model's calls of tools are written, as `agentrl.env.tools.parsers.ToolFormat`. One that is not `native` has
    `instructions`, which the template lacks, and its results are messages of the user."""

    native: bool

    def parse(self, text: str) -> ParsedAnswer: ...
    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str: ...
    def answer(self, messages: Sequence[Message]) -> Sequence[Message]: ...


def parser_at(place: str) -> ToolParser:
    """The parser that `module:Class` names. Raises UsageError."""
    module_name, _, class_name = place.partition(":")
    try:
        return getattr(import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"--tool-parser {place}: no such parser ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat that was rendered: `generate` is the body of the same request for tokens."""

    id: str
    model: str
    generate: bytes
    stream: bool
    logprobs: bool
    tools: bool
    usage: bool  # with a stream's last event


class Chat:
    """Chats with the model in `folder`. Raises ModelError if that has no chat template."""

    def __init__(self, folder: Path, parser: ToolParser | None) -> None:
        self._renderer, self._parser = Renderer(folder), parser

    def parse(self, document: dict[str, Any], *, name: str, length: int) -> ChatRequest:
        """Check and render a request; `length` is the most tokens of prompt and answer. Raises BadRequest."""
        messages = [_message(message) for message in _list(document, "messages")]
        if not messages:
            raise BadRequest("messages: a non-empty list is required")
        tool_schemas = cast("list[Mapping[str, Json]]", _list(document, "tools"))
        if document.get("tool_choice") not in (None, "auto", "none"):
            raise BadRequest("tool_choice: the embedded engine has 'auto' and 'none'")
        # `none` leaves the schemas out of the prompt as well: most templates have no other way to say that no call is
        # wanted.
        tool_schemas = [] if document.get("tool_choice") == "none" else tool_schemas
        if tool_schemas and self._parser is None:
            raise BadRequest("tools: this engine was started without --tool-parser")
        if document.get("top_logprobs"):
            raise BadRequest("top_logprobs: the embedded engine has the log-probs of sampled tokens alone (0)")
        if document.get("response_format") not in (None, {"type": "text"}):
            raise BadRequest("response_format: the embedded engine writes text")
        if document.get("n") not in (None, 1):
            raise BadRequest("n: the embedded engine gives one answer to a chat")
        for key in ("functions", "function_call", "audio", "web_search_options"):
            if document.get(key):
                raise BadRequest(f"{key}: the embedded engine has tools alone")
        token_ids = self._render(messages, tool_schemas)
        max_tokens = document.get("max_completion_tokens", document.get("max_tokens"))
        stop_texts = document.get("stop")
        sampling: dict[str, Any] = {key: document[key] for key in _SAMPLING if document.get(key) is not None}
        # OpenAI's default is the rest of the context, vLLM's completion API has 16: a chat client that names nothing
        # expects a whole answer.
        sampling["max_tokens"] = max(1, length - len(token_ids)) if max_tokens is None else max_tokens
        sampling["stop"] = [stop_texts] if isinstance(stop_texts, str) else stop_texts
        # The renderer's, and not the config's alone: many templates end a turn with a token that `eos_token_id` does
        # not name, and the answer would run on into a turn of the user.
        sampling["stop_token_ids"] = list(self._renderer.stop_token_ids)
        model_name, chat_id = document.get("model"), f"chatcmpl-{uuid4().hex}"
        generate_request = {
            "request_id": chat_id,
            "model": model_name,
            "token_ids": token_ids,
            "sampling_params": sampling,
            "stream": True,
        }
        options = document.get("stream_options")
        return ChatRequest(
            id=chat_id,
            model=name if model_name is None else str(model_name),
            generate=json.dumps(generate_request).encode(),
            stream=document.get("stream") is True,
            logprobs=document.get("logprobs") is True,
            tools=bool(tool_schemas),
            usage=isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True,
        )

    def _render(self, messages: list[Message], tools: Sequence[Mapping[str, Json]]) -> list[int]:
        if tools and self._parser is not None and not self._parser.native:
            instructions = self._parser.instructions(tools)
            if messages[0]["role"] == "system":
                messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
            else:
                messages.insert(0, {"role": "system", "content": instructions})
            # A template without tools would drop their schemas and refuse the role of their answers: instructions go
            # into the system message, and answers become messages of the user.
            messages, tools = list(self._parser.answer(messages)), ()
        try:
            return list(self._renderer.start(messages, tools))
        except ModelError as error:
            raise BadRequest(str(error)) from None

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, without the one that ends the turn."""
        return self._renderer.decode(ids)

    def answer(self, request: ChatRequest, whole: Emission, prompt: int) -> dict[str, Json]:
        """The whole answer to a request that was not streamed."""
        message, finish_reason = self._message(request, whole)
        choice: dict[str, Json] = {"index": 0, "message": message, "finish_reason": finish_reason}
        if request.logprobs:
            choice["logprobs"] = self.logprobs(whole)
        return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(whole, prompt)}

    def _message(self, request: ChatRequest, whole: Emission) -> tuple[dict[str, Json], str]:
        answer_text, finish_reason = self.text(whole.token_ids), "length" if whole.finish == "length" else "stop"
        if not request.tools or self._parser is None:
            return {"role": "assistant", "content": answer_text}, finish_reason
        parsed_answer = self._parser.parse(answer_text)
        tool_calls = [_call(tool_call) for tool_call in parsed_answer.calls if hasattr(tool_call, "arguments")]
        # A broken call is text, for the client to judge.
        if not tool_calls or len(tool_calls) < len(parsed_answer.calls):
            return {"role": "assistant", "content": answer_text}, finish_reason
        if finish_reason != "length":  # else the end of what stood behind the calls is lost
            finish_reason = "tool_calls"
        content = parsed_answer.text.strip() or None
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}, finish_reason

    def logprobs(self, part: Emission) -> dict[str, Json]:
        """The log-probs of sampled tokens, in nats."""
        token_entries: list[dict[str, Json]] = []
        for token_id, logprob in zip(part.token_ids, part.logprobs, strict=True):
            token_text = self._renderer.decode([token_id])
            token_entry: dict[str, Json] = {"token": token_text, "logprob": logprob, "bytes": list(token_text.encode())}
            token_entries.append({**token_entry, "top_logprobs": []})
        return {"content": token_entries}

    def event(
        self, request: ChatRequest, delta: Mapping[str, Json], part: Emission, reason: str | None = None
    ) -> bytes:
        """An event of a stream."""
        choice: dict[str, Json] = {"index": 0, "delta": dict(delta), "finish_reason": reason}
        if request.logprobs and part.token_ids:
            choice["logprobs"] = self.logprobs(part)
        return _event({**_head(request, "chat.completion.chunk"), "choices": [choice]})

    def last(self, request: ChatRequest, whole: Emission, prompt: int, sent: str) -> bytes:
        """The events that end a stream, of whose text `sent` is on its way already."""
        message, finish_reason = self._message(request, whole)
        delta: dict[str, Json] = {}
        if tool_calls := cast("list[dict[str, Json]]", message.get("tool_calls") or []):
            delta["tool_calls"] = [{"index": index, **tool_call} for index, tool_call in enumerate(tool_calls)]
        if unsent_text := str(message["content"] or "")[len(sent) :]:
            delta["content"] = unsent_text
        no_emission = Emission([], [], [], None)
        events = self.event(request, delta, no_emission, None) if delta else b""
        events += self.event(request, {}, no_emission, finish_reason)
        if request.usage:
            events += _event({**_head(request, "chat.completion.chunk"), "choices": [], "usage": _usage(whole, prompt)})
        return events + b"data: [DONE]\n\n"


def fresh(text: str, sent: str) -> str:
    """The part of a growing text that can be sent now: a character whose bytes are not all there waits."""
    return "" if text.endswith(_NOT_WHOLE) else text[len(sent) :]


def _head(request: ChatRequest, kind: str) -> dict[str, Json]:
    return {"id": request.id, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(whole: Emission, prompt: int) -> dict[str, Json]:
    sampled_count = len(whole.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled_count, "total_tokens": prompt + sampled_count}


def _event(document: Mapping[str, Json]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _call(call: Any) -> dict[str, Json]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    list_value = cast("list[Any]", document.get(name) or [])
    if not isinstance(list_value, list) or not all(isinstance(list_item, dict) for list_item in list_value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(f"{name}: must be a list of objects")
    return list_value


def _message(raw_message: Mapping[str, Any]) -> Message:
    """A message as templates read it: its content is text, the arguments of its calls are objects."""
    role, content = raw_message.get("role"), raw_message.get("content")
    if not isinstance(role, str):
        raise BadRequest("messages: each needs a role")
    if isinstance(content, list):
        text_parts = _list({"messages.content": content}, "messages.content")
        if not all(isinstance(text_part.get("text"), str) for text_part in text_parts):
            raise BadRequest("messages: the parts of a content must be texts")
        content = "".join(text_part["text"] for text_part in text_parts)
    if content is not None and not isinstance(content, str):
        raise BadRequest("messages: a content is a text, or a list of texts")
    message = {**raw_message, "role": role, "content": content or ""}
    if tool_calls := raw_message.get("tool_calls"):
        message["tool_calls"] = [_read_call(call) for call in _list({"tool_calls": tool_calls}, "tool_calls")]
    return cast("Message", message)


def _read_call(call: Mapping[str, Any]) -> dict[str, Json]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest("messages.tool_calls: each needs a function")
    function_fields = dict(cast("dict[str, Any]", function))
    if isinstance(arguments := function_fields.get("arguments"), str):
        try:
            function_fields["arguments"] = json.loads(arguments or "{}")
        except ValueError:
            raise BadRequest("messages.tool_calls: arguments are no JSON") from None
    return {**call, "function": function_fields}
