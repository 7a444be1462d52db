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
    part_texts: list[str] = []
    for content_part in cast("list[Any]", content):
        if isinstance(content_part, str):
            part_texts.append(content_part)
        elif isinstance(content_part, Mapping):
            part_fields = cast("Mapping[str, Any]", content_part)
            part_text = part_fields.get("text")
            part_texts.append(part_text if isinstance(part_text, str) else f"[{part_fields.get('type', 'content')}]")
        else:
            raise TypeError(f"a part of a content is a {type(content_part).__name__}, not text")
    return "\n".join(part_texts)


def plain_message(message: Mapping[str, Any]) -> Message:
    """A message with a text as content, its thoughts as `reasoning_content`, and calls whose arguments are an object.
    Keys without a value go; a key that is not known stays, for a template may read it. Arguments that are no JSON stay
    the text that they are.

    The older `function_call` and the role `function` become `tool_calls` and `tool`. Raises TypeError for a message of
    another shape, for a part of a content that is not known, and for two different thoughts."""
    if not isinstance(cast("object", message), Mapping):
        raise TypeError(f"a message is a {type(message).__name__}, not an object")
    plain_fields: dict[str, Any] = {
        field_name: field_value for field_name, field_value in message.items() if field_value is not None
    }
    if "role" not in plain_fields and "from" in plain_fields:
        # Refused and not translated: data sets with `from` and `value` name their roles as they like ("human", "gpt",
        # "function_response"), and a wrong guess would train the user's words.
        raise TypeError("a message has 'from' in the place of 'role': write role and content, as OpenAI's API does")
    if not isinstance(plain_fields.get("role"), str) or not plain_fields["role"]:
        raise TypeError(f"a message has role = {plain_fields.get('role')!r:.40}: give system, user, assistant or tool")
    _merge_thoughts(plain_fields)
    # OpenAI's models refuse in a key of its own.
    if not plain_fields.get("content") and isinstance(plain_fields.get("refusal"), str):
        plain_fields["content"] = plain_fields.pop("refusal")
    _read_content(plain_fields)
    if "function_call" in plain_fields:
        function_call: Any = plain_fields.pop("function_call")
        if plain_fields.get("tool_calls"):
            raise TypeError("a message has function_call beside tool_calls: give tool_calls alone")
        plain_fields["tool_calls"] = [{"function": function_call}]
    if plain_fields.get("role") == "function":
        plain_fields["role"] = "tool"
    tool_calls: Any = plain_fields.pop("tool_calls", None)
    if isinstance(tool_calls, str):
        tool_calls = _decoded(tool_calls, "tool_calls") if tool_calls.strip() else []
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise TypeError(f"tool_calls is a {type(tool_calls).__name__}, not a list")
    if tool_calls:
        plain_fields["tool_calls"] = [_plain_call(tool_call) for tool_call in cast("list[Any]", tool_calls)]
    return cast("Message", plain_fields)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Each of them as `plain_message` has it. A TypeError names the message by its number, from 0 on."""
    converted: list[Message] = []
    for message_index, message in enumerate(messages):
        try:
            converted.append(plain_message(message))
        except TypeError as shape_error:
            raise TypeError(f"message {message_index}: {shape_error}") from None
    return tuple(converted)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a demonstration's message is trained by its own mark (`TRAINING_MARKS`); without one it is. Raises
    ValueError for a mark that is neither 0 nor 1, for marks that disagree, and for a key that reads like a mark and is
    none of them: nobody can tell whether `mask = 1` stands for trained or for masked, and a guess may teach what was
    marked as wrong."""
    for mark_name, mark_value in message.items():
        # A mark that is not known is worse than none: the message would be trained although its author excluded it, and
        # no figure of the run would show it (law 8).
        if (
            mark_value is not None
            and mark_name not in TRAINING_MARKS
            and not _MARK_WORDS.isdisjoint(mark_name.lower().split("_"))
        ):
            raise ValueError(
                f"{mark_name} = {mark_value!r:.40} reads like a mark of what is trained: give weight, 0 or 1"
            )
    marks_by_name: dict[str, bool] = {}
    for mark_name in TRAINING_MARKS:
        mark_value: Any = message.get(mark_name)
        if mark_value is None:
            continue
        if not isinstance(mark_value, bool | int | float) or mark_value not in (0, 1):
            raise ValueError(f"{mark_name} = {mark_value!r:.40}: give 0 (context only) or 1 (trained)")
        marks_by_name[mark_name] = bool(mark_value)
    if len(set(marks_by_name.values())) > 1:
        raise ValueError(
            f"{' and '.join(marks_by_name)} disagree about whether the message is trained: give one of them"
        )
    return next(iter(marks_by_name.values()), True)


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
    tool_schemas: list[Mapping[str, Json]] = []
    for tool_index, listed_tool in enumerate(cast("list[Any]", tools)):
        if isinstance(listed_tool, str):
            listed_tool = _decoded(listed_tool, f"tools[{tool_index}]")
        if not isinstance(listed_tool, Mapping):
            raise TypeError(f"tools[{tool_index}] is a {type(listed_tool).__name__}, not an object")
        tool_schema = cast("dict[str, Any]", _without_padding(dict(cast("Mapping[str, Any]", listed_tool))))
        if "function" in tool_schema and tool_schema.get("type", "function") != "function":
            raise TypeError(f"tools[{tool_index}].type = {tool_schema['type']!r:.40}: give tools of type function")
        function: Any = tool_schema.get("function", tool_schema)
        if isinstance(function, dict) and isinstance(
            parameters := cast("dict[str, Any]", function).get("parameters"), str
        ):
            function["parameters"] = _decoded(parameters, f"tools[{tool_index}].parameters")
        for foreign_key in ("input_schema", "inputSchema") if isinstance(function, dict) else ():
            if foreign_key in function:  # of Anthropic's API and of MCP; a template would show no parameters
                problem = f"tools[{tool_index}] has {foreign_key!r} in the place of 'parameters'"
                raise TypeError(f"{problem}: give OpenAI's function schema")
        tool_name: Any = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if not isinstance(tool_name, str) or not tool_name:
            raise TypeError(f"tools[{tool_index}] has no name: give {{'type': 'function', 'function': {{'name': …}}}}")
        tool_schemas.append(tool_schema)
    return tool_schemas


