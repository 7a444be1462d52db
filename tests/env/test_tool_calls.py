"""Parsers of tool calls: total on any text, exact on what `write` wrote, in order, nothing dropped."""

import json
import re
import time

import pytest
from each_case import each_case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import registry
from agentrl.env.tools import calls as tool_calls
from agentrl.env.tools.calls import Malformed, ToolCall
from agentrl.env.tools.parsers import FORMATS, MAX_BROKEN, get_format
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
TAGS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n"),
    *(
        "<|start|>assistant",
        "<|channel|>",
        "<|constrain|>json",
        "<|message|>",
        "<|call|>",
        "<|end|>",
        " to=functions.f",
    ),
    *("\nAction: ", "\nAction Input: ", "\nObservation: "),
    *(
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "</arg_value>",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
    ),
    *(
        "</function>",
        '<invoke name="f">',
        '<parameter name="a">',
        "</invoke>",
        "<minimax:tool_call>",
        "<seed:tool_call>",
    ),
    *(
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="a" string="true">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
    ),
    *(
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```<｜tool▁call▁end｜>",
        "<|tool_call_begin|>functions.f:0",
    ),
    *(
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_call>call:f{",
        "<tool_call|>",
        "<|tool_call_start|>[",
    ),
    *(
        "f(a=",
        ")]<|tool_call_end|>",
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
        "<TOOLCALL>[",
        "<tool_calls>",
        "</tool_calls>",
    ),
]
PIECES = [
    *("{", "}", '"', "\\", "\n", " ", ":", ",", "[", "]", ";", '{"name": "f", "arguments": {}}', '"name": "f"'),
    *('"arguments"', '{"name": "g", "parameters": {}}', "NaN", "1e999", "\\ud800", "é", "f", "null"),
]
tag_soup = st.lists(st.sampled_from(TAGS + PIECES), max_size=40).map("".join)
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
calls = st.builds(ToolCall, names, st.dictionaries(st.text(), json_values, max_size=3))
# Parameters between tags: their names are no text of any kind, and a value's type is what the schema says.
UNTYPED = ("qwen3_coder", "seed_oss", "glm", "minimax_m2", "muse", "minicpm5")
BETWEEN_TAGS = (*UNTYPED, "deepseek_v32", "deepseek_v4")
WHOLE_TURN = ("llama", "pythonic")
plain_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)
plain_calls = st.builds(ToolCall, plain_names, st.dictionaries(plain_names, json_values, max_size=3))


def calls_of(name):
    return plain_calls if name in BETWEEN_TAGS else calls


def schemas_of(name, calls):
    """Schemas under which the calls are what was meant: only dialects that write no types read them."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    found = {}
    for call in calls:
        of = found.setdefault(call.name, {})
        for key, value in call.arguments.items():
            of.setdefault(key, set()).add(kinds.get(type(value), "null"))
    return [
        {"name": tool, "parameters": {"properties": {key: {"type": sorted(types)} for key, types in of.items()}}}
        for tool, of in found.items()
        if name in UNTYPED
    ]


def is_readable(name, calls):
    """What a dialect without types cannot tell apart: one parameter that is text in one call, and JSON in another."""
    schemas = schemas_of(name, calls)
    mixed = any(
        "string" in kind["type"] and len(kind["type"]) > 1
        for schema in schemas
        for kind in schema["parameters"]["properties"].values()
    )
    return not mixed


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(UnknownIdError, match="hermes"):
        get_format("hremes")


@pytest.mark.medium
@each_case("name", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_every_format_reads_what_it_writes(name, data):
    written = data.draw(st.lists(calls_of(name), min_size=1, max_size=4).filter(lambda made: is_readable(name, made)))
    form = get_format(name)
    assert form.parse(form.write(*written), schemas_of(name, written)).calls == tuple(written)


@each_case("name", FORMATS)
def test_a_tag_within_a_string_is_content(name):
    form = get_format(name)
    for tag in TAGS:
        call = ToolCall("f", {"a": 1, "text": f"a{tag}b\n{tag}"})
        parsed = form.parse(form.write(call) + ("" if name in WHOLE_TURN else "\nthen"), schemas_of(name, [call]))
        assert parsed.calls == (call,), tag


@each_case("name", FORMATS)
def test_a_text_comes_back_with_its_edges(name):
    values = ["", "\n", "\n\nx\n\n", " x ", "5", "true", "null", '"5"', "[1]", "{", "\\", "é\u2028"]
    call = ToolCall("f", {f"a{at}": value for at, value in enumerate(values)})
    assert get_format(name).parse(get_format(name).write(call), schemas_of(name, [call])).calls == (call,)


def test_a_value_that_is_marked_as_no_text_stays_one_where_it_holds_a_quoted_one():
    form = get_format("deepseek_v32")
    text = form.write(ToolCall("f", {"a": 5})).replace(">5<", '>"5"<')
    assert form.parse(text).calls == (ToolCall("f", {"a": '"5"'}),)


NO_SCHEMAS = [
    *(5, "x", [1], None),
    *({"properties": value} for value in (5, [1], "x", {"a": 5}, {"a": None})),
    *({"properties": {"a": {key: value}}} for key in ("type", "enum", "anyOf") for value in (5, [{}], {"x": 1}, [5])),
]


@each_case("name", FORMATS)
def test_law_3_a_schema_that_is_none_breaks_no_reader(name):
    """An agent program offers what it likes, and a policy may speak for it."""
    form = get_format(name)
    text = form.write(ToolCall("f", {"a": "x"}))
    for parameters in NO_SCHEMAS:
        parsed = form.parse(text, [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        assert parsed.calls == (ToolCall("f", {"a": "x"}),), parameters


@pytest.mark.medium
@each_case("name", FORMATS)
def test_a_long_text_is_read_in_time(name):
    """An action is some thousand tokens; catastrophic backtracking in it would take minutes. The pieces are what a call
    of this dialect begins with, cut behind each of its marks, and what any of them may stumble over."""
    call = get_format(name).write(ToolCall("f", {"a": "x"}))
    ends = {match.end() for match in re.finditer(r"[^\w\s]+|\s+", call)}
    for piece in [*(call[:end] for end in sorted(ends)), "{", "[", ";{", "\n{", " "]:
        started = time.process_time()
        get_format(name).parse(piece * (30_000 // len(piece)))
        assert time.process_time() - started < 20, piece


class Counting(json.JSONDecoder):
    """Counts the characters that it reads, and some for those before a mistake, whose lines its error counts."""

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.read = 0

    def raw_decode(self, s, idx=0):
        end = len(s)
        try:
            value, end = super().raw_decode(s, idx)
            return value, end
        except json.JSONDecodeError as error:
            end = error.pos
            self.read += idx // MAX_BROKEN
            raise
        finally:
            self.read += end - idx


@pytest.mark.medium
@each_case(
    "name, piece",
    [
        *(("json", piece) for piece in ("[\n", "{\n", "[[],\n", '[{"name": 1,\n', "[[[[[[[[[[]]]]]]]]]],[\n")),
        *(("hermes", piece) for piece in ("<tool_call>{", "<tool_call>[", '<tool_call>["')),
        *(("mistral", piece) for piece in ("[TOOL_CALLS][{", "[TOOL_CALLS]f{", ',{"name":1,"a":[1')),
        ("harmony", "to=f<|message|>{"),
        ("cohere", "<|START_ACTION|>[{"),
        *(
            ("deepseek_v31", piece)
            for piece in ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[[")
        ),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"),
        ("llama", ';{"a":[1'),
        ("react", "Action: f\nAction Input: [\n"),
    ],
)
def test_a_text_is_read_in_linear_time(name, piece, monkeypatch):
    """An action is some thousand tokens, and nobody else is served while it is read."""
    reader = Counting()
    monkeypatch.setattr(tool_calls, "_DECODER", reader)
    head, reads = {"mistral": "[TOOL_CALLS][1", "llama": "{"}.get(name, ""), list[int]()
    for size in (60_000, 120_000):
        reader.read = 0
        get_format(name).parse(head + piece * (size // len(piece)))
        reads.append(reader.read)
    assert 0 < reads[1] <= 2.2 * reads[0] + 1_000 and reads[1] <= 2 * (MAX_BROKEN + 2) * 120_000


def test_blanks_after_a_name_are_read_once():
    """Each of them was tried as the end of the name's and the begin of the braces' blanks: minutes for this text."""
    assert parsed("mistral", "[TOOL_CALLS]a" + " " * 300_000) == [("", STRUCTURAL)]


def test_what_is_left_after_many_broken_calls_is_one():
    last = ToolCall("last", {})
    text = wrap("{") * (MAX_BROKEN + 1) + HERMES.write(last)
    *_, last_read, rest = found = HERMES.parse(text).calls
    assert len(found) == MAX_BROKEN + 1
    assert last_read.raw == "{" and rest.raw == wrap("{") + HERMES.write(last)
    assert "64 tool calls before it are broken" in str(rest.error)
    assert HERMES.parse(wrap("{") * MAX_BROKEN + HERMES.write(last)).calls[-1] == last


def test_the_texts_of_broken_calls_take_no_more_than_the_text():
    text = "<|channel|> to=f<|message|>{} {}" * 3_000
    assert sum(len(call.raw) for call in get_format("harmony").parse(text).calls) <= len(text)


@pytest.mark.medium
@each_case("name", FORMATS)
@given(text=st.text() | tag_soup)
@settings(max_examples=60)
def test_no_text_breaks_a_parser(name, text):
    parsed = get_format(name).parse(text)
    for call in parsed.calls:
        if isinstance(call, Malformed):
            assert str(call.error)
        else:
            assert call.name


def wrap(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@settings(max_examples=40)
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


@each_case(
    "text, kind, said",
    [
        (wrap('{"name": "w", "arguments": {}'), StructuralParseError, "not valid JSON"),
        (wrap('{"name": "w", "arguments": {}}}'), StructuralParseError, "more than one"),
        (wrap("{'name': 'w'}"), StructuralParseError, "not valid JSON"),
        ('<tool_call>{"name": "w", "arguments": {}}', StructuralParseError, "is not closed"),
        ("<tool_call>", StructuralParseError, "not valid JSON"),
        (wrap("NaN"), StructuralParseError, "NaN"),
        (wrap('{"name": "f", "arguments": {"a": 1, "b": 2, "a": 3}}'), StructuralParseError, "stands twice"),
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


@each_case(
    "text, expected",
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


# --- the other dialects


def parsed(name, text):
    return [
        (call.name, type(call.error).__name__) if isinstance(call, Malformed) else (call.name, dict(call.arguments))
        for call in get_format(name).parse(text).calls
    ]


STRUCTURAL, CONTENT = "StructuralParseError", "ContentParseError"
LONDON = {"city": "London"}


@each_case(
    "name, text, expected",
    [
        # Llama: the message is the call
        ("llama", '{"name": "f", "parameters": {"city": "London"}}', [("f", LONDON)]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"city": "London"}}', [("f", LONDON)]),
        ("llama", ' {"name": "f", "arguments": {"city": "London"}}', [("f", LONDON)]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ("llama", '{"name": "f", "parameters": {; {"name": "g", "parameters": {}}', [("", STRUCTURAL), ("g", {})]),
        ("llama", '{"parameters": {}}', [("", CONTENT)]),
        ("llama", "{not json", [("", STRUCTURAL)]),
        ("llama", 'I would write {"name": "f", "parameters": {}}', []),
        # Mistral, both tokenizers
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "London"}}]', [("f", LONDON)]),
        (
            "mistral",
            'Let me see.[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]',
            [("f", {}), ("g", {})],
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argu', [("f", {}), ("", STRUCTURAL)]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', [("f", {}), ("", STRUCTURAL)]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"a" 1}}, {"name": "g", "arguments": {}}]',
            [("", STRUCTURAL), ("g", {})],
        ),
        ("mistral", "[TOOL_CALLS][]", [("", STRUCTURAL)]),
        ("mistral", '[TOOL_CALLS]["f"]', [("", CONTENT)]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "London"}[TOOL_CALLS]g{}', [("f", LONDON), ("g", {})]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", [("f", {})]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{[TOOL_CALLS]g[ARGS]{}", [("f", STRUCTURAL), ("g", {})]),
        ("mistral", "[TOOL_CALLS]f", [("", STRUCTURAL)]),
        # Harmony
        (
            "harmony",
            "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f <|constrain|>json<|message|>{"city": "London"}',  # the closing tag ends the turn
            [("f", LONDON)],
        ),
        ("harmony", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("f", {})]),
        ("harmony", " to=functions.f<|channel|>commentary<|message|>{}<|call|>", [("f", {})]),
        ("harmony", "<|channel|>commentary to=browser.open<|message|>{}<|call|>", [("browser.open", {})]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{broken<|call|>", [("f", STRUCTURAL)]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{} {}<|call|>", [("f", STRUCTURAL)]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>", [("f", CONTENT)]),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}<|call|>", [("", CONTENT)]),
        ("harmony", '<|channel|>final<|message|>to=functions.f {"a": 1}', []),
        # plain JSON
        ("json", 'Sure:\n```json\n{"name": "f", "arguments": {"city": "London"}}\n```\n', [("f", LONDON)]),
        ("json", '[{"name": "f", "arguments": {}}, {"name": "g"}]', [("f", {}), ("g", {})]),
        ("json", '{"name": "f", "arguments": {"a": }}\n{"name": "g"}', [("", STRUCTURAL), ("g", {})]),
        ("json", 'The set {1, 2} and\n{3: 4}\n[see above] and {"a": 1}', []),
        # ReAct
        ("react", 'Thought: hm\nAction: f\nAction Input: {"city": "London"}', [("f", LONDON)]),
        (
            "react",
            'Action: f\nAction Input: {"a": "\nAction: g"}\nAction: h\nAction Input: {}',
            [("f", {"a": "\nAction: g"}), ("h", {})],
        ),
        ("react", "Action: f\nAction Input: London\nAction: g\nAction Input: {}", [("f", STRUCTURAL), ("g", {})]),
        ("react", "Action: f", [("f", STRUCTURAL)]),
        ("react", "Action:\nAction Input: {}", [("", STRUCTURAL)]),
        ("react", "Action: f\nAction Input: [1]", [("f", CONTENT)]),
        (
            "react",
            "Action: f\nAction Input: {}\nObservation: 3\nAction: g\nAction Input: {}",
            [("f", {}), ("g", CONTENT)],
        ),
        ("react", "Thought: I am done. Final Answer: 3", []),
    ],
)
def test_dialects(name, text, expected):
    assert parsed(name, text) == expected


def test_what_stands_around_calls_is_text():
    assert get_format("mistral").parse("Let me see.[TOOL_CALLS]f{} bye").text == "Let me see. bye"
    assert get_format("json").parse('a\n{"name": "f"}\nb').text == "a\n\nb"
    assert get_format("llama").parse("only text").text == "only text"
    broken = '<invoke name="f">\n<parameter name="a">1\n</invoke> bye'
    assert (get_format("minimax_m2").parse(broken).text, parsed("minimax_m2", broken)) == (" bye", [("f", STRUCTURAL)])


def test_dialects_without_a_template_teach_and_answer_in_plain_roles():
    schemas = [{"name": "f", "description": "Do."}]
    results = ({"role": "tool", "content": "3", "name": "f"}, {"role": "tool", "content": "4", "name": "g"})
    for name, answer in [("json", "Result of f: 3\nResult of g: 4"), ("react", "Observation: 3\nObservation: 4")]:
        form = get_format(name)
        assert '{"name": "f", "description": "Do."}' in form.instructions(schemas)
        assert form.answer(results) == ({"role": "user", "content": answer},)
    for name in ("hermes", "llama", "mistral", "harmony"):
        assert get_format(name).answer(results) == results


# --- thoughts, types, dialects of others


@each_case(
    "name, text, thoughts, words",
    [
        ("hermes", "<think>\nhm\n</think>\n\nIt is 4.", "hm", "\n\nIt is 4."),
        ("hermes", "hm\n</think>It is 4.", "hm", "It is 4."),  # the template opened the block
        ("gemma4", "<|channel>thought\nhm<channel|>It is 4.", "thought\nhm", "It is 4."),
        ("seed_oss", "<seed:think>hm</seed:think>It is 4.", "hm", "It is 4."),
        ("mistral", "[THINK]hm[/THINK]It is 4.", "hm", "It is 4."),
        (
            "cohere",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>It is 4.<|END_RESPONSE|>",
            "hm",
            "It is 4.",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 4.",
            "hm",
            "It is 4.",
        ),
    ],
)
def test_thoughts_stand_apart_from_words(name, text, thoughts, words):
    parsed = get_format(name).parse(text)
    assert (parsed.thoughts, parsed.text, parsed.calls) == (thoughts, words, ())


def test_a_value_without_a_type_has_that_of_the_schema():
    schema = {"name": "f", "parameters": {"properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}}
    text = "<tool_call>f\n<arg_key>zip</arg_key>\n<arg_value>08</arg_value>\n<arg_key>n</arg_key>\n"
    text += "<arg_value>8</arg_value>\n</tool_call>"
    assert get_format("glm").parse(text, [schema]).calls == (ToolCall("f", {"zip": "08", "n": 8}),)


class Shouted(type(HERMES)):
    """A dialect of somebody else's."""

    name = "shouted"
    _open = "<CALL>"
    _close = "</CALL>"


def test_a_package_brings_a_dialect_of_its_own(monkeypatch):
    monkeypatch.setitem(registry._registered, ("tool_formats", "shouted"), Shouted)
    call = ToolCall("f", {"a": 1})
    for name in ("shouted", f"{__name__}:Shouted"):
        assert get_format(name).parse('<CALL>{"name": "f", "arguments": {"a": 1}}</CALL>').calls == (call,)
    with pytest.raises(UnknownIdError, match="shouted"):
        get_format("shoted")
