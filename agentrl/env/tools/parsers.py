"""The dialects in which models write tool calls, by name. The first six are here: `hermes`, `llama`, `mistral`,
`harmony`, `json`, `react`; the others in `agentrl.env.tools.tagged_parsers`. A package offers more under the entry
point `agentrl.tool_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentrl import registry
from agentrl.env.tools.calls import Malformed, Parsed, ToolCall, call_of, decode_json, dump, named_call, skip_space
from agentrl.env.tools.tagged_parsers import TAGGED
from agentrl.env.tools.tool_format import MAX_BROKEN, Span, ToolFormat, as_user, call_at, listed, next_match, object_of
from agentrl.errors import ContentParseError, ParseError, StructuralParseError, UnknownIdError, UsageError
from agentrl.records import Json, Message, Messages

__all__ = ["DEFAULT", "FALLBACK", "FORMATS", "MAX_BROKEN", "ToolFormat", "format_of", "get_format", "spoken_by"]

DEFAULT: Final = "hermes"
"""The dialect where no chat template shows another."""
FALLBACK: Final = "json"
"""The dialect for a model whose chat template knows no tool calls."""


class Hermes(ToolFormat):
    """Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, any number of them."""

    name = "hermes"
    markers = ("<tool_call>",)
    _open: Final = "<tool_call>"
    _close: Final = "</tool_call>"

    def write(self, *calls: ToolCall) -> str:
        return "\n".join(f"{self._open}\n{object_of(call, 'arguments')}\n{self._close}" for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (call_begin := text.find(self._open, start)) >= 0:
            call_span = self._span(text, call_begin)
            yield call_span
            start = call_span.end

    def _span(self, text: str, begin: int) -> Span:
        json_begin = skip_space(text, begin + len(self._open))
        try:
            json_value, json_end = decode_json(text, json_begin)
        except StructuralParseError as json_error:
            return self._resync(text, begin, json_error)
        raw_json, json_end = text[json_begin:json_end], skip_space(text, json_end)
        if text.startswith(self._close, json_end):
            return Span(begin, json_end + len(self._close), call_of(json_value, raw_json))
        problem = "is not closed" if json_end == len(text) else "holds more than one JSON object"
        correction = f"the tool call {problem}: write {self._open}, one JSON object, {self._close}"
        return self._resync(text, begin, StructuralParseError(correction))

    def _resync(self, text: str, begin: int, error: ParseError) -> Span:
        """A broken call ends after its closing tag, or before the next opening one."""
        content_begin = begin + len(self._open)
        # The next opening tag bounds the damage. A search for the closing tag alone would find the one of the next
        # call, and a well-formed call would vanish into the text of the broken one before it.
        next_opening = text.find(self._open, content_begin)
        search_end = next_opening if next_opening >= 0 else len(text)
        closing_tag = text.find(self._close, content_begin, search_end)
        if closing_tag >= 0:
            return Span(
                begin, closing_tag + len(self._close), Malformed(error, text[content_begin:closing_tag].strip())
            )
        return Span(begin, search_end, Malformed(error, text[content_begin:search_end].strip()))


class Llama(ToolFormat):
    """Llama 3: the whole message is `{"name": …, "parameters": {…}}`, several of them separated by semicolons."""

    name = "llama"
    _tag: Final = "<|python_tag|>"
    # Possessive quantifiers, here and in the patterns below: three neighbouring `\s*` can share out a run of blanks in
    # quadratically many ways, and a policy can write 100,000 blanks. With `*+` what is taken is not given back.
    _lead: Final = re.compile(r"\s*+(?:<\|python_start\|>)?+\s*+(?:<\|python_end\|>)?+\s*+")

    def write(self, *calls: ToolCall) -> str:
        return "; ".join(object_of(call, "parameters") for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        call_begin = skip_space(text, start)
        lead_match = self._lead.match(text, call_begin)
        position = lead_match.end() if lead_match else call_begin
        if not text.startswith("{", position):
            call_begin = text.find(self._tag, start)
            if call_begin < 0:
                return
            position = skip_space(text, call_begin + len(self._tag))
        while True:
            # After a broken call the next one is looked for behind a semicolon and in front of a brace: a semicolon
            # alone is also within strings of code.
            read_call, call_end = call_at(text, position, re.compile(r";\s*(?=\{)"))
            yield Span(call_begin, call_end, read_call)
            call_begin = call_end
            separator = re.compile(r"\s*+(?:;\s*+(?=\{)|(?=\{\"name\"))").match(text, call_end)  # Llama 4 writes none
            if separator is None:
                return
            position = separator.end()


class Mistral(ToolFormat):
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or in the newer ones `[TOOL_CALLS]name[ARGS]{…}`."""

    name = "mistral"
    markers = ("[TOOL_CALLS]",)
    thoughts = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    _tag: Final = "[TOOL_CALLS]"
    _named: Final = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")

    def write(self, *calls: ToolCall) -> str:
        return self._tag + "[" + ", ".join(object_of(call, "arguments") for call in calls) + "]"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (tag_begin := text.find(self._tag, start)) >= 0:
            position = skip_space(text, tag_begin + len(self._tag))
            if text.startswith("[", position):
                span_begin = tag_begin
                for last_end, read_call in self._list(text, position):
                    yield Span(span_begin, last_end, read_call)
                    span_begin = last_end
                start = span_begin
            else:
                call_span = self._one(text, tag_begin, position)
                yield call_span
                start = call_span.end

    def _one(self, text: str, begin: int, at: int) -> Span:
        stop_pattern = re.compile(re.escape(self._tag))
        head_match = self._named.match(text, at)
        if head_match is None:
            read_call, call_end = call_at(text, at, stop_pattern)
            return Span(begin, call_end, read_call)
        try:
            json_value, call_end = decode_json(text, head_match.end())
        except StructuralParseError as json_error:
            call_end = next_match(text, head_match.end(), stop_pattern)
            return Span(begin, call_end, Malformed(json_error, text[at:call_end].strip(), head_match[1]))
        return Span(begin, call_end, named_call(head_match[1], json_value, text[at:call_end]))

    def _list(self, text: str, position: int) -> Iterator[tuple[int, ToolCall | Malformed]]:
        """The elements of a list, one by one: what is broken must not take its siblings with it."""
        position = skip_space(text, position + 1)
        if text.startswith("]", position):
            yield position + 1, Malformed(StructuralParseError("the list of tool calls is empty"), "[]")
        while not text.startswith("]", position):
            read_call, call_end = call_at(text, position, re.compile(r",\s*(?=\{\s*\"name\")|" + re.escape(self._tag)))
            next_place = skip_space(text, call_end)
            if text.startswith("]", next_place):
                yield next_place + 1, read_call
                return
            if not text.startswith(",", next_place):
                yield call_end, read_call
                if not isinstance(read_call, Malformed):
                    list_error = StructuralParseError("the list of tool calls is not closed with ]")
                    yield call_end, Malformed(list_error, text[call_end : call_end + 40])
                return
            yield next_place + 1, read_call
            position = skip_space(text, next_place + 1)


