"""A model behind an OpenAI-compatible chat endpoint, as the policy of one episode.

Owns both directions of the translation: the environment's messages to the API's, and an answer of the API to the text
that the environment reads and to the message that goes back to the server in later turns. Thoughts go back under the
names that the server gave them: a model with interleaved thinking that does not see them again plays worse than it is.

Never decides an outcome. A refused request ends the episode as a score of the model in one case alone, when the server
says that the conversation is too long for the model. Any other refusal is a failure of infrastructure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl import notices
from agentrl.engine.answer_content import ANSWERS, text_of_answer
from agentrl.engine.scoring_client import ChatCompletion, ScoringClient
from agentrl.env.tools.calls import Malformed, ToolCall, decode_whole
from agentrl.env.tools.parsers import ToolFormat, format_of, get_format
from agentrl.env.tools.tools import clean_text
from agentrl.errors import ContextFull, EngineBroke, EngineRefusal, ScoreError, StructuralParseError
from agentrl.host.user_warnings import warn
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Message
from agentrl.rollout.text_policy import TextAnswer, TextPolicy

_TEXT: Final = get_format("json")  # how calls are written where the server knows none

_THOUGHTS: Final = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
"""Keys of a message with the model's thoughts: of vLLM, of DeepSeek and SGLang, of OpenRouter, of LiteLLM."""

_PARTS: Final = "content_parts"
"""Key of our own: the content of an answer as the server wrote it, if it is a list with thoughts in it."""

_READ: Final = frozenset({"role", "content", "tool_calls", "refusal", *_THOUGHTS})

