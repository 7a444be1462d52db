"""The functions that tasks are made of: their code, the places of their bugs, their arguments.

Owns: the templates and their names. Knows nothing of modules, splits or prompts. A name says nothing about what a
function does, so that only the tests do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl_environments.code_repair.mutation import WORDS, Site

FUNCTION_NAMES = (
    *("scale", "shift", "pick", "rate", "grade", "limit", "total", "first", "count", "label", "score", "price"),
    *("level", "place", "mark", "cost", "part", "size", "kind", "rank", "tone", "unit", "step", "group"),
)
ARGUMENT_NAMES: dict[Signature, tuple[str, ...]] = {
    "number": ("x", "n", "v", "k"),
    "pair": ("a, b", "p, q", "m, n", "u, v"),
    "list": ("xs", "items", "vals", "row"),
    "word": ("s", "key", "name", "tag"),
}
Signature = Literal["number", "pair", "list", "word"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A correct function body and argument tuples (as source) that it may be tested with, the most telling one first.
    `bugs` names the kinds of nodes that a bug may sit in."""

    body: str
    bugs: tuple[Site, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A family of functions. `draft(rng, argument)` draws one of it."""

    name: str
    signature: Signature
    draft: Callable[[random.Random, str], Draft]


TRAINED: list[Template] = []
UNSEEN: list[Template] = []
"""Templates of the second held-out set: in no demonstration and no training task."""


def _template(signature: Signature, into: list[Template] = TRAINED):
    def add(draft: Callable[[random.Random, str], Draft]) -> Callable[[random.Random, str], Draft]:
        into.append(Template(draft.__name__, signature, draft))
        return draft

    return add


def _numbers(rng: random.Random, population: Sequence[int], n: int) -> tuple[str, ...]:
    return tuple(str(x) for x in rng.sample(population, n))


def _around(rng: random.Random, threshold: int) -> tuple[str, ...]:
    """The neighbours of a threshold, and two numbers further off."""
    near_numbers = [threshold, threshold - 1, threshold + 1]
    far_numbers = rng.sample([x for x in range(10) if x not in near_numbers], 3)
    return tuple(str(x) for x in [*near_numbers, *far_numbers] if x >= 0)


def _lists(rng: random.Random, n: int, length: int) -> tuple[str, ...]:
    return tuple(str(rng.sample(range(1, 10), length)) for _ in range(n))


def _pairs(rng: random.Random, n: int) -> tuple[str, ...]:
    """Pairs of different digits, the larger one first or second."""
    return tuple(", ".join(_numbers(rng, range(1, 10), 2)) for _ in range(n))


@_template("number")
def add_constant(rng: random.Random, x: str) -> Draft:
    return Draft(f"return {x} + {rng.randint(1, 9)}", ("number",), ("0", *_numbers(rng, range(1, 7), 4)))


@_template("number")
def times_constant(rng: random.Random, x: str) -> Draft:
    return Draft(f"return {x} * {rng.randint(2, 9)}", ("number",), ("1", *_numbers(rng, range(2, 6), 3)))


@_template("pair")
def arithmetic(rng: random.Random, pair: str) -> Draft:
    first_name, second_name = pair.split(", ")
    operator = rng.choice("+-*")
    number_pairs = [(rng.randint(4, 9), rng.randint(1, 4)) for _ in range(6)]
    return Draft(
        f"return {first_name} {operator} {second_name}",
        ("arithmetic",),
        tuple(
            f"{first_number}, {second_number}"
            for first_number, second_number in number_pairs
            if first_number > second_number
        ),
    )


@_template("list")
def reduce_list(rng: random.Random, xs: str) -> Draft:
    return Draft(f"return {rng.choice(('max', 'min', 'sum', 'len'))}({xs})", ("call",), _lists(rng, 6, 3))


@_template("number")
def repeat(rng: random.Random, x: str) -> Draft:
    return Draft(f"return [{x}] * {rng.randint(1, 5)}", ("number",), _numbers(rng, range(1, 10), 4))


@_template("list")
def head(rng: random.Random, xs: str) -> Draft:
    return Draft(f"return {xs}[:{rng.randint(1, 3)}]", ("number",), _lists(rng, 5, 4))


@_template("number")
def at_most(rng: random.Random, x: str) -> Draft:
    upper_limit = rng.randint(1, 8)
    return Draft(f"return min({x}, {upper_limit})", ("number", "call"), _numbers(rng, range(10), 6))


@_template("number")
def compare(rng: random.Random, x: str) -> Draft:
    threshold = rng.randint(2, 8)
    operator = rng.choice(("<", "<=", ">", ">="))
    return Draft(f"return {x} {operator} {threshold}", ("comparison",), _around(rng, threshold))


@_template("number")
def branch(rng: random.Random, x: str) -> Draft:
    threshold, (yes_word, no_word) = rng.randint(2, 8), rng.sample(WORDS, 2)
    operator = rng.choice(("<", "<=", ">", ">="))
    function_body = f"if {x} {operator} {threshold}:\n    return {yes_word!r}\nreturn {no_word!r}"
    return Draft(function_body, ("word",), _around(rng, threshold))


@_template("word")
def look_up(rng: random.Random, key: str) -> Draft:
    key_words = rng.sample(WORDS, 2)
    table_items = ", ".join(f"{key_word!r}: {rng.randint(1, 9)}" for key_word in key_words)
    return Draft(f"return {{{table_items}}}[{key}]", ("number",), tuple(repr(key_word) for key_word in key_words))


@_template("list")
def accumulate(rng: random.Random, xs: str) -> Draft:
    total, each = rng.choice((("t", "i"), ("r", "c"), ("acc", "e")))
    function_body = f"{total} = {rng.randint(0, 9)}\nfor {each} in {xs}:\n    {total} += {each}\nreturn {total}"
    return Draft(function_body, ("number",), ("[]", *_lists(rng, 3, 1), *_lists(rng, 2, 2)))


@_template("word")
def put_before(rng: random.Random, s: str) -> Draft:
    return Draft(
        f"return [{rng.choice(WORDS)!r}, {s}]", ("word",), tuple(repr(list_word) for list_word in rng.sample(WORDS, 5))
    )


@_template("number")
def equals(rng: random.Random, x: str) -> Draft:
    equal_number = rng.randint(1, 9)
    return Draft(f"return {x} == {equal_number}", ("number",), tuple(str(call_number) for call_number in range(1, 10)))


@_template("pair")
def larger(rng: random.Random, pair: str) -> Draft:
    first_name, second_name = pair.split(", ")
    return Draft(
        f"return {first_name} if {first_name} {rng.choice('<>')} {second_name} else {second_name}",
        ("comparison",),
        _pairs(rng, 6),
    )


@_template("number", UNSEEN)
def at_least(rng: random.Random, x: str) -> Draft:
    return Draft(f"return max({x}, {rng.randint(1, 8)})", ("number", "call"), _numbers(rng, range(10), 6))


@_template("word", UNSEEN)
def put_after(rng: random.Random, s: str) -> Draft:
    return Draft(
        f"return [{s}, {rng.choice(WORDS)!r}]", ("word",), tuple(repr(list_word) for list_word in rng.sample(WORDS, 5))
    )


@_template("number", UNSEEN)
def match_number(rng: random.Random, x: str) -> Draft:
    matched_number, (yes_word, no_word) = rng.randint(1, 9), rng.sample(WORDS, 2)
    function_body = f"if {x} == {matched_number}:\n    return {yes_word!r}\nreturn {no_word!r}"
    return Draft(function_body, ("word",), _around(rng, matched_number))


@_template("list", UNSEEN)
def named_head(rng: random.Random, xs: str) -> Draft:
    head_name = rng.choice(("t", "r", "acc"))
    return Draft(f"{head_name} = {xs}[:{rng.randint(1, 3)}]\nreturn {head_name}", ("number",), _lists(rng, 5, 4))


Level = Literal["easy", "medium"]
_EASY = (
    *("add_constant", "times_constant", "arithmetic", "reduce_list", "head"),
    *("at_most", "equals", "larger", "put_before"),
)
LEVELS: dict[Level, tuple[list[Template], int]] = {
    "easy": ([template for template in TRAINED if template.name in _EASY], 2),
    "medium": (TRAINED, 4),
}
"""The templates of a level, and how many functions a module has; one of them has the bug."""
