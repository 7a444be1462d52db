"""`@tool`: schemas from hints and docstrings, argument checks, results as the model reads them."""

import itertools
import threading
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentrl.env.tools.tools import (
    ArgumentCheck,
    FunctionTool,
    SchemaTool,
    as_result,
    clean_text,
    cut,
    envelope,
    tool,
    tools_of,
)
from agentrl.errors import ToolArgumentError, ToolError, UsageError
from agentrl.protocols import ToolResult


class Point(TypedDict):
    x: int
    y: int


class Box:
    @tool
    def place(self, word: str, times: int = 2, *, colour: Literal["red", "blue"] | None = None) -> str:
        """Put a word into the box.

        It stays there.

        Args:
            word: what to put in,
                over two lines
            times (int): how often
            colour: of the ink

        Returns:
            nothing: of interest
        """
        return f"{word}*{times}:{colour}"

    @tool(name="look", parallel=True, timeout_s=3, errors=(KeyError,))
    async def look_inside(self, at: Point, model_config: list[int], schema: Annotated[float, Field(ge=0)] = 0.5):
        """Look.

        :param at: where to
        :param int schema: a name that pydantic keeps for itself
        """
        if at["x"] > 9:
            raise KeyError("x")
        if at["x"] < 0:
            raise ZeroDivisionError
        return {"at": at, "sum": sum(model_config), "schema": schema}

    def hidden(self) -> None:
        """No tool."""


class Child(Box):
    def place(self, word: str) -> str:
        """Overridden without @tool: not offered any more."""
        return word

    @tool
    def last(self) -> None:
        """Defined last."""


def test_the_schema_says_what_hints_and_docstring_say():
    place = tools_of(Box())[0]
    assert place.schema == {
        "name": "place",
        "description": "Put a word into the box.\n\nIt stays there.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["word"],
            "properties": {
                "word": {"type": "string", "description": "what to put in, over two lines"},
                "times": {"type": "integer", "default": 2, "description": "how often"},
                "colour": {
                    "anyOf": [{"enum": ["red", "blue"], "type": "string"}, {"type": "null"}],
                    "default": None,
                    "description": "of the ink",
                },
            },
        },
    }
    assert place.schema is not place.schema
    assert envelope([place.schema]) == [{"type": "function", "function": place.schema}]
    assert envelope(envelope([place.schema])) == envelope([place.schema])


def test_nested_types_and_reserved_names():
    look = tools_of(Box())[1]
    assert (look.name, look.parallel, look.timeout_s) == ("look", True, 3)
    properties = look.schema["parameters"]["properties"]
    assert set(properties) == {"at", "model_config", "schema"}
    assert properties["schema"] == {
        "type": "number",
        "minimum": 0,
        "default": 0.5,
        "description": "a name that pydantic keeps for itself",
    }
    assert "title" not in str(look.schema)


def test_tools_are_found_in_order_and_an_override_without_a_mark_is_none():
    assert [t.name for t in tools_of(Box())] == ["place", "look"]
    assert [t.name for t in tools_of(Child())] == ["look", "last"]


async def test_arguments_are_checked_converted_and_defaults_kept():
    place, look = tools_of(Box())
    assert (await place.call({"word": "a"})).content == "a*2:None"
    assert (await place.call({"word": "a", "times": 3, "colour": "red"})).content == "a*3:red"
    result = await look.call({"at": {"x": 1, "y": 2}, "model_config": [1, 2]})
    assert result.content == '{"at": {"x": 1, "y": 2}, "sum": 3, "schema": 0.5}'


@each_case(
    ("arguments", "said"),
    [
        ({}, "'word' is a required property"),
        ({"word": 3}, "argument 'word': 3 is not of type 'string'"),
        ({"word": "a", "times": "3"}, "argument 'times': '3' is not of type 'integer'"),
        ({"word": "a", "wrod": "b"}, "('wrod' was unexpected)"),
        ({"word": "a", "colour": "green"}, "argument 'colour': 'green' is not valid"),
        ({"word": "x" * 9000 + "\ud800", "times": []}, "argument 'times': [] is not of type"),
    ],
)
async def test_a_wrong_argument_is_named(arguments, said):
    with pytest.raises(ToolArgumentError) as caught:
        await tools_of(Box())[0].call(arguments)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


async def test_only_declared_errors_are_the_models():
    look = tools_of(Box())[1]
    with pytest.raises(ToolError, match="KeyError: 'x'"):
        await look.call({"at": {"x": 10, "y": 0}, "model_config": []})
    with pytest.raises(ZeroDivisionError):
        await look.call({"at": {"x": -1, "y": 0}, "model_config": []})


async def test_blocking_tools_run_in_a_thread():
    here = threading.current_thread()

    @tool
    def where() -> str:
        """Tell the thread."""
        return str(threading.current_thread() is here)

    assert (await FunctionTool(where).call({})).content == "False"
    assert (await FunctionTool(where, blocking=False).call({})).content == "True"


def make_bad_tools():
    def no_docstring(x: int) -> int:
        return x

    def no_hint(x) -> int:
        """Doc."""
        return x

    def positional(x: int, /) -> int:
        """Doc."""
        return x

    def many(*x: int) -> int:
        """Doc."""
        return 0

    def unwritable(x: threading.Lock) -> int:  # type: ignore[valid-type]
        """Doc."""
        return 0

    return [
        (no_docstring, "needs a docstring"),
        (no_hint, "parameter 'x' needs a type hint"),
        (positional, "cannot be named"),
        (many, "cannot be named"),
        (unwritable, "no JSON schema|cannot read"),
    ]


@each_case(("function", "hint"), make_bad_tools())
def test_a_function_without_a_schema_is_refused_by_name(function, hint):
    with pytest.raises(UsageError, match=f"{function.__name__}.*({hint})"):
        FunctionTool(function)


