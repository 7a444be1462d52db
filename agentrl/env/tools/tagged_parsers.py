"""Dialects whose calls stand between tags: with JSON inside, with a tag for each parameter, or with values in a
notation of their own.

One class for each shape; a family is an object of it, with its tags. A tag of the end counts only where it can end
something: a value may say `</parameter>` in the middle of its text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from agentrl.env.tools.calls import (
    MAX_DEPTH,
    Malformed,
    ToolCall,
    call_of,
    check_plain,
    decode_json,
    decode_whole,
    dump,
    named_call,
    skip_space,
)
from agentrl.env.tools.json_schema import reader_of
from agentrl.env.tools.tool_format import Span, ToolFormat, next_match
from agentrl.errors import StructuralParseError
from agentrl.records import Json

_THINK: Final = ("<think>", "</think>")


class _Tagged(ToolFormat):
    """A dialect that is an object of its class."""

    def __init__(
        self,
        name: str,
        *,
        markers: tuple[str, ...] = (),
        thoughts: tuple[tuple[str, str], ...] = (_THINK,),
        framing: str | None = None,
    ) -> None:
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]
        self.markers, self.thoughts = markers, thoughts  # pyright: ignore[reportAttributeAccessIssue]
        self.framing = None if framing is None else re.compile(framing)  # pyright: ignore[reportAttributeAccessIssue]


class JsonList(_Tagged):
    """`OPEN[{NAME: …, ARGUMENTS: {…}}, …]CLOSE`; single objects one after the other are read as well."""

    def __init__(
        self, name: str, begin: str, end: str, *, keys: tuple[str, str, str] = ("name", "arguments", ""), **more: Any
    ) -> None:
        super().__init__(name, **more)
        self._begin, self._end, self._keys = begin, end, keys

    def write(self, *calls: ToolCall) -> str:
        name_key, arguments, id_key = self._keys
        entries = [
            ({id_key: call.id or str(call_index)} if id_key else {})
            | {name_key: call.name, arguments: dict(call.arguments)}
            for call_index, call in enumerate(calls)
        ]
        return f"{self._begin}{dump(entries)}{self._end}"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (tag_begin := text.find(self._begin, start)) >= 0:
            position, span_begin, is_list = skip_space(text, tag_begin + len(self._begin)), tag_begin, False
            if text.startswith("[", position):
                position, is_list = skip_space(text, position + 1), True
            while text.startswith("{", position):
                try:
                    json_value, json_end = decode_json(text, position)
                except StructuralParseError as json_error:
                    json_end = self._broken_end(text, position)
                    yield Span(span_begin, json_end, Malformed(json_error, text[position:json_end].strip()))
                else:
                    yield Span(span_begin, json_end, self._call(json_value, text[position:json_end]))
                span_begin, position = json_end, skip_space(text, json_end)
                if text.startswith(",", position):
                    position = skip_space(text, position + 1)
            position = skip_space(text, position + 1) if is_list and text.startswith("]", position) else position
            is_closed = self._end != "" and text.startswith(self._end, position)
            start = position + len(self._end) if is_closed else position
            # Once for the whole list, after the calls in it: those that were read well are run, and the model reads
            # what was wrong with the rest.
            if span_begin == tag_begin or (self._end and not is_closed):
                start = start if is_closed else self._broken_end(text, start)
                correction = f"write {self._begin}[, JSON objects, ]{self._end}"
                yield Span(
                    span_begin,
                    start,
                    Malformed(StructuralParseError(f"the tool calls are broken: {correction}"), text[span_begin:start]),
                )
            # Always further than the tag: what is broken at its first character would otherwise be found again for
            # ever.
            start = max(start, tag_begin + len(self._begin))

    def _broken_end(self, text: str, at: int) -> int:
        """A broken list ends after its closing tag, or before the next opening one."""
        possible_ends = [text.find(self._begin, at + 1), text.find(self._end, at) if self._end else -1]
        if possible_ends[1] >= 0 and (possible_ends[0] < 0 or possible_ends[1] < possible_ends[0]):
            return possible_ends[1] + len(self._end)
        return possible_ends[0] if possible_ends[0] >= 0 else len(text)

    def _call(self, value: Any, raw: str) -> ToolCall | Malformed:
        name_key, arguments, id_key = self._keys
        if isinstance(value, dict) and name_key != "name":
            value_fields = cast("dict[str, Any]", value)
            value = {"name": value_fields.get(name_key), **value_fields}
        read_call = call_of(value, raw, key=arguments)
        call_id = cast("dict[str, Any]", value).get(id_key) if id_key and isinstance(read_call, ToolCall) else None
        return (
            replace(read_call, id=call_id)
            if isinstance(read_call, ToolCall) and isinstance(call_id, str)
            else read_call
        )


class Headed(_Tagged):
    """A head that names the tool, a JSON object, a tail: `head` matches the first with the groups `name` and maybe
    `id`, and `write_as` writes all of a call."""

    def __init__(
        self, name: str, *, head: str, tail: str, write_as: str, around: tuple[str, str] = ("", ""), **more: Any
    ) -> None:
        super().__init__(name, **more)
        self._head, self._tail = re.compile(head), re.compile(tail)
        self._write_as, self._around = write_as, around

    def write(self, *calls: ToolCall) -> str:
        call_texts = (
            self._write_as.replace("ID", call.id or f"functions.{call.name}:{call_index}")
            .replace("NAME", call.name)
            .replace("JSON", dump(dict(call.arguments)))
            for call_index, call in enumerate(calls)
        )
        return self._around[0] + "".join(call_texts) + self._around[1]

    def spans(self, text: str, start: int) -> Iterator[Span]:
        position = start
        while (head_match := self._head.search(text, position)) is not None:
            tool_name, call_id = head_match["name"].strip(), head_match.groupdict().get("id") or ""
            call_begin = text.rfind(self._around[0], position, head_match.start()) if self._around[0] else -1
            call_begin = (
                call_begin
                if call_begin >= 0 and not text[call_begin + len(self._around[0]) : head_match.start()].strip()
                else head_match.start()
            )
            json_begin = skip_space(text, head_match.end())
            try:
                json_value, call_end = decode_json(text, json_begin)
            except StructuralParseError as json_error:
                call_end = self._next(text, json_begin)
                yield Span(call_begin, call_end, Malformed(json_error, text[json_begin:call_end].strip(), tool_name))
                position = max(call_end, head_match.end())
                continue
            read_call = named_call(tool_name, json_value, text[json_begin:call_end])
            tail_match = self._tail.match(text, call_end)
            if tail_match is None:
                call_end = self._next(text, call_end)
                read_call = Malformed(
                    StructuralParseError("the tool call is not closed"), text[json_begin:call_end].strip(), tool_name
                )
            else:
                call_end = tail_match.end()
                if self._around[1] and text.startswith(self._around[1], skip_space(text, call_end)):
                    call_end = skip_space(text, call_end) + len(self._around[1])
            yield Span(
                call_begin,
                call_end,
                replace(read_call, id=call_id) if isinstance(read_call, ToolCall) and call_id else read_call,
            )
            position = max(call_end, head_match.end())

    def _next(self, text: str, at: int) -> int:
        """A broken call ends after its tail, or before the next head."""
        head_match, tail_match = self._head.search(text, at), self._tail.search(text, at)
        possible_ends = [
            possible_end
            for possible_end in (head_match.start() if head_match else -1, tail_match.end() if tail_match else -1)
            if possible_end >= at
        ]
        return min(possible_ends, default=len(text))


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a dialect with a tag for each parameter. The patterns `call` and `key` have a group `name`, and `key`
    maybe `text` ("true" or "false": whether the value is text); the other texts are written as they are."""

    around: tuple[str, str]
    call: str
    call_end: str
    key: str
    value_end: str
    write_call: str
    write_key: str
    trims: bool = False  # a line end at each side of a value is none of it
    between: str = "\n"


