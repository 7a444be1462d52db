"""Arithmetic on text, by walking its syntax tree: numbers and operators only, nothing is ever executed.

Exact: integers stay integers and fractions stay fractions, so that an answer is right or wrong and never nearly so.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

MAX_CHARS: Final = 400
MAX_DIGITS: Final = 200
"""Results and powers beyond this size are refused before they are computed."""

_BINARY: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class ArithmeticRefused(ValueError):
    """The text is no arithmetic that is computed here; its message is for the reader."""


def evaluate(text: str) -> Fraction:
    """The value of an expression of numbers, `+ - * / // % **`, signs and brackets.

    Raises ArithmeticRefused for anything else, for division by zero and for numbers beyond `MAX_DIGITS` digits."""
    if len(text) > MAX_CHARS:
        raise ArithmeticRefused(f"the expression has {len(text)} characters, at most {MAX_CHARS} are allowed")
    text = text.strip()
    try:
        syntax_tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArithmeticRefused("this is not an arithmetic expression") from None
    return _value(syntax_tree.body, text)


def written(value: Fraction) -> str:
    """The shortest exact text: `7`, `2.5`, or `1/3` where decimals would not end."""
    if value.denominator == 1:
        return str(value.numerator)
    other_factors = value.denominator
    for prime_factor in (2, 5):
        while other_factors % prime_factor == 0:
            other_factors //= prime_factor
    if other_factors != 1 or value.denominator > 10**12:
        return f"{value.numerator}/{value.denominator}"
    digit_count = 0
    while (value * 10**digit_count).denominator != 1:
        digit_count += 1
    scaled_value = abs(value.numerator) * 10**digit_count // value.denominator
    sign_text = "-" if value < 0 else ""
    digit_text = str(scaled_value).rjust(digit_count + 1, "0")
    return f"{sign_text}{digit_text[:-digit_count]}.{digit_text[-digit_count:]}"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex()):
            raise ArithmeticRefused("only numbers are allowed")
        case ast.Constant(value=int() | float()):
            return _literal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text), _value(right, text))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _bounded(_BINARY[type(op)](_value(left, text), _value(right, text)))
            except ZeroDivisionError:
                raise ArithmeticRefused("division by zero") from None
        case _:
            raise ArithmeticRefused(
                f"{type(node).__name__} is not arithmetic: use numbers, + - * / // % ** and brackets"
            )


def _literal(text: str) -> Fraction:
    """A decimal literal as it is written: through a float its last digits would be lost."""
    literal_match = re.fullmatch(r"[\d_]*\.?[\d_]*(?:[eE]([+-]?\d{1,9}))?", text)
    if literal_match is None:
        raise ArithmeticRefused(f"{text[:20]} is not a decimal number")
    if abs(int(literal_match[1] or 0)) > MAX_DIGITS:
        _too_large()
    return _bounded(Fraction(text.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticRefused("the exponent must be a whole number")
    base_digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if abs(exponent.numerator) * base_digits > MAX_DIGITS:
        _too_large()
    if base == 0 and exponent < 0:
        raise ArithmeticRefused("division by zero")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_DIGITS * 4:
        _too_large()
    return value


def _too_large() -> Fraction:
    raise ArithmeticRefused(f"the number has more than {MAX_DIGITS} digits")
