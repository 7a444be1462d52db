"""Chat messages as APIs, data rows and demonstrations write them, brought into the one shape of our records.

Owns the vocabulary of a message: which roles, keys and parts of a content are known, what older and foreign spellings
of them mean (`function_call`, `reasoning`, `weight`), and what is refused. Arguments of a call are a JSON object, which
most clients write as text: both are decoded here alone. Knows neither templates nor dialects: whether a template reads
a key that is not in the vocabulary, the renderer finds out.

Also the nulls that Arrow (Parquet, Hugging Face data sets) pads rows with. Arrow has one schema for a whole column, so
a tool with a parameter `path` gets a parameter `line` of value null if any other tool of the file has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl import notices
from agentrl.env.image_parts import with_images
from agentrl.env.tools.calls import decode_whole
from agentrl.errors import StructuralParseError
from agentrl.records import Json, Message

REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's thoughts. Records use the first. vLLM from 0.16 on and OpenRouter write `reasoning`, gpt-oss'
template reads `thinking`."""

TRAINING_MARKS: Final = ("weight", "loss_weight", "train", "train_on_turn", "training", "trainable", "learns", "loss")
"""Keys by which data sets say whether an assistant's message is trained: OpenAI's and Fireworks' `weight` (0 or 1),
axolotl's `train` and `training`, ms-swift's `loss`."""

_MARK_WORDS: Final = frozenset(
    {"loss", "mask", "masked", "train", "trained", "trainable", "training", "learn", "learns", "weight", "weights"}
)

MESSAGE_KEYS: Final = frozenset(
    {"role", "content", "images", "tool_calls", "tool_call_id", "name", REASONING_KEYS[0], *TRAINING_MARKS}
)
"""The keys that a message in our shape may have without a template that reads them."""

CALL_KEYS: Final = frozenset({"id", "type", "function", "index"})
"""The keys of a call in OpenAI's envelope; `index` is its place in a streamed answer."""
FUNCTION_KEYS: Final = frozenset({"name", "arguments"})

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_THOUGHT_PARTS: Final = ("thinking", "reasoning")
_PART_KEYS: Final = frozenset({"text", "content", "summary", "signature", "id"})
"""Keys of a part besides the one of its type. A signature proves to a provider that thoughts are its own."""


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
    """A message with a text as content, its thoughts as `reasoning_content`, and calls whose arguments are an object.
    Keys without a value go; a key that is not known stays, for a template may read it. Arguments that are no JSON stay
    the text that they are.

    The older `function_call` and the role `function` become `tool_calls` and `tool`. Raises TypeError for a message of
    another shape, for a part of a content that is not known, and for two different thoughts."""
    if not isinstance(cast("object", message), Mapping):
        raise TypeError(f"a message is a {type(message).__name__}, not an object")
    plain: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    if "role" not in plain and "from" in plain:
        # Refused and not translated: data sets with `from` and `value` name their roles as they like ("human", "gpt",
        # "function_response"), and a wrong guess would train the user's words.
        raise TypeError("a message has 'from' in the place of 'role': write role and content, as OpenAI's API does")
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise TypeError(f"a message has role = {plain.get('role')!r:.40}: give system, user, assistant or tool")
    _merge_thoughts(plain)
    if not plain.get("content") and isinstance(plain.get("refusal"), str):  # OpenAI's models refuse in a key of its own
        plain["content"] = plain.pop("refusal")
    _read_content(plain)
    if "function_call" in plain:
        call: Any = plain.pop("function_call")
        if plain.get("tool_calls"):
            raise TypeError("a message has function_call beside tool_calls: give tool_calls alone")
        plain["tool_calls"] = [{"function": call}]
    if plain.get("role") == "function":
        plain["role"] = "tool"
    calls: Any = plain.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = _decoded(calls, "tool_calls") if calls.strip() else []
    if calls is not None and not isinstance(calls, list):
        raise TypeError(f"tool_calls is a {type(calls).__name__}, not a list")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in cast("list[Any]", calls)]
    return cast("Message", plain)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Each of them as `plain_message` has it. A TypeError names the message by its number, from 0 on."""
    plain: list[Message] = []
    for number, message in enumerate(messages):
        try:
            plain.append(plain_message(message))
        except TypeError as error:
            raise TypeError(f"message {number}: {error}") from None
    return tuple(plain)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a demonstration's message is trained by its own mark (`TRAINING_MARKS`); without one it is. Raises
    ValueError for a mark that is neither 0 nor 1, for marks that disagree, and for a key that reads like a mark and is
    none of them: nobody can tell whether `mask = 1` stands for trained or for masked, and a guess may teach what was
    marked as wrong."""
    for key, value in message.items():
        # A mark that is not known is worse than none: the message would be trained although its author excluded it, and
        # no figure of the run would show it (law 8).
        if value is not None and key not in TRAINING_MARKS and not _MARK_WORDS.isdisjoint(key.lower().split("_")):
            raise ValueError(f"{key} = {value!r:.40} reads like a mark of what is trained: give weight, 0 or 1")
    marks: dict[str, bool] = {}
    for key in TRAINING_MARKS:
        value: Any = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{key} = {value!r:.40}: give 0 (context only) or 1 (trained)")
        marks[key] = bool(value)
    if len(set(marks.values())) > 1:
        raise ValueError(f"{' and '.join(marks)} disagree about whether the message is trained: give one of them")
    return next(iter(marks.values()), True)


