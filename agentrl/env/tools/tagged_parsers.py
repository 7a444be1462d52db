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
        name, arguments, id = self._keys
        entries = [
            ({id: call.id or str(number)} if id else {}) | {name: call.name, arguments: dict(call.arguments)}
            for number, call in enumerate(calls)
        ]
        return f"{self._begin}{dump(entries)}{self._end}"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (begin := text.find(self._begin, start)) >= 0:
            position, last, listed = skip_space(text, begin + len(self._begin)), begin, False
            if text.startswith("[", position):
                position, listed = skip_space(text, position + 1), True
            while text.startswith("{", position):
                try:
                    value, end = decode_json(text, position)
                except StructuralParseError as error:
                    end = self._broken_end(text, position)
                    yield Span(last, end, Malformed(error, text[position:end].strip()))
                else:
                    yield Span(last, end, self._call(value, text[position:end]))
                last, position = end, skip_space(text, end)
                if text.startswith(",", position):
                    position = skip_space(text, position + 1)
            position = skip_space(text, position + 1) if listed and text.startswith("]", position) else position
            closed = self._end != "" and text.startswith(self._end, position)
            start = position + len(self._end) if closed else position
            # Once for the whole list, after the calls in it: those that were read well are run, and the model reads
            # what was wrong with the rest.
            if last == begin or (self._end and not closed):
                start = start if closed else self._broken_end(text, start)
                hint = f"write {self._begin}[, JSON objects, ]{self._end}"
                yield Span(
                    last, start, Malformed(StructuralParseError(f"the tool calls are broken: {hint}"), text[last:start])
                )
            # Always further than the tag: what is broken at its first character would otherwise be found again for
            # ever.
            start = max(start, begin + len(self._begin))

    def _broken_end(self, text: str, at: int) -> int:
        """A broken list ends after its closing tag, or before the next opening one."""
        ends = [text.find(self._begin, at + 1), text.find(self._end, at) if self._end else -1]
        if ends[1] >= 0 and (ends[0] < 0 or ends[1] < ends[0]):
            return ends[1] + len(self._end)
        return ends[0] if ends[0] >= 0 else len(text)

    def _call(self, value: Any, raw: str) -> ToolCall | Malformed:
        name, arguments, id = self._keys
        if isinstance(value, dict) and name != "name":
            fields = cast("dict[str, Any]", value)
            value = {"name": fields.get(name), **fields}
        call = call_of(value, raw, key=arguments)
        call_id = cast("dict[str, Any]", value).get(id) if id and isinstance(call, ToolCall) else None
        return replace(call, id=call_id) if isinstance(call, ToolCall) and isinstance(call_id, str) else call


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
        texts = (
            self._write_as.replace("ID", call.id or f"functions.{call.name}:{number}")
            .replace("NAME", call.name)
            .replace("JSON", dump(dict(call.arguments)))
            for number, call in enumerate(calls)
        )
        return self._around[0] + "".join(texts) + self._around[1]

    def spans(self, text: str, start: int) -> Iterator[Span]:
        position = start
        while (head := self._head.search(text, position)) is not None:
            name, id = head["name"].strip(), head.groupdict().get("id") or ""
            begin = text.rfind(self._around[0], position, head.start()) if self._around[0] else -1
            begin = (
                begin if begin >= 0 and not text[begin + len(self._around[0]) : head.start()].strip() else head.start()
            )
            inner = skip_space(text, head.end())
            try:
                value, end = decode_json(text, inner)
            except StructuralParseError as error:
                end = self._next(text, inner)
                yield Span(begin, end, Malformed(error, text[inner:end].strip(), name))
                position = max(end, head.end())
                continue
            call = named_call(name, value, text[inner:end])
            tail = self._tail.match(text, end)
            if tail is None:
                end = self._next(text, end)
                call = Malformed(StructuralParseError("the tool call is not closed"), text[inner:end].strip(), name)
            else:
                end = tail.end()
                if self._around[1] and text.startswith(self._around[1], skip_space(text, end)):
                    end = skip_space(text, end) + len(self._around[1])
            yield Span(begin, end, replace(call, id=id) if isinstance(call, ToolCall) and id else call)
            position = max(end, head.end())

    def _next(self, text: str, at: int) -> int:
        """A broken call ends after its tail, or before the next head."""
        head, tail = self._head.search(text, at), self._tail.search(text, at)
        ends = [end for end in (head.start() if head else -1, tail.end() if tail else -1) if end >= at]
        return min(ends, default=len(text))


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
        follows = rf"(?:{tags.key}|{re.escape(tags.call_end)})"
        self._value_end = re.compile(rf"{re.escape(tags.value_end)}(?=\s*+{follows})")

    def write(self, *calls: ToolCall) -> str:
        tags, between = self._tags, self._tags.between
        written: list[str] = []
        for call in calls:
            pieces = [tags.write_call.replace("NAME", call.name)]
            for key, value in call.arguments.items():
                plain = isinstance(value, str)
                head = tags.write_key.replace("NAME", key).replace("TEXT", "true" if plain else "false")
                edge = "\n" if tags.trims else ""
                pieces.append(f"{head}{edge}{value if plain else dump(value)}{edge}{tags.value_end}")
            written.append(between.join([*pieces, tags.call_end]))
        begin, end = tags.around
        if not begin:
            return between.join(written)
        return f"{begin}{between}{between.join(written)}{between}{end}"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        begin_tag, end_tag = self._tags.around
        position = start
        while (head := self._call.search(text, position)) is not None:
            begin = head.start()
            if begin_tag and (tag_begin := text.rfind(begin_tag, position, begin)) >= 0:
                begin = begin if text[tag_begin + len(begin_tag) : begin].strip() else tag_begin
            name, end, arguments = head["name"].strip(), head.end(), dict[str, Any]()
            error: StructuralParseError | None = None
            while (key := self._key.match(text, end)) is not None:
                closed = self._value_end.search(text, key.end())
                if closed is None:
                    error = StructuralParseError(f"the parameter {key['name']!r} is not closed: {self._tags.value_end}")
                    break
                value, end = text[key.end() : closed.start()], closed.end()
                if self._tags.trims:
                    value = value.removeprefix("\n").removesuffix("\n")
                arguments[key["name"].strip()] = (
                    value if key.groupdict().get("text") is None else self._typed(value, key)
                )
            end = skip_space(text, end)
            if error is None and text.startswith(self._tags.call_end, end):
                end += len(self._tags.call_end)
                after = skip_space(text, end)
                if end_tag and text.startswith(end_tag, after):
                    end = after + len(end_tag)
                call = named_call(name, arguments, text[head.start() : end])
            else:
                error = error or StructuralParseError(f"the tool call is not closed: write {self._tags.call_end}")
                following = self._call.search(text, head.end())
                stop = following.start() if following else len(text)
                closing = text.find(self._tags.call_end, end, stop)
                end = closing + len(self._tags.call_end) if closing >= 0 else stop
                call = Malformed(error, text[head.start() : end].strip(), name)
            yield Span(begin, max(end, head.end()), call)
            position = max(end, head.end())

    def _typed(self, value: str, key: re.Match[str]) -> Any:
        if key["text"] == "true":
            return value
        try:
            read = decode_whole(value)
        except StructuralParseError:
            return value
        # The tag says that the value is no text. If it reads as one anyway, the model has put quotes around it, and its
        # letters as they stand are the least guess.
        return value if isinstance(read, str) else read

    @property
    def _writes_types(self) -> bool:
        return "TEXT" in self._tags.write_key

    def typed(self, call: ToolCall | Malformed, schemas: Sequence[Mapping[str, Json]]) -> ToolCall | Malformed:
        if isinstance(call, Malformed) or self._writes_types:
            return call
        reader = reader_of(call.name, schemas)
        values = {
            key: reader.read(key, value) if isinstance(value, str) else value for key, value in call.arguments.items()
        }
        return replace(call, arguments=values)

    def spelled(self, call: ToolCall, schemas: Sequence[Mapping[str, Json]]) -> ToolCall:
        if self._writes_types:
            return call
        reader = reader_of(call.name, schemas)
        return replace(call, arguments={key: reader.spell(key, value) for key, value in call.arguments.items()})


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
        match = pattern.match(self.text, self.at)
        if match is None:
            raise StructuralParseError(f"the tool call has no {what} at character {self.at}")
        self.at = match.end()
        return match[0]

    def text_value(self) -> str | None:
        raise NotImplementedError

    def key(self) -> str:
        raise NotImplementedError

    def value(self, depth: int = MAX_DEPTH) -> Any:
        if depth == 0:
            raise StructuralParseError(f"the tool call is nested deeper than {MAX_DEPTH} levels")
        self.skip()
        if (text := self.text_value()) is not None:
            return text
        if self.take("{"):
            return dict(self.items("}", lambda: self.pair(depth)))
        for begin, end in ("[]", "()"):
            if self.take(begin):
                return list(self.items(end, lambda: self.value(depth - 1)))
        return self.word()

    def pair(self, depth: int) -> tuple[str, Any]:
        key = self.key()
        self.need(":")
        return key, self.value(depth - 1)

    def items(self, end: str, item: Any) -> Iterator[Any]:
        while not self.take(end):
            yield item()
            if not self.take(","):
                self.need(end)
                return

    def word(self) -> Any:
        word = self.match(_WORD, "value")
        if word in _WORDS:
            return _WORDS[word]
        try:
            value = decode_whole(word)
        except StructuralParseError:
            raise StructuralParseError(f"{word[:40]!r} is no value") from None
        return value


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
        quoted = self.match(_QUOTED, "closed string")
        try:
            value = ast.literal_eval(re.sub(r"(?<!\\)[\n\r]", lambda end: _LINE_ENDS[end[0]], quoted))
        except (ValueError, SyntaxError, MemoryError) as error:
            raise StructuralParseError(f"a string of the tool call is broken: {error}") from None
        return str(value)

    def key(self) -> str:
        self.skip()
        text = self.text_value()
        if text is None:
            raise StructuralParseError(f"a key is no string at character {self.at}")
        return text


