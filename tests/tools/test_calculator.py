"""The calculator is exact where it can be, refuses what is no arithmetic, and cannot be made to work for long."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ToolError
from agentrl_tools.calculator import Calculator, evaluate


@each_case(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", str(2**100)),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1 / 4", "0.25"),
        ("sqrt(2) ** 2 - 2 < 1", None),
        ("sqrt(16)", "4.0"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("__import__('os')", None),
        ("(1).real", None),
        ("[1][0]", None),
        ("lambda: 1", None),
        ("'a' * 3", None),
        ("True + 1", None),
        ("1 / 0", None),
        ("9 ** 9 ** 9", None),
        ("2 ** 0.5 * 1e400", None),
        ("(-8) ** 0.5", None),
        ("", None),
        ("(" * 500 + "1" + ")" * 500, None),
        ("+".join(["1"] * 400), "400"),
    ],
)
def test_value(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ToolError):
            evaluate(expression)
    else:
        assert evaluate(expression) == value


@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(1, 999), st.sampled_from("+-*/"))
def test_agrees_with_exact_fractions(a: int, b: int, c: int, sign: str) -> None:
    exact = {"+": Fraction(a) + Fraction(b, c), "-": Fraction(a) - Fraction(b, c), "*": Fraction(a * b, c)}
    exact["/"] = Fraction(a * c, b) if b else Fraction(0)
    text = f"{a} {sign} ({b} / {c})"
    if sign == "/" and b == 0:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(text)
        return
    shown = evaluate(text)
    value = exact[sign]
    assert shown == (str(value.numerator) if value.denominator == 1 else repr(float(value)))


@given(st.text(max_size=200))
def test_any_text_is_a_value_or_a_tool_error(text: str) -> None:
    with suppress(ToolError):
        assert isinstance(evaluate(text), str)


async def test_as_a_tool() -> None:
    assert (await Calculator().call({"expression": "6 * 7"})).content == "42"