class Harmony(ToolFormat):
    """GPT-OSS: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    name = "harmony"
    _start: Final = "<|start|>"
    _message: Final = "<|message|>"
    _recipient: Final = re.compile(r"\bto=([^\s<]+)")
    _end: Final = re.compile(r"<\|(?:call|end|return|start|channel)\|>")
    _more: Final = re.compile(r"\S")
    _analysis: Final = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>analysis[^<]*+<\|message\|>")
    _frame: Final = re.compile(r"<\|start\|>assistant|<\|channel\|>\w*+[^<]*+<\|message\|>|<\|(?:end|return)\|>")

    def write(self, *calls: ToolCall) -> str:
        call_heads = (
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{self._message}" for call in calls
        )
        call_bodies = (f"{dump(dict(call.arguments))}<|call|>" for call in calls)
        return f"{self._start}assistant".join(
            call_head + call_body for call_head, call_body in zip(call_heads, call_bodies, strict=True)
        )

    def spans(self, text: str, start: int) -> Iterator[Span]:
        # From the mark of the body backwards to the head, not from the head on: the head is free text in which the
        # order of recipient and channel varies, and the recipient is searched within these bounds only.
        while (message_tag := text.find(self._message, start)) >= 0:
            call_begin = max(start, text.rfind(self._start, start, message_tag))
            recipient = self._recipient.search(text, call_begin, message_tag)
            start = message_tag + len(self._message)
            if recipient is None:
                start = next_match(text, start, self._end)
                continue
            tool_name = recipient[1].removeprefix("functions.")
            position = skip_space(text, start)
            try:
                json_value, call_end = decode_json(text, position)
                read_call = named_call(tool_name, json_value, text[position:call_end])
            except StructuralParseError as call_error:
                call_end = next_match(text, position, self._end)
                read_call = Malformed(call_error, text[position:call_end].strip(), tool_name)
            closing_tag = re.compile(r"\s*<\|(?:call|end|return)\|>").match(text, call_end)
            start = closing_tag.end() if closing_tag else call_end
            if not isinstance(read_call, Malformed) and not closing_tag and self._more.search(text, call_end):
                start = next_match(text, call_end, self._end)
                call_error = StructuralParseError("the tool call holds more than one JSON object")
                read_call = Malformed(call_error, text[position:start], tool_name)
            yield Span(call_begin, start, read_call)

    def parse(self, text: str, schemas: Sequence[Mapping[str, Json]] = ()) -> Parsed:
        """Thoughts are a channel of their own, before, between and after the words."""
        parsed_turn, thoughts, word_parts, position = super().parse(text, schemas), list[str](), list[str](), 0
        for thought_head in self._analysis.finditer(parsed_turn.text):
            if thought_head.start() >= position:
                thought_end = next_match(parsed_turn.text, thought_head.end(), self._end)
                word_parts.append(parsed_turn.text[position : thought_head.start()])
                thoughts.append(parsed_turn.text[thought_head.end() : thought_end])
                position = thought_end
        return replace(
            parsed_turn,
            text=self._frame.sub("", "".join([*word_parts, parsed_turn.text[position:]])),
            thoughts="\n".join(thoughts),
        )

    def _thoughts(self, text: str) -> tuple[int, str]:
        return 0, ""


class PlainJson(ToolFormat):
    """For models without a dialect: `{"name": …, "arguments": {…}}` on a line of its own or in a fenced block, or a
    list of them."""

    name = "json"
    native = False
    _line: Final = re.compile(r"^[ \t]*(?:```[a-z_]*[ \t]*\n\s*)?(?=[{\[])", re.MULTILINE)

    def write(self, *calls: ToolCall) -> str:
        return "\n".join(object_of(call, "arguments") for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        # Characters that may be read in vain; a line costs some, however early it breaks.
        read_budget = MAX_BROKEN * len(text)
        while (line_match := self._line.search(text, start)) is not None:
            position = line_match.end()
            try:
                json_value, json_end = decode_json(text, position)
            except StructuralParseError as json_error:
                # Every line that begins with a brace may be a call, and each try may read to the end of the text, so
                # 50,000 lines of `{` would cost the square of that. The budget makes the sum linear; when it is spent,
                # the rest of the text counts as one broken call, which the model is told about.
                read_budget -= json_error.read + len(text) // MAX_BROKEN
                following = self._line.search(text, position + 1) if read_budget >= 0 else None
                json_end = following.start() if following else len(text)
                # Prose and code begin lines with braces too. Only what looks like a call is answered with an error; the
                # rest is text.
                if re.search(r"\"name\"\s*:", text[position:json_end]):
                    yield Span(line_match.start(), json_end, Malformed(json_error, text[position:json_end].strip()))
                start = max(json_end, position + 1)
                continue
            start = json_end
            json_values = cast("list[Any]", json_value if isinstance(json_value, list) else [json_value])
            call_begin = line_match.start()
            for list_item in json_values:
                if isinstance(list_item, dict) and "name" in list_item:
                    yield Span(call_begin, json_end, call_of(list_item, text[position:json_end]))
                    call_begin = json_end

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        return (
            'To call a tool, write one JSON object on a line of its own: {"name": "TOOL", "arguments": {…}}\n'
            f"Tools:\n{listed(schemas)}"
        )


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
        is_made_up = False
        while (action_match := self._action.search(text, start)) is not None:
            # A model that goes on after its action invents the tool's answer and acts on it. Were those calls run, it
            # would be rewarded for plans that rest on results that no tool gave.
            is_made_up = is_made_up or self._observed.search(text[start : action_match.start()]) is not None
            tool_name = action_match[1].strip()
            read_call, call_end = self._call(text, action_match.end(), tool_name)
            if is_made_up:
                made_up_error = ContentParseError(
                    "it follows an Observation that you wrote yourself: stop after Action Input"
                )
                read_call = Malformed(made_up_error, text[action_match.start() : call_end], tool_name)
            yield Span(action_match.start(), call_end, read_call)
            start = max(call_end, action_match.end())

    def _call(self, text: str, at: int, name: str) -> tuple[ToolCall | Malformed, int]:
        input_match = self._input.match(text, at)
        if not name or input_match is None:
            input_error = StructuralParseError(
                "write Action: and the tool's name, then Action Input: and a JSON object"
            )
            return Malformed(input_error, text[at : at + 80].strip(), name), at
        try:
            json_value, json_end = decode_json(text, input_match.end())
        except StructuralParseError as input_error:
            json_end = next_match(text, input_match.end(), re.compile(r"^[ \t]*(?:Action|Observation):", re.MULTILINE))
            return Malformed(input_error, text[input_match.end() : json_end].strip(), name), json_end
        return named_call(name, json_value, text[input_match.end() : json_end], key="Action Input"), json_end

    def instructions(self, schemas: Sequence[Mapping[str, Json]]) -> str:
        return (
            "Think, then act, in this form, and stop after the input; the observation will be given to you.\n"
            "Thought: what to do next\nAction: TOOL\nAction Input: {…}\n"
            f"Tools:\n{listed(schemas)}"
        )

    def answer_as_user(self, messages: Sequence[Message]) -> Messages:
        return as_user(f"Observation: {message['content']}" for message in messages)


FORMATS: Final[Mapping[str, ToolFormat]] = {
    form.name: form for form in (Hermes(), Llama(), Mistral(), Harmony(), *TAGGED, PlainJson(), ReAct())
}


def get_format(name: str) -> ToolFormat:
    """The dialect called `name`: ours, a package's, or that behind a reference `module:attribute`. Raises
    UnknownIdError."""
    if name in FORMATS:
        return FORMATS[name]
    if name not in registry.ids("tool_formats") and ":" not in name:
        format_names = [*FORMATS, *registry.ids("tool_formats")]
        raise UnknownIdError(f"no tool-call format {name!r}; known: {', '.join(format_names)}")
    tool_format = registry.resolve("tool_formats", name)()
    if not isinstance(tool_format, ToolFormat):
        raise UsageError(f"tool format {name!r} makes a {type(tool_format).__name__}: give a class of ToolFormat")
    return tool_format


def format_of(env: Any) -> ToolFormat:
    """The dialect that an environment speaks: its own, or that of the model's chat template, which its driver set.
    Raises UsageError if neither is known."""
    format_name = getattr(env, "tool_format", None) or getattr(env, "template_format", DEFAULT)
    if not format_name:
        correction = f"give the environment a tool_format: {', '.join(FORMATS)}, or one of your own"
        raise UsageError(
            f"the model's chat template writes tool calls in a dialect that is not known here: {correction}"
        )
    return get_format(format_name)


def spoken_by(written: str, source: str, call: ToolCall, schema: Mapping[str, Json]) -> str | None:
    """The dialect of a chat template with this `source` that has `written` so for a `call`: the one that reads it back.
    For a template that writes no calls, the one whose marks are in its source, else `json`. None if no dialect reads
    what it wrote."""
    if written:
        tool_formats = [*FORMATS.values(), *(get_format(format_name) for format_name in registry.ids("tool_formats"))]
        # a template may open the next turn in any case, with a mark of thoughts
        text_by_format = {
            tool_format.name: written.rpartition(tool_format.thoughts[0][0])[0] for tool_format in tool_formats
        }
        parsed_by_format = [
            (tool_format, tool_format.parse(shown_text, [schema]))
            for tool_format in tool_formats
            for shown_text in (written, text_by_format[tool_format.name])
        ]
        fitting_formats = [
            (len(parsed_turn.text), tool_format.name)
            for tool_format, parsed_turn in parsed_by_format
            if parsed_turn.calls == (call,)
        ]
        # The shortest text that is left: the tags of the right dialect are part of no word.
        return min(fitting_formats, key=lambda one: one[0])[1] if fitting_formats else None
    # The mark in the source is the weaker sign, and comes second: templates are copied from one another and keep marks
    # of dialects that they never write. What was written and can be read back leaves no doubt.
    matching = (
        tool_format.name for tool_format in FORMATS.values() if any(marker in source for marker in tool_format.markers)
    )
    return next(matching, FALLBACK)
