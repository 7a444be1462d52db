"""Dialects of tool calls: each parses a model's text, and writes calls.

A dialect is total: any text gives a `Parsed`, never an exception, and every call that was begun comes back in order,
well-formed or `Malformed`. It reads a call where it begins and goes on where it ends, so that a tag within a
string is content. A broken call may be read again from within: after `MAX_BROKEN` of them the rest is one, so that any
text is read in linear time.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from agentrl.env.tools.calls import Malformed, Parsed, ToolCall, call_of, decode_json, dump
from agentrl.env.tools.json_schema import shown_schema
from agentrl.errors import StructuralParseError
from agentrl.records import ImagePart, Json, Message, Messages

MAX_BROKEN: Final = 64
"""So many broken calls of a text are read one by one."""


@dataclass(frozen=True, slots=True)
class Span:
    """A call and the part of the text, `begin` to `end`, that it takes up."""

    begin: int
    end: int
    call: ToolCall | Malformed


class ToolFormat(ABC):
    """A dialect. `parse` and `write` are inverse: `parse(write(a, b)).calls == (a, b)`; one that writes values without
    their types needs the tools' schemas for that, in `spelled` and in `parse`.

    A chat template teaches the model the `native` ones. The others bring `instructions` of their own, and their results
    come back as user messages. A package of your own offers one under the entry point `agentrl.tool_formats`."""

    name: ClassVar[str]
    native: ClassVar[bool] = True
    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that only the chat templates of its models hold: they tell the dialect if a template leaves out calls."""
    thoughts: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    """Pairs of tags that open and close a block of reasoning at the head of a turn."""
    framing: ClassVar[re.Pattern[str] | None] = None
    """Tags around the text of a turn that are no part of the text."""

    def parse(self, text: str, schemas: Sequence[Mapping[str, Json]] = ()) -> Parsed:
        """The calls of a turn, its words and its thoughts. `schemas`, those of the tools, say of what type a value is
        in dialects that do not write it."""
        words_begin, thoughts = self._thoughts(text)
        text_between, read_calls, position = list[str](), list[ToolCall | Malformed](), words_begin
        for call_span in self._spans(text, words_begin):
            text_between.append(text[position : call_span.begin])
            read_calls.append(call_span.call)
            position = call_span.end
        text_between.append(text[position:])
        turn_words = "".join(text_between)
        if self.framing is not None:
            turn_words = self.framing.sub("", turn_words)
        return Parsed(turn_words, tuple(self.typed(call, schemas) for call in read_calls), thoughts, text[:words_begin])

    def typed(self, call: ToolCall | Malformed, schemas: Sequence[Mapping[str, Json]]) -> ToolCall | Malformed:
        """A call with its values as the tool's schema has them."""
        return call

    def spelled(self, call: ToolCall, schemas: Sequence[Mapping[str, Json]]) -> ToolCall:
        """A call whose arguments `write` puts down so that `parse` with the same schemas gives the call back. A dialect
        that writes values without their types has to tell a text `5` from the number."""
        return call

    def _spans(self, text: str, start: int) -> Iterator[Span]:
        broken_count = 0
        for call_span in self.spans(text, start):
            broken_count += isinstance(call_span.call, Malformed)
            # The bound of the whole room: a broken call may be read again from within, so n of them cost n times the
            # rest of the text. After the bound, what is left is one broken call.
            if broken_count > MAX_BROKEN:
                bound_error = StructuralParseError(
                    f"{MAX_BROKEN} tool calls before it are broken: the rest is not read"
                )
                yield Span(call_span.begin, len(text), Malformed(bound_error, text[call_span.begin :]))
                return
            yield call_span

    @abstractmethod
    def spans(self, text: str, start: int) -> Iterator[Span]:
        """The calls from `start` on, in order and without overlap."""

    @abstractmethod
    def write(self, *calls: ToolCall) -> str:
        """The calls of one turn."""

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        """The text that teaches the model the format and the tools, where the chat template does not."""
        example_call = self.write(ToolCall("TOOL", {"ARGUMENT": "VALUE"}))
        return f"To call a tool, write:\n{example_call}\nTools:\n{listed(schemas)}"

    def answer(self, messages: Messages) -> Messages:
        """Tool messages in the roles that this dialect's models know."""
        return messages if self.native else self.pictured_as_user(messages)

    def answer_as_user(self, messages: Sequence[Message]) -> Messages:
        """Tool messages as one message of the user."""
        return as_user(f"Result of {message.get('name', 'the call')}: {message['content']}" for message in messages)

    def pictured_as_user(self, messages: Sequence[Message]) -> Messages:
        """Tool messages as one message of the user, with their images where these stood in their texts."""
        if not any(message.get("images") for message in messages):
            return self.answer_as_user(messages)
        user_text, user_images = "", list[ImagePart]()
        for message in messages:
            for text_answer in self.answer_as_user((message,)):
                user_text += "\n" if user_text else ""
                content_begin = len(user_text) + max(text_answer["content"].rfind(message["content"]), 0)
                user_images += [
                    ImagePart(at=content_begin + tool_image["at"], url=tool_image["url"])
                    for tool_image in message.get("images", ())
                ]
                user_text += text_answer["content"]
        return (Message(role="user", content=user_text, images=user_images),)

    def _thoughts(self, text: str) -> tuple[int, str]:
        """Where the reasoning at the head of `text` ends, and what it says: calls drafted in it are not meant.

        A chat template may have opened the block, so that only its end is in `text`; an end that lies within a
        well-formed call is an argument's content and ends nothing."""
        for opening_tag, closing_tag in self.thoughts:
            closing_begin, turn_head = text.find(closing_tag), text.lstrip()
            if turn_head.startswith(opening_tag):
                thoughts_end = len(text) if closing_begin < 0 else closing_begin + len(closing_tag)
                return thoughts_end, text[:thoughts_end].lstrip().removeprefix(opening_tag).removesuffix(
                    closing_tag
                ).strip()
            # A closing tag without its opening one is the usual case, not a mistake: many templates open the block in
            # the prompt. But a call may carry the tag within an argument, when a model writes about thoughts.
            if closing_begin >= 0 and not any(
                call_span.begin < closing_begin < call_span.end and isinstance(call_span.call, ToolCall)
                for call_span in self._spans(text, 0)
            ):
                return closing_begin + len(closing_tag), text[:closing_begin].strip()
        return 0, ""


