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
    changed_sources = dict(sources)
    for edit in sorted(edits, key=lambda edit: edit.line, reverse=True):
        source_lines = changed_sources[edit.path].split("\n")
        source_lines[edit.line - 1 : edit.line - 1 + edit.count] = edit.new
        changed_sources[edit.path] = "\n".join(source_lines)
    return changed_sources


def mutations(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every single change of an expression or a statement."""
    for source_path, source_text in sources.items():
        source_bytes = source_text.encode()
        line_starts = _line_starts(source_bytes)
        for subject, function in _functions(ast.parse(source_text)):
            for change_kind, change_start, change_end, new_text in _changes(function, source_bytes, line_starts):
                changed_source = (source_bytes[:change_start] + new_text.encode() + source_bytes[change_end:]).decode()
                if _compiles(changed_source):
                    yield Breakage(change_kind, subject, (_edit(source_path, source_text, changed_source),))


def stubs(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every function whose body could be removed, its docstring left."""
    for source_path, source_text in sources.items():
        for subject, function in _functions(ast.parse(source_text)):
            if ast.get_docstring(function) is None or len(function.body) <= _SHORTEST_STUB:
                continue
            first_line, last_line = function.body[1].lineno, function.end_lineno or 0
            indentation = " " * function.body[0].col_offset
            stub_edit = Edit(
                source_path, first_line, last_line - first_line + 1, (f"{indentation}raise NotImplementedError",)
            )
            yield Breakage("stub", subject, (stub_edit,))


def features(sources: Mapping[str, str]) -> Iterator[Breakage]:
    """Every function with a docstring that could be removed as a whole: no module of the repository imports it."""
    imported_names = {
        import_alias.name
        for source_text in sources.values()
        for syntax_node in ast.walk(ast.parse(source_text))
        if isinstance(syntax_node, ast.ImportFrom)
        for import_alias in syntax_node.names
    }
    for source_path, source_text in sources.items():
        source_lines = source_text.split("\n")
        for subject, function in _functions(ast.parse(source_text)):
            if ast.get_docstring(function) is None or function.name.startswith("_") or function.name in imported_names:
                continue
            first_line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            last_line = function.end_lineno or first_line
            signature = "\n".join(source_lines[first_line - 1 : function.body[0].end_lineno])
            while last_line < len(source_lines) - 1 and not source_lines[last_line].strip():
                last_line += 1
            removal = Edit(source_path, first_line, last_line - first_line + 1, ())
            if _compiles(applied(sources, (removal,))[source_path]):
                yield Breakage("feature", subject, (removal,), textwrap.dedent(signature))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their name in the module, inner ones left out."""
    for module_node in tree.body:
        if isinstance(module_node, ast.FunctionDef):
            yield module_node.name, module_node
        elif isinstance(module_node, ast.ClassDef):
            yield from (
                (f"{module_node.name}.{class_member.name}", class_member)
                for class_member in module_node.body
                if isinstance(class_member, ast.FunctionDef)
            )


Change = tuple[Kind, int, int, str]
"""What stands in the source from one byte up to another becomes a text."""


def _changes(function: ast.FunctionDef, data: bytes, starts: list[int]) -> Iterator[Change]:
    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def swap(kind: Kind, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """Change what stands between two expressions, besides spaces and parentheses."""
        between_start, between_end = span(left)[1], span(right)[0]
        operator_start = data.find(old.encode(), between_start, between_end)
        if operator_start >= 0 and data[between_start:between_end].strip(b" ()\n") == old.encode():
            yield kind, operator_start, operator_start + len(old), new

    for syntax_node in ast.walk(function):
        match syntax_node:
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
                yield "constant", *span(syntax_node), str(not value)
            case ast.Constant(value=int() as value):
                yield "constant", *span(syntax_node), str(value + 1)
            case ast.If(test=condition) | ast.IfExp(test=condition):
                condition_start, condition_end = span(condition)
                yield "control", condition_start, condition_end, f"not ({data[condition_start:condition_end].decode()})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "control", *span(syntax_node), data.__getitem__(slice(*span(operand))).decode()
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "control", *span(value), "None"
            case _:
                pass
        for statements in (getattr(syntax_node, "body", []), getattr(syntax_node, "orelse", [])):
            yield from _removals(statements, span) if isinstance(statements, list) else ()


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
    line_starts = [0]
    for source_line in data.split(b"\n"):
        line_starts.append(line_starts[-1] + len(source_line) + 1)
    return line_starts


def _compiles(source: str) -> bool:
    try:
        compile(source, "<breakage>", "exec")
    except SyntaxError:
        return False
    return True


def _edit(path: str, before: str, after: str) -> Edit:
    """The lines that differ. A `pass` that stands for a removed statement goes where it is not needed."""
    old_lines, new_lines = before.split("\n"), after.split("\n")
    same_at_start = 0
    while old_lines[same_at_start] == new_lines[same_at_start]:
        same_at_start += 1
    same_at_end = 0
    while (
        same_at_end < min(len(old_lines), len(new_lines)) - same_at_start
        and old_lines[-1 - same_at_end] == new_lines[-1 - same_at_end]
    ):
        same_at_end += 1
    added_lines = tuple(new_lines[same_at_start : len(new_lines) - same_at_end])
    if len(added_lines) == 1 and added_lines[0].strip() == "pass":
        without_pass = "\n".join([*new_lines[:same_at_start], *new_lines[same_at_start + 1 :]])
        added_lines = () if _compiles(without_pass) else added_lines
    return Edit(path, same_at_start + 1, len(old_lines) - same_at_end - same_at_start, added_lines)
