"""Random actions for an environment that is checked: well-formed calls after its schemas, and texts that are none.

Seeded through the generator that it is given. It never looks at an environment's inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from agentrl.env.spaces import Text
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import ToolFormat
from agentrl.env.tools.tools import function_schema
from agentrl.records import Json

_MAX_DEPTH: Final = 6
_WORDS: Final = ("", "a", "one two", "x" * 80, "0", "../up", "naïve ✓", "line\nbreak", '"quoted"', "</tool_call>")


def sample_action(schemas: Sequence[Mapping[str, Json]], form: ToolFormat, rng: np.random.Generator) -> str:
    """Mostly one or two well-formed calls with some text before them; at times only text."""
    if not schemas or rng.random() < 0.15:
        return Text(seed=rng).sample()
    count = 1 + int(rng.random() < 0.2)
    calls = [sample_call(schemas[int(rng.integers(len(schemas)))], rng) for _ in range(count)]
    before = "" if form.name in ("llama", "pythonic") else _pick(_WORDS[:4], rng) + "\n"  # a llama speaks or calls
    return before + form.write(*calls)


def sample_call(schema: Mapping[str, Json], rng: np.random.Generator) -> ToolCall:
    """A call whose arguments fit the schema, as far as the common keywords of JSON schema go."""
    function = function_schema(schema)
    parameters = cast("Mapping[str, Json]", function.get("parameters") or {})
    arguments = sample_value({"type": "object", **parameters}, rng, root=parameters)
    return ToolCall(str(function["name"]), cast("dict[str, Json]", arguments))


def sample_value(
    schema: Mapping[str, Json], rng: np.random.Generator, *, root: Mapping[str, Json], depth: int = _MAX_DEPTH
) -> Json:
    """A value that fits `schema`; references are looked up in `root`."""
    if "$ref" in schema:
        schema = _resolve(str(schema["$ref"]), root)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return _pick(schema[key], rng)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_value(_pick(schema[key], rng), rng, root=root, depth=depth - 1)
    kind: Any = schema.get("type", "string")
    kind = _pick(kind, rng) if isinstance(kind, list) else kind
    if kind == "object":
        return _sample_object(schema, rng, root, depth)
    if kind == "array":
        least = int(schema.get("minItems", 0))
        count = (
            least if depth <= 0 else int(rng.integers(least, max(least, min(int(schema.get("maxItems", 3)), 3)) + 1))
        )
        items = cast("Mapping[str, Json]", schema.get("items") or {})
        return [sample_value(items, rng, root=root, depth=depth - 1) for _ in range(count)]
    return _sample_scalar(str(kind), schema, rng)


def _sample_object(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> Json:
    properties = cast("Mapping[str, Mapping[str, Json]]", schema.get("properties") or {})
    required = set(cast("list[str]", schema.get("required") or []))
    chosen = [name for name in properties if name in required or (depth > 0 and rng.random() < 0.5)]
    return {name: sample_value(properties[name], rng, root=root, depth=depth - 1) for name in chosen}


def _sample_scalar(kind: str, schema: Mapping[str, Json], rng: np.random.Generator) -> Json:
    if kind == "integer":
        low, high = int(schema.get("minimum", -3)), schema.get("maximum")
        return int(rng.integers(low, max(low, int(high) if high is not None else low + 103) + 1))
    if kind == "number":
        low, high = float(schema.get("minimum", -1.0)), schema.get("maximum")
        return low + (float(high) - low if high is not None else 10.0) * float(rng.random())
    if kind == "boolean":
        return bool(rng.random() < 0.5)
    if kind == "null":
        return None
    text: str = _pick(_WORDS, rng)
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    text = text.ljust(least, "x")
    return text if most is None else text[: int(most)]


def _resolve(reference: str, root: Mapping[str, Json]) -> Mapping[str, Json]:
    at: Any = root
    for part in reference.removeprefix("#/").split("/"):
        at = at[part]
    return at


def _pick(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]