def arguments_of(value: Any) -> Any:
    """The arguments of a call: what their JSON text says, once, if they come as text."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        return decode_whole(value) if value.strip() else {}
    except StructuralParseError:
        return value


def plain_tools(tools: Any) -> list[Mapping[str, Json]]:
    """The schemas of a row's tools: a list, or the JSON text of one. Nulls that Arrow padded them with go, where a
    schema of JSON has no use for a null. Raises TypeError for anything else."""
    if isinstance(tools, str):
        tools = _decoded(tools, "tools") if tools.strip() else []
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise TypeError(f"tools is a {type(tools).__name__}: give a list of function schemas")
    schemas: list[Mapping[str, Json]] = []
    for number, tool in enumerate(cast("list[Any]", tools)):
        if isinstance(tool, str):
            tool = _decoded(tool, f"tools[{number}]")
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{number}] is a {type(tool).__name__}, not an object")
        schema = cast("dict[str, Any]", _without_padding(dict(cast("Mapping[str, Any]", tool))))
        if "function" in schema and schema.get("type", "function") != "function":
            raise TypeError(f"tools[{number}].type = {schema['type']!r:.40}: give tools of type function")
        function: Any = schema.get("function", schema)
        if isinstance(function, dict) and isinstance(
            parameters := cast("dict[str, Any]", function).get("parameters"), str
        ):
            function["parameters"] = _decoded(parameters, f"tools[{number}].parameters")
        for key in ("input_schema", "inputSchema") if isinstance(function, dict) else ():
            if key in function:  # of Anthropic's API and of MCP; a template would show no parameters
                raise TypeError(
                    f"tools[{number}] has {key!r} in the place of 'parameters': give OpenAI's function schema"
                )
        name: Any = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise TypeError(f"tools[{number}] has no name: give {{'type': 'function', 'function': {{'name': …}}}}")
        schemas.append(schema)
    return schemas


def without_padded_arguments(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages with calls that lack the nulls of Arrow's padding: arguments that the called tool does not have, or
    whose schema takes no null. Calls of a tool without schema stay as they are."""
    parameters: dict[Any, Any] = {}
    for tool in tools:
        function = cast("Mapping[str, Any]", tool.get("function", tool))
        parameters[function.get("name")] = function.get("parameters")
    plain: list[Message] = []
    for message in messages:
        calls: list[dict[str, Any]] = []
        for call in message.get("tool_calls", ()):
            function = cast("dict[str, Any]", call["function"])
            schema = parameters.get(function.get("name"))
            if isinstance(schema, Mapping):
                function = {
                    **function,
                    "arguments": _unpadded(function["arguments"], cast("Mapping[str, Any]", schema)),
                }
            calls.append({**call, "function": function})
        plain.append(cast("Message", {**message, "tool_calls": calls}) if calls else message)
    return tuple(plain)


