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
        problem = "is not closed" if after == len(text) else "holds more than one JSON object"
        hint = f"the tool call {problem}: write {self._open}, one JSON object, {self._close}"
        return self._resync(text, begin, StructuralParseError(hint))

    def _resync(self, text: str, begin: int, error: ParseError) -> Span:
        """A broken call ends after its closing tag, or before the next opening one."""
        inner = begin + len(self._open)
        # The next opening tag bounds the damage. A search for the closing tag alone would find the one of the next
        # call, and a well-formed call would vanish into the text of the broken one before it.
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
    # Possessive quantifiers, here and in the patterns below: three neighbouring `\s*` can share out a run of blanks in
    # quadratically many ways, and a policy can write 100,000 blanks. With `*+` what is taken is not given back.
    _lead: Final = re.compile(r"\s*+(?:<\|python_start\|>)?+\s*+(?:<\|python_end\|>)?+\s*+")

    def write(self, *calls: ToolCall) -> str:
        return "; ".join(object_of(call, "parameters") for call in calls)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        begin = skip_space(text, start)
        lead = self._lead.match(text, begin)
        position = lead.end() if lead else begin
        if not text.startswith("{", position):
            begin = text.find(self._tag, start)
            if begin < 0:
                return
            position = skip_space(text, begin + len(self._tag))
        while True:
            # After a broken call the next one is looked for behind a semicolon and in front of a brace: a semicolon
            # alone is also within strings of code.
            call, end = call_at(text, position, re.compile(r";\s*(?=\{)"))
            yield Span(begin, end, call)
            begin = end
            separator = re.compile(r"\s*+(?:;\s*+(?=\{)|(?=\{\"name\"))").match(text, end)  # Llama 4 writes none
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
        while (begin := text.find(self._tag, start)) >= 0:
            position = skip_space(text, begin + len(self._tag))
            if text.startswith("[", position):
                last = begin
                for last_end, call in self._list(text, position):
                    yield Span(last, last_end, call)
                    last = last_end
                start = last
            else:
                span = self._one(text, begin, position)
                yield span
                start = span.end

    def _one(self, text: str, begin: int, at: int) -> Span:
        stop = re.compile(re.escape(self._tag))
        head = self._named.match(text, at)
        if head is None:
            call, end = call_at(text, at, stop)
            return Span(begin, end, call)
        try:
            value, end = decode_json(text, head.end())
        except StructuralParseError as error:
            end = next_match(text, head.end(), stop)
            return Span(begin, end, Malformed(error, text[at:end].strip(), head[1]))
        return Span(begin, end, named_call(head[1], value, text[at:end]))

    def _list(self, text: str, position: int) -> Iterator[tuple[int, ToolCall | Malformed]]:
        """The elements of a list, one by one: what is broken must not take its siblings with it."""
        position = skip_space(text, position + 1)
        if text.startswith("]", position):
            yield position + 1, Malformed(StructuralParseError("the list of tool calls is empty"), "[]")
        while not text.startswith("]", position):
            call, end = call_at(text, position, re.compile(r",\s*(?=\{\s*\"name\")|" + re.escape(self._tag)))
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
            position = skip_space(text, after + 1)


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
        heads = (f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{self._message}" for call in calls)
        bodies = (f"{dump(dict(call.arguments))}<|call|>" for call in calls)
        return f"{self._start}assistant".join(head + body for head, body in zip(heads, bodies, strict=True))

    def spans(self, text: str, start: int) -> Iterator[Span]:
        # From the mark of the body backwards to the head, not from the head on: the head is free text in which the
        # order of recipient and channel varies, and the recipient is searched within these bounds only.
        while (message := text.find(self._message, start)) >= 0:
            begin = max(start, text.rfind(self._start, start, message))
            recipient = self._recipient.search(text, begin, message)
            start = message + len(self._message)
            if recipient is None:
                start = next_match(text, start, self._end)
                continue
            name = recipient[1].removeprefix("functions.")
            position = skip_space(text, start)
            try:
                value, end = decode_json(text, position)
                call = named_call(name, value, text[position:end])
            except StructuralParseError as error:
                end = next_match(text, position, self._end)
                call = Malformed(error, text[position:end].strip(), name)
            closed = re.compile(r"\s*<\|(?:call|end|return)\|>").match(text, end)
            start = closed.end() if closed else end
            if not isinstance(call, Malformed) and not closed and self._more.search(text, end):
                start = next_match(text, end, self._end)
                error = StructuralParseError("the tool call holds more than one JSON object")
                call = Malformed(error, text[position:start], name)
            yield Span(begin, start, call)

    def parse(self, text: str, schemas: Sequence[Mapping[str, Json]] = ()) -> Parsed:
        """Thoughts are a channel of their own, before, between and after the words."""
        parsed, thoughts, words, position = super().parse(text, schemas), list[str](), list[str](), 0
        for head in self._analysis.finditer(parsed.text):
            if head.start() >= position:
                end = next_match(parsed.text, head.end(), self._end)
                words.append(parsed.text[position : head.start()])
                thoughts.append(parsed.text[head.end() : end])
                position = end
        return replace(
            parsed, text=self._frame.sub("", "".join([*words, parsed.text[position:]])), thoughts="\n".join(thoughts)
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
        budget = MAX_BROKEN * len(text)
        while (line := self._line.search(text, start)) is not None:
            position = line.end()
            try:
                value, end = decode_json(text, position)
            except StructuralParseError as error:
                # Every line that begins with a brace may be a call, and each try may read to the end of the text, so
                # 50,000 lines of `{` would cost the square of that. The budget makes the sum linear; when it is spent,
                # the rest of the text counts as one broken call, which the model is told about.
                budget -= error.read + len(text) // MAX_BROKEN
                following = self._line.search(text, position + 1) if budget >= 0 else None
                end = following.start() if following else len(text)
                # Prose and code begin lines with braces too. Only what looks like a call is answered with an error; the
                # rest is text.
                if re.search(r"\"name\"\s*:", text[position:end]):
                    yield Span(line.start(), end, Malformed(error, text[position:end].strip()))
                start = max(end, position + 1)
                continue
            start = end
            items = cast("list[Any]", value if isinstance(value, list) else [value])
            begin = line.start()
            for item in items:
                if isinstance(item, dict) and "name" in item:
                    yield Span(begin, end, call_of(item, text[position:end]))
                    begin = end

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
        made_up = False
        while (action := self._action.search(text, start)) is not None:
            # A model that goes on after its action invents the tool's answer and acts on it. Were those calls run, it
            # would be rewarded for plans that rest on results that no tool gave.
            made_up = made_up or self._observed.search(text[start : action.start()]) is not None
            name = action[1].strip()
            call, end = self._call(text, action.end(), name)
            if made_up:
                error = ContentParseError("it follows an Observation that you wrote yourself: stop after Action Input")
                call = Malformed(error, text[action.start() : end], name)
            yield Span(action.start(), end, call)
            start = max(end, action.end())

    def _call(self, text: str, at: int, name: str) -> tuple[ToolCall | Malformed, int]:
        input_match = self._input.match(text, at)
        if not name or input_match is None:
            error = StructuralParseError("write Action: and the tool's name, then Action Input: and a JSON object")
            return Malformed(error, text[at : at + 80].strip(), name), at
        try:
            value, end = decode_json(text, input_match.end())
        except StructuralParseError as error:
            end = next_match(text, input_match.end(), re.compile(r"^[ \t]*(?:Action|Observation):", re.MULTILINE))
            return Malformed(error, text[input_match.end() : end].strip(), name), end
        return named_call(name, value, text[input_match.end() : end], key="Action Input"), end

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
        names = [*FORMATS, *registry.ids("tool_formats")]
        raise UnknownIdError(f"no tool-call format {name!r}; known: {', '.join(names)}")
    tool_format = registry.resolve("tool_formats", name)()
    if not isinstance(tool_format, ToolFormat):
        raise UsageError(f"tool format {name!r} makes a {type(tool_format).__name__}: give a class of ToolFormat")
    return tool_format


def format_of(env: Any) -> ToolFormat:
    """The dialect that an environment speaks: its own, or that of the model's chat template, which its driver set.
    Raises UsageError if neither is known."""
    name = getattr(env, "tool_format", None) or getattr(env, "template_format", DEFAULT)
    if not name:
        hint = f"give the environment a tool_format: {', '.join(FORMATS)}, or one of your own"
        raise UsageError(f"the model's chat template writes tool calls in a dialect that is not known here: {hint}")
    return get_format(name)


def spoken_by(written: str, source: str, call: ToolCall, schema: Mapping[str, Json]) -> str | None:
    """The dialect of a chat template with this `source` that has `written` so for a `call`: the one that reads it back.
    For a template that writes no calls, the one whose marks are in its source, else `json`. None if no dialect reads
    what it wrote."""
    if written:
        forms = [*FORMATS.values(), *(get_format(name) for name in registry.ids("tool_formats"))]
        # a template may open the next turn in any case, with a mark of thoughts
        texts = {form.name: written.rpartition(form.thoughts[0][0])[0] for form in forms}
        read = [(form, form.parse(text, [schema])) for form in forms for text in (written, texts[form.name])]
        fitting = [(len(parsed.text), form.name) for form, parsed in read if parsed.calls == (call,)]
        return min(fitting, key=lambda one: one[0])[1] if fitting else None  # its tags are part of no word
    # The mark in the source is the weaker sign, and comes second: templates are copied from one another and keep marks
    # of dialects that they never write. What was written and can be read back leaves no doubt.
    matching = (form.name for form in FORMATS.values() if any(marker in source for marker in form.markers))
    return next(matching, FALLBACK)