class Parameters(_Tagged):
    """A tag for the call, one for each parameter. A value is text or JSON: what its tool's schema says."""

    def __init__(self, name: str, tags: Tags, **more: Any) -> None:
        super().__init__(name, **more)
        self._tags = tags
        self._call, self._key = re.compile(tags.call), re.compile(r"\s*+" + tags.key)
        # A closing tag counts only in front of the next parameter or the end of the call. A model that writes an HTML
        # or XML file as a value has the tag in the middle of it, and the first match would cut the file there.
        next_pattern = rf"(?:{tags.key}|{re.escape(tags.call_end)})"
        self._value_end = re.compile(rf"{re.escape(tags.value_end)}(?=\s*+{next_pattern})")

    def write(self, *calls: ToolCall) -> str:
        tags, between = self._tags, self._tags.between
        written_calls: list[str] = []
        for call in calls:
            call_pieces = [tags.write_call.replace("NAME", call.name)]
            for parameter_name, parameter_value in call.arguments.items():
                is_text = isinstance(parameter_value, str)
                key_tag = tags.write_key.replace("NAME", parameter_name).replace("TEXT", "true" if is_text else "false")
                line_edge = "\n" if tags.trims else ""
                value_text = parameter_value if is_text else dump(parameter_value)
                call_pieces.append(f"{key_tag}{line_edge}{value_text}{line_edge}{tags.value_end}")
            written_calls.append(between.join([*call_pieces, tags.call_end]))
        block_begin, block_end = tags.around
        if not block_begin:
            return between.join(written_calls)
        return f"{block_begin}{between}{between.join(written_calls)}{between}{block_end}"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        begin_tag, end_tag = self._tags.around
        position = start
        while (head_match := self._call.search(text, position)) is not None:
            call_begin = head_match.start()
            if begin_tag and (tag_begin := text.rfind(begin_tag, position, call_begin)) >= 0:
                call_begin = call_begin if text[tag_begin + len(begin_tag) : call_begin].strip() else tag_begin
            tool_name, read_end, arguments = head_match["name"].strip(), head_match.end(), dict[str, Any]()
            call_error: StructuralParseError | None = None
            while (key_match := self._key.match(text, read_end)) is not None:
                value_end = self._value_end.search(text, key_match.end())
                if value_end is None:
                    call_error = StructuralParseError(
                        f"the parameter {key_match['name']!r} is not closed: {self._tags.value_end}"
                    )
                    break
                value_text, read_end = text[key_match.end() : value_end.start()], value_end.end()
                if self._tags.trims:
                    value_text = value_text.removeprefix("\n").removesuffix("\n")
                arguments[key_match["name"].strip()] = (
                    value_text if key_match.groupdict().get("text") is None else self._typed(value_text, key_match)
                )
            read_end = skip_space(text, read_end)
            if call_error is None and text.startswith(self._tags.call_end, read_end):
                read_end += len(self._tags.call_end)
                after_call = skip_space(text, read_end)
                if end_tag and text.startswith(end_tag, after_call):
                    read_end = after_call + len(end_tag)
                read_call = named_call(tool_name, arguments, text[head_match.start() : read_end])
            else:
                call_error = call_error or StructuralParseError(
                    f"the tool call is not closed: write {self._tags.call_end}"
                )
                following = self._call.search(text, head_match.end())
                search_stop = following.start() if following else len(text)
                closing_tag = text.find(self._tags.call_end, read_end, search_stop)
                read_end = closing_tag + len(self._tags.call_end) if closing_tag >= 0 else search_stop
                read_call = Malformed(call_error, text[head_match.start() : read_end].strip(), tool_name)
            yield Span(call_begin, max(read_end, head_match.end()), read_call)
            position = max(read_end, head_match.end())

    def _typed(self, value: str, key: re.Match[str]) -> Any:
        if key["text"] == "true":
            return value
        try:
            json_value = decode_whole(value)
        except StructuralParseError:
            return value
        # The tag says that the value is no text. If it reads as one anyway, the model has put quotes around it, and its
        # letters as they stand are the least guess.
        return value if isinstance(json_value, str) else json_value

    @property
    def _writes_types(self) -> bool:
        return "TEXT" in self._tags.write_key

    def typed(self, call: ToolCall | Malformed, schemas: Sequence[Mapping[str, Json]]) -> ToolCall | Malformed:
        if isinstance(call, Malformed) or self._writes_types:
            return call
        parameter_reader = reader_of(call.name, schemas)
        typed_values = {
            parameter_name: parameter_reader.read(parameter_name, parameter_value)
            if isinstance(parameter_value, str)
            else parameter_value
            for parameter_name, parameter_value in call.arguments.items()
        }
        return replace(call, arguments=typed_values)

    def spelled(self, call: ToolCall, schemas: Sequence[Mapping[str, Json]]) -> ToolCall:
        if self._writes_types:
            return call
        parameter_reader = reader_of(call.name, schemas)
        return replace(
            call,
            arguments={
                parameter_name: parameter_reader.spell(parameter_name, parameter_value)
                for parameter_name, parameter_value in call.arguments.items()
            },
        )


