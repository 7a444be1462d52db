"""Types of parameters: what `env.call` writes is read back equal in every dialect, whatever the schema combines.

Values are drawn together with schemas that they fit, and compared as JSON text, which tells 1 from 1.0, true and "1".
"""

from __future__ import annotations

import enum
import json
from typing import Any, Literal

import pytest
from each_case import each_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.json_schema import types_of, without_references
from agentrl.env.tools.parsers import FORMATS, get_format
from agentrl.env.tools.tools import ArgumentCheck, FunctionTool, SchemaTool
from agentrl.errors import ToolArgumentError, UsageError

TEXTS = st.sampled_from(
    [
        *("", "5", " 5 ", "2024", "3.10", "true", "True", "null", "None", "1e5", "-0", "08", "word", "naïve", "\\"),
        *('"5"', '"null"', '"a"', '"\\"5\\""', "[1, 2]", '["a"]', '{"a": 1}'),
    ]
)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXTS,
    "integer": st.integers(-3, 3) | st.just(10**20),
    "number": st.sampled_from([0.5, -2.5, 1e22, 3.0, 7]),
    "boolean": st.booleans(),
    "null": st.none(),
}
CHOICES = ["5", 5, True, None, "auto", "true", 2.5]


@st.composite
def schema_and_value(draw: Any, depth: int = 2) -> tuple[dict[str, Any], Any]:
    kinds = ["type", "enum", "const", "types", "any"] + ["anyOf", "oneOf", "allOf", "array", "object", "nullable"] * (
        depth > 0
    )
    kind = draw(st.sampled_from(kinds))
    if kind == "type":
        name = draw(st.sampled_from(list(SCALARS)))
        return {"type": name}, draw(SCALARS[name])
    if kind == "types":
        names = draw(st.lists(st.sampled_from(list(SCALARS)), min_size=2, max_size=3, unique=True))
        return {"type": names}, draw(SCALARS[draw(st.sampled_from(names))])
    if kind == "any":
        return {}, draw(st.one_of(*SCALARS.values(), st.just([1, "a"]), st.just({"a": None})))
    if kind == "enum":
        choices = draw(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=4))
        return {"enum": choices}, draw(st.sampled_from(choices))
    if kind == "const":
        value = draw(st.sampled_from(CHOICES))
        return {"const": value}, value
    inner, value = draw(schema_and_value(depth=depth - 1))
    other, _ = draw(schema_and_value(depth=depth - 1))
    if kind == "array":
        return {"type": "array", "items": inner}, [value]
    if kind == "object":
        return {"type": "object", "properties": {"k": inner}, "required": ["k"]}, {"k": value}
    if kind == "nullable":
        return {**inner, "nullable": True}, draw(st.sampled_from([value, None]))
    if kind == "allOf":
        return {"allOf": [inner, {"description": "narrower"}]}, value
    return {kind: draw(st.permutations([inner, other]))}, value


@st.composite
def parameter(draw: Any) -> tuple[dict[str, Any], Any]:
    """A schema of parameters with one of them, at times behind a reference, and its value."""
    schema, value = draw(schema_and_value())
    if draw(st.booleans()):
        root = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Some~1Name"}}, "$defs": {"Some/Name": schema}}
        return root, value
    return {"type": "object", "properties": {"x": schema}}, value


@pytest.mark.medium
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
@given(made=parameter())
def test_what_is_called_is_what_the_tool_reads(made: tuple[dict[str, Any], Any]) -> None:
    parameters, value = made
    arguments = {"x": value}
    schema = {"name": "f", "parameters": parameters}
    try:
        ArgumentCheck(schema)(arguments)
    except ToolArgumentError:
        return  # two branches of a oneOf took it
    for name, form in FORMATS.items():
        text = form.write(form.spelled(ToolCall("f", arguments), [schema]))
        (call,) = form.parse(text, [schema]).calls
        assert isinstance(call, ToolCall) and json.dumps(dict(call.arguments)) == json.dumps(arguments), name


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


RAW = [
    name
    for name in FORMATS
    if get_format(name).write(ToolCall("f", {"x": "5"})) == get_format(name).write(ToolCall("f", {"x": 5}))
]


def test_which_dialects_write_values_without_their_types() -> None:
    assert RAW == ["qwen3_coder", "seed_oss", "glm", "minimax_m2", "muse", "minicpm5"]