class Pythonic(_Tagged):
    """`OPEN[name(key="value", …), …]CLOSE`: calls as Python writes them. Without tags, the whole turn is the list."""

    def __init__(self, name: str, begin: str, end: str, *, alternatives: tuple[str, ...] = (), **more: Any) -> None:
        super().__init__(name, **more)
        self._begin, self._end = begin, end
        self._opens = (begin, *alternatives)

    def write(self, *calls: ToolCall) -> str:
        return f"{self._begin}[{', '.join(self._written(call) for call in calls)}]{self._end}"

    def _written(self, call: ToolCall) -> str:
        if all(key.isidentifier() for key in call.arguments):
            return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        return f"{call.name}(**{dict(call.arguments)!r})"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        if not self._begin:
            position = skip_space(text, start)
            for tag in self._opens[1:]:
                position = skip_space(text, position + len(tag)) if text.startswith(tag, position) else position
            if _LISTED.match(text, position):
                yield from self._list(text, start, position)
            return
        while (begin := text.find(self._begin, start)) >= 0:
            for span in self._list(text, begin, skip_space(text, begin + len(self._begin))):
                yield span
                start = span.end
            start = max(start, begin + len(self._begin))

    def _list(self, text: str, begin: int, at: int) -> Iterator[Span]:
        reader, last = _Python(text, at), begin
        try:
            reader.need("[")
            while True:
                name = reader.match(_NAME, "name")
                reader.need("(")
                arguments = dict[str, Any]()
                for piece in reader.items(")", lambda: self._argument(reader)):
                    arguments |= piece
                check_plain(arguments, MAX_DEPTH)
                call = named_call(name, arguments, text[last : reader.at])
                more = reader.take(",")
                if not more:
                    reader.need("]")
                    if self._end and not reader.take(self._end):
                        raise StructuralParseError(f"the tool calls are not closed: write {self._end}")
                yield Span(last, reader.at, call)
                last = reader.at
                if not more:
                    return
        except StructuralParseError as error:
            end = text.find(self._end, last + 1) if self._end else -1
            end = end + len(self._end) if end >= 0 else len(text)
            yield Span(last, end, Malformed(error, text[last:end].strip()))

    def _argument(self, reader: _Python) -> dict[str, Any]:
        if reader.take("**"):
            value = reader.value()
            if not isinstance(value, dict):
                raise StructuralParseError("** stands before no object")
            return cast("dict[str, Any]", value)
        key = reader.match(_NAME, "name of an argument")
        reader.need("=")
        return {key: reader.value()}