def test_a_foreign_schema_is_checked():
    with pytest.raises(UsageError, match="'odd' has an invalid JSON schema"):
        ArgumentCheck({"name": "odd", "parameters": {"type": "thing"}})
    check = ArgumentCheck({"type": "function", "function": {"name": "any"}})
    check({"whatever": 1})


class Model(BaseModel):
    a: int


@each_case(
    ("value", "content"),
    [
        (None, "ok"),
        ("text", "text"),
        ("\udcff!", "\\udcff!"),
        (b"caf\xc3\xa9 \xff\xfe", "café \\xff\\xfe"),
        ([1, "é"], '[1, "é"]'),
        (Model(a=1), '{"a":1}'),
        ({"path": ...}, '{"path": "Ellipsis"}'),
        (ToolResult(content="x", is_error=True), "x"),
    ],
)
def test_results_are_texts_that_utf8_can_carry(value, content):
    result = as_result(value)
    assert result.content == content
    result.content.encode()


@given(st.binary(max_size=200))
def test_no_byte_is_lost_to_the_reader(data):
    text = as_result(data).content
    text.encode()
    # undo it by an independent way: escapes of undecodable bytes back to bytes
    assert text == data.decode("utf-8", "surrogateescape").encode("utf-8", "surrogateescape").decode(
        "utf-8", "backslashreplace"
    )


def test_cut_keeps_head_and_tail_and_says_so():
    text, was_cut = cut("a" * 50 + "b" * 50, 20)
    assert was_cut and text == "a" * 10 + "\n[output cut: 20 of 100 bytes shown]\n" + "b" * 10
    assert cut("a" * 20, 20) == ("a" * 20, False)


@given(st.text(max_size=60), st.integers(1, 40))
def test_cut_never_breaks_a_character(text, limit):
    text = clean_text(text)
    shown, was_cut = cut(text, limit)
    assert was_cut == (len(text.encode()) > limit)
    if was_cut:
        head, note, tail = shown.partition("\n[output cut: ")
        assert text.startswith(head) and text.endswith(tail.partition("]\n")[2]) and note


def test_schemas_are_valid_json_schema():
    for offered in tools_of(Box()):
        jsonschema.Draft202012Validator.check_schema(offered.schema["parameters"])


def test_a_generator_is_no_tool():
    def lines():
        """Lines."""
        yield "one"

    async def later():
        """Lines, later."""
        yield "one"

    for function in (lines, later):
        with pytest.raises(UsageError, match=r"yields, and a model reads one answer: return it$"):
            FunctionTool(function)


async def test_an_integer_written_with_a_point_is_an_integer_for_the_tool():
    seen = []

    @tool
    def take(line: int, factor: float, rest: Any = None) -> str:
        """Take."""
        seen.append((line, factor, rest))
        return "ok"

    await FunctionTool(take).call({"line": 1.0, "factor": 2.0, "rest": [1.0, {"a": 2.5, "b": 3.0}]})
    assert seen == [(1, 2.0, [1, {"a": 2.5, "b": 3}])] and type(seen[0][0]) is int
    given = []
    schema = {"type": "object", "properties": {"line": {"type": "integer"}}}
    await SchemaTool("t", "T.", schema, lambda arguments: given.append(arguments["line"])).call({"line": 1.0})
    assert given == [1] and type(given[0]) is int


json_values = st.recursive(
    st.sampled_from([0, 1, 1.0, True, False, None, "1", "", 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
UNIQUE = ArgumentCheck({"parameters": {"properties": {"x": {"uniqueItems": True}}}})


def unique(items: list[Any]) -> bool:
    try:
        UNIQUE({"x": items})
    except ToolArgumentError as error:
        assert "argument 'x': its items must differ" in str(error)
        return False
    return True


def same(one: Any, other: Any) -> bool:
    """As JSON Schema says it."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@given(st.lists(json_values, max_size=4))
def test_items_are_unique_as_json_schema_says(items):
    assert unique(items) == (not any(same(one, other) for one, other in itertools.combinations(items, 2)))


def test_unique_items_are_found_in_linear_time():
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    assert unique([None, *map(Counted, range(300))]) and not unique([None, *map(Counted, range(300)), 299])
    assert compared <= 600


@each_case(("unit", "value", "fits"), [(0.5, 10**400, True), (0.75, 10**400, False), (2, 10**400, True)])
def test_an_integer_that_no_float_can_be_is_judged(unit, value, fits):
    check = ArgumentCheck({"parameters": {"properties": {"x": {"multipleOf": unit}}}})
    if fits:
        assert check({"x": value}) == {"x": value}
    else:
        with pytest.raises(ToolArgumentError, match=r"argument 'x': not a multiple of 0\.75: 1000"):
            check({"x": value})


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        (
            {"patternProperties": {"^k": {}}, "unevaluatedProperties": False},
            lambda many: {f"k{n}": n for n in range(many)},
        ),
        ({"contains": {"type": "integer"}, "unevaluatedItems": False}, lambda many: list(range(many))),
    ],
    ids=["members", "items"],
)
def test_a_check_of_quadratic_time_is_made_for_a_thousand(schema: dict[str, Any], given: Any) -> None:
    check = ArgumentCheck({"parameters": {"properties": {"x": schema}}})
    assert check({"x": given(1_000)})
    with pytest.raises(ToolArgumentError, match="argument 'x': 1001 are too many: give at most 1000"):
        check({"x": given(1_001)})
    with pytest.raises(ToolArgumentError, match="argument 'x': Unevaluated"):
        check({"x": {"other": 1} if isinstance(given(1), dict) else [1, "other"]})
