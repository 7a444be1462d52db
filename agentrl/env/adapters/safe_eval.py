"""Decides which answers may go to a verifier that evaluates them as Python, as some of reasoning-gym's and sympy do.

A model's text never reaches `eval`: an answer passes only if it is plain arithmetic or a plain list. Knows nothing
of data sets or scores.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from typing import Final

_LONGEST: Final = 2_000  # characters
_LARGEST: Final = 10**40
_POWER: Final = 64  # exponents within exponents multiply
_FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
)
_PYTHON: Final = re.compile(r"(?<![\w.])(?:eval|exec)\(")
_SYMPY: Final = re.compile(r"\b(?:parse_expr|sympify|S)\(")


def evaluates(verifier: object) -> tuple[bool, bool]:
    """Whether the modules of an object's classes call Python's `eval`, and whether they call sympy's."""
    python = symbolic = False
    for cls in type(verifier).__mro__[:-1]:
        module = sys.modules.get(cls.__module__)
        source = inspect.getsource(module) if module is not None and getattr(module, "__file__", None) else ""
        python = python or _PYTHON.search(source) is not None
        symbolic = symbolic or ("sympy" in source and _SYMPY.search(source) is not None)
    return python, symbolic


def is_plain(answer: str, *, symbolic: bool) -> bool:
    """Whether evaluating an answer runs nothing and ends soon. `symbolic`: sympy reads it, who understands texts that
    are no Python, and functions."""
    if len(answer) > _LONGEST:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        return _weight(tree, symbolic) <= _POWER
    except _NotPlain:
        return False
    except (SyntaxError, ValueError):  # `eval` refuses it as well
        return not symbolic
    except (RecursionError, MemoryError):
        return False


class _NotPlain(Exception):
    pass


def _weight(node: ast.expr, symbolic: bool) -> int:
    """The highest product of exponents within one another. Raises _NotPlain."""
    match node:
        case ast.Constant(value=int(number)) if abs(number) <= _LARGEST:
            return 1
        case ast.Constant(value=float()):
            return 1
        case ast.Name(id=name) if symbolic and len(name) <= 20 and "__" not in name:
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=inner):
            return _weight(inner, symbolic)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _weight(left, symbolic) * max(1, abs(_exponent(right)))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return max(_weight(left, symbolic), _weight(right, symbolic))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if symbolic and name in _FUNCTIONS:
            return 2 * _weight(inner, symbolic)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if not symbolic:
            return max((1 if _is_text(part) else _weight(part, symbolic) for part in parts), default=1)
        case _:
            raise _NotPlain


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _exponent(node: ast.expr) -> int:
    """A whole number or a plain fraction of two, rounded up. Raises _NotPlain."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _exponent(inner)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return max(abs(_exponent(left)), abs(_exponent(right)))
        case _:
            raise _NotPlain