def without_padded_arguments(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages with calls that lack the nulls of Arrow's padding: arguments that the called tool does not have, or
    whose schema takes no null. Calls of a tool without schema stay as they are."""
    parameters: dict[Any, Any] = {}
    for tool in tools:
        function = cast("Mapping[str, Any]", tool.get("function", tool))
        parameters[function.get("name")] = function.get("parameters")
    unpadded_messages: list[Message] = []
    for message in messages:
        plain_calls: list[dict[str, Any]] = []
        for tool_call in message.get("tool_calls", ()):
            function = cast("dict[str, Any]", tool_call["function"])
            argument_schema = parameters.get(function.get("name"))
            if isinstance(argument_schema, Mapping):
                function = {
                    **function,
                    "arguments": _unpadded(function["arguments"], cast("Mapping[str, Any]", argument_schema)),
                }
            plain_calls.append({**tool_call, "function": function})
        unpadded_messages.append(cast("Message", {**message, "tool_calls": plain_calls}) if plain_calls else message)
    return tuple(unpadded_messages)


def _merge_thoughts(plain: dict[str, Any]) -> None:
    """Thoughts under one key. A list of details (OpenRouter's `reasoning_details`) repeats them and goes; alone, its
    texts and summaries are the thoughts."""
    thoughts = {thought_key: plain.pop(thought_key) for thought_key in REASONING_KEYS if thought_key in plain}
    details: Any = plain.pop("reasoning_details", None)
    for thought_key, thought_text in thoughts.items():
        if not isinstance(thought_text, str):
            raise TypeError(f"{thought_key} is a {type(thought_text).__name__}, not text")
    thought_texts = {thought_text for thought_text in thoughts.values() if thought_text}
    # Servers that send the thoughts twice, under an old and a new name, send them equal. Two that differ are two
    # authors, and joining them would teach a text that nobody wrote.
    if len(thought_texts) > 1:
        raise TypeError(f"{' and '.join(thoughts)} differ: give one of them")
    if not thought_texts and details:
        details = _decoded(details, "reasoning_details") if isinstance(details, str) else details
        thought_texts = {_thoughts_in(details, "reasoning_details")} - {""}
    if thought_texts or thoughts:
        plain[REASONING_KEYS[0]] = next(iter(thought_texts), "")


def _thoughts_in(value: Any, field: str) -> str:
    """The text of thoughts: a text, or a list of texts and of parts with a `text` or a `summary`. Encrypted parts are
    named. Raises TypeError for another shape: its repr would be trained as thoughts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"{field} is a {type(value).__name__}: give a text, or a list of parts with text")
    part_texts: list[str] = []
    for part_index, thought_part in enumerate(cast("list[Any]", value)):
        part_fields = (
            cast("Mapping[str, Any]", thought_part) if isinstance(thought_part, Mapping) else {"text": thought_part}
        )
        part_text = next(
            (part_fields[text_key] for text_key in ("text", "summary") if isinstance(part_fields.get(text_key), str)),
            None,
        )
        if part_text is not None:
            part_texts.append(part_text)
        elif isinstance(part_fields.get("data"), str):
            notices.note("messages", "encrypted thoughts are left out: nobody can read them", by_policy=True)
        else:
            raise TypeError(f"{field}[{part_index}] has no text: give a text, or a list of parts with text")
    return "\n".join(part_text for part_text in part_texts if part_text)


def _read_content(plain: dict[str, Any]) -> None:
    """A list of parts becomes a text with its images beside; parts of thoughts join the thoughts."""
    content: Any = plain.get("content")
    if not isinstance(content, list):
        plain["content"] = text_of(content)
        return
    content_parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for content_part in cast("list[Any]", content):
        if isinstance(content_part, str):
            content_part = {"type": "text", "text": content_part}
        if not isinstance(content_part, Mapping):
            raise TypeError(f"a part of a content is a {type(content_part).__name__}, not text")
        part_fields = {
            field_name: part_value
            for field_name, part_value in cast("Mapping[str, Any]", content_part).items()
            if part_value is not None
        }
        part_kind = part_fields.get("type", "text" if "text" in part_fields else None)
        for part_key in sorted(part_fields.keys() - {"type", str(part_kind), *_PART_KEYS}):
            notices.note("messages", f"the key {part_key!r} of a part of a content is not used", by_policy=True)
        if part_kind in _THOUGHT_PARTS:
            part_value = next(
                (
                    part_fields[part_key]
                    for part_key in (part_kind, "text", "content", "summary")
                    if part_fields.get(part_key)
                ),
                "",
            )
            thoughts.append(_thoughts_in(part_value, f"a part of type {part_kind}"))
        elif part_kind == "refusal" and isinstance(part_fields.get("refusal"), str):
            content_parts.append({"type": "text", "text": part_fields["refusal"]})
        elif part_kind in _TEXT_PARTS and isinstance(part_fields.get("text"), str):
            content_parts.append({"type": "text", "text": part_fields["text"]})
        elif part_kind == "image_url":
            content_parts.append({"type": "image_url", "image_url": part_fields.get("image_url")})
        else:
            raise TypeError(f"a part of a content has type {part_kind!r}: give parts of type text or image_url")
    text_parts = [content_part for content_part in content_parts if content_part["type"] == "text"]
    if len(text_parts) == len(content_parts):  # without images there is no place to keep, and the parts are lines
        plain["content"] = "\n".join(content_part["text"] for content_part in text_parts)
    else:
        try:
            plain |= with_images({"content": content_parts})
        except ValueError as image_error:
            raise TypeError(str(image_error)) from None
    if thoughts:
        if plain.get(REASONING_KEYS[0]):
            raise TypeError("a message has thoughts in its content and under a key: give one of them")
        plain[REASONING_KEYS[0]] = "\n".join(thoughts)


def _plain_call(call: Any) -> dict[str, Json]:
    """A call in OpenAI's envelope; some clients write the function alone."""
    if not isinstance(call, Mapping):
        raise TypeError(f"a tool call is a {type(call).__name__}, not an object")
    call_fields = {
        field_name: field_value
        for field_name, field_value in cast("Mapping[str, Any]", call).items()
        if field_value is not None
    }
    if call_fields.get("type", "function") != "function":
        raise TypeError(f"a tool call has type {call_fields['type']!r}: give calls of type function")
    function: Any = call_fields.pop("function", None)
    if function is None:
        function = {
            field_name: call_fields.pop(field_name) for field_name in list(call_fields) if field_name not in CALL_KEYS
        }
    if not isinstance(function, Mapping):
        raise TypeError(f"the function of a tool call is a {type(function).__name__}, not an object")
    function_fields = dict(cast("Mapping[str, Any]", function))
    if not isinstance(function_fields.get("name"), str):
        raise TypeError(f"a tool call has name = {function_fields.get('name')!r:.40}: give the name of a tool")
    if "arguments" not in function_fields and (
        foreign_names := sorted({"parameters", "input", "args"} & function_fields.keys())
    ):
        raise TypeError(f"a tool call has {foreign_names[0]!r} in the place of 'arguments': write name and arguments")
    function_fields["arguments"] = arguments_of(function_fields.get("arguments"))
    return {"type": "function", **call_fields, "function": function_fields}


def _decoded(text: str, field: str) -> Any:
    """Decode a JSON text. Raises TypeError that names the field."""
    try:
        return decode_whole(text)
    except StructuralParseError as json_error:
        raise TypeError(f"{field} is a text that is no JSON ({json_error}): give a list") from None


def _takes_null(schema: Any) -> bool:
    """Whether a JSON schema takes null; also one that does not say, such as `{}` or one with `$ref`."""
    if not isinstance(schema, Mapping):
        return True
    schema_fields = cast("Mapping[str, Any]", schema)
    choice_schemas: Any = schema_fields.get("anyOf") or schema_fields.get("oneOf")
    if isinstance(choice_schemas, list):
        return any(_takes_null(choice) for choice in cast("list[Any]", choice_schemas))
    if isinstance(enum_values := schema_fields.get("enum"), list):
        return None in enum_values
    declared_types: Any = schema_fields.get("type")
    return (
        declared_types is None
        or schema_fields.get("nullable") is True
        or declared_types == "null"
        or (isinstance(declared_types, list) and "null" in declared_types)
    )


def _without_padding(value: Any) -> Any:
    """A schema without the keys that are null. A null in a list (`enum`) stays, and so do `default` and `const` where
    null is one of the values that the schema takes."""
    if isinstance(value, list):
        return [_without_padding(inner_value) for inner_value in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    schema_fields = cast("dict[str, Any]", value)
    says_types = any(schema_fields.get(field_name) for field_name in ("type", "anyOf", "oneOf", "enum"))
    # A null is padding or a value, and only the schema itself can tell: `default: null` of an optional parameter has to
    # stay, the `default` that Arrow invented for a string has to go.
    takes_null = says_types and _takes_null(
        {field_name: inner_value for field_name, inner_value in schema_fields.items() if inner_value is not None}
    )
    return {
        field_name: _without_padding(inner_value)
        for field_name, inner_value in schema_fields.items()
        if inner_value is not None or (field_name in ("default", "const") and takes_null)
    }


def _unpadded(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value without the nulls that `schema` has no use for, in objects and in lists of objects."""
    choices: list[Any] = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    choice_schemas = [cast("Mapping[str, Any]", choice) for choice in choices if isinstance(choice, Mapping)]
    if isinstance(value, list):
        item_schema = next(
            (
                choice_schema["items"]
                for choice_schema in choice_schemas
                if isinstance(choice_schema.get("items"), Mapping)
            ),
            None,
        )
        return cast(
            "Any",
            value
            if item_schema is None
            else [_unpadded(inner_value, item_schema) for inner_value in cast("list[Any]", value)],
        )
    properties: dict[str, Any] = {}
    for choice_schema in choice_schemas:
        if isinstance(choice_schema.get("properties"), Mapping):
            properties |= cast("Mapping[str, Any]", choice_schema["properties"])
    if not isinstance(value, dict) or not properties:
        return cast("Any", value)
    unpadded_members: dict[str, Any] = {}
    for member_name, inner_value in cast("dict[str, Any]", value).items():
        member_schema = properties.get(member_name)
        # Dropped only where a null could not have been meant. Left in, the model would learn to pass `line=null` to
        # tools that have no such parameter.
        if inner_value is None and (member_name not in properties or not _takes_null(member_schema)):
            continue
        unpadded_members[member_name] = (
            _unpadded(inner_value, cast("Mapping[str, Any]", member_schema))
            if isinstance(member_schema, Mapping)
            else inner_value
        )
    return unpadded_members
