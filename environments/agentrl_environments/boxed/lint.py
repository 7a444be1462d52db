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
    syntax_tree = ast.parse(source)
    return _unused_imports(syntax_tree) + sum(_of_node(syntax_node) for syntax_node in ast.walk(syntax_tree))


def _of_node(node: ast.AST) -> int:
    fault_count = 0
    for block_name in ("body", "orelse", "finalbody"):
        statements = getattr(node, block_name, None)
        if isinstance(statements, list):
            fault_count += _unreached(statements) + _defined_twice(statements)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        fault_count += _unused_variables(node)
        default_values = [
            *node.args.defaults,
            *(default_value for default_value in node.args.kw_defaults if default_value),
        ]
        fault_count += sum(isinstance(default_value, ast.List | ast.Dict | ast.Set) for default_value in default_values)
    elif isinstance(node, ast.ExceptHandler):
        fault_count += node.type is None
    elif isinstance(node, ast.Compare):
        comparisons = zip(node.ops, node.comparators, strict=True)
        fault_count += sum(
            isinstance(operator, ast.Eq | ast.NotEq) and _is_none(comparator) for operator, comparator in comparisons
        )
    return fault_count


def _unused_imports(tree: ast.Module) -> int:
    """Names that a module imports and neither uses nor lists in `__all__`."""
    used_names = {syntax_node.id for syntax_node in ast.walk(tree) if isinstance(syntax_node, ast.Name)}
    used_names |= {
        syntax_node.value
        for syntax_node in ast.walk(tree)
        if isinstance(syntax_node, ast.Constant) and isinstance(syntax_node.value, str)
    }
    imported_names = [
        import_alias.asname or import_alias.name.split(".")[0]
        for syntax_node in ast.walk(tree)
        if isinstance(syntax_node, ast.Import | ast.ImportFrom) and getattr(syntax_node, "module", "") != "__future__"
        for import_alias in syntax_node.names
    ]
    return sum(imported_name not in used_names for imported_name in imported_names)


def _unused_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Plain names that are assigned and never read; a name that starts with `_` says so itself."""
    name_nodes = [syntax_node for syntax_node in ast.walk(function) if isinstance(syntax_node, ast.Name)]
    read_names = {syntax_node.id for syntax_node in name_nodes if not isinstance(syntax_node.ctx, ast.Store)}
    outer_names = {
        variable
        for syntax_node in ast.walk(function)
        if isinstance(syntax_node, ast.Global | ast.Nonlocal)
        for variable in syntax_node.names
    }
    assigned_names = {
        assign_target.id
        for syntax_node in ast.walk(function)
        if isinstance(syntax_node, ast.Assign)
        for assign_target in syntax_node.targets
        if isinstance(assign_target, ast.Name)
    }
    return sum(not variable.startswith("_") for variable in assigned_names - read_names - outer_names)


def _unreached(block: list[ast.stmt]) -> int:
    return any(isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue) for statement in block[:-1])


def _defined_twice(block: list[ast.stmt]) -> int:
    plain_names = [
        statement.name
        for statement in block
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not statement.decorator_list
    ]
    return len(plain_names) - len(set(plain_names))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def main(paths: list[str]) -> None:
    finding_count = 0
    for source_path in paths:
        try:
            with open(source_path, encoding="utf-8") as source_file:  # noqa: PTH123  (pathlib is slow to import)
                finding_count += findings(source_file.read())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            finding_count += UNREADABLE
    print(json.dumps(finding_count))


if __name__ == "__main__":
    main(sys.argv[1:])
