"""Results of tools: what a tool returns as the text, and the pictures, that the model reads.

A result never costs an episode: JSON types become JSON as a user expects it, a value of any other type is read as its
text and named once with its tool and type. Knows neither calls nor dialects.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import json
import pathlib
import uuid
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, cast

from pydantic import BaseModel

from agentrl import notices
from agentrl.env.image_parts import image_part, with_images
from agentrl.errors import ToolError, UsageError
from agentrl.protocols import ToolResult
from agentrl.records import ImagePart, Json

_DEEPEST: Final = 64
_MOST_VALUES: Final = 200_000
_ARRAYS: Final = frozenset({"numpy", "torch", "jax", "jaxlib", "tensorflow", "array", "pandas"})
_CONTAINERS: Final = ("builtins", "collections")
_AS_TEXT: Final = (Decimal, Fraction, complex, uuid.UUID, pathlib.PurePath, datetime.timedelta, datetime.tzinfo)


def as_result(value: Any, tool: str = "") -> ToolResult:
    """A tool's return value as the model reads it: text as it is, bytes decoded, None as "ok", pictures as pictures,
    the rest as JSON. Raises ToolError for a picture that is none."""
    if isinstance(value, ToolResult):
        return value
    if value is None:
        return ToolResult(content="ok")
    if isinstance(value, str):
        return ToolResult(content=clean_text(str(value.value) if isinstance(value, enum.Enum) else value))
    if isinstance(value, bytes | bytearray | memoryview):
        return ToolResult(content=readable(bytes(cast("bytes", value))))
    if (picture_parts := _parts(value)) is not None:
        return _with_pictures(picture_parts, tool)
    if isinstance(value, BaseModel):
        try:
            return ToolResult(content=clean_text(value.model_dump_json()))
        # The slower way below writes the fields that pydantic can write, and the text of those that it cannot.
        except ValueError:  # a field of a type that pydantic does not write, or a surrogate
            pass
    return ToolResult(content=json.dumps(plain_json(value, tool), ensure_ascii=False))


def plain_json(value: Any, tool: str = "") -> Json:
    """A value of Python as JSON, in whose types a user would write it."""
    return _Plain(tool).of(value, _DEEPEST)


def readable(data: bytes) -> str:
    """Bytes as text; bytes that are not UTF-8 show as `\\xff` and the like, so that nothing is lost to the reader."""
    return data.decode("utf-8", errors="backslashreplace")


def clean_text(text: str) -> str:
    """Text without lone surrogates: each shows as the escape of its byte or code point."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def cut(text: str, limit: int) -> tuple[str, bool]:
    """At most about `limit` bytes of `text`: its head and its tail with a note in between, and whether it was cut."""
    text_bytes = text.encode()
    if len(text_bytes) <= limit:
        return text, False
    head_bytes, tail_bytes = text_bytes[: limit - limit // 2], text_bytes[len(text_bytes) - limit // 2 :]
    cut_note = f"\n[output cut: {limit} of {len(text_bytes)} bytes shown]\n"
    return head_bytes.decode(errors="ignore") + cut_note + tail_bytes.decode(errors="ignore"), True


# --- pictures


def _parts(value: Any) -> list[Any] | None:
    """A result as OpenAI's parts if it holds a picture: a list of texts and pictures, or a picture of PIL."""
    result_items = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not any(_is_picture(item) for item in result_items):
        return None
    return result_items


def _is_picture(item: Any) -> bool:
    if isinstance(item, Mapping):
        return cast("Mapping[str, Any]", item).get("type") == "image_url" and "image_url" in item
    return type(item).__module__.partition(".")[0] == "PIL" and hasattr(item, "save")


def _with_pictures(items: list[Any], tool: str) -> ToolResult:
    try:
        openai_parts = [_as_part(result_item) for result_item in items]
        tool_message = with_images({"role": "tool", "content": openai_parts})
    except (ValueError, UsageError, OSError, AttributeError) as picture_error:
        raise ToolError(
            f"{tool or 'the tool'} returned a picture that cannot be shown: {picture_error}"
        ) from picture_error
    return ToolResult(
        content=clean_text(tool_message["content"]), images=tuple(cast("list[ImagePart]", tool_message["images"]))
    )


def _as_part(item: Any) -> Any:
    if isinstance(item, str):
        return {"type": "text", "text": clean_text(item)}
    if isinstance(item, Mapping) or not hasattr(item, "save"):
        return cast("Any", item)
    png_file = io.BytesIO()
    item.save(png_file, "PNG")
    return image_part(png_file.getvalue())


# --- JSON


class _Plain:
    """A value as JSON. `_left` more values are written; beyond them, and beyond a depth, a mark stands."""

    def __init__(self, tool: str) -> None:
        self._tool, self._left = tool, _MOST_VALUES

    def of(self, value: Any, depth: int) -> Json:
        self._left -= 1
        if depth == 0 or self._left < 0:
            return "[nested too deeply]" if depth == 0 else "[too many values]"
        # Before the plain types: a member of a StrEnum or an IntEnum is a text or a number too, whose value is what
        # counts.
        if isinstance(value, enum.Enum):
            return self.of(value.value, depth - 1)
        if isinstance(value, str):
            return clean_text(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return readable(bytes(cast("bytes", value)))
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, BaseModel) and (dumped_model := _dumped(value)) is not value:
            return self.of(dumped_model, depth)
        if (value_fields := _fields(value)) is not None:
            return {
                _key(member_key): self.of(inner_value, depth - 1) for member_key, inner_value in value_fields.items()
            }
        if isinstance(value, set | frozenset):
            inner_values = [self.of(inner_value, depth - 1) for inner_value in cast("Iterable[Any]", value)]
            # The order of a set differs from process to process, and replay from it.
            return sorted(inner_values, key=_rank)
        if (inner_values := _items(value)) is not None:
            return [self.of(inner_value, depth - 1) for inner_value in inner_values]
        if (converted := _of_array(value)) is not value:
            return self.of(converted, depth - 1)
        return self._text(value)

    def _text(self, value: Any) -> str:
        type_name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        kind_notice = f"the tool {self._tool!r} returned a {type_name}, which is no JSON: the model reads its text"
        notices.note("results of tools", kind_notice, by_policy=True)
        has_text = type(value).__str__ is not object.__str__ or type(value).__repr__ is not object.__repr__
        try:
            return clean_text(str(value)) if has_text else f"<{type_name}>"  # without the address that Python writes
        except Exception:  # an author's own method
            return f"<{type_name}>"


def _dumped(value: BaseModel) -> Any:
    """A model as pydantic writes it: with its serializers and computed fields, and without those that it excludes. The
    model itself if pydantic cannot, for a field of a type of the author's."""
    try:
        return value.model_dump(mode="json")
    except Exception:  # a serializer's own reasons
        return value


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The members of a value that is an object in JSON."""
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value)
    if isinstance(value, BaseModel):
        model_fields = {
            field_name: getattr(value, field_name)
            for field_name, value_field in type(value).model_fields.items()
            if not value_field.exclude
        }
        return model_fields | (value.model_extra or {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {value_field.name: getattr(value, value_field.name, None) for value_field in dataclasses.fields(value)}
    attributes: Any = getattr(cast("Any", type(value)), "__attrs_attrs__", None)
    return (
        None
        if attributes is None
        else {value_field.name: getattr(value, value_field.name, None) for value_field in attributes}
    )


def _items(value: Any) -> Iterable[Any] | None:
    """The items of a value that is a list in JSON: of a list, a tuple, a range, a view of a dict, and an iterator."""
    if type(value).__module__.partition(".")[0] in _ARRAYS or isinstance(value, type):
        return None
    # Not everything that can be iterated is a list to its reader: an open file, a database's table or a data set of
    # torch would be read to its end. Iterators, and containers of the standard library, are meant as their items.
    is_iterator, is_container = hasattr(value, "__next__"), hasattr(value, "__iter__")
    if isinstance(value, list | tuple) or is_iterator or (is_container and type(value).__module__ in _CONTAINERS):
        return _bounded(cast("Iterable[Any]", value))
    return None


def _bounded(items: Iterable[Any]) -> Iterable[Any]:
    for item_index, item in enumerate(items):
        if item_index >= _MOST_VALUES:
            yield "[too many values]"
            return
        yield item


def _of_array(value: Any) -> Any:
    """An array, a tensor, one of their numbers or a table as plain lists and numbers; any other value itself."""
    if type(value).__module__.partition(".")[0] not in _ARRAYS:
        return value
    try:
        if hasattr(value, "columns") and hasattr(value, "to_dict"):
            return value.to_dict(orient="records")
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # a library's own reasons
        return value


def _key(key: Any) -> str:
    """A key of an object as JSON has it: a text."""
    while isinstance(key, enum.Enum):
        key = key.value
    key = _of_array(key)
    if isinstance(key, str):
        return clean_text(key)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    if isinstance(key, datetime.date | datetime.time):
        return key.isoformat()
    return readable(key) if isinstance(key, bytes) else clean_text(str(key))


def _rank(value: Json) -> tuple[str, Any]:
    if isinstance(value, bool | int | float) and value == value:
        return ("", value)
    return ("text", value) if isinstance(value, str) else ("value", json.dumps(value, sort_keys=True))
