"""Parsers of tool calls: total on any text, exact on what `write` wrote, in order, nothing dropped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env.tool_calls import FORMATS, Malformed, ToolCall, get_format
from agentrl.errors import ContentParseError, StructuralParseError, UnknownIdError

HERMES = get_format("hermes")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tag_soup = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', "\\", "\n", " ", ":", ",", "[", "]"),
            *('{"name": "f", "arguments": {}}', '"name"', '"arguments"', "NaN", "1e999", "\\ud800", "é", "f", "null"),
        ]
    ),
    max_size=40,
).map("".join)
calls = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3))


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(UnknownIdError, match="hermes"):
        get_format("hremes")


@pytest.mark.parametrize("name", FORMATS)
@given(call=calls)
def test_every_format_reads_what_it_writes(name, call):
    form = get_format(name)
    assert form.parse(form.write(call)).calls == (call,)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text() | tag_soup)
@settings(max_examples=300)
def test_no_text_breaks_a_parser(name, text):
    parsed = get_format(name).parse(text)
    for call in parsed.calls:
        if isinstance(call, Malformed):
            assert str(call.error)
        else:
            assert call.name


def wrap(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@given(st.lists(calls | st.none(), max_size=5), st.text())
def test_siblings_keep_their_order_and_malformed_ones_their_place(siblings, between):
    between = between.replace("<", "").replace("{", "")
    text = between.join(wrap('{"name": "f", ') if call is None else HERMES.write(call) for call in siblings)
    parsed = HERMES.parse(text)
    assert [None if isinstance(call, Malformed) else call for call in parsed.calls] == siblings
    assert parsed.text == between * max(0, len(siblings) - 1)


def one(text):
    (call,) = HERMES.parse(text).calls
    return call


def test_a_closing_tag_within_a_string_closes_nothing():
    call = ToolCall("write", {"text": 'a </tool_call> <tool_call> "b" \\ \n c'})
    assert one(HERMES.write(call)) == call


def test_raw_line_ends_within_strings_are_read():
    assert one(wrap('{"name": "w", "arguments": {"t": "a\n\tb"}}')) == ToolCall("w", {"t": "a\n\tb"})


def test_arguments_may_be_missing_or_their_own_json_text():
    assert one(wrap('{"name": "w"}')) == ToolCall("w", {})
    assert one(wrap('{"name": "w", "arguments": "{\\"a\\": 1}"}')) == ToolCall("w", {"a": 1})
    assert one('<tool_call>{"name": "w", "arguments": {}}</tool_call>') == ToolCall("w", {})


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (wrap('{"name": "w", "arguments": {}'), StructuralParseError, "not valid JSON"),
        (wrap('{"name": "w", "arguments": {}}}'), StructuralParseError, "more than one"),
        (wrap("{'name': 'w'}"), StructuralParseError, "not valid JSON"),
        ('<tool_call>{"name": "w", "arguments": {}}', StructuralParseError, "is not closed"),
        ("<tool_call>", StructuralParseError, "not valid JSON"),
        (wrap("NaN"), StructuralParseError, "NaN"),
        (wrap('{"name": "w", "arguments": {"x": 1e999}}'), StructuralParseError, "out of range"),
        (wrap('{"name": "w", "arguments": {"x": "\\ud800"}}'), StructuralParseError, "surrogate"),
        (wrap('{"name": "w", "arguments": {"x": ' + "9" * 5000 + "}}"), StructuralParseError, "not valid JSON"),
        (wrap('{"name": "w", "arguments": ' + '{"a":' * 80 + "1" + "}" * 81), StructuralParseError, "nested deeper"),
        (wrap("[" * 100_000), StructuralParseError, "not valid JSON"),
        (wrap('["w"]'), ContentParseError, "not a list"),
        (wrap('{"arguments": {}}'), ContentParseError, 'no "name"'),
        (wrap('{"name": "", "arguments": {}}'), ContentParseError, 'no "name"'),
        (wrap('{"name": "w", "arguments": [1]}'), ContentParseError, '"arguments" is a JSON object, not a list'),
        (wrap('{"name": "w", "arguments": "{}{}"}'), StructuralParseError, "more than one"),
        (wrap('{"name": "w", "arguments": "x"}'), StructuralParseError, "not valid JSON"),
    ],
)
def test_a_broken_call_says_what_is_wrong(text, kind, said):
    call = one(text)
    assert isinstance(call, Malformed)
    assert type(call.error) is kind and said in str(call.error)


def test_an_unclosed_call_ends_where_the_next_one_begins():
    parsed = HERMES.parse('<tool_call>{"name": "a"' + wrap('{"name": "b"}') + "tail")
    assert isinstance(parsed.calls[0], Malformed) and parsed.calls[0].raw == '{"name": "a"'
    assert parsed.calls[1:] == (ToolCall("b", {}),) and parsed.text == "tail"


def test_a_text_without_calls_is_text():
    assert HERMES.parse("2 < 3").calls == () and HERMES.parse("").text == ""


DRAFT, MEANT = wrap('{"name": "draft"}'), ToolCall("meant", {"t": "</think>"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>{DRAFT}</think>{HERMES.write(MEANT)}", [MEANT]),
        (f"{DRAFT} maybe</think>{HERMES.write(MEANT)}", [MEANT]),  # the template opened the thought
        (f"<think>never ends {DRAFT}", []),
        (f"{HERMES.write(MEANT)}", [MEANT]),
        (f"{DRAFT}{HERMES.write(MEANT)}", [ToolCall("draft", {}), MEANT]),
    ],
)
def test_calls_drafted_in_thought_are_not_meant(text, expected):
    parsed = HERMES.parse(text)
    assert list(parsed.calls) == expected
