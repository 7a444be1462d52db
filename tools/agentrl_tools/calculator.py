"""Arithmetic, exact where it can be: nothing is evaluated but numbers and operators, within bounds of size."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from agentrl.errors import ToolError
from agentrl.protocols import ToolResult
from agentrl.records import Json
from agentrl_tools.base import SchemaChecked

Number = Fraction | float

_MAX_LENGTH = 1_000
_MAX_BITS = 4_096
_MAX_DEPTH = 500
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(math.floor(a / b)),
    ast.Mod: lambda a, b: a - b * math.floor(a / b),
}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    name: getattr(math, name) for name in ("sqrt", "sin", "cos", "tan", "exp", "log", "log2", "log10", "atan")
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(SchemaChecked):
    """`calculator(expression)`: + - * / // % **, brackets, sqrt, sin, cos, tan, exp, log, abs, floor, ceil, pi, e."""

    parallel = True

    def __init__(self) -> None:
        expression: Json = {"type": "string", "description": "like (3 + 4) * 2 ** 10", "maxLength": _MAX_LENGTH}
        super().__init__("calculator", "Evaluate an arithmetic expression.", {"expression": expression}, "expression")

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError."""
        return ToolResult(content=evaluate(self.checked(arguments)["expression"]))


def evaluate(expression: str) -> str:
    """The value as text. Integers and fractions are exact; a fraction is shown as a decimal. Raises ToolError."""
    try:
        exact_value = _value(ast.parse(expression.strip(), mode="eval").body, 0)
        if isinstance(exact_value, Fraction):
            return str(exact_value.numerator) if exact_value.denominator == 1 else repr(float(exact_value))
        if not math.isfinite(exact_value):
            raise ToolError("the result is not a finite number")
        return repr(exact_value)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ToolError(f"not an arithmetic expression: {expression[:80]!r}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (OverflowError, ValueError) as error:
        raise ToolError(f"cannot be computed: {error}") from error


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=bool() | str() | bytes() | None | complex()):
            raise ToolError(f"{node.value!r} is no number")
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float(number)):
            return Fraction(ast.unparse(node)) if math.isfinite(number) else number
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]):
            return _call(name, _value(inner, depth + 1))
        case _:
            raise ToolError(f"not allowed here: {ast.unparse(node)[:80]!r}")


def _call(name: str, value: Number) -> Number:
    if name == "abs":
        return abs(value)
    if name in ("floor", "ceil"):
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
    if name not in _FUNCTIONS:
        raise ToolError(f"no function {name!r}; there are abs, floor, ceil, {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name](float(value))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        result_bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if result_bits > _MAX_BITS:
            raise ToolError(f"the result has more than {_MAX_BITS} bits")
        return base**exponent.numerator
    float_power = float(base) ** float(exponent)
    if isinstance(float_power, complex):
        raise ToolError("the result is not a real number")
    return float_power


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError(f"a number has more than {_MAX_BITS} bits")
    return value
