"""Tool calls in a model's text: one parser per dialect.

A parser is total: any text gives a `Parsed`, never an exception. Every call that was begun comes back, in order, as
a `ToolCall` or, if it is broken, as a `Malformed` that says why; nothing is repaired by guessing and nothing is
dropped. It knows which calls are well-formed, never which tools exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, cast

from agentrl.env.spaces import is_unicode
from agentrl.errors import ContentParseError, ParseError, StructuralParseError, UnknownIdError
from agentrl.records import Json

MAX_DEPTH: Final = 64
"""Arguments nested deeper than this are refused: no tool needs them, and they exhaust whoever walks them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call. `arguments` is JSON-safe; whether they fit the tool is not known yet."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that was begun and is broken. `raw` is its text; `error` is what the model should read."""

    error: ParseError
    raw: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """`text` is what stands outside of the calls, thoughts included."""

    text: str
    calls: tuple[ToolCall | Malformed, ...]


class ToolFormat(Protocol):
    """A dialect. `parse` and `write` are inverse: `parse(write(call)).calls == (call,)`."""

    name: str

    def parse(self, text: str) -> Parsed: ...
    def write(self, call: ToolCall) -> str: ...


def get_format(name: str) -> ToolFormat:
    """The dialect called `name`. Raises UnknownIdError."""
    if name not in FORMATS:
        raise UnknownIdError(f"no tool-call format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


class Hermes:
    """Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, any number of them."""

    name = "hermes"
    _open: Final = "<tool_call>"
    _close: Final = "</tool_call>"

    def write(self, call: ToolCall) -> str:
        return f"{self._open}\n{_dump({'name': call.name, 'arguments': dict(call.arguments)})}\n{self._close}"

    def parse(self, text: str) -> Parsed:
        start = end_of_thoughts(text, lambda at: self._covers(text, at))
        outside, calls, at = [text[:start]], list[ToolCall | Malformed](), start
        while (begin := text.find(self._open, at)) >= 0:
            outside.append(text[at:begin])
            call, at = self._call(text, begin)
            calls.append(call)
        outside.append(text[at:])
        return Parsed("".join(outside), tuple(calls))

    def _covers(self, text: str, position: int) -> bool:
        """Whether a well-formed call reaches over `position`."""
        at = 0
        while (begin := text.find(self._open, at)) >= 0 and begin < position:
            call, at = self._call(text, begin)
            if at > position:
                return isinstance(call, ToolCall)
        return False

    def _call(self, text: str, begin: int) -> tuple[ToolCall | Malformed, int]:
        """The call that begins at `begin`, and where it ends."""
        inner = _skip_space(text, begin + len(self._open))
        try:
            value, after = decode_json(text, inner)
            after = _skip_space(text, after)
            if text.startswith(self._close, after):
                return call_of(value, text[inner:after], arguments_key="arguments"), after + len(self._close)
            what = "is not closed" if after == len(text) else "holds more than one JSON object"
            error = StructuralParseError(f"the tool call {what}: write {self._open}, one JSON object, {self._close}")
        except StructuralParseError as broken:
            error = broken
        return self._resync(text, begin, error)

    def _resync(self, text: str, begin: int, error: ParseError) -> tuple[Malformed, int]:
        """Where a broken call ends: after its closing tag, or before the next opening one."""
        inner = begin + len(self._open)
        close, reopen = text.find(self._close, inner), text.find(self._open, inner)
        if close >= 0 and (reopen < 0 or close < reopen):
            return Malformed(error, text[inner:close].strip()), close + len(self._close)
        end = reopen if reopen >= 0 else len(text)
        return Malformed(error, text[inner:end].strip()), end


FORMATS: Final[Mapping[str, ToolFormat]] = {form.name: form for form in (Hermes(),)}


# --- what the dialects share


def end_of_thoughts(text: str, inside_call: Callable[[int], bool]) -> int:
    """Where the reasoning `<think>…</think>` at the head of `text` ends: calls drafted in it are not meant.

    A chat template may have opened the block, so that only its end is in `text`; an end that lies within a
    well-formed call (`inside_call(position)`) is an argument's content and ends nothing."""
    end = text.find("</think>")
    if text.lstrip().startswith("<think>"):
        return len(text) if end < 0 else end + len("</think>")
    if end < 0 or inside_call(end):
        return 0
    return end + len("</think>")


def decode_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends. Raw line ends within strings are accepted.

    Raises StructuralParseError for what is no JSON, or JSON that no record can carry: NaN, infinities, lone
    surrogates, nesting deeper than `MAX_DEPTH`."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise StructuralParseError(
            f"the tool call is not valid JSON: {error.msg} at character {error.pos - at}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise StructuralParseError(f"the tool call is not valid JSON: {error}") from None
    _check_plain(value, MAX_DEPTH)
    return value, end


def call_of(value: Any, raw: str, *, arguments_key: str) -> ToolCall | Malformed:
    """A decoded JSON value as a call: an object with a `name` and an object (or its JSON text) of arguments."""
    if not isinstance(value, dict):
        return Malformed(ContentParseError(f"a tool call is a JSON object, not {_kind(value)}"), raw)
    fields = cast("dict[str, Any]", value)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(ContentParseError('the tool call has no "name"'), raw)
    arguments = fields.get(arguments_key, {})
    if isinstance(arguments, str):
        try:
            arguments = decode_whole(arguments)
        except StructuralParseError as error:
            return Malformed(error, raw, name)
    if not isinstance(arguments, dict):
        return Malformed(ContentParseError(f'"{arguments_key}" is a JSON object, not {_kind(arguments)}'), raw, name)
    return ToolCall(name, cast("dict[str, Any]", arguments))


def decode_whole(text: str) -> Any:
    """The one JSON value that `text` holds. Raises StructuralParseError as `decode_json` does."""
    value, end = decode_json(text, _skip_space(text, 0))
    if text[end:].strip():
        raise StructuralParseError("more than one JSON value where one belongs")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:20]} is out of range")
    return value


_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)


def _check_plain(value: Any, depth: int) -> None:
    if depth == 0:
        raise StructuralParseError(f"the tool call is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str) and not is_unicode(value):
        raise StructuralParseError("the tool call holds a lone surrogate, which is no character")
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            _check_plain(key, depth)
            _check_plain(inner, depth - 1)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_plain(inner, depth - 1)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _kind(value: Any) -> str:
    names: dict[Any, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(value), "a number")
