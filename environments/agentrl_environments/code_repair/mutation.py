"""Single-node mutations of a Python module: the bugs that tasks are made of and the edits that could undo them.

Owns: which nodes may be changed into what, and how a change looks as an edit of one line. Knows nothing of tasks,
tests or prompts. Every source here is in the form of `normal`, in which a mutation never moves a line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Site = Literal["number", "word", "arithmetic", "comparison", "call"]

WORDS = (
    *("red", "blue", "green", "gold", "hot", "cold", "low", "high", "big", "small"),
    *("yes", "no", "cat", "dog", "sun", "moon", "fast", "slow", "old", "new"),
)
_ARITHMETIC: tuple[type[ast.operator], ...] = (ast.Add, ast.Sub, ast.Mult)
_ORDER: tuple[type[ast.cmpop], ...] = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_EQUALITY: tuple[type[ast.cmpop], ...] = (ast.Eq, ast.NotEq)
_REDUCTIONS = ("max", "min", "sum", "len")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one node. `line` (from 1) becomes `text`; `site` counts the nodes of a module that may change."""

    site: int
    kind: Site
    line: int
    text: str
    source: str


def normal(source: str) -> str:
    """`source` as `ast.unparse` writes it, without blank lines between functions."""
    return _unparse(ast.parse(source))


def _unparse(tree: ast.Module) -> str:
    return "\n".join(ast.unparse(statement) for statement in tree.body)


@lru_cache(maxsize=4096)
def mutations(source: str) -> tuple[Mutation, ...]:
    """Every single-node mutation of `source` (as `normal` writes it), in the order of the nodes."""
    syntax_tree = ast.parse(source)
    lines_before = source.split("\n")
    accepted: list[Mutation] = []
    for site_index, (site_kind, put_value, old_value, alternatives) in enumerate(_sites(syntax_tree)):
        for new_value in alternatives:
            put_value(new_value)
            mutated_source = _unparse(syntax_tree)
            lines_after = mutated_source.split("\n")
            changed_lines = [
                line_index
                for line_index, (line_before, line_after) in enumerate(zip(lines_before, lines_after, strict=True))
                if line_before != line_after
            ]
            if len(changed_lines) == 1:
                accepted.append(
                    Mutation(site_index, site_kind, changed_lines[0] + 1, lines_after[changed_lines[0]], mutated_source)
                )
        put_value(old_value)
    return tuple(accepted)


def _sites(tree: ast.Module) -> Iterator[tuple[Site, Callable[[Any], None], Any, list[Any]]]:
    """Per mutable node: its kind, how to put a value there, the value that stands there, and the other values."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield "number", _setter(node, "value"), value, [digit for digit in range(10) if digit != value]
            case ast.Constant(value=str() as value):
                yield "word", _setter(node, "value"), value, [word for word in WORDS if word != value]
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if isinstance(op, _ARITHMETIC):
                yield "arithmetic", _setter(node, "op"), op, [kind() for kind in _ARITHMETIC if type(op) is not kind]
            case ast.Compare(ops=[op]):
                comparisons = _ORDER if isinstance(op, _ORDER) else _EQUALITY
                yield "comparison", _first(node.ops), op, [kind() for kind in comparisons if type(op) is not kind]
            case ast.Call(func=ast.Name(id=name) as function) if name in _REDUCTIONS:
                # with two arguments only max and min make sense
                functions = _REDUCTIONS if len(node.args) == 1 else _REDUCTIONS[:2]
                yield "call", _setter(function, "id"), name, [other for other in functions if other != name]
            case _:
                pass


def _setter(node: ast.AST, field: str) -> Callable[[Any], None]:
    return lambda value: setattr(node, field, value)


def _first(values: list[Any]) -> Callable[[Any], None]:
    return lambda value: values.__setitem__(0, value)