# --- values in a notation of their own


class _Reader:
    """Reads values from a place in a text on. Raises StructuralParseError; reads each character once."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def skip(self) -> None:
        self.at = skip_space(self.text, self.at)

    def take(self, piece: str) -> bool:
        self.skip()
        if self.text.startswith(piece, self.at):
            self.at += len(piece)
            return True
        return False

    def need(self, piece: str) -> None:
        if not self.take(piece):
            raise StructuralParseError(f"the tool call lacks {piece!r} at character {self.at}")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        self.skip()
        pattern_match = pattern.match(self.text, self.at)
        if pattern_match is None:
            raise StructuralParseError(f"the tool call has no {what} at character {self.at}")
        self.at = pattern_match.end()
        return pattern_match[0]

    def text_value(self) -> str | None:
        raise NotImplementedError

    def key(self) -> str:
        raise NotImplementedError

    def value(self, depth: int = MAX_DEPTH) -> Any:
        if depth == 0:
            raise StructuralParseError(f"the tool call is nested deeper than {MAX_DEPTH} levels")
        self.skip()
        if (plain_text := self.text_value()) is not None:
            return plain_text
        if self.take("{"):
            return dict(self.items("}", lambda: self.pair(depth)))
        for opening_bracket, closing_bracket in ("[]", "()"):
            if self.take(opening_bracket):
                return list(self.items(closing_bracket, lambda: self.value(depth - 1)))
        return self.word()

    def pair(self, depth: int) -> tuple[str, Any]:
        member_key = self.key()
        self.need(":")
        return member_key, self.value(depth - 1)

    def items(self, end: str, item: Any) -> Iterator[Any]:
        while not self.take(end):
            yield item()
            if not self.take(","):
                self.need(end)
                return

    def word(self) -> Any:
        bare_word = self.match(_WORD, "value")
        if bare_word in _WORDS:
            return _WORDS[bare_word]
        try:
            word_value = decode_whole(bare_word)
        except StructuralParseError:
            raise StructuralParseError(f"{bare_word[:40]!r} is no value") from None
        return word_value


_WORD: Final = re.compile(r"[A-Za-z0-9_.+-]++")
_WORDS: Final[Mapping[str, Any]] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_NAME: Final = re.compile(r"[\w.-]++")
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_LINE_ENDS: Final = {"\n": "\\n", "\r": "\\r"}


class _Python(_Reader):
    def text_value(self) -> str | None:
        if self.text[self.at : self.at + 1] not in ("'", '"'):
            return None
        quoted_text = self.match(_QUOTED, "closed string")
        try:
            string_value = ast.literal_eval(re.sub(r"(?<!\\)[\n\r]", lambda end: _LINE_ENDS[end[0]], quoted_text))
        except (ValueError, SyntaxError, MemoryError) as literal_error:
            raise StructuralParseError(f"a string of the tool call is broken: {literal_error}") from None
        return str(string_value)

    def key(self) -> str:
        self.skip()
        key_text = self.text_value()
        if key_text is None:
            raise StructuralParseError(f"a key is no string at character {self.at}")
        return key_text


class Pythonic(_Tagged):
    """`OPEN[name(key="value", …), …]CLOSE`: calls as Python writes them. Without tags, the whole turn is the list."""

    def __init__(self, name: str, begin: str, end: str, *, alternatives: tuple[str, ...] = (), **more: Any) -> None:
        super().__init__(name, **more)
        self._begin, self._end = begin, end
        self._opens = (begin, *alternatives)

    def write(self, *calls: ToolCall) -> str:
        return f"{self._begin}[{', '.join(self._written(call) for call in calls)}]{self._end}"

    def _written(self, call: ToolCall) -> str:
        if all(argument_name.isidentifier() for argument_name in call.arguments):
            written_arguments = (f"{name}={value!r}" for name, value in call.arguments.items())
            return f"{call.name}({', '.join(written_arguments)})"
        return f"{call.name}(**{dict(call.arguments)!r})"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        if not self._begin:
            position = skip_space(text, start)
            for opening_tag in self._opens[1:]:
                position = (
                    skip_space(text, position + len(opening_tag))
                    if text.startswith(opening_tag, position)
                    else position
                )
            if _LISTED.match(text, position):
                yield from self._list(text, start, position)
            return
        while (tag_begin := text.find(self._begin, start)) >= 0:
            for call_span in self._list(text, tag_begin, skip_space(text, tag_begin + len(self._begin))):
                yield call_span
                start = call_span.end
            start = max(start, tag_begin + len(self._begin))

    def _list(self, text: str, begin: int, at: int) -> Iterator[Span]:
        value_reader, span_begin = _Python(text, at), begin
        try:
            value_reader.need("[")
            while True:
                tool_name = value_reader.match(_NAME, "name")
                value_reader.need("(")
                arguments = dict[str, Any]()
                for argument in value_reader.items(")", lambda: self._argument(value_reader)):
                    arguments |= argument
                check_plain(arguments, MAX_DEPTH)
                read_call = named_call(tool_name, arguments, text[span_begin : value_reader.at])
                has_more = value_reader.take(",")
                if not has_more:
                    value_reader.need("]")
                    if self._end and not value_reader.take(self._end):
                        raise StructuralParseError(f"the tool calls are not closed: write {self._end}")
                yield Span(span_begin, value_reader.at, read_call)
                span_begin = value_reader.at
                if not has_more:
                    return
        except StructuralParseError as list_error:
            broken_end = text.find(self._end, span_begin + 1) if self._end else -1
            broken_end = broken_end + len(self._end) if broken_end >= 0 else len(text)
            yield Span(span_begin, broken_end, Malformed(list_error, text[span_begin:broken_end].strip()))

    def _argument(self, reader: _Python) -> dict[str, Any]:
        if reader.take("**"):
            argument_value = reader.value()
            if not isinstance(argument_value, dict):
                raise StructuralParseError("** stands before no object")
            return cast("dict[str, Any]", argument_value)
        argument_name = reader.match(_NAME, "name of an argument")
        reader.need("=")
        return {argument_name: reader.value()}


_LISTED: Final = re.compile(r"\[\s*+[\w.-]++\(")
_QUOTE: Final = '<|"|>'


class _Gemma(_Reader):
    def text_value(self) -> str | None:
        if not self.take(_QUOTE):
            return None
        quote_end = self.text.find(_QUOTE, self.at)
        if quote_end < 0:
            raise StructuralParseError(f"a string of the tool call is not closed: write {_QUOTE}")
        quoted_text, self.at = self.text[self.at : quote_end], quote_end + len(_QUOTE)
        return quoted_text

    def key(self) -> str:
        self.skip()
        if (key_text := self.text_value()) is not None:
            return key_text
        return self.match(_GEMMA_KEY, "key").strip()


_GEMMA_KEY: Final = re.compile(r"[^:{}\[\],<]++")


class Gemma(_Tagged):
    """Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,number:1}<tool_call|>`."""

    _begin: Final = "<|tool_call>"
    _end: Final = "<tool_call|>"
    _head: Final = re.compile(r"call:([^\s{]++)")

    def write(self, *calls: ToolCall) -> str:
        return "".join(f"{self._begin}call:{call.name}{self._value(dict(call.arguments))}{self._end}" for call in calls)

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{_QUOTE}{value}{_QUOTE}"
        if isinstance(value, dict):
            member_pairs = cast("dict[str, Any]", value).items()
            written_keys = (
                member_key
                if _GEMMA_KEY.fullmatch(member_key) and member_key == member_key.strip()
                else f"{_QUOTE}{member_key}{_QUOTE}"
                for member_key, _ in member_pairs
            )
            return (
                "{"
                + ",".join(
                    f"{member_key}:{self._value(inner_value)}"
                    for member_key, (_, inner_value) in zip(written_keys, member_pairs, strict=True)
                )
                + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(self._value(inner_value) for inner_value in cast("list[Any]", value)) + "]"
        return dump(value)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (tag_begin := text.find(self._begin, start)) >= 0:
            position, tool_name = skip_space(text, tag_begin + len(self._begin)), ""
            try:
                head_match = self._head.match(text, position)
                if head_match is None:
                    raise StructuralParseError(f"write {self._begin}call:NAME{{…}}{self._end}")
                tool_name, value_reader = head_match[1], _Gemma(text, head_match.end())
                if not text.startswith("{", value_reader.at):
                    raise StructuralParseError("the tool call has no arguments: write {…}")
                arguments = value_reader.value()
                check_plain(arguments, MAX_DEPTH)
                value_reader.need(self._end)
                start = value_reader.at
                yield Span(tag_begin, start, named_call(tool_name, arguments, text[position:start]))
            except StructuralParseError as call_error:
                start = next_match(text, position, _GEMMA_END)
                start += len(self._end) if text.startswith(self._end, start) else 0
                yield Span(tag_begin, start, Malformed(call_error, text[position:start].strip(), tool_name))


_GEMMA_END: Final = re.compile(r"<tool_call\|>|<\|tool_call>")

_INVOKE: Final = r'(?P<name>[^"<>\n]*+)"\s*+>'


def _invoked(name: str, around: tuple[str, str], prefix: str = "", **more: Any) -> Parameters:
    """`<invoke name="NAME">` and `<parameter name="KEY">VALUE</parameter>`, as MiniMax and others write it."""
    invoke_tags = Tags(
        around=around,
        call=rf'<{re.escape(prefix)}invoke\s++name="{_INVOKE}',
        call_end=f"</{prefix}invoke>",
        key=rf'<{re.escape(prefix)}parameter\s++name="{_INVOKE}',
        value_end=f"</{prefix}parameter>",
        write_call=f'<{prefix}invoke name="NAME">',
        write_key=f'<{prefix}parameter name="NAME">',
    )
    return Parameters(name, invoke_tags, **more)


def _dsml(name: str, block: str) -> Parameters:
    """DeepSeek's own tags, which say of each value whether it is text."""
    dsml_tags = Tags(
        around=(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"),
        call=rf'<｜DSML｜invoke\s++name="{_INVOKE}',
        call_end="</｜DSML｜invoke>",
        key=r'<｜DSML｜parameter\s++name="(?P<name>[^"<>\n]*+)"\s++string="(?P<text>true|false)"\s*+>',
        value_end="</｜DSML｜parameter>",
        write_call='<｜DSML｜invoke name="NAME">',
        write_key='<｜DSML｜parameter name="NAME" string="TEXT">',
    )
    return Parameters(name, dsml_tags)


def _functions(name: str, around: tuple[str, str], *, trims: bool, **more: Any) -> Parameters:
    """`<function=NAME>` and `<parameter=KEY>VALUE</parameter>`, as Qwen3-Coder and Seed-OSS write it."""
    function_tags = Tags(
        around=around,
        call=r"<function=(?P<name>[^<>\n]++)>",
        call_end="</function>",
        key=r"<parameter=(?P<name>[^<>\n]++)>",
        value_end="</parameter>",
        write_call="<function=NAME>",
        write_key="<parameter=NAME>",
        trims=trims,
    )
    return Parameters(name, function_tags, **more)


_GLM: Final = Tags(
    around=("", ""),
    call=r"<tool_call>(?P<name>[^<>{}\[\]\n]++)(?=\s*+(?:<arg_key>|</tool_call>))",
    call_end="</tool_call>",
    key=r"<arg_key>(?P<name>[^<>\n]++)</arg_key>\s*+<arg_value>",
    value_end="</arg_value>",
    write_call="<tool_call>NAME",
    write_key="<arg_key>NAME</arg_key>\n<arg_value>",
)
_DEEPSEEK: Final = r"<｜tool▁call▁begin｜>\s*+(?:function\s*+<｜tool▁sep｜>\s*+)?+(?P<name>[^\s<｜]++)"

TAGGED: Final[tuple[ToolFormat, ...]] = (
    _functions("qwen3_coder", ("<tool_call>", "</tool_call>"), trims=True),
    _functions(
        "seed_oss",
        ("<seed:tool_call>", "</seed:tool_call>"),
        trims=False,
        thoughts=(("<seed:think>", "</seed:think>"),),
    ),
    Parameters("glm", _GLM),
    _invoked("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
    _invoked("muse", ("<atem:function_calls>", "</atem:function_calls>"), "atem:"),
    Parameters(
        "minicpm5",
        Tags(
            around=("", ""),
            call=rf'<function\s++name="{_INVOKE}',
            call_end="</function>",
            key=rf'<param\s++name="{_INVOKE}',
            value_end="</param>",
            write_call='<function name="NAME">',
            write_key='<param name="NAME">',
        ),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    Headed(
        "deepseek_v3",
        head=_DEEPSEEK + r"\s*+```json\s*+",
        tail=r"\s*+```\s*+<｜tool▁call▁end｜>",
        write_as="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Headed(
        "deepseek_v31",
        head=r"<｜tool▁call▁begin｜>\s*+(?P<name>[^\s<｜]++)\s*+<｜tool▁sep｜>",
        tail=r"\s*+<｜tool▁call▁end｜>",
        write_as="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Headed(
        "kimi_k2",
        head=r"<\|tool_call_begin\|>\s*+(?P<id>(?:functions\.)?+(?P<name>[^\s:<]++):\d++)\s*+<\|tool_call_argument_begin\|>",
        tail=r"\s*+<\|tool_call_end\|>",
        write_as="<|tool_call_begin|>ID<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        markers=("<|tool_call_argument_begin|>",),
    ),
    Headed(
        "functionary",
        head=r"<function=(?P<name>[^<>\n]++)>(?=\s*+\{)",
        tail=r"\s*+</function>",
        write_as="<function=NAME>JSON</function>",
    ),
    Headed(
        "solar",
        head=r"<\|tool_call:begin\|>(?P<id>[^<>\s]*+)<\|tool_call:name\|>(?P<name>[^<>\s]++)<\|tool_call:args\|>",
        tail=r"\s*+<\|tool_call:end\|>",
        write_as="<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>",
        around=("<|tool_calls|>", ""),
        thoughts=(("<|think|>", "<|end|>"),),
    ),
    JsonList(
        "cohere",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        keys=("tool_name", "parameters", "tool_call_id"),
        thoughts=(("<|START_THINKING|>", "<|END_THINKING|>"),),
        framing=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    ),
    JsonList("granite", "<|tool_call|>", "", markers=("<|tool_call|>",)),
    JsonList("nemotron_nano", "<TOOLCALL>", "</TOOLCALL>"),
    JsonList("tool_calls", "<tool_calls>", "</tool_calls>"),
    JsonList("gigachat", "<|function_call|>", ""),
    Gemma("gemma4", thoughts=(("<|channel>", "<channel|>"),)),
    Pythonic("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", markers=("<|tool_list_start|>",)),
    Pythonic("pythonic", "", "", alternatives=("<|python_start|>",)),
)
"""A dialect of each family, by the name that vLLM's parsers have where they know it."""
