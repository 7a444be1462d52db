"""The dialects in which models write tool calls: `hermes`, `llama`, `mistral`, `harmony`, `json`, `react`.

A dialect is total: any text gives a `Parsed`, never an exception, and every call that was begun comes back in order,
well-formed or `Malformed`. It reads a call's JSON where it begins and goes on where it ends, so that a tag within a
string is content. A broken call may be read again from within: after `MAX_BROKEN` of them the rest is one, so that any
text is read in linear time.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

from agentrl.env.tool_calls import Malformed, Parsed, ToolCall, call_of, decode_json, dump, named_call, skip_space
from agentrl.errors import ContentParseError, ParseError, StructuralParseError, UnknownIdError
from agentrl.records import Json, Message, Messages

MAX_BROKEN: Final = 64
"""So many broken calls of a text are read one by one."""


@dataclass(frozen=True, slots=True)
class Span:
    """A call and the part of the text, `begin` to `end`, that it takes up."""

    begin: int
    end: int
    call: ToolCall | Malformed


class ToolFormat(ABC):
    """A dialect. `parse` and `write` are inverse: `parse(write(a, b)).calls == (a, b)`.

    A chat template teaches the model the `native` ones. The others bring `instructions` of their own, and their results
    come back as user messages."""

    name: ClassVar[str]
    native: ClassVar[bool] = True

    def parse(self, text: str) -> Parsed:
        start = self._end_of_thoughts(text)
        outside, calls, at = [text[:start]], list[ToolCall | Malformed](), start
        for span in self._spans(text, start):
            outside.append(text[at : span.begin])
            calls.append(span.call)
            at = span.end
        outside.append(text[at:])
        return Parsed("".join(outside), tuple(calls))

    def _spans(self, text: str, start: int) -> Iterator[Span]:
        broken = 0
        for span in self.spans(text, start):
            broken += isinstance(span.call, Malformed)
            if broken > MAX_BROKEN:
                error = StructuralParseError(f"{MAX_BROKEN} tool calls before it are broken: the rest is not read")
                yield Span(span.begin, len(text), Malformed(error, text[span.begin :]))
                return
            yield span

    @abstractmethod
    def spans(self, text: str, start: int) -> Iterator[Span]:
        """The calls from `start` on, in order and without overlap."""

    @abstractmethod
    def write(self, *calls: ToolCall) -> str:
        """The calls of one turn."""

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        """The text that the system message must teach the model; empty for native dialects."""
        return ""

    def answer(self, messages: Messages) -> Messages:
        """Tool messages in the roles that this dialect's models know."""
        return messages

    def _end_of_thoughts(self, text: str) -> int:
        """Where the reasoning `<think>…</think>` at the head of `text` ends: calls drafted in it are not meant.

        A chat template may have opened the block, so that only its end is in `text`; an end that lies within a
        well-formed call is an argument's content and ends nothing."""
        end = text.find("</think>")
        if text.lstrip().startswith("<think>"):
            return len(text) if end < 0 else end + len("</think>")
        if end < 0 or any(
            span.begin < end < span.end and isinstance(span.call, ToolCall) for span in self._spans(text, 0)
        ):
            return 0
        return end + len("</think>")


