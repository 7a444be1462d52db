"""JSON schemas of tools: a validator that takes bounded time, the JSON types that a schema allows, a schema without
references, and the reading of values that a dialect writes without their type.

Schemas come from authors, servers and agent programs, so any JSON may stand anywhere in them. Nothing here raises for
an odd one; `agentrl.env.tools.tools` refuses an invalid schema by name. Knows neither dialects nor tools.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, cast

import jsonschema
import jsonschema.validators

from agentrl.env.tools.calls import decode_whole, dump
from agentrl.errors import StructuralParseError
from agentrl.records import Json

_MANY: Final = 1_000  # members or items where a check compares each with each
_MOST_INLINED: Final = 2_000  # objects and lists of a schema that is written without references

ANY: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""All JSON types. `number` stands for numbers that are no integer; a schema of numbers allows both."""

_TEXT: Final[frozenset[str]] = frozenset({"string"})
_PYTHON: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}


def function_schema(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """The function part of a tool schema, whether or not it comes in OpenAI's envelope."""
    return schema.get("function", schema)


# --- the validator


def _unique_items(validator: Any, keyword_value: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """`uniqueItems` in linear time: equal values have one text, whatever the order of their members. jsonschema's own
    compares each with each if they cannot be sorted."""
    if keyword_value and isinstance(value, list):
        list_items = cast("list[Any]", value)
        if len({json.dumps(_comparable(item), sort_keys=True) for item in list_items}) < len(list_items):
            yield jsonschema.ValidationError(f"its items must differ: {value!r}")


def _comparable(value: Any) -> Any:
    """JSON in which equal numbers have one text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {
            member_key: _comparable(inner_value) for member_key, inner_value in cast("dict[str, Any]", value).items()
        }
    return [_comparable(inner_value) for inner_value in cast("list[Any]", value)] if isinstance(value, list) else value


def _multiple_of(validator: Any, unit: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """`multipleOf`, also of an integer that no float can be: jsonschema's own raises OverflowError."""
    try:
        yield from jsonschema.Draft202012Validator.VALIDATORS["multipleOf"](validator, unit, value, schema)
    except OverflowError:
        if Fraction(value) % Fraction(unit):
            yield jsonschema.ValidationError(f"not a multiple of {unit}: {value!r}")


def _bounded(keyword: str) -> Callable[..., Iterator[jsonschema.ValidationError]]:
    """One of jsonschema's checks that take quadratic time, for as many members or items as it is quick with."""
    original = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def check(validator: Any, keyword_value: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, dict | list) and (inner_count := len(cast("list[Any]", value))) > _MANY:
            yield jsonschema.ValidationError(f"{inner_count} are too many: give at most {_MANY}")
        else:
            yield from original(validator, keyword_value, value, schema)

    return check


def _unless_null(keyword: str) -> Callable[..., Iterator[jsonschema.ValidationError]]:
    """One of jsonschema's checks, which a null passes where OpenAPI's `nullable: true` stands beside it. MCP servers
    and clients of Gemini write that; JSON Schema itself does not know the word and would refuse the null."""
    original = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def check(validator: Any, keyword_value: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        # Left as JSON Schema has it, a model that answers `null` where the server's own schema allows it would read
        # that its argument is wrong, and learn never to send what the server wants.
        if value is not None or schema.get("nullable") is not True:
            yield from original(validator, keyword_value, value, schema)

    return check


_extended = cast("Callable[..., Any]", jsonschema.validators.extend)  # pyright: ignore[reportUnknownMemberType]
VALIDATOR: Final = _extended(
    jsonschema.Draft202012Validator,
    {"uniqueItems": _unique_items, "multipleOf": _multiple_of}
    | {keyword: _bounded(keyword) for keyword in ("unevaluatedItems", "unevaluatedProperties")}
    | {keyword: _unless_null(keyword) for keyword in ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")},
)
"""A validator of Draft 2020-12 in which every check takes time that is about linear in the value."""


# --- what a schema says


def target_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The part of `root` that the `$ref` of a schema points to; None if it has none, or points elsewhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    schema_part: Any = root
    for path_part in reference.removeprefix("#").removeprefix("/").split("/") if reference not in ("#", "#/") else ():
        member_name = path_part.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema_part, Mapping) or member_name not in schema_part:
            return None
        schema_part = cast("Mapping[str, Any]", schema_part)[member_name]
    return schema_part


def type_of(value: Any) -> str:
    """The JSON type of a value, as `ANY` names them."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    type_names: dict[Any, str] = {int: "integer", str: "string", type(None): "null", dict: "object"}
    return type_names.get(type(value), "array")


def types_of(schema: Any, root: Mapping[str, Any], followed: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The JSON types that values of a schema may have; all where it says nothing. `root` holds what references name,
    `followed` the types of references that were followed."""
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else ANY
    schema_fields, followed = cast("Mapping[str, Any]", schema), {} if followed is None else followed
    allowed_types = ANY
    declared = schema_fields.get("type")
    if isinstance(declared, str | list):
        known_types = {
            type_name
            for type_name in cast("list[Any]", declared if isinstance(declared, list) else [declared])
            if isinstance(type_name, str) and type_name in ANY
        }
        allowed_types &= (known_types | {"integer"} if "number" in known_types else known_types) or ANY
    if isinstance(enum_values := schema_fields.get("enum"), list):
        allowed_types &= {type_of(enum_value) for enum_value in cast("list[Any]", enum_values)}
    if "const" in schema_fields:
        allowed_types &= {type_of(schema_fields["const"])}
    reference = str(schema_fields.get("$ref"))
    if (target_schema := target_of(schema_fields, root)) is not None:
        if reference not in followed:
            # A tree's node refers to the node. Without an answer in the meantime this walks for ever, and "anything" is
            # the only one that excludes no value.
            followed[reference] = ANY  # of a schema within itself, while it is read
            followed[reference] = types_of(target_schema, root, followed)
        allowed_types &= followed[reference]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema_fields.get(keyword), list) and branches:
            of_branches = (types_of(branch_schema, root, followed) for branch_schema in cast("list[Any]", branches))
            allowed_types &= frozenset[str]().union(*of_branches)
    if isinstance(part_schemas := schema_fields.get("allOf"), list):
        for part_schema in cast("list[Any]", part_schemas):
            allowed_types &= types_of(part_schema, root, followed)
    return allowed_types | {"null"} if schema_fields.get("nullable") is True else allowed_types


def without_references(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose local references are replaced by what they name, so that a chat template which writes the
    properties alone shows a model its choices. Within itself a schema keeps the reference, and a schema that would
    become very large stays as it is."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    inlining = _Inlining(schema)
    inlined_schema = inlining.of(schema, ())
    # References multiply: twenty definitions, each of which names the next one twice, are a million objects once they
    # are inlined, and such a schema may come from a server that nobody here wrote.
    if inlining.left < 0:
        return schema
    definitions = () if inlining.keeps_references else ("$defs", "definitions")
    return {
        schema_key: schema_value for schema_key, schema_value in inlined_schema.items() if schema_key not in definitions
    }


def shown_schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The function part of a tool schema as a model reads it: its parameters without references."""
    function = dict(function_schema(schema))
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = without_references(function["parameters"])
    return function


class _Inlining:
    """The work of `without_references` on one schema. `left` objects and lists may still be written."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self.left, self.keeps_references = root, _MOST_INLINED, False

    def of(self, value: Any, followed: tuple[str, ...]) -> Any:
        if not isinstance(value, Mapping | list) or self.left < 0:
            return cast("Any", value)
        self.left -= 1
        if isinstance(value, list):
            return [self.of(list_item, followed) for list_item in cast("list[Any]", value)]
        schema_fields, resolved = cast("Mapping[str, Any]", value), dict[str, Any]()
        if "$ref" in schema_fields:
            reference, target_schema = str(schema_fields["$ref"]), target_of(schema_fields, self._root)
            if isinstance(target_schema, Mapping) and reference not in followed:
                resolved = self.of(target_schema, (*followed, reference))
                schema_fields = {
                    schema_key: inner_schema
                    for schema_key, inner_schema in schema_fields.items()
                    if schema_key != "$ref"
                }
            else:
                self.keeps_references = True
        return resolved | {
            schema_key: inner_schema if schema_key in ("$defs", "definitions") else self.of(inner_schema, followed)
            for schema_key, inner_schema in schema_fields.items()
        }


def schemas_of_item(schema: Mapping[str, Any], at: int) -> Iterator[Any]:
    """Yield the schema of the item at a place of a list, if there is one."""
    prefix_schemas = schema.get("prefixItems")
    if isinstance(prefix_schemas, list) and at < len(cast("list[Any]", prefix_schemas)):
        yield prefix_schemas[at]
    elif "items" in schema:
        yield schema["items"]


def schemas_of_member(schema: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yield the schema of a member of an object, if there is one. `patternProperties` are left to the validator."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield cast("Mapping[str, Any]", properties)[key]
    elif "additionalProperties" in schema and "patternProperties" not in schema:
        yield schema["additionalProperties"]


def has_float(value: Any) -> bool:
    """Whether a float stands anywhere in a JSON value."""
    if isinstance(value, dict):
        return any(map(has_float, cast("dict[str, Any]", value).values()))
    return any(map(has_float, cast("list[Any]", value))) if isinstance(value, list) else isinstance(value, float)


# --- values without a written type


class ParameterReader:
    """Reads and spells the parameters of one tool in a dialect that writes texts as they are and all else as JSON.

    Such a text may stand for two values: `5` for a number and for a text. The rule, which `read` and `spell` share: a
    text is the JSON value that it writes if the schema takes this value and it is no text; a JSON string of a text that
    would be read otherwise (`"5"`, `"null"`) stands for that text; anything else is the text as it is. So a parameter
    `str | None` takes 2024, true and {"a": 1} as the texts that they are, and `int | str` takes 5 as the number."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        parameters = function.get("parameters")
        self._root = cast("Mapping[str, Any]", parameters if isinstance(parameters, Mapping) else {})
        properties = self._root.get("properties")
        self._properties = cast("Mapping[str, Any]", properties if isinstance(properties, Mapping) else {})
        self._validator: Any = VALIDATOR(self._root)
        self._types: dict[str, frozenset[str]] = {}

    def read(self, key: str, text: str) -> Json:
        """The value that a text stands for."""
        value_types = self._types_of(key)
        if value_types == _TEXT:
            return text
        stripped = text.strip()
        if "string" not in value_types and stripped in _PYTHON and type_of(_PYTHON[stripped]) in value_types:
            return _PYTHON[stripped]  # some chat templates write Python's words
        try:
            json_value = decode_whole(stripped)
        except StructuralParseError:
            return text
        if isinstance(json_value, str):
            return json_value if "string" in value_types and self.read(key, json_value) != json_value else text
        if "string" not in value_types:
            return json_value
        fits_schema = type_of(json_value) in value_types and (
            self._takes(key, json_value) or not self._takes(key, text)
        )
        return json_value if fits_schema else text

    def spell(self, key: str, value: Json) -> Json:
        """A value as the dialect has to write it, so that `read` gives it back: a text that would be read as something
        else becomes its JSON string."""
        if not isinstance(value, str) or self.read(key, value) == value:
            return value
        quoted_text = dump(value)
        return quoted_text if self.read(key, quoted_text) == value else value

    def _schema_of(self, key: str) -> Any:
        return self._properties.get(key, self._root.get("additionalProperties", True))

    def _types_of(self, key: str) -> frozenset[str]:
        if key not in self._properties:
            return types_of(self._schema_of(key), self._root) or ANY  # an unknown key, whatever it may be worth
        if key not in self._types:
            self._types[key] = types_of(self._schema_of(key), self._root)
        return self._types[key]

    def _takes(self, key: str, value: Any) -> bool:
        """Whether the schema takes a value; its types alone decide where it has a reference that leads nowhere."""
        try:
            return bool(self._validator.evolve(schema=self._schema_of(key)).is_valid(value))
        except Exception:  # a reference or pattern that jsonschema cannot follow: several libraries raise their own
            return type_of(value) in self._types_of(key)


@functools.lru_cache(maxsize=1_024)
def _reader(function: str) -> ParameterReader:
    return ParameterReader(json.loads(function))


def leads_nowhere(schema: Any, root: Mapping[str, Any]) -> str | None:
    """The first reference of a schema that names nothing in it, None if there is none. Anchors are not followed."""
    if isinstance(schema, list):
        return next(filter(None, (leads_nowhere(list_item, root) for list_item in cast("list[Any]", schema))), None)
    if not isinstance(schema, Mapping):
        return None
    schema_fields = cast("Mapping[str, Any]", schema)
    reference = schema_fields.get("$ref")
    is_anchor = isinstance(reference, str) and reference.startswith("#") and not reference.startswith("#/")
    if isinstance(reference, str) and not is_anchor and target_of(schema_fields, root) is None and "$id" not in root:
        return reference
    return next(filter(None, (leads_nowhere(inner_schema, root) for inner_schema in schema_fields.values())), None)


def reader_of(name: str, schemas: Sequence[Any]) -> ParameterReader:
    """The reader of a tool among `schemas`; for an unknown tool one that takes every value."""
    for tool_schema in schemas:
        function: Any = (
            function_schema(cast("Mapping[str, Any]", tool_schema)) if isinstance(tool_schema, Mapping) else None
        )
        if isinstance(function, Mapping) and cast("Mapping[str, Any]", function).get("name") == name:
            return _reader(json.dumps(function, sort_keys=True, default=str))
    return _reader("{}")