_ENDED: Final = frozenset(
    {"stop", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence", "end_turn", "tool_use"}
)
_CUT: Final = frozenset({"length", "model_length", "max_tokens", "max_output_tokens"})
_BROKEN: Final = frozenset({"abort", "error", "cancelled"})

_DEEPEST: Final = 100


class ServedModel:
    """The served model in one episode, as a text policy. `tokens` counts what the model wrote, None if the server does
    not say."""

    def __init__(self, client: ScoringClient, env: AsyncEnv, *, deadline_s: float, options: Mapping[str, Json]) -> None:
        self._client, self._env = client, env
        self._deadline_s, self._options = deadline_s, options
        self._calls = 0
        self._writes_calls_as_text = False  # the server takes no tools: they are part of the system message
        self._returns_thoughts = True
        self._has_answered = False
        self.tokens: int | None = 0
        self.policy = TextPolicy(self.answer, tool_format=env.template_format)

    async def answer(
        self, messages: list[Message], news: list[Message], tools: Sequence[Mapping[str, Json]]
    ) -> TextAnswer:
        """The model's next action. Raises EngineError."""
        try:
            completion = await self._request(messages, tools)
        except EngineRefusal as error:
            # Only after a first answer: a first prompt that does not fit is the task's or the server's doing, and
            # nothing that the model could be scored for (law 3).
            if error.context_full and self._has_answered:
                raise ContextFull(str(error)) from error
            if self._has_answered and self._returns_thoughts and any(_has_thoughts(message) for message in messages):
                # Some servers refuse the very field that they answer with. Only a try can tell: they agree on no words.
                completion = await self._request_without_thoughts(messages, tools, error)
            # Servers without tools say so in words of their own, with a status that says nothing. So the one word that
            # all of them use is looked for, once, before the first answer; a wrong guess costs one request, which is
            # refused again.
            elif not self._has_answered and not self._writes_calls_as_text and tools and "tool" in error.reason:
                warn(f"{error}: its model reads the tools as text, and writes calls so")
                self._writes_calls_as_text = True
                return await self.answer(messages, news, tools)
            else:
                raise
        self._has_answered = True
        self.tokens = None if self.tokens is None or completion.tokens is None else self.tokens + completion.tokens
        return self._read(completion, tools)

    async def _request(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> ChatCompletion:
        if any(message.get("raw") for message in messages):
            notice = "a prompt without a chat template is sent as a message: the server writes its template around it"
            notices.note(ANSWERS, notice, place=self._client.url, by_policy=True)
        conversation = as_api(messages, with_thoughts=self._returns_thoughts)
        offered_tools: dict[str, Json] = {}
        if tools and self._writes_calls_as_text:
            conversation = _taught(conversation, tools)
        elif tools:
            offered_tools["tools"] = cast("Json", list(tools))
        return await self._client.completion(
            conversation, deadline_s=self._deadline_s, **self._options, **offered_tools
        )

    async def _request_without_thoughts(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]], refused: EngineRefusal
    ) -> ChatCompletion:
        """Raises the refusal of the request that had them if the server refuses this one too."""
        self._returns_thoughts = False
        try:
            completion = await self._request(messages, tools)
        except EngineRefusal as error:
            if error.context_full:
                raise ContextFull(str(error)) from error
            raise refused from None
        notice = f"the server refuses its model's thoughts of earlier turns, so it plays without them: {refused.reason}"
        notices.note(ANSWERS, notice, place=self._client.url, by_policy=True)
        return completion

    def _read(self, answer: ChatCompletion, tools: Sequence[Mapping[str, Json]]) -> TextAnswer:
        """The model's answer as a policy's text for the environment, and as a message of the conversation."""
        call_format = format_of(self._env)
        message_fields = cast("dict[str, Any]", _clean(dict(answer.message)))
        api_message, answer_text = _as_message(message_fields)
        api_calls, call_texts = self._calls_of(message_fields.get("tool_calls"), call_format, tools)
        if api_calls and len(api_calls) == len(call_texts):
            api_message["tool_calls"] = api_calls
        if self._writes_calls_as_text:
            parsed_text = _TEXT.parse(answer_text)
            answer_text = parsed_text.text
            call_texts += [
                parsed_call.raw
                if isinstance(parsed_call, Malformed)
                else call_format.write(call_format.spelled(parsed_call, tools))
                for parsed_call in parsed_text.calls
            ]
        return TextAnswer(
            clean_text(answer_text + "".join(call_texts)),
            api_message,
            answer.tokens,
            was_cut=was_cut_by(answer.finish_reason, self._client.url),
        )

    def _calls_of(
        self, raw_calls: Any, form: ToolFormat, tools: Sequence[Mapping[str, Json]]
    ) -> tuple[list[dict[str, Json]], list[str]]:
        """The calls of an answer in OpenAI's shape, and the text of each: in the environment's dialect, or its JSON if
        it is broken, in which case the first list lacks it. Raises ScoreError for calls that are no list."""
        if not isinstance(raw_calls, list | None):
            raise ScoreError(f"{self._client.url} gave tool_calls that are no list: {str(raw_calls)[:100]}")
        api_calls, call_texts = list[dict[str, Json]](), list[str]()
        for raw_call in cast("list[Any]", raw_calls or []):
            self._calls += 1
            written_call = _written(raw_call, form, tools, f"call{self._calls:05d}")
            if written_call is None:
                call_texts.append(json.dumps(raw_call))
            else:
                api_calls.append(written_call[0])
                call_texts.append(written_call[1])
        return api_calls, call_texts


def was_cut_by(finish_reason: str | None, url: str) -> bool:
    """Whether a limit of tokens ended an answer of the server at `url`. Raises EngineBroke if the server broke it
    off."""
    named_reason = (finish_reason or "stop").lower()
    # A server that breaks an answer off has failed, and what arrived is not what the model would have written: scored,
    # it would be a cut answer of the model's.
    if named_reason in _BROKEN:
        raise EngineBroke(f"{url} broke its answer off: finish_reason {finish_reason!r}")
    if named_reason not in _ENDED and named_reason not in _CUT:
        notice = (
            f"the finish_reason {clean_text(named_reason)[:60]!r} is not known: the answer counts as one that ended"
        )
        notices.note(ANSWERS, notice, place=url, by_policy=True)
    return named_reason in _CUT