@each_case("name", RAW)
@each_case(
    "hint, text, value",
    [
        (str | None, "2024", "2024"),
        (str | None, '{"a": 1}', '{"a": 1}'),
        (str | None, "None", "None"),
        (str | None, "null", None),
        (str | None, '"null"', "null"),
        (str | None, '"quoted"', '"quoted"'),
        (int | str, "5", 5),
        (int | str, '"5"', "5"),
        (int | str, "5.5", "5.5"),
        (int | None, "None", None),
        (bool | None, "True", True),
        (list[str] | str, '["a"]', ["a"]),
        (list[str] | str, "[1, 2]", "[1, 2]"),
        (Literal["1", "2"] | None, "1", "1"),
        (Color | None, "red", Color.RED),
        (dict[str, Any], '{"a": 10.0}', {"a": 10.0}),
        (float, "3", 3.0),
    ],
)
async def test_a_text_that_a_model_writes_has_the_type_that_its_schema_takes(
    name: str, hint: Any, text: str, value: Any
) -> None:
    taken: list[Any] = []

    def f(x: Any) -> None:
        """Take."""
        taken.append(x)

    f.__annotations__["x"] = hint
    tool = FunctionTool(f)
    form = get_format(name)
    written = form.write(ToolCall("f", {"x": text}))
    (call,) = form.parse(written, [tool.schema]).calls
    assert isinstance(call, ToolCall)
    await tool.call(call.arguments)
    assert taken == [value] and type(taken[0]) is type(value)


async def test_a_float_stays_one_where_the_schema_does_not_ask_for_an_integer() -> None:
    taken: list[Any] = []
    properties: dict[str, Any] = {"n": {"type": "integer"}, "m": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
    properties |= {"x": {"type": "number"}, "free": {}, "of": {"$ref": "#/$defs/list"}}
    definitions = {"list": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "number"}}}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    given: dict[str, Any] = {"n": 2.0, "m": 1e22, "x": 10.0, "free": {"big": 1e22, "z": -0.0}, "of": [1.0, 1.0]}
    await SchemaTool("f", "F.", schema, taken.append).call(given)
    expected = '{"n": 2, "m": 10000000000000000000000, "x": 10.0, "free": {"big": 1e+22, "z": -0.0}, "of": [1, 1.0]}'
    assert json.dumps(taken[0]) == expected


async def test_nullable_takes_null_and_a_reference_that_names_nothing_is_refused() -> None:
    check = ArgumentCheck({"parameters": {"properties": {"x": {"type": "string", "enum": ["a"], "nullable": True}}}})
    assert check({"x": None}) == {"x": None}
    with pytest.raises(ToolArgumentError):
        check({"x": "b"})
    with pytest.raises(UsageError, match="'#/nowhere'"):
        ArgumentCheck({"name": "f", "parameters": {"properties": {"x": {"$ref": "#/nowhere"}}}})


def test_references_become_what_they_name_and_a_schema_within_itself_stays() -> None:
    schema = FunctionTool(paint).schema["parameters"]
    assert "$ref" not in json.dumps(schema) and "$defs" not in schema
    assert schema["properties"]["color"]["enum"] == ["red", "green"]
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    root = {"properties": {"head": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    shown = without_references(root)
    assert shown["properties"]["head"]["type"] == "object" and shown["$defs"] == {"Node": node}
    assert types_of({"$ref": "#/$defs/Node"}, root) == {"object"}
    assert types_of({"enum": [3.0, 2.5]}, {}) == {"integer", "number"}
    many = {
        "$defs": {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(60)},
        "$ref": "#/$defs/d0",
    }
    assert without_references(many) == many  # 2**60 parts
    assert len(types_of(many, many)) == 7


def paint(color: Color, other: Color | None = None) -> None:
    """Paint."""


class Painter(agentrl.ToolEnv):
    tool_format = "json"

    def prompt(self, task: Any) -> str:
        return "paint"

    def grade(self) -> float:
        return 0.0


def test_a_model_that_is_told_of_tools_as_text_sees_the_choices() -> None:
    env = Painter(
        tools=[
            SchemaTool("f", "F.", {"properties": {"x": {"$ref": "#/$defs/C"}}, "$defs": {"C": {"enum": ["zred"]}}}, len)
        ]
    )
    ((system, _), _) = env.reset(seed=0)
    assert '"x": {"enum": ["zred"]}' in system["content"]