def _merge_thoughts(plain: dict[str, Any]) -> None:
    """Thoughts under one key. A list of details (OpenRouter's `reasoning_details`) repeats them and goes; alone, its
    texts and summaries are the thoughts."""
    thoughts = {key: plain.pop(key) for key in REASONING_KEYS if key in plain}
    details: Any = plain.pop("reasoning_details", None)
    for key, value in thoughts.items():
        if not isinstance(value, str):
            raise TypeError(f"{key} is a {type(value).__name__}, not text")
    texts = {value for value in thoughts.values() if value}
    # Servers that send the thoughts twice, under an old and a new name, send them equal. Two that differ are two
    # authors, and joining them would teach a text that nobody wrote.
    if len(texts) > 1:
        raise TypeError(f"{' and '.join(thoughts)} differ: give one of them")
    if not texts and details:
        details = _decoded(details, "reasoning_details") if isinstance(details, str) else details
        texts = {_thoughts_in(details, "reasoning_details")} - {""}
    if texts or thoughts:
        plain[REASONING_KEYS[0]] = next(iter(texts), "")


def _thoughts_in(value: Any, field: str) -> str:
    """The text of thoughts: a text, or a list of texts and of parts with a `text` or a `summary`. Encrypted parts are
    named. Raises TypeError for another shape: its repr would be trained as thoughts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"{field} is a {type(value).__name__}: give a text, or a list of parts with text")
    texts: list[str] = []
    for number, part in enumerate(cast("list[Any]", value)):
        fields = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {"text": part}
        text = next((fields[key] for key in ("text", "summary") if isinstance(fields.get(key), str)), None)
        if text is not None:
            texts.append(text)
        elif isinstance(fields.get("data"), str):
            notices.note("messages", "encrypted thoughts are left out: nobody can read them", by_policy=True)
        else:
            raise TypeError(f"{field}[{number}] has no text: give a text, or a list of parts with text")
    return "\n".join(text for text in texts if text)


def _read_content(plain: dict[str, Any]) -> None:
    """A list of parts becomes a text with its images beside; parts of thoughts join the thoughts."""
    content: Any = plain.get("content")
    if not isinstance(content, list):
        plain["content"] = text_of(content)
        return
    content_parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise TypeError(f"a part of a content is a {type(part).__name__}, not text")
        fields = {name: value for name, value in cast("Mapping[str, Any]", part).items() if value is not None}
        kind = fields.get("type", "text" if "text" in fields else None)
        for key in sorted(fields.keys() - {"type", str(kind), *_PART_KEYS}):
            notices.note("messages", f"the key {key!r} of a part of a content is not used", by_policy=True)
        if kind in _THOUGHT_PARTS:
            value = next((fields[key] for key in (kind, "text", "content", "summary") if fields.get(key)), "")
            thoughts.append(_thoughts_in(value, f"a part of type {kind}"))
        elif kind == "refusal" and isinstance(fields.get("refusal"), str):
            content_parts.append({"type": "text", "text": fields["refusal"]})
        elif kind in _TEXT_PARTS and isinstance(fields.get("text"), str):
            content_parts.append({"type": "text", "text": fields["text"]})
        elif kind == "image_url":
            content_parts.append({"type": "image_url", "image_url": fields.get("image_url")})
        else:
            raise TypeError(f"a part of a content has type {kind!r}: give parts of type text or image_url")
    texts = [part for part in content_parts if part["type"] == "text"]
    if len(texts) == len(content_parts):  # without images there is no place to keep, and the parts are lines
        plain["content"] = "\n".join(part["text"] for part in texts)
    else:
        try:
            plain |= with_images({"content": content_parts})
        except ValueError as error:
            raise TypeError(str(error)) from None
    if thoughts:
        if plain.get(REASONING_KEYS[0]):
            raise TypeError("a message has thoughts in its content and under a key: give one of them")
        plain[REASONING_KEYS[0]] = "\n".join(thoughts)


def _plain_call(call: Any) -> dict[str, Json]:
    """A call in OpenAI's envelope; some clients write the function alone."""
    if not isinstance(call, Mapping):
        raise TypeError(f"a tool call is a {type(call).__name__}, not an object")
    fields = {name: value for name, value in cast("Mapping[str, Any]", call).items() if value is not None}
    if fields.get("type", "function") != "function":
        raise TypeError(f"a tool call has type {fields['type']!r}: give calls of type function")
    function: Any = fields.pop("function", None)
    if function is None:
        function = {name: fields.pop(name) for name in list(fields) if name not in CALL_KEYS}
    if not isinstance(function, Mapping):
        raise TypeError(f"the function of a tool call is a {type(function).__name__}, not an object")
    inner = dict(cast("Mapping[str, Any]", function))
    if not isinstance(inner.get("name"), str):
        raise TypeError(f"a tool call has name = {inner.get('name')!r:.40}: give the name of a tool")
    if "arguments" not in inner and (others := sorted({"parameters", "input", "args"} & inner.keys())):
        raise TypeError(f"a tool call has {others[0]!r} in the place of 'arguments': write name and arguments")
    inner["arguments"] = arguments_of(inner.get("arguments"))
    return {"type": "function", **fields, "function": inner}