def call_at(text: str, at: int, resync: re.Pattern[str]) -> tuple[ToolCall | Malformed, int]:
    """The call whose JSON object begins at `at`, and where it ends; a broken one ends before `resync` matches."""
    try:
        json_value, call_end = decode_json(text, at)
    except StructuralParseError as json_error:
        call_end = next_match(text, at + 1, resync)
        return Malformed(json_error, text[at:call_end].strip()), call_end
    # Llama writes "parameters" and most others "arguments"; models mix them up often enough, and the meaning is plain.
    arguments_key = "parameters" if isinstance(json_value, dict) and "parameters" in json_value else "arguments"
    return call_of(json_value, text[at:call_end], key=arguments_key), call_end


def next_match(text: str, at: int, pattern: re.Pattern[str]) -> int:
    """Where `pattern` matches next, or the end of the text."""
    following = pattern.search(text, at)
    return following.start() if following else len(text)


def object_of(call: ToolCall, key: str) -> str:
    """A call as JSON, its arguments under `key`."""
    return dump({"name": call.name, key: dict(call.arguments)})


def listed(schemas: Sequence[Mapping[str, Json]]) -> str:
    """Schemas of tools, one a line, with what their references name in the place of these."""
    return "\n".join(dump(shown_schema(tool_schema)) for tool_schema in schemas)


def as_user(lines: Iterator[str]) -> Messages:
    """One user message of these lines; none of no line."""
    user_text = "\n".join(lines)
    return (Message(role="user", content=user_text),) if user_text else ()
