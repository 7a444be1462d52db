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
        digest = blake2b(digest_size=8)
        for name, text in [*sorted(self.sources.items()), *sorted(self.tests.items())]:
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def load(name: str) -> Repository:
    """The repository of a name."""
    root = FOLDER / name
    sources = {f"{name}/{path.name}": path.read_text("utf-8") for path in sorted((root / name).glob("*.py"))}
    tests = {path.name: path.read_text("utf-8") for path in sorted((root / "tests").glob("test_*.py"))}
    ids = sorted(test for file, text in tests.items() for test in _methods(file, text))
    return Repository(name, (root / "README.md").read_text("utf-8"), sources, tests, tuple(ids))


def encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files as bytes."""
    return {path: text.encode() for path, text in files.items()}


def without_tests(tests: Mapping[str, str], hidden: Collection[str]) -> dict[str, str]:
    """The test files without some tests; a class or a file that would be left without any goes too."""
    kept: dict[str, str] = {}
    for file, text in tests.items():
        lines = text.split("\n")
        left = 0
        for node in reversed(ast.parse(text).body):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and _is_test(inner)]
            gone = [method for method in methods if _name(file, node, method) in hidden]
            left += len(methods) - len(gone)
            for part in [node] if methods and len(gone) == len(methods) else reversed(gone):
                _cut(lines, part)
        if left:
            kept[file] = "\n".join(lines).rstrip("\n") + "\n"
    return kept


def _methods(file: str, text: str) -> dict[str, ast.FunctionDef]:
    return {
        _name(file, node, inner): inner
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and _is_test(inner)
    }


def _is_test(function: ast.FunctionDef) -> bool:
    return function.name.startswith("test_")


def _name(file: str, owner: ast.ClassDef, method: ast.FunctionDef) -> str:
    return f"{file.removesuffix('.py')}.{owner.name}.{method.name}"


def _cut(lines: list[str], node: ast.ClassDef | ast.FunctionDef) -> None:
    """Take out the node and the empty lines before it, or behind it if there are none before."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    end = node.end_lineno or node.lineno
    before = start
    while before and not lines[before - 1].strip():
        before -= 1
    if before == start:
        while end < len(lines) and not lines[end].strip():
            end += 1
    del lines[before:end]
