"""Chat messages as APIs, data rows and demonstrations write them, brought into the one shape of our records.

Owns what a content may look like (text, null, a list of parts) and that the arguments of a call are a JSON object,
which most clients write as text: both are decoded here alone. Knows neither templates nor dialects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl.env.tools.calls import decode_whole
from agentrl.errors import StructuralParseError
from agentrl.records import Json, Message


def text_of(content: Any) -> str:
    """A content as text: null is empty, parts are joined by line ends, and a part without text (an image, say) is named
    in its place. Raises TypeError for a content of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"content is a {type(content).__name__}, not text")
    parts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping):
            fields = cast("Mapping[str, Any]", part)
            text = fields.get("text")
            parts.append(text if isinstance(text, str) else f"[{fields.get('type', 'content')}]")
        else:
            raise TypeError(f"a part of a content is a {type(part).__name__}, not text")
    return "\n".join(parts)


def plain_message(message: Mapping[str, Any]) -> Message:
    """A message with a text as content and with calls whose arguments are an object. Keys without a value go; arguments
    that are no JSON stay the text that they are. Raises TypeError for a message of another shape."""
    plain: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    plain["content"] = text_of(message.get("content"))
    calls: Any = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise TypeError(f"tool_calls is a {type(calls).__name__}, not a list")
        plain["tool_calls"] = [_plain_call(call) for call in cast("list[Any]", calls)]
    return cast("Message", plain)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Each of them as `plain_message` has it."""
    return tuple(plain_message(message) for message in messages)


def arguments_of(value: Any) -> Any:
    """The arguments of a call: what their JSON text says, once, if they come as text."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        return decode_whole(value) if value.strip() else {}
    except StructuralParseError:
        return value


def _plain_call(call: Any) -> dict[str, Json]:
    """A call in OpenAI's envelope; some clients write the function alone."""
    if not isinstance(call, Mapping):
        raise TypeError(f"a tool call is a {type(call).__name__}, not an object")
    fields = dict(cast("Mapping[str, Any]", call))
    function: Any = fields.pop("function", None)
    if function is None:
        function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    if not isinstance(function, Mapping):
        raise TypeError(f"the function of a tool call is a {type(function).__name__}, not an object")
    inner = dict(cast("Mapping[str, Any]", function))
    inner["arguments"] = arguments_of(inner.get("arguments"))
    return {"type": "function", **fields, "function": inner}
