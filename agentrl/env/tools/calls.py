"""Tool calls in a model's text: what a call is, and the reading of its JSON. The dialects are in `env.dialects`.

Any text that begins a call becomes a `ToolCall`, or a `Malformed` that says why it is none; nothing is repaired by
guessing and nothing is dropped. It knows which calls are well-formed, never which tools exist.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, cast

from agentrl.env.spaces import is_unicode
from agentrl.errors import ContentParseError, ParseError, StructuralParseError
from agentrl.records import Json

MAX_DEPTH: Final = 64
"""Arguments nested deeper than this are refused: no tool needs them, and they exhaust whoever walks them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call. `arguments` is JSON-safe; whether they fit the tool is not known yet. `id` is the model's
    own, in the dialects that have one."""

    name: str
    arguments: Mapping[str, Json]
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that was begun and is broken. `raw` is its text; `error` is a message for the model."""

    error: ParseError
    raw: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """`text` is what stands outside of calls and thoughts; `thoughts` is the reasoning in front of them, and `head` the
    same as it was written, with its tags."""

    text: str
    calls: tuple[ToolCall | Malformed, ...]
    thoughts: str = ""
    head: str = ""


def own_id(call: ToolCall | Malformed) -> str:
    """The id that the model gave a call; nothing for one that is no id."""
    return call.id if isinstance(call, ToolCall) and _ID.fullmatch(call.id) else ""


def decode_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends. Raw line ends within strings are accepted.

    Raises StructuralParseError for text that is not JSON, an object with a key that stands twice, or JSON that no
    record can carry: NaN, infinities, lone surrogates, nesting deeper than `MAX_DEPTH`."""
    if text[at : at + 1] not in _BEGINS:  # cheaper than the decoder's error, which counts the lines before it
        raise StructuralParseError("the tool call is not valid JSON: Expecting value at character 0")
    value_end = len(text)
    try:
        json_value, value_end = _DECODER.raw_decode(text, at)
        check_plain(json_value, MAX_DEPTH)
        return json_value, value_end
    except StructuralParseError as decode_error:
        structural_error = decode_error
    except json.JSONDecodeError as decode_error:
        value_end = decode_error.pos
        structural_error = StructuralParseError(
            f"the tool call is not valid JSON: {decode_error.msg} at character {value_end - at}"
        )
    # Both can be written by a policy: integers of more digits than Python converts, and brackets nested deeper than its
    # stack.
    except (ValueError, RecursionError) as decode_error:
        structural_error = StructuralParseError(f"the tool call is not valid JSON: {decode_error}")
    # How far the decoder came, for readers that try at many places: they bound the sum, else a text of a thousand
    # opening brackets is read a thousand times to its end.
    structural_error.read = value_end - at
    raise structural_error from None


def call_of(value: Any, raw: str, *, key: str = "arguments") -> ToolCall | Malformed:
    """A decoded JSON value as a call: an object with a `name` and, under `key`, an object (or its JSON text)."""
    if not isinstance(value, dict):
        return Malformed(ContentParseError(f"a tool call is a JSON object, not {_kind(value)}"), raw)
    call_fields = cast("dict[str, Any]", value)
    tool_name = call_fields.get("name")
    if not isinstance(tool_name, str) or not tool_name:
        return Malformed(ContentParseError('the tool call has no "name"'), raw)
    arguments = call_fields.get(key, {})
    # OpenAI's API carries arguments as a text of JSON, and some models write their calls like that. Decoded once and
    # not again: a text within the text is the tool's business.
    if isinstance(arguments, str):
        try:
            arguments = decode_whole(arguments)
        except StructuralParseError as json_error:
            return Malformed(json_error, raw, tool_name)
    return named_call(tool_name, arguments, raw, key=key)


def named_call(name: str, arguments: Any, raw: str, *, key: str = "arguments") -> ToolCall | Malformed:
    """A call whose name stood outside of its JSON."""
    if not name:
        return Malformed(ContentParseError("the tool call has no name"), raw)
    if not isinstance(arguments, dict):
        return Malformed(ContentParseError(f'"{key}" is a JSON object, not {_kind(arguments)}'), raw, name)
    return ToolCall(name, cast("dict[str, Any]", arguments))


def decode_whole(text: str) -> Any:
    """The one JSON value that `text` holds. Raises StructuralParseError as `decode_json` does."""
    json_value, value_end = decode_json(text, skip_space(text, 0))
    if text[value_end:].strip():
        raise StructuralParseError("more than one JSON value where one belongs")
    return json_value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _finite(number: str) -> float:
    float_value = float(number)
    if math.isinf(float_value):
        raise ValueError(f"{number[:20]} is out of range")
    return float_value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ. Python's decoder would drop all but the last value of a key without a word."""
    object_values = dict(pairs)
    if len(object_values) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return object_values


_ID: Final = re.compile(r"[\w.:-]{1,64}")
_BEGINS: Final = frozenset('{["-0123456789tfnNI')
# `strict=False` lets a string span lines: models write a program as an argument with its line ends as they are, which
# is against JSON's letter but has one reading only. Everything beyond that (single quotes, trailing commas, Python's
# True) stays an error: a guess would run a call that the model did not write, and reward the model for writing it so.
_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)


def check_plain(value: Any, depth: int, what: str = "the tool call") -> None:
    """Raises StructuralParseError for a value nested deeper than `depth`, or with a text that UTF-8 cannot carry."""
    if depth == 0:
        raise StructuralParseError(f"{what} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str) and not is_unicode(value):
        raise StructuralParseError(f"{what} holds a lone surrogate, which is no character")
    if isinstance(value, dict):
        for member_key, inner_value in cast("dict[str, Any]", value).items():
            check_plain(member_key, depth, what)
            check_plain(inner_value, depth - 1, what)
    elif isinstance(value, list):
        for inner_value in cast("list[Any]", value):
            check_plain(inner_value, depth - 1, what)


def dump(value: Any) -> str:
    """JSON on one line, as the dialects write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def skip_space(text: str, position: int) -> int:
    """The next place from `position` on that is no blank."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _kind(value: Any) -> str:
    kind_names: dict[Any, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return kind_names.get(type(value), "a number")
