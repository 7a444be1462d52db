"""The calculator: exact arithmetic against Python's own fractions, nothing but arithmetic, and a played episode."""

from decimal import Decimal
from fractions import Fraction

import pytest
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import UsageError
from agentrl_environments.calculator.arithmetic import ArithmeticRefused, evaluate, written

ID = "agentrl/Calculator-v0"
HERMES = get_format("hermes")

numbers = st.integers(0, 999).map(lambda n: (str(n), Fraction(n))) | st.decimals(
    0, 99, places=2, allow_nan=False, allow_infinity=False
).map(lambda d: (str(d), Fraction(d)))


def combined(inner):
    def join(left, sign, right):
        value = {"+": left[1] + right[1], "-": left[1] - right[1], "*": left[1] * right[1]}[sign]
        return f"({left[0]} {sign} {right[0]})", value

    return st.builds(join, inner, st.sampled_from("+-*"), inner) | inner.map(lambda x: (f"-{x[0]}", -x[1]))


@given(st.recursive(numbers, combined, max_leaves=6))
def test_values_are_exact(case):
    text, value = case
    assert evaluate(text) == value
    assert evaluate(written(value)) == value


@given(st.fractions(-1000, 1000, max_denominator=500))
def test_written_values_read_back(value):
    assert evaluate(written(value)) == value


@each_case(
    ("text", "value"),
    [
        ("7 / 2", "3.5"),
        ("1/3", "1/3"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("-0.05", "-0.05"),
        ("1e3", "1000"),
        ("1_000.50", "1000.5"),
        ("0.123456789012345678901234567890", "12345678901234567890123456789/100000000000000000000000000000"),
        (" ( 1 ) ", "1"),
    ],
)
def test_operators_and_their_text(text, value):
    assert written(evaluate(text)) == value


@each_case(
    "text",
    [
        *("", "1 +", "x", "__import__('os')", "(1).real", "[1]", "'a'", "True", "1j", "1 if 1 else 2", "lambda: 1"),
        *("9 ** 9 ** 9", "10 ** 300", "2 ** 0.5", "1 / 0", "1 % 0", "0 ** -1", "1e999", "nan", "1 < 2", "~1", "1 << 9"),
        *("(" * 300 + "1" + ")" * 300, "1" * 500, "-" * 390 + "1" + "\x00", "1; 2", "f(1)", "a.b", "1e-999999", "0x10"),
    ],
)
def test_what_is_no_small_arithmetic_is_refused(text):
    with pytest.raises(ArithmeticRefused):
        evaluate(text)


@given(st.text(max_size=30) | st.text("0123456789+-*/%(). e", max_size=30))
def test_any_text_is_evaluated_or_refused(text):
    try:
        assert isinstance(evaluate(text), Fraction)
    except ArithmeticRefused as refused:
        assert str(refused)


def said(name, **arguments):
    return HERMES.write(ToolCall(name, arguments))


async def test_an_episode():
    async with agentrl.make(ID, terms=3, largest=20) as env:
        observation, _ = await env.areset(seed=4)
        question = observation[-1]["content"]
        expression = question.removeprefix("What is ").removesuffix("?")
        observation, *_ = await env.astep(said("calculate", expression=expression))
        answer = observation[0]["content"]
        assert Decimal(answer) == eval(expression)  # an oracle of its own: integers and + - * only
        _, reward, terminated, _, info = await env.astep(said("submit", answer=answer))
        assert (reward, terminated) == (0.0, True)
        assert info == {"stop_reason": "done", "outcome": 1.0, "success": True}
        await env.areset(seed=4, options={"expression": "1 + 1"})
        assert (await env.astep(said("submit", answer="3")))[4]["outcome"] == 0.0
        await env.areset(seed=4)
        observation, *_ = await env.astep(said("calculate", expression="import os"))
        assert observation[0]["content"] == "error: ArithmeticRefused: this is not an arithmetic expression"


def test_passes_the_checker():
    assert agentrl.check_env(ID).findings == ()


def test_sizes_are_checked():
    with pytest.raises(UsageError, match="terms = 0"):
        agentrl.make(ID, terms=0)
