"""The model APIs that agent programs speak, translated: OpenAI's chat completions and responses, Anthropic's messages.
`text_completions` has the older one beside them.

A request becomes a `Conversation` (messages and tools as our records have them), a `Reply` becomes the API's answer,
whole or as a stream of events. It knows neither episodes nor tokens: counts of tokens are those of the reply, by
default zero.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, cast

from agentrl.env.agent_programs.request_checks import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Refused,
    RequestKeys,
    UnservedRequest,
    always,
    check_tools,
    kind_not_in,
    not_in,
    note,
    objects,
    shown,
    text_at,
)
from agentrl.env.chat_messages import text_of
from agentrl.env.spaces import ROLES, Messages
from agentrl.env.tools.calls import MAX_DEPTH, Parsed, ToolCall, check_plain, dump, own_id
from agentrl.env.tools.parsers import ToolFormat
from agentrl.errors import StructuralParseError
from agentrl.records import Json, Message

Fields = Mapping[str, Any]

NO_FORM: Final = "the policy's answer is sampled without a form: ask for it in the messages"
_NO_CHOICE: Final = "a call cannot be forced: give 'auto' or 'none'"
NO_LOGPROBS: Final = "log-probabilities are the run's"
FORMS: Final = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar")
SAMPLING: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
BOOKKEEPING: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "client_metadata", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)


def _has_form(text: Any) -> bool:
    """Whether `text` of the responses API, or `output_config` of Anthropic's, asks for an answer of a form."""
    if not isinstance(text, dict):
        return True
    answer_form = cast("Fields", text).get("format")
    return answer_form is not None and kind_not_in("text")(answer_form)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that a program asks to be continued. `tools` are function schemas in OpenAI's envelope;
    `sampling` has the keys about sampling that are honoured, as the request has them."""

    messages: tuple[Message, ...]
    tools: tuple[Fields, ...] = ()
    stops: tuple[str, ...] = ()
    sampling: Fields = field(default_factory=dict[str, Json])

    @property
    def is_raw(self) -> bool:
        """Whether it is one text, which the policy goes on with."""
        return any(message.get("raw") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer: text outside of its calls, and the calls. `id` is unique within the episode, and with
    `prefix` beyond it. `is_cut` says that a limit ended the turn and not the policy; `stop` is the stop text that ended
    `text`. `tokens` counts the tokens of prompt and answer; 0 where nobody counts."""

    id: str
    text: str
    calls: tuple[ToolCall, ...] = field(default=())
    thoughts: str = ""
    is_cut: bool = False
    stop: str = ""
    prefix: str = ""
    tokens: tuple[int, int] = (0, 0)

    def call_id(self, index: int) -> str:
        """The id of a call: the model's own, or nine letters and digits, which the strictest chat template takes."""
        return own_id(self.calls[index]) or f"c{self.id}{index:04d}"

    @property
    def name(self) -> str:
        """The id by which a client may speak of the reply."""
        return self.prefix + self.id

    @property
    def message(self) -> Message:
        """The reply as a message of chat completions and of our records."""
        chat_message = Message(role="assistant", content=self.text)
        if self.calls:
            chat_message["tool_calls"] = [
                {
                    "id": self.call_id(call_index),
                    "type": "function",
                    "function": {"name": tool_call.name, "arguments": dump(dict(tool_call.arguments))},
                }
                for call_index, tool_call in enumerate(self.calls)
            ]
        return chat_message


def reply_of(form: ToolFormat, action: str, conversation: Conversation, *, id: str, is_cut: bool) -> Reply:
    """The policy's action as the reply to `conversation`: calls only where all of them are whole, else the text as it
    is; thoughts apart from it. What goes on from a raw text is text alone."""
    parsed_action = Parsed(action, ()) if conversation.is_raw else form.parse(action, conversation.tools)
    reply_text, reply_calls = action, tuple[ToolCall, ...]()
    if not parsed_action.calls:
        reply_text = parsed_action.text.lstrip() if parsed_action.thoughts else parsed_action.text
    elif conversation.tools:
        # All or none: the API has no place for a call that is broken, and an answer with the others alone would
        # hide from the program, and in the next request from the model, that something was lost.
        whole_calls = tuple(parsed_call for parsed_call in parsed_action.calls if isinstance(parsed_call, ToolCall))
        if len(whole_calls) == len(parsed_action.calls):
            reply_text, reply_calls = parsed_action.text.strip(), whole_calls
    thoughts, ended_by = "" if reply_text is action else parsed_action.thoughts, ""
    for stop_text in conversation.stops:
        if stop_text and stop_text in reply_text:
            reply_text, ended_by = reply_text.partition(stop_text)[0], stop_text
    return Reply(id, reply_text, reply_calls, thoughts, is_cut and not ended_by, ended_by)


