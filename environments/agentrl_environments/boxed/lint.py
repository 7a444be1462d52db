"""Counts what a careful reader would strike out of Python sources. Runs in a box, because parsing them is not safe.

`lint.py PATH...` prints one number: findings of all files, ten for one that is missing or does not parse. A finding is
an import or local variable that is never used, code behind a `return`, `raise`, `break` or `continue`, a bare
`except`, a mutable default, `== None`, or a second definition of the same name in one block.
"""

from __future__ import annotations

import ast
import json
import sys

UNREADABLE = 10


def findings(source: str) -> int:
    """How many there are. Raises SyntaxError."""
    tree = ast.parse(source)
    return _unused_imports(tree) + sum(_of_node(node) for node in ast.walk(tree))


def _of_node(node: ast.AST) -> int:
    faults = 0
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            faults += _unreached(block) + _defined_twice(block)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        faults += _unused_variables(node)
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
        faults += sum(isinstance(default, ast.List | ast.Dict | ast.Set) for default in defaults)
    elif isinstance(node, ast.ExceptHandler):
        faults += node.type is None
    elif isinstance(node, ast.Compare):
        against = zip(node.ops, node.comparators, strict=True)
        faults += sum(isinstance(op, ast.Eq | ast.NotEq) and _is_none(value) for op, value in against)
    return faults


def _unused_imports(tree: ast.Module) -> int:
    """Names that a module imports and neither uses nor lists in `__all__`."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = [
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
        for alias in node.names
    ]
    return sum(name not in used for name in imported)


def _unused_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Plain names that are assigned and never read; a name that starts with `_` says so itself."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
    outer = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    assigned = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return sum(not name.startswith("_") for name in assigned - read - outer)


def _unreached(block: list[ast.stmt]) -> int:
    return any(isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) for node in block[:-1])


def _defined_twice(block: list[ast.stmt]) -> int:
    plain = [
        node.name
        for node in block
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list
    ]
    return len(plain) - len(set(plain))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def main(paths: list[str]) -> None:
    total = 0
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123  (pathlib is slow to import)
                total += findings(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            total += UNREADABLE
    print(json.dumps(total))


if __name__ == "__main__":
    main(sys.argv[1:])
