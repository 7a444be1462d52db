"""Ways to break a repository: one statement or expression changed, a body removed, a function removed.

Owns: which changes there are, as edits of lines that keep everything else as it was written. Knows nothing of tests:
whether a change breaks anything is for the catalogue to find out.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["operator", "comparison", "constant", "control", "removal", "several", "stub", "feature"]
MUTATIONS: Final[tuple[Kind, ...]] = ("operator", "comparison", "constant", "control", "removal")

_OPERATORS: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
_COMPARISONS: Final[Mapping[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_SHORTEST_STUB: Final = 2  # statements besides the docstring


@dataclass(frozen=True, slots=True)
class Edit:
    """From line `line` (from 1) on, `count` lines of `path` become `new`."""

    path: str
    line: int
    count: int
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Breakage:
    """One way to break a repository. `subject` is the function it sits in; `signature` the head and the docstring of a
    function that a feature task removed."""

    kind: Kind
    subject: str
    edits: tuple[Edit, ...]
    signature: str = ""


def applied(sources: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """The sources after the edits, whose lines count in the unchanged sources."""
    changed = dict(sources)
    for edit in sorted(edits, key=lambda edit: edit.line, reverse=True):
        lines = changed[edit.path].split("\n")
        lines[edit.line - 1 : edit.line - 1 + edit.count] = edit.new
        changed[edit.path] = "\n".join(lines)
    return changed


def mutations(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every single change of an expression or a statement."""
    for path, source in sources.items():
        data = source.encode()
        starts = _line_starts(data)
        for subject, function in _functions(ast.parse(source)):
            for kind, start, end, text in _changes(function, data, starts):
                changed = (data[:start] + text.encode() + data[end:]).decode()
                if _compiles(changed):
                    yield Breakage(kind, subject, (_edit(path, source, changed),))


def stubs(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every function whose body could be removed, its docstring left."""
    for path, source in sources.items():
        for subject, function in _functions(ast.parse(source)):
            if ast.get_docstring(function) is None or len(function.body) <= _SHORTEST_STUB:
                continue
            first, last = function.body[1].lineno, function.end_lineno or 0
            indent = " " * function.body[0].col_offset
            edit = Edit(path, first, last - first + 1, (f"{indent}raise NotImplementedError",))
            yield Breakage("stub", subject, (edit,))


def features(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every function with a docstring that could be removed as a whole: no module of the repository imports it."""
    imported = {
        alias.name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for path, source in sources.items():
        lines = source.split("\n")
        for subject, function in _functions(ast.parse(source)):
            if ast.get_docstring(function) is None or function.name.startswith("_") or function.name in imported:
                continue
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            last = function.end_lineno or first
            signature = "\n".join(lines[first - 1 : function.body[0].end_lineno])
            while last < len(lines) - 1 and not lines[last].strip():
                last += 1
            edit = Edit(path, first, last - first + 1, ())
            if _compiles(applied(sources, (edit,))[path]):
                yield Breakage("feature", subject, (edit,), textwrap.dedent(signature))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their name in the module, inner ones left out."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, ast.FunctionDef)
            )


Change = tuple[Kind, int, int, str]
"""What stands in the source from one byte up to another becomes a text."""


def _changes(function: ast.FunctionDef, data: bytes, starts: list[int]) -> Iterator[Change]:
    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def swap(kind: Kind, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """Change what stands between two expressions, besides spaces and parentheses."""
        start, end = span(left)[1], span(right)[0]
        at = data.find(old.encode(), start, end)
        if at >= 0 and data[start:end].strip(b" ()\n") == old.encode():
            yield kind, at, at + len(old), new

    for node in ast.walk(function):
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                yield from swap("operator", left, right, *_OPERATORS[type(op)])
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in _OPERATORS:
                old, new = _OPERATORS[type(op)]
                yield from swap("operator", target, value, old + "=", new + "=")
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield from swap("comparison", left, right, *_COMPARISONS[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from swap("control", left, right, old, new)
            case ast.Constant(value=bool() as value):
                yield "constant", *span(node), str(not value)
            case ast.Constant(value=int() as value):
                yield "constant", *span(node), str(value + 1)
            case ast.If(test=test) | ast.IfExp(test=test):
                start, end = span(test)
                yield "control", start, end, f"not ({data[start:end].decode()})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "control", *span(node), data.__getitem__(slice(*span(operand))).decode()
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "control", *span(value), "None"
            case _:
                pass
        for block in (getattr(node, "body", []), getattr(node, "orelse", [])):
            yield from _removals(block, span) if isinstance(block, list) else ()


def _removals(block: list[ast.stmt], span) -> Iterator[Change]:
    """Statements whose effect would be missed; the only one of a block becomes `pass`."""
    for statement in block:
        match statement:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Continue():
                removable = True
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                removable = True
            case ast.If(body=[ast.Raise()], orelse=[]):
                removable = True
            case _:
                removable = False
        if removable:
            yield "removal", *span(statement), "pass"


def _line_starts(data: bytes) -> list[int]:
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _compiles(source: str) -> bool:
    try:
        compile(source, "<breakage>", "exec")
    except SyntaxError:
        return False
    return True


def _edit(path: str, before: str, after: str) -> Edit:
    """The lines that differ. A `pass` that stands for a removed statement goes where it is not needed."""
    old, new = before.split("\n"), after.split("\n")
    start = 0
    while old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    added = tuple(new[start : len(new) - end])
    if len(added) == 1 and added[0].strip() == "pass":
        without = "\n".join([*new[:start], *new[start + 1 :]])
        added = () if _compiles(without) else added
    return Edit(path, start + 1, len(old) - end - start, added)