@dataclass(frozen=True, slots=True)
class SamplingKeys:
    """The keys about sampling that whoever serves a request honours, and why the others have no effect. An agent
    program in a run has no say in how its policy is sampled; a client of a recorder has."""

    honoured: frozenset[str] = frozenset()
    otherwise: str = "the run file says how the policy samples"


OF_THE_RUN: Final = SamplingKeys()


class Api(ABC):
    """One API, for requests whose keys about sampling are treated as `sampling` says."""

    path: ClassVar[str]
    keys: ClassVar[RequestKeys]

    def __init__(self, sampling: SamplingKeys = OF_THE_RUN) -> None:
        self._sampling = sampling

    def read(self, body: Fields) -> Conversation:
        """The conversation to continue. Raises UnservedRequest for a body of another shape, or one that no episode can
        record: what the policy made a program send is the program's to hear of, and no failure of the environment.
        May be called in a thread."""
        try:
            # The keys first, then the bounds, then the depth, and only then the content: each step may rely on the one
            # before it, and none of them walks more than a bounded part of what a policy may have sent.
            self.keys.check(body, self._sampling.honoured, self._sampling.otherwise)
            self._bound(body)
            read_keys = self.keys.honoured | self._sampling.honoured
            check_plain({key: body[key] for key in read_keys if key in body}, MAX_DEPTH, "the request")
            conversation = self._read(body)
            check_tools(conversation.tools)
        except StructuralParseError as error:
            raise UnservedRequest(str(error)) from None
        # The readers below take the shape for granted, as one check for each field would be longer than they are. A
        # body of another shape ends in one of these, and the program reads a 400.
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UnservedRequest(f"no request as {self.path} takes it: {type(error).__name__}: {error}") from None
        if refusal_reason := _MESSAGES.why_not(conversation.messages):
            raise UnservedRequest(f"messages: {refusal_reason}")
        if not conversation.messages:
            raise UnservedRequest("the conversation is empty: send a message at least")
        for unknown_role in {message["role"] for message in conversation.messages}.difference(ROLES):
            raise UnservedRequest(f"role {shown(unknown_role)!r} is none of {', '.join(ROLES)}")
        stop_texts = cast("tuple[Any, ...]", conversation.stops)
        if len(stop_texts) > _MOST_STOPS or not all(isinstance(stop_text, str) for stop_text in stop_texts):
            raise UnservedRequest(f"stops must be texts, at most {_MOST_STOPS}")
        sampling = self._sampling_of(body)
        return replace(conversation, sampling=sampling) if sampling else conversation

    def _sampling_of(self, body: Fields) -> Fields:
        """The keys about sampling that are honoured, as the request has them."""
        return {key: body[key] for key in self._sampling.honoured & self.keys.sampling if body.get(key) is not None}

    def _bound(self, body: Fields) -> None:
        """Refuse lists that are too long before anything walks them."""
        for list_key, longest in (("messages", MOST_MESSAGES), ("input", MOST_MESSAGES), ("tools", MOST_TOOLS)):
            if isinstance(body.get(list_key), list):
                objects(body[list_key], list_key, longest)

    @abstractmethod
    def _read(self, body: Fields) -> Conversation: ...

    @abstractmethod
    def write(self, reply: Reply, body: Fields) -> Json: ...

    @abstractmethod
    def events(self, reply: Reply, body: Fields, *, sent: int = 0) -> list[tuple[str, Json]]:
        """The reply as a stream: (event name or "", data). Without what `piece` gave already of its text: the first
        `sent` characters."""

    @abstractmethod
    def piece(self, reply: Reply, body: Fields, text: str, *, is_first: bool) -> list[tuple[str, Json]]:
        """More `text` of a reply that is being made, as events; with those before it if it `is_first`."""

    def remember(self, conversation: Conversation, reply: Reply) -> None:
        """Some APIs let a request go on from an earlier reply by its id; the others need not know."""
        return

    def error(self, text: str) -> Json:
        return {"error": {"message": text, "type": "invalid_request_error"}}


