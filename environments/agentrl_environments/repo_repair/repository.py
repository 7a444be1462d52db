"""The mini repositories: their sources, their tests, and who belongs to which split.

Owns: reading package data. Knows nothing of bugs, tasks or boxes. A test is named as `unittest` names it,
`module.Class.method`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal, get_args

Split = Literal["train", "held_out"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
FOLDER: Final = Path(__file__).parent.parent / "repositories"
REPOSITORIES: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": ("calc", "graphs", "iniconf", "ledger", "lru", "matrix", "minimark", "spans", "texttable"),
    "held_out": ("jsonpatch", "queues", "routes"),
}


@dataclass(frozen=True, slots=True)
class Repository:
    """`sources` by path from the repository's root, `tests` by file name, `test_ids` in order."""

    name: str
    readme: str
    sources: Mapping[str, str]
    tests: Mapping[str, str]
    test_ids: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Changes with any source or test."""
        content_hash = blake2b(digest_size=8)
        for file_name, file_text in [*sorted(self.sources.items()), *sorted(self.tests.items())]:
            content_hash.update(f"{file_name}\0{file_text}\0".encode())
        return content_hash.hexdigest()


@lru_cache(maxsize=64)
def load(name: str) -> Repository:
    """The repository of a name."""
    repository_root = FOLDER / name
    source_files = {
        f"{name}/{file_path.name}": file_path.read_text("utf-8")
        for file_path in sorted((repository_root / name).glob("*.py"))
    }
    test_files = {
        file_path.name: file_path.read_text("utf-8")
        for file_path in sorted((repository_root / "tests").glob("test_*.py"))
    }
    test_ids = sorted(
        test_id for test_file, file_text in test_files.items() for test_id in _methods(test_file, file_text)
    )
    return Repository(
        name, (repository_root / "README.md").read_text("utf-8"), source_files, test_files, tuple(test_ids)
    )


def encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files as bytes."""
    return {file_path: file_text.encode() for file_path, file_text in files.items()}


def without_tests(tests: Mapping[str, str], hidden: Collection[str]) -> dict[str, str]:
    """The test files without some tests; a class or a file that would be left without any goes too."""
    kept_files: dict[str, str] = {}
    for test_file, file_text in tests.items():
        file_lines = file_text.split("\n")
        remaining = 0
        for class_node in reversed(ast.parse(file_text).body):
            if not isinstance(class_node, ast.ClassDef):
                continue
            test_methods = [
                class_member
                for class_member in class_node.body
                if isinstance(class_member, ast.FunctionDef) and _is_test(class_member)
            ]
            hidden_methods = [
                test_method for test_method in test_methods if _name(test_file, class_node, test_method) in hidden
            ]
            remaining += len(test_methods) - len(hidden_methods)
            for cut_node in (
                [class_node] if test_methods and len(hidden_methods) == len(test_methods) else reversed(hidden_methods)
            ):
                _cut(file_lines, cut_node)
        if remaining:
            kept_files[test_file] = "\n".join(file_lines).rstrip("\n") + "\n"
    return kept_files


def _methods(file: str, text: str) -> dict[str, ast.FunctionDef]:
    return {
        _name(file, class_node, class_member): class_member
        for class_node in ast.parse(text).body
        if isinstance(class_node, ast.ClassDef)
        for class_member in class_node.body
        if isinstance(class_member, ast.FunctionDef) and _is_test(class_member)
    }


def _is_test(function: ast.FunctionDef) -> bool:
    return function.name.startswith("test_")


def _name(file: str, owner: ast.ClassDef, method: ast.FunctionDef) -> str:
    return f"{file.removesuffix('.py')}.{owner.name}.{method.name}"


def _cut(lines: list[str], node: ast.ClassDef | ast.FunctionDef) -> None:
    """Take out the node and the empty lines before it, or behind it if there are none before."""
    node_start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    node_end = node.end_lineno or node.lineno
    cut_start = node_start
    while cut_start and not lines[cut_start - 1].strip():
        cut_start -= 1
    if cut_start == node_start:
        while node_end < len(lines) and not lines[node_end].strip():
            node_end += 1
    del lines[cut_start:node_end]
