"""From trees to values, exactly."""

from fractions import Fraction

from calc.errors import EvaluationError
from calc.parser import parse

LARGEST_POWER = 1000


def _average(*values):
    return sum(values) / Fraction(len(values))


FUNCTIONS = {
    "abs": (abs, 1),
    "min": (min, None),
    "max": (max, None),
    "avg": (_average, None),
    "floor": (lambda value: value.numerator // value.denominator, 1),
}


def evaluate(tree, names=None):
    """The value of a tree: an int where it is whole, else a Fraction. `names` maps names to values; an assignment adds
    to it. Raises EvaluationError."""
    names = {} if names is None else names
    return _simple(_evaluate(tree, names))


def calculate(text, names=None):
    """The value of an expression."""
    return evaluate(parse(text), names)


def run(text):
    """The values of several lines, of which later ones know the names that earlier ones assigned. Empty lines and what
    follows a `#` are left out."""
    names = {}
    values = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            values.append(calculate(line, names))
    return values


def _evaluate(tree, names):
    kind = tree[0]
    if kind == "number":
        return Fraction(tree[1])
    if kind == "name":
        if tree[1] not in names:
            raise EvaluationError(f"unknown name {tree[1]}")
        return Fraction(names[tree[1]])
    if kind == "negate":
        return -_evaluate(tree[1], names)
    if kind == "assign":
        value = _evaluate(tree[2], names)
        names[tree[1]] = _simple(value)
        return value
    if kind == "call":
        return _call(tree[1], [_evaluate(part, names) for part in tree[2]])
    return _binary(tree[1], _evaluate(tree[2], names), _evaluate(tree[3], names))


def _call(name, values):
    if name not in FUNCTIONS:
        raise EvaluationError(f"unknown function {name}")
    function, count = FUNCTIONS[name]
    if not values or (count is not None and len(values) != count):
        raise EvaluationError(f"wrong number of arguments for {name}")
    return Fraction(function(*values))


def _binary(operator, left, right):
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if operator == "^":
        if right.denominator != 1 or abs(right) > LARGEST_POWER:
            raise EvaluationError("the exponent must be a whole number of modest size")
        if left == 0 and right < 0:
            raise EvaluationError("division by zero")
        return left ** int(right)
    if right == 0:
        raise EvaluationError("division by zero")
    return left / right if operator == "/" else left % right


def _simple(value):
    return value.numerator if value.denominator == 1 else value