class ChatCompletions(Api):
    """OpenAI's `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    keys = RequestKeys(
        honoured=frozenset({"messages", "tools", "tool_choice", "stop", "stream", "stream_options", "model"}),
        sampling=SAMPLING
        | {"max_completion_tokens", "logit_bias", "reasoning_effort", "reasoning", "verbosity", "chat_template_kwargs"},
        bookkeeping=BOOKKEEPING | {"prediction"},
        refused={
            "n": Refused(not_in(1), "n must be 1: an episode has one continuation"),
            "response_format": Refused(kind_not_in("text"), NO_FORM),
            "functions": Refused(always, "give tools: functions are not served"),
            "function_call": Refused(not_in("auto", "none"), "give tools: functions are not served"),
            "tool_choice": Refused(not_in("auto", "none"), _NO_CHOICE),
            "logprobs": Refused(always, NO_LOGPROBS),
            "top_logprobs": Refused(always, NO_LOGPROBS),
            "modalities": Refused(not_in(["text"]), "the policy writes text"),
            "audio": Refused(always, "the policy writes text"),
            "web_search_options": Refused(always, "nothing is searched here: offer a tool"),
            "continue_final_message": Refused(always, "an answer is a message of its own"),
            **{key: Refused(always, NO_FORM) for key in FORMS},
            **{key: Refused(always, "answers are sampled, one at a time") for key in ("best_of", "use_beam_search")},
        },
    )

    def _read(self, body: Fields) -> Conversation:
        entries = objects(body.get("messages"), "messages", MOST_MESSAGES)
        messages = tuple(_chat_message(message, f"messages[{index}]") for index, message in enumerate(entries))
        stream_options_of(body)
        return Conversation(messages, _functions(body), stop_texts_of(body))

    def write(self, reply: Reply, body: Fields) -> Json:
        chat_message = {**_chat_reply(reply), "content": reply.text or None}
        only_choice = {"index": 0, "message": chat_message, "finish_reason": _chat_finish(reply), "logprobs": None}
        return {**_chat_head(reply, body, "chat.completion"), "choices": [only_choice], "usage": usage_of(reply)}

    def piece(self, reply: Reply, body: Fields, text: str, *, is_first: bool) -> list[tuple[str, Json]]:
        delta: dict[str, Json] = {"role": "assistant", "content": text} if is_first else {"content": text}
        only_choice: Json = {"index": 0, "delta": delta, "finish_reason": None}
        return [("", {**_chat_head(reply, body, "chat.completion.chunk"), "choices": [only_choice]})]

    def events(self, reply: Reply, body: Fields, *, sent: int = 0) -> list[tuple[str, Json]]:
        chunk_head = _chat_head(reply, body, "chat.completion.chunk")
        reply_delta = {**_chat_reply(reply), "content": reply.text[sent:]}
        for call_index, delta_call in enumerate(reply_delta.get("tool_calls", ())):
            delta_call["index"] = call_index
        event_chunks: list[Json] = [
            {**chunk_head, "choices": [{"index": 0, "delta": reply_delta, "finish_reason": None}]},
            {**chunk_head, "choices": [{"index": 0, "delta": {}, "finish_reason": _chat_finish(reply)}]},
        ]
        if stream_options_of(body).get("include_usage"):
            event_chunks.append({**chunk_head, "choices": [], "usage": usage_of(reply)})
        return [("", event_chunk) for event_chunk in event_chunks] + [("", DONE)]


class Responses(Api):
    """OpenAI's `/v1/responses`, with `previous_response_id`."""

    path = "/v1/responses"
    keys = RequestKeys(
        honoured=frozenset(
            {"input", "instructions", "previous_response_id", "tools", "tool_choice", "stream", "model"}
        ),
        sampling=SAMPLING | {"max_output_tokens", "reasoning"},
        bookkeeping=BOOKKEEPING | {"truncation", "include", "stream_options", "context_management"},
        refused={
            "text": Refused(_has_form, NO_FORM),
            "tool_choice": Refused(not_in("auto", "none"), _NO_CHOICE),
            "top_logprobs": Refused(always, NO_LOGPROBS),
            "conversation": Refused(always, "send the whole conversation, or previous_response_id"),
            "prompt": Refused(always, "there are no stored prompts: send instructions and input"),
            "background": Refused(always, "wait for the answer"),
        },
    )

    def __init__(self, sampling: SamplingKeys = OF_THE_RUN) -> None:
        super().__init__(sampling)
        self._earlier: dict[str, tuple[Message, ...]] = {}

    def _read(self, body: Fields) -> Conversation:
        input_value: Any = body.get("input", [])
        if isinstance(input_value, str):
            input_value = [{"role": "user", "content": input_value}]
        input_items = objects(input_value, "input", MOST_MESSAGES)
        earlier_messages: tuple[Message, ...] = ()
        earlier_id = body.get("previous_response_id")
        if earlier_id is not None:
            if not isinstance(earlier_id, str) or earlier_id not in self._earlier:
                raise UnservedRequest(f"no response with id {shown(earlier_id)!r} in this episode")
            # OpenAI's rule: the instructions of an earlier response do not carry over.
            earlier_messages = tuple(message for message in self._earlier[earlier_id] if message["role"] != "system")
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise UnservedRequest(f"instructions = {shown(instructions)}: give a text")
        opening = (Message(role="system", content=instructions),) if instructions else ()
        return Conversation((*opening, *earlier_messages, *_merged(input_items)), _functions(body, is_flat=True))

    def remember(self, conversation: Conversation, reply: Reply) -> None:
        self._earlier[f"resp_{reply.name}"] = (*conversation.messages, cast("Message", _chat_reply(reply)))

    def write(self, reply: Reply, body: Fields) -> Json:
        return self._response(reply, body, "incomplete" if reply.is_cut else "completed", self._output(reply))

    def piece(self, reply: Reply, body: Fields, text: str, *, is_first: bool) -> list[tuple[str, Json]]:
        (item,) = self._output(replace(reply, text=text))
        # The item's events up to its text, or that of its text alone.
        *opening_events, text_event = list(_item_events(0, item))[:3]
        return _numbered([*self._begun(reply, body), *opening_events, text_event] if is_first else [text_event])

    def events(self, reply: Reply, body: Fields, *, sent: int = 0) -> list[tuple[str, Json]]:
        all_events = [] if sent else self._begun(reply, body)
        for item_index, item in enumerate(self._output(reply)):
            all_events += _item_events(item_index, item, 0 if item_index else sent)
        last_type = "response.incomplete" if reply.is_cut else "response.completed"
        all_events.append({"type": last_type, "response": self.write(reply, body)})
        return _numbered(all_events)

    def _begun(self, reply: Reply, body: Fields) -> list[dict[str, Any]]:
        begun_response = self._response(reply, body, "in_progress", [])
        return [
            {"type": "response.created", "response": begun_response},
            {"type": "response.in_progress", "response": begun_response},
        ]

    def _response(self, reply: Reply, body: Fields, status: str, output: Sequence[Fields]) -> Json:
        return {
            "id": f"resp_{reply.name}",
            "object": "response",
            # No clock in an answer: a program that prints it, or sends it back, would make each replay another one.
            "created_at": 0,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "model": model_of(body),
            "output": [dict(output_item) for output_item in output],
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": list(body.get("tools") or []),
            "usage": {
                "input_tokens": reply.tokens[0],
                "output_tokens": reply.tokens[1],
                "total_tokens": sum(reply.tokens),
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        output_items: list[dict[str, Any]] = []
        if reply.thoughts:
            thoughts: list[Json] = [{"type": "reasoning_text", "text": reply.thoughts}]
            output_items.append(
                {"type": "reasoning", "id": f"rs_{reply.name}", "summary": list[Json](), "content": thoughts}
            )
        if reply.text or not reply.calls:
            text_content: list[Json] = [_text_part(reply.text)]
            item_status = "incomplete" if reply.is_cut else "completed"
            message_item = {"type": "message", "id": f"msg_{reply.name}", "role": "assistant", "status": item_status}
            output_items.append({**message_item, "content": text_content})
        for index, call in enumerate(reply.calls):
            identity = {"type": "function_call", "id": f"fc_{reply.name}_{index}", "call_id": reply.call_id(index)}
            output_items.append(
                {**identity, "name": call.name, "arguments": dump(dict(call.arguments)), "status": "completed"}
            )
        return output_items


class AnthropicMessages(Api):
    """Anthropic's `/v1/messages`."""

    path = "/v1/messages"
    keys = RequestKeys(
        honoured=frozenset({"messages", "system", "tools", "tool_choice", "stop_sequences", "stream", "model"}),
        sampling=SAMPLING | {"thinking"},
        bookkeeping=BOOKKEEPING | {"betas", "anthropic_version", "context_management", "cache_control"},
        refused={
            "tool_choice": Refused(kind_not_in("auto", "none"), _NO_CHOICE),
            "output_format": Refused(always, NO_FORM),
            "output_config": Refused(_has_form, NO_FORM),
            "mcp_servers": Refused(always, "no server is called from here: offer tools"),
            "container": Refused(always, "there are no containers here"),
        },
    )

    def _read(self, body: Fields) -> Conversation:
        system_content = body.get("system")
        opening = (Message(role="system", content=_content(system_content)),) if system_content else ()
        entries = objects(body.get("messages"), "messages", MOST_MESSAGES)
        messages = [
            our_message
            for message_index, message in enumerate(entries)
            for our_message in _anthropic_parts(message, f"messages[{message_index}]")
        ]
        our_tools = [
            {
                "type": "function",
                "function": {
                    "name": schema.get("name"),
                    "description": schema.get("description", ""),
                    "parameters": schema["input_schema"],
                },
            }
            for schema in _on_offer(body, lambda tool: "input_schema" in tool)
        ]
        return Conversation((*opening, *messages), tuple(our_tools), tuple(body.get("stop_sequences") or ()))

    def write(self, reply: Reply, body: Fields) -> Json:
        content_blocks: list[Json] = []
        if reply.thoughts and kind_not_in("enabled", "adaptive")(body.get("thinking")):
            note("thoughts are not given to a client that does not ask for thinking")
        elif reply.thoughts:
            content_blocks.append({"type": "thinking", "thinking": reply.thoughts, "signature": ""})
        if reply.text or not reply.calls:
            content_blocks.append({"type": "text", "text": reply.text})
        for call_index, reply_call in enumerate(reply.calls):
            use_block = {"type": "tool_use", "id": reply.call_id(call_index), "name": reply_call.name}
            content_blocks.append({**use_block, "input": dict(reply_call.arguments)})
        return {**self._head(reply, body), "content": content_blocks, **self._ending(reply)}

    def piece(self, reply: Reply, body: Fields, text: str, *, is_first: bool) -> list[tuple[str, Json]]:
        whole_reply = replace(reply, text=text, thoughts="", calls=())
        events = self.events(whole_reply, body)
        return events[:3] if is_first else events[2:3]  # the message and its block begin, and its text

    def events(self, reply: Reply, body: Fields, *, sent: int = 0) -> list[tuple[str, Json]]:
        whole_reply: Any = self.write(reply, body)
        stream_events: list[dict[str, Any]] = [
            {
                "type": "message_start",
                "message": {**self._head(reply, body), "content": [], "stop_reason": None, "stop_sequence": None},
            }
        ]
        if sent:  # the text's block is the first one, and open
            rest_delta = {"type": "text_delta", "text": whole_reply["content"].pop(0)["text"][sent:]}
            stream_events = [
                {"type": "content_block_delta", "index": 0, "delta": rest_delta},
                {"type": "content_block_stop", "index": 0},
            ]
        for block_index, block in enumerate(whole_reply["content"], start=1 if sent else 0):
            emptied: dict[str, Any]
            if block["type"] in ("text", "thinking"):
                kind = block["type"]
                emptied, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
            else:
                emptied = {"type": "tool_use", "id": block["id"], "name": block["name"], "input": dict[str, Json]()}
                delta = {"type": "input_json_delta", "partial_json": dump(block["input"])}
            stream_events.append({"type": "content_block_start", "index": block_index, "content_block": emptied})
            stream_events.append({"type": "content_block_delta", "index": block_index, "delta": delta})
            stream_events.append({"type": "content_block_stop", "index": block_index})
        stream_events.append(
            {"type": "message_delta", "delta": self._ending(reply), "usage": {"output_tokens": reply.tokens[1]}}
        )
        stream_events.append({"type": "message_stop"})
        return [(stream_event["type"], stream_event) for stream_event in stream_events]

    def error(self, text: str) -> Json:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": text}}

    def _ending(self, reply: Reply) -> dict[str, Json]:
        stop_reason = "max_tokens" if reply.is_cut else "stop_sequence" if reply.stop else None
        return {
            "stop_reason": stop_reason or ("tool_use" if reply.calls else "end_turn"),
            "stop_sequence": reply.stop or None,
        }

    def _head(self, reply: Reply, body: Fields) -> dict[str, Any]:
        return {
            "id": f"msg_{reply.name}",
            "type": "message",
            "role": "assistant",
            "model": model_of(body),
            "usage": {"input_tokens": reply.tokens[0], "output_tokens": reply.tokens[1]},
        }


_MESSAGES: Final = Messages(sys.maxsize, sys.maxsize)
_MOST_STOPS: Final = 64  # each is looked for in the whole of a reply
DONE: Final = "[DONE]"
_FUNCTION: Final = ("name", "description", "parameters", "strict")
_MOST_NAME: Final = 200
_ANTHROPIC_BLOCKS: Final = ("tool_result", "tool_use", "thinking", "redacted_thinking")
_OF_MESSAGE: Final = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "function_call"),
        *("type", "id", "status", "phase", "annotations", "refusal", "audio", "reasoning_details", "model", "usage"),
        *("stop_reason", "stop_sequence", "provider_specific_fields"),
    }
)
"""Keys that are read, and those that clients repeat from an answer without a meaning for the next one."""
_UNKNOWN_KEY: Final = "a key of a message that is not known is left out"
_OF_ITEM: Final = {
    "reasoning": frozenset({"type", "id", "summary", "content", "status"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
}
"""Keys of the items of the responses API that are no messages."""
_OF_BLOCK: Final = {
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
}
"""Keys of the blocks of Anthropic's messages that are no text."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})
_OF_PART: Final = frozenset({"type", "text", "annotations", "logprobs", "citations", "cache_control", "id"})
_OF_TOOL: Final = frozenset(
    {"type", "function", *_FUNCTION, "input_schema", "cache_control", "defer_loading", "allowed_callers"}
)


def event_line(name: str, data: Json) -> str:
    """One server-sent event as it is written to the wire; an empty name writes no event line."""
    data_text = data if data == DONE else json.dumps(data)
    return f"event: {name}\ndata: {data_text}\n\n" if name else f"data: {data_text}\n\n"


def stop_texts_of(body: Fields) -> tuple[str, ...]:
    """The stop texts of OpenAI's APIs: one, or a list of them."""
    stop_value = body.get("stop") or ()
    return (stop_value,) if isinstance(stop_value, str) else tuple(stop_value)


def stream_options_of(body: Fields) -> Fields:
    """The options of a stream. Raises UnservedRequest."""
    stream_options: Any = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise UnservedRequest(f"stream_options = {shown(stream_options)}: give an object")
    return cast("Fields", stream_options)


def model_of(body: Fields) -> str:
    """The name of the model as the program wrote it."""
    model_name = body.get("model")
    return model_name[:_MOST_NAME] if isinstance(model_name, str) else "policy"


def _chat_head(reply: Reply, body: Fields, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.name}", "object": kind, "created": 0, "model": model_of(body)}


def usage_of(reply: Reply) -> dict[str, Json]:
    """The counts of tokens as OpenAI's older APIs write them."""
    prompt, answer = reply.tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _chat_finish(reply: Reply) -> str:
    """The finish reason: a cut answer says so, also one with calls, since what stood behind them is lost."""
    if reply.is_cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _chat_reply(reply: Reply) -> dict[str, Any]:
    """The reply's message, with the thoughts where servers of open models put them."""
    return {**reply.message, "reasoning_content": reply.thoughts} if reply.thoughts else dict(reply.message)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": list[Json](), "logprobs": list[Json]()}


def _numbered(events: Sequence[dict[str, Any]]) -> list[tuple[str, Json]]:
    return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]


def _item_events(index: int, item: Fields, sent: int = 0) -> Iterable[dict[str, Any]]:
    """The events of one item of the responses API: it is added empty, its content comes, and it is done. Without those
    before the first `sent` characters of a message, and without these."""
    place = {"item_id": item["id"], "output_index": index}
    empty_content = {"arguments": ""} if item["type"] == "function_call" else {"content": list[Json]()}
    if not sent:
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, **empty_content, "status": "in_progress"},
        }
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments}
    elif item["type"] == "reasoning":
        reasoning_text = item["content"][0]["text"]
        yield {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": reasoning_text}
        yield {"type": "response.reasoning_text.done", **place, "content_index": 0, "text": reasoning_text}
    else:
        text_part = item["content"][0]
        part_place: dict[str, Any] = {**place, "content_index": 0}
        if not sent:
            yield {"type": "response.content_part.added", **part_place, "part": _text_part("")}
        delta_text = text_part["text"][sent:]
        yield {"type": "response.output_text.delta", **part_place, "delta": delta_text, "logprobs": list[Json]()}
        yield {"type": "response.output_text.done", **part_place, "text": text_part["text"], "logprobs": list[Json]()}
        yield {"type": "response.content_part.done", **part_place, "part": text_part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _on_offer(body: Fields, is_function: Callable[[Fields], bool]) -> list[Fields]:
    """The tools that the policy may call; none where the request forbids calls. Others are named: they are the
    servers' own, such as a search."""
    tool_choice: Any = body.get("tool_choice")
    all_tools = objects(body.get("tools") or [], "tools", MOST_TOOLS)
    functions = [tool_schema for tool_schema in all_tools if is_function(tool_schema)]
    if any(
        cast("Fields", tool_schema.get("function") or tool_schema).get("strict") is True for tool_schema in functions
    ):
        note("arguments are sampled freely, whatever a tool's strict says")
    for tool_index, tool_schema in enumerate(functions):
        _note_unknown(tool_schema, _OF_TOOL, "a key of a tool that is not known is left out", f"tools[{tool_index}]")
    if len(functions) < len(all_tools):
        other_kinds = [tool_schema.get("type") for tool_schema in all_tools if not is_function(tool_schema)]
        note("tools that are no functions are not offered", place=shown(other_kinds))
    if body.get("parallel_tool_calls") is False or (
        isinstance(tool_choice, dict) and cast("Fields", tool_choice).get("disable_parallel_tool_use")
    ):
        note("the policy may make several calls at once, whatever the request says")
    choice_kind = cast("Fields", tool_choice).get("type") if isinstance(tool_choice, dict) else tool_choice
    return [] if choice_kind == "none" else functions


def _functions(body: Fields, *, is_flat: bool = False) -> tuple[Fields, ...]:
    """The functions on offer in OpenAI's envelope, which the responses API leaves out (`is_flat`)."""
    functions = _on_offer(body, lambda tool: tool.get("type") == "function")
    if is_flat:
        return tuple(
            {"type": "function", "function": {key: tool_schema[key] for key in _FUNCTION if key in tool_schema}}
            for tool_schema in functions
        )
    return tuple(functions)


def _content(content: Any) -> str:
    """A content as text; parts that are no text are named in the text, and in a notice."""
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        for part in (cast("Fields", part) for part in parts if isinstance(part, dict)):
            if not isinstance(part.get("text"), str):
                note("parts that are no text are named to the policy, and not shown")
            elif part.get("type", "text") not in _TEXT_PARTS:
                note("a part of a kind that is not known is read as text", place=shown(part["type"]))
            _note_unknown(part, _OF_PART, "a key of a part that is not known is left out", "part")
    return text_of(content)


def _note_unknown(fields: Fields, known: frozenset[str], what: str, where: str) -> None:
    """Name the keys of `fields` with a value that are not known; a null asks for nothing."""
    for field_name, field_value in fields.items():
        if field_value and field_name not in known:
            note(what, place=f"{where[:_MOST_NAME]}.{shown(field_name)}")


def _chat_message(message: Fields, where: str) -> Message:
    role_name = text_at(message, "role", where)
    content = _content(message.get("content")) or _refusal(message)
    our_message = Message(role="system" if role_name == "developer" else role_name, content=content)
    if message.get("function_call") is not None:
        raise UnservedRequest(f"{where}.function_call is not served: give tool_calls")
    if message.get("tool_calls"):
        our_message["tool_calls"] = [
            _chat_call(tool_call, f"{where}.tool_calls[{call_index}]")
            for call_index, tool_call in enumerate(objects(message["tool_calls"], f"{where}.tool_calls", MOST_MESSAGES))
        ]
    for text_key in ("tool_call_id", "name"):
        if message.get(text_key):
            our_message[text_key] = text_at(message, text_key, where)
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts != (message.get("reasoning") or thoughts):
        note("reasoning beside another reasoning_content is left out", place=where)
    if message.get("reasoning_details") and not thoughts:
        note("reasoning_details without their text in reasoning are left out", place=where)
    if message.get("audio"):
        note("audio of a message is left out", place=where)
    if thoughts:
        if not isinstance(thoughts, str):
            raise UnservedRequest(f"{where}.reasoning_content = {shown(thoughts)}: give a text")
        cast("dict[str, Json]", our_message)["reasoning_content"] = thoughts
    _note_unknown(message, _OF_MESSAGE, _UNKNOWN_KEY, where)
    return our_message


def _refusal(message: Fields) -> str:
    """The words of an answer that has no content, since OpenAI's models refuse in a key of its own."""
    refusal_text = message.get("refusal")
    return refusal_text if isinstance(refusal_text, str) else ""


def _chat_call(call: Fields, where: str) -> dict[str, Json]:
    """A call of an earlier message in OpenAI's envelope."""
    if call.get("type", "function") != "function":
        raise UnservedRequest(f"{where}.type = {shown(call['type'])}: only functions are served")
    function: Any = call.get("function")
    if not isinstance(function, dict):
        raise UnservedRequest(f"{where}.function = {shown(function)}: give an object")
    fields = cast("Fields", function)
    text_at(fields, "name", f"{where}.function")
    if not isinstance(fields.get("arguments"), str | dict):
        raise UnservedRequest(f"{where}.function.arguments = {shown(fields.get('arguments'))}: give JSON as a text")
    if call.get("id") is not None:
        text_at(call, "id", where)
    return dict(call)


def _merged(items: Sequence[Fields]) -> list[Message]:
    """Items of the responses API as messages; calls join the assistant's message before them, and so do thoughts the
    one behind them."""
    messages: list[Message] = []
    thoughts = ""
    for item_index, input_item in enumerate(items):
        item_kind = input_item.get("type", "message")
        item_path = f"input[{item_index}]"
        if item_kind in _OF_ITEM:
            _note_unknown(input_item, _OF_ITEM[item_kind], "a key of an item that is not known is left out", item_path)
        if item_kind == "reasoning":
            reasoning_parts = [*(input_item.get("summary") or ()), *(input_item.get("content") or ())]
            thoughts = "\n".join(filter(None, (thoughts, _content(reasoning_parts))))
            continue
        if item_kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(Message(role="assistant", content=""))
            call_fields = {"name": input_item.get("name"), "arguments": input_item.get("arguments", "{}")}
            earlier_calls = messages[-1].get("tool_calls", [])
            tool_call = _chat_call(
                {"id": input_item.get("call_id"), "type": "function", "function": call_fields}, item_path
            )
            messages[-1]["tool_calls"] = [*earlier_calls, tool_call]
        elif item_kind == "function_call_output":
            output_text = _content(input_item.get("output"))
            messages.append(
                Message(role="tool", content=output_text, tool_call_id=text_at(input_item, "call_id", item_path))
            )
        elif item_kind == "message":
            messages.append(_chat_message(input_item, item_path))
        elif item_kind == "item_reference":
            raise UnservedRequest(f"{item_path}: items are not kept here: send the item itself")
        else:
            note(
                "an item that is no message, function call or reasoning is left out",
                place=f"{item_path}: {shown(item_kind)}",
            )
        if thoughts and messages and messages[-1]["role"] == "assistant":
            cast("dict[str, Json]", messages[-1]).setdefault("reasoning_content", thoughts)
        elif thoughts:
            note("reasoning without an answer behind it is left out", place=item_path)
        thoughts = ""
    return messages


def _anthropic_parts(message: Fields, where: str) -> Iterable[Message]:
    """One of Anthropic's messages as ours: tool results are messages of their own, before the text beside them."""
    role_name, message_content = text_at(message, "role", where), message.get("content")
    _note_unknown(message, _OF_MESSAGE, _UNKNOWN_KEY, where)
    if isinstance(message_content, str):
        return [Message(role=role_name, content=message_content)]
    content_blocks = objects(message_content if message_content is not None else [], f"{where}.content", MOST_MESSAGES)
    for content_block in content_blocks:
        block_keys = _OF_BLOCK.get(content_block.get("type", ""), content_block.keys())
        _note_unknown(
            content_block, frozenset(block_keys), "a key of a block that is not known is left out", f"{where}.content"
        )
    tool_results = [
        Message(
            role="tool",
            content=_content(content_block.get("content")),
            tool_call_id=text_at(content_block, "tool_use_id", f"{where}.content"),
        )
        for content_block in content_blocks
        if content_block.get("type") == "tool_result"
    ]
    use_blocks = [content_block for content_block in content_blocks if content_block.get("type") == "tool_use"]
    thoughts = [content_block for content_block in content_blocks if content_block.get("type") == "thinking"]
    text_blocks = [
        content_block for content_block in content_blocks if content_block.get("type") not in _ANTHROPIC_BLOCKS
    ]
    if any(content_block.get("type") == "redacted_thinking" for content_block in content_blocks):
        note("redacted thoughts are left out", place=where)
    if not text_blocks and not use_blocks and not thoughts:
        return tool_results
    our_message = Message(role=role_name, content=_content(text_blocks))
    if use_blocks:
        our_message["tool_calls"] = [_tool_use(use_block, f"{where}.content") for use_block in use_blocks]
    if thoughts:
        joined_thoughts = "\n".join(
            text_at(content_block, "thinking", f"{where}.content") for content_block in thoughts
        )
        cast("dict[str, Json]", our_message)["reasoning_content"] = joined_thoughts
    return [*tool_results, our_message]


def _tool_use(use: Fields, where: str) -> dict[str, Json]:
    """A call of an earlier message in OpenAI's envelope."""
    arguments: Any = use.get("input") or {}
    if not isinstance(arguments, dict):
        raise UnservedRequest(f"{where}: input = {shown(arguments)}: give an object")
    function = {"name": use.get("name"), "arguments": dump(arguments)}
    return _chat_call({"id": use.get("id"), "type": "function", "function": function}, where)