def as_api(messages: Sequence[Message], *, with_thoughts: bool = True) -> list[Message]:
    """A conversation in the API's form: answers to calls have the ids of the calls, in their order."""
    conversation: list[Message] = []
    open_ids: list[str] = []
    for message in messages:
        api_fields: dict[str, Any] = {"role": message["role"], "content": message["content"]}
        if "images" in message:
            api_fields["images"] = message["images"]
        if message["role"] == "assistant":
            tool_calls = message.get("tool_calls", [])
            open_ids = [str(tool_call.get("id") or "") for tool_call in tool_calls]
            if tool_calls:
                api_fields["tool_calls"] = tool_calls
            if with_thoughts:
                answer_fields = cast("Mapping[str, Any]", message)
                api_fields |= {
                    thought_key: answer_fields[thought_key] for thought_key in _THOUGHTS if thought_key in answer_fields
                }
                api_fields["content"] = answer_fields.get(_PARTS, api_fields["content"])
        elif message["role"] == "tool" and open_ids:
            api_fields["tool_call_id"] = open_ids.pop(0)
        elif message["role"] == "tool":  # the model wrote the call as text: the API has no call
            api_fields["role"] = "user"
        conversation.append(cast("Message", api_fields))
    return conversation


def _has_thoughts(message: Message) -> bool:
    return any(thought_key in message for thought_key in (*_THOUGHTS, _PARTS))


def _as_message(fields: Mapping[str, Any]) -> tuple[Message, str]:
    """An answer as a message of the conversation, with its thoughts and without its calls; and its text."""
    content, refusal = fields.get("content"), fields.get("refusal")
    answer_text, has_thoughts = text_of_answer(content if content or not isinstance(refusal, str) else refusal)
    message: dict[str, Any] = {"role": "assistant", "content": answer_text}
    message.update((field_name, fields[field_name]) for field_name in _THOUGHTS if fields.get(field_name))
    if has_thoughts:
        message[_PARTS] = content
    if (answer_role := fields.get("role") or "assistant") != "assistant":
        notices.note(ANSWERS, f"an answer of role {str(answer_role)[:60]!r} is read as the assistant's", by_policy=True)
    for field_name in fields.keys() - _READ:
        if fields[field_name]:
            notices.note(ANSWERS, f"the key {field_name[:60]!r} of a message is not used", by_policy=True)
    return cast("Message", message), answer_text


def _written(
    call: Any, form: ToolFormat, tools: Sequence[Mapping[str, Json]], spare_id: str
) -> tuple[dict[str, Json], str] | None:
    """A call in OpenAI's shape, its arguments as JSON text, and in one of our dialects; None if it is broken."""
    try:
        function = call["function"]
        raw_arguments: Any = function.get("arguments") or {}
        raw_arguments = {} if isinstance(raw_arguments, str) and not raw_arguments.strip() else raw_arguments
        is_text = isinstance(raw_arguments, str)
        arguments: Any = decode_whole(raw_arguments) if is_text else raw_arguments
        if not isinstance(arguments, dict):
            return None
        tool_call = ToolCall(str(function["name"]), cast("dict[str, Json]", arguments))
        call_text = form.write(form.spelled(tool_call, tools))
        arguments_text = raw_arguments if is_text else json.dumps(arguments)
        api_call = {"id": spare_id, "type": "function"} | {
            call_key: call_value for call_key, call_value in call.items() if call_value
        }
        return api_call | {"function": {**function, "arguments": arguments_text}}, call_text
    except (AttributeError, KeyError, TypeError, ValueError, StructuralParseError):
        return None


def _taught(conversation: list[Message], tools: Sequence[Mapping[str, Json]]) -> list[Message]:
    """The conversation for a server that takes no tools."""
    instructions = _TEXT.instructions(tools)
    first_message, later_messages = conversation[0], conversation[1:]
    if first_message["role"] != "system":
        return [Message(role="system", content=instructions), *conversation]
    return [Message(role="system", content=f"{first_message['content']}\n\n{instructions}"), *later_messages]


def _clean(value: Any, depth: int = _DEEPEST) -> Any:
    """JSON without lone surrogates, which no request can carry, and no deeper than a reader of it can follow."""
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, dict | list):
        return value
    # The model's arguments may be nested a million deep by a repeated bracket, and every reader of JSON after us
    # recurses.
    if depth == 0:
        return "[nested too deeply]"
    if isinstance(value, list):
        return [_clean(nested_value, depth - 1) for nested_value in cast("list[Any]", value)]
    return {
        clean_text(entry_key): _clean(nested_value, depth - 1)
        for entry_key, nested_value in cast("dict[str, Any]", value).items()
    }
