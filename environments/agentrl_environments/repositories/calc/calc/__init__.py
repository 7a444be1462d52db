"""A calculator for arithmetic expressions."""

from calc.errors import CalcError
from calc.evaluator import calculate, evaluate
from calc.parser import parse, show
from calc.tokens import tokenize

__all__ = ["CalcError", "calculate", "evaluate", "parse", "show", "tokenize"]