def _decoded(text: str, field: str) -> Any:
    """Decode a JSON text. Raises TypeError that names the field."""
    try:
        return decode_whole(text)
    except StructuralParseError as error:
        raise TypeError(f"{field} is a text that is no JSON ({error}): give a list") from None


def _takes_null(schema: Any) -> bool:
    """Whether a JSON schema takes null; also one that does not say, such as `{}` or one with `$ref`."""
    if not isinstance(schema, Mapping):
        return True
    fields = cast("Mapping[str, Any]", schema)
    choices: Any = fields.get("anyOf") or fields.get("oneOf")
    if isinstance(choices, list):
        return any(_takes_null(choice) for choice in cast("list[Any]", choices))
    if isinstance(values := fields.get("enum"), list):
        return None in values
    types: Any = fields.get("type")
    return (
        types is None
        or fields.get("nullable") is True
        or types == "null"
        or (isinstance(types, list) and "null" in types)
    )


def _without_padding(value: Any) -> Any:
    """A schema without the keys that are null. A null in a list (`enum`) stays, and so do `default` and `const` where
    null is one of the values that the schema takes."""
    if isinstance(value, list):
        return [_without_padding(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    says_types = any(fields.get(key) for key in ("type", "anyOf", "oneOf", "enum"))
    # A null is padding or a value, and only the schema itself can tell: `default: null` of an optional parameter has to
    # stay, the `default` that Arrow invented for a string has to go.
    takes_null = says_types and _takes_null({key: item for key, item in fields.items() if item is not None})
    return {
        key: _without_padding(item)
        for key, item in fields.items()
        if item is not None or (key in ("default", "const") and takes_null)
    }


def _unpadded(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value without the nulls that `schema` has no use for, in objects and in lists of objects."""
    choices: list[Any] = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    schemas = [cast("Mapping[str, Any]", choice) for choice in choices if isinstance(choice, Mapping)]
    if isinstance(value, list):
        items = next((each["items"] for each in schemas if isinstance(each.get("items"), Mapping)), None)
        return cast("Any", value if items is None else [_unpadded(item, items) for item in cast("list[Any]", value)])
    properties: dict[str, Any] = {}
    for each in schemas:
        if isinstance(each.get("properties"), Mapping):
            properties |= cast("Mapping[str, Any]", each["properties"])
    if not isinstance(value, dict) or not properties:
        return cast("Any", value)
    plain: dict[str, Any] = {}
    for name, item in cast("dict[str, Any]", value).items():
        inner = properties.get(name)
        # Dropped only where a null could not have been meant. Left in, the model would learn to pass `line=null` to
        # tools that have no such parameter.
        if item is None and (name not in properties or not _takes_null(inner)):
            continue
        plain[name] = _unpadded(item, cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else item
    return plain