_LISTED: Final = re.compile(r"\[\s*+[\w.-]++\(")
_QUOTE: Final = '<|"|>'


class _Gemma(_Reader):
    def text_value(self) -> str | None:
        if not self.take(_QUOTE):
            return None
        end = self.text.find(_QUOTE, self.at)
        if end < 0:
            raise StructuralParseError(f"a string of the tool call is not closed: write {_QUOTE}")
        text, self.at = self.text[self.at : end], end + len(_QUOTE)
        return text

    def key(self) -> str:
        self.skip()
        if (text := self.text_value()) is not None:
            return text
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
            pairs = cast("dict[str, Any]", value).items()
            keys = (
                key if _GEMMA_KEY.fullmatch(key) and key == key.strip() else f"{_QUOTE}{key}{_QUOTE}"
                for key, _ in pairs
            )
            return (
                "{" + ",".join(f"{key}:{self._value(item)}" for key, (_, item) in zip(keys, pairs, strict=True)) + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(self._value(item) for item in cast("list[Any]", value)) + "]"
        return dump(value)

    def spans(self, text: str, start: int) -> Iterator[Span]:
        while (begin := text.find(self._begin, start)) >= 0:
            position, name = skip_space(text, begin + len(self._begin)), ""
            try:
                head = self._head.match(text, position)
                if head is None:
                    raise StructuralParseError(f"write {self._begin}call:NAME{{…}}{self._end}")
                name, reader = head[1], _Gemma(text, head.end())
                if not text.startswith("{", reader.at):
                    raise StructuralParseError("the tool call has no arguments: write {…}")
                value = reader.value()
                check_plain(value, MAX_DEPTH)
                reader.need(self._end)
                start = reader.at
                yield Span(begin, start, named_call(name, value, text[position:start]))
            except StructuralParseError as error:
                start = next_match(text, position, _GEMMA_END)
                start += len(self._end) if text.startswith(self._end, start) else 0
                yield Span(begin, start, Malformed(error, text[position:start].strip(), name))


_GEMMA_END: Final = re.compile(r"<tool_call\|>|<\|tool_call>")

_INVOKE: Final = r'(?P<name>[^"<>\n]*+)"\s*+>'


def _invoked(name: str, around: tuple[str, str], prefix: str = "", **more: Any) -> Parameters:
    """`<invoke name="NAME">` and `<parameter name="KEY">VALUE</parameter>`, as MiniMax and others write it."""
    tags = Tags(
        around=around,
        call=rf'<{re.escape(prefix)}invoke\s++name="{_INVOKE}',
        call_end=f"</{prefix}invoke>",
        key=rf'<{re.escape(prefix)}parameter\s++name="{_INVOKE}',
        value_end=f"</{prefix}parameter>",
        write_call=f'<{prefix}invoke name="NAME">',
        write_key=f'<{prefix}parameter name="NAME">',
    )
    return Parameters(name, tags, **more)


def _dsml(name: str, block: str) -> Parameters:
    """DeepSeek's own tags, which say of each value whether it is text."""
    tags = Tags(
        around=(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"),
        call=rf'<｜DSML｜invoke\s++name="{_INVOKE}',
        call_end="</｜DSML｜invoke>",
        key=r'<｜DSML｜parameter\s++name="(?P<name>[^"<>\n]*+)"\s++string="(?P<text>true|false)"\s*+>',
        value_end="</｜DSML｜parameter>",
        write_call='<｜DSML｜invoke name="NAME">',
        write_key='<｜DSML｜parameter name="NAME" string="TEXT">',
    )
    return Parameters(name, tags)


def _functions(name: str, around: tuple[str, str], *, trims: bool, **more: Any) -> Parameters:
    """`<function=NAME>` and `<parameter=KEY>VALUE</parameter>`, as Qwen3-Coder and Seed-OSS write it."""
    tags = Tags(
        around=around,
        call=r"<function=(?P<name>[^<>\n]++)>",
        call_end="</function>",
        key=r"<parameter=(?P<name>[^<>\n]++)>",
        value_end="</parameter>",
        write_call="<function=NAME>",
        write_key="<parameter=NAME>",
        trims=trims,
    )
    return Parameters(name, tags, **more)


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