class Hermes(ToolFormat):
    """Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, any number of them."""

    name = "hermes"
    _open: Final = "<tool_call>"
    _close: Final = "</tool_call>"

    def write(self, *calls: ToolCall) -> str:
        return "\n".join(f"{self._open}\n{_object(call, 'arguments')}\n{self._close}" for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (begin := text.find(self._open, start)) >= 0:
            span = self._span(text, begin)
            yield span
            start = span.end

    def _span(self, text: str, begin: int) -> Span:
        inner = skip_space(text, begin + len(self._open))
        try:
            value, after = decode_json(text, inner)
        except StructuralParseError as error:
            return self._resync(text, begin, error)
        raw, after = text[inner:after], skip_space(text, after)
        if text.startswith(self._close, after):
            return Span(begin, after + len(self._close), call_of(value, raw))
        what = "is not closed" if after == len(text) else "holds more than one JSON object"
        hint = f"the tool call {what}: write {self._open}, one JSON object, {self._close}"
        return self._resync(text, begin, StructuralParseError(hint))

    def _resync(self, text: str, begin: int, error: ParseError) -> Span:
        """A broken call ends after its closing tag, or before the next opening one."""
        inner = begin + len(self._open)
        reopen = text.find(self._open, inner)
        end = reopen if reopen >= 0 else len(text)
        close = text.find(self._close, inner, end)
        if close >= 0:
            return Span(begin, close + len(self._close), Malformed(error, text[inner:close].strip()))
        return Span(begin, end, Malformed(error, text[inner:end].strip()))


class Llama(ToolFormat):
    """Llama 3: the whole message is `{"name": …, "parameters": {…}}`, several of them separated by semicolons."""

    name = "llama"
    _tag: Final = "<|python_tag|>"

    def write(self, *calls: ToolCall) -> str:
        return "; ".join(_object(call, "parameters") for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        begin = at = skip_space(text, start)
        if not text.startswith("{", at):
            begin = text.find(self._tag, start)
            if begin < 0:
                return
            at = skip_space(text, begin + len(self._tag))
        while True:
            call, end = _call_at(text, at, re.compile(r";\s*(?=\{)"))
            yield Span(begin, end, call)
            begin = end
            separator = re.compile(r"\s*;\s*(?=\{)").match(text, end)
            if separator is None:
                return
            at = separator.end()


class Mistral(ToolFormat):
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or in the newer ones `[TOOL_CALLS]name[ARGS]{…}`."""

    name = "mistral"
    _tag: Final = "[TOOL_CALLS]"
    _named: Final = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")

    def write(self, *calls: ToolCall) -> str:
        return self._tag + "[" + ", ".join(_object(call, "arguments") for call in calls) + "]"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (begin := text.find(self._tag, start)) >= 0:
            at = skip_space(text, begin + len(self._tag))
            if text.startswith("[", at):
                last = begin
                for last_end, call in self._list(text, at):
                    yield Span(last, last_end, call)
                    last = last_end
                start = last
            else:
                span = self._one(text, begin, at)
                yield span
                start = span.end

    def _one(self, text: str, begin: int, at: int) -> Span:
        stop = re.compile(re.escape(self._tag))
        head = self._named.match(text, at)
        if head is None:
            call, end = _call_at(text, at, stop)
            return Span(begin, end, call)
        try:
            value, end = decode_json(text, head.end())
        except StructuralParseError as error:
            end = _next(text, head.end(), stop)
            return Span(begin, end, Malformed(error, text[at:end].strip(), head[1]))
        return Span(begin, end, named_call(head[1], value, text[at:end]))

    def _list(self, text: str, at: int) -> Iterator[tuple[int, ToolCall | Malformed]]:
        """The elements of a list, one by one: what is broken must not take its siblings with it."""
        at = skip_space(text, at + 1)
        if text.startswith("]", at):
            yield at + 1, Malformed(StructuralParseError("the list of tool calls is empty"), "[]")
        while not text.startswith("]", at):
            call, end = _call_at(text, at, re.compile(r",\s*(?=\{\s*\"name\")|" + re.escape(self._tag)))
            after = skip_space(text, end)
            if text.startswith("]", after):
                yield after + 1, call
                return
            if not text.startswith(",", after):
                yield end, call
                if not isinstance(call, Malformed):
                    error = StructuralParseError("the list of tool calls is not closed with ]")
                    yield end, Malformed(error, text[end : end + 40])
                return
            yield after + 1, call
            at = skip_space(text, after + 1)


class Harmony(ToolFormat):
    """GPT-OSS: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    name = "harmony"
    _start: Final = "<|start|>"
    _message: Final = "<|message|>"
    _recipient: Final = re.compile(r"\bto=([^\s<]+)")
    _end: Final = re.compile(r"<\|(?:call|end|return|start|channel)\|>")
    _more: Final = re.compile(r"\S")

    def write(self, *calls: ToolCall) -> str:
        heads = (f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{self._message}" for call in calls)
        bodies = (f"{dump(dict(call.arguments))}<|call|>" for call in calls)
        return f"{self._start}assistant".join(head + body for head, body in zip(heads, bodies, strict=True))

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (message := text.find(self._message, start)) >= 0:
            begin = max(start, text.rfind(self._start, start, message))
            recipient = self._recipient.search(text, begin, message)
            start = message + len(self._message)
            if recipient is None:
                start = _next(text, start, self._end)
                continue
            name = recipient[1].removeprefix("functions.")
            at = skip_space(text, start)
            try:
                value, end = decode_json(text, at)
                call = named_call(name, value, text[at:end])
            except StructuralParseError as error:
                end = _next(text, at, self._end)
                call = Malformed(error, text[at:end].strip(), name)
            closed = re.compile(r"\s*<\|(?:call|end|return)\|>").match(text, end)
            start = closed.end() if closed else end
            if not isinstance(call, Malformed) and not closed and self._more.search(text, end):
                start = _next(text, end, self._end)
                error = StructuralParseError("the tool call holds more than one JSON object")
                call = Malformed(error, text[at:start], name)
            yield Span(begin, start, call)

    def _end_of_thoughts(self, text: str) -> int:
        return 0  # thoughts are a channel of their own


class PlainJson(ToolFormat):
    """For models without a dialect: `{"name": …, "arguments": {…}}` on a line of its own or in a fenced block, or a
    list of them."""

    name = "json"
    native = False
    _line: Final = re.compile(r"^[ \t]*(?:```[a-z_]*[ \t]*\n\s*)?(?=[{\[])", re.MULTILINE)

    def write(self, *calls: ToolCall) -> str:
        return "\n".join(_object(call, "arguments") for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        left = MAX_BROKEN * len(text)  # characters that may be read in vain; a line costs some, however early it breaks
        while (line := self._line.search(text, start)) is not None:
            at = line.end()
            try:
                value, end = decode_json(text, at)
            except StructuralParseError as error:
                left -= error.read + len(text) // MAX_BROKEN
                following = self._line.search(text, at + 1) if left >= 0 else None
                end = following.start() if following else len(text)
                if re.search(r"\"name\"\s*:", text[at:end]):
                    yield Span(line.start(), end, Malformed(error, text[at:end].strip()))
                start = max(end, at + 1)
                continue
            start = end
            items = cast("list[Any]", value if isinstance(value, list) else [value])
            begin = line.start()
            for item in items:
                if isinstance(item, dict) and "name" in item:
                    yield Span(begin, end, call_of(item, text[at:end]))
                    begin = end

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        return (
            'To call a tool, write one JSON object on a line of its own: {"name": "TOOL", "arguments": {…}}\n'
            f"Tools:\n{_listed(schemas)}"
        )

    def answer(self, messages: Messages) -> Messages:
        return _as_user(f"Result of {message.get('name', 'the call')}: {message['content']}" for message in messages)


class ReAct(ToolFormat):
    """ReAct: `Action: NAME` and, on the next line, `Action Input: {…}`. If the model writes an `Observation:`
    itself, the text after it is made up: calls in it are refused, not run."""

    name = "react"
    native = False
    _action: Final = re.compile(r"^[ \t]*Action:[ \t]*(.*)$", re.MULTILINE)
    _input: Final = re.compile(r"\s*Action Input:\s*")
    _observed: Final = re.compile(r"^[ \t]*Observation:", re.MULTILINE)

    def write(self, *calls: ToolCall) -> str:
        return "\n".join(f"Action: {call.name}\nAction Input: {dump(dict(call.arguments))}" for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        made_up = False
        while (action := self._action.search(text, start)) is not None:
            made_up = made_up or self._observed.search(text[start : action.start()]) is not None
            name = action[1].strip()
            call, end = self._call(text, action.end(), name)
            if made_up:
                error = ContentParseError("it follows an Observation that you wrote yourself: stop after Action Input")
                call = Malformed(error, text[action.start() : end], name)
            yield Span(action.start(), end, call)
            start = max(end, action.end())

    def _call(self, text: str, at: int, name: str) -> tuple[ToolCall | Malformed, int]:
        given = self._input.match(text, at)
        if not name or given is None:
            error = StructuralParseError("write Action: and the tool's name, then Action Input: and a JSON object")
            return Malformed(error, text[at : at + 80].strip(), name), at
        try:
            value, end = decode_json(text, given.end())
        except StructuralParseError as error:
            end = _next(text, given.end(), re.compile(r"^[ \t]*(?:Action|Observation):", re.MULTILINE))
            return Malformed(error, text[given.end() : end].strip(), name), end
        return named_call(name, value, text[given.end() : end], key="Action Input"), end

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        return (
            "Think, then act, in this form, and stop after the input; the observation will be given to you.\n"
            "Thought: what to do next\nAction: TOOL\nAction Input: {…}\n"
            f"Tools:\n{_listed(schemas)}"
        )

    def answer(self, messages: Messages) -> Messages:
        return _as_user(f"Observation: {message['content']}" for message in messages)


FORMATS: Final[Mapping[str, ToolFormat]] = {
    form.name: form for form in (Hermes(), Llama(), Mistral(), Harmony(), PlainJson(), ReAct())
}


def get_format(name: str) -> ToolFormat:
    """The dialect called `name`. Raises UnknownIdError."""
    if name not in FORMATS:
        raise UnknownIdError(f"no tool-call format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _call_at(text: str, at: int, resync: re.Pattern[str]) -> tuple[ToolCall | Malformed, int]:
    """The call whose JSON object begins at `at`, and where it ends; a broken one ends before `resync` matches."""
    try:
        value, end = decode_json(text, at)
    except StructuralParseError as error:
        end = _next(text, at + 1, resync)
        return Malformed(error, text[at:end].strip()), end
    key = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
    return call_of(value, text[at:end], key=key), end


def _next(text: str, at: int, pattern: re.Pattern[str]) -> int:
    found = pattern.search(text, at)
    return found.start() if found else len(text)


def _object(call: ToolCall, key: str) -> str:
    return dump({"name": call.name, key: dict(call.arguments)})


def _listed(schemas: Sequence[Mapping[str, Json]]) -> str:
    return "\n".join(dump(dict(schema)) for schema in schemas)


def _as_user(lines: Iterator[str]) -> Messages:
    text = "\n".join(lines)
    return (Message(role="user", content=text),) if text else ()
