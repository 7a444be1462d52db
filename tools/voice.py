"""Measure how the code reads: names, comments and docstrings, each beside its goal.

    python tools/voice.py [--list MEASURE] [FOLDER ...]

`--list` prints each place that a measure counts. Measures of the house's own words are of style, never of behaviour:
a place may be right although it is counted, and the goals leave room for that. The content of tasks is not read: a
policy works on it, and it is written as other people write.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VAGUE = frozenset(
    re.split(" ", "asked at found given held kept known left made named news one own said there those told what whole")
)
OPENINGS = re.compile(r"(That|Those|Of|As|What|The same)\b")
BANNED = frozenset(re.split(" ", "asked bears found given mend mended mends said tells told wanted"))
_TASK_CONTENT = {"repositories", "harbor_tasks"}
_WORD = re.compile(r"[a-z]+")
_WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CODE_NAME = re.compile(r"`([A-Za-z_]\w*)`")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """A line that a measure counts, and what it has there."""

    path: Path
    line: int
    text: str


def sources(folders: Iterable[str]) -> list[Path]:
    """Our Python files in folders, as git lists them."""
    git_output = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=True).stdout
    source_paths = [Path(name) for name in git_output.splitlines() if name.endswith(".py")]
    return [path for path in source_paths if _TASK_CONTENT.isdisjoint(path.parts)]


def bound_name(node: ast.AST) -> str | None:
    """The name that a node of the syntax tree gives to something; None if it gives none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name) | ast.alias(asname=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.ExceptHandler(name=name) | ast.MatchMapping(rest=name):
            return name
        case _:
            return None


class Measures:
    """Sums over source files; `places` has the counted ones of each measure."""

    def __init__(self) -> None:
        self.lines = self.comments = self.locals = self.letters = self.docstrings = self.names = 0
        self.places = defaultdict[str, list[Place]](list)
        self._identifiers, self._quoted = set[str](), list[Place]()

    def add(self, path: Path) -> None:
        """Read one file."""
        source_text = path.read_text(encoding="utf-8")
        self.lines += source_text.count("\n")
        self._identifiers.update(path.with_suffix("").parts)
        for syntax_node in ast.walk(ast.parse(source_text)):
            if isinstance(syntax_node, ast.Name) and isinstance(syntax_node.ctx, ast.Store):
                self._add_local(path, syntax_node)
            if name := bound_name(syntax_node):
                self._add_name(path, syntax_node, name)
            if isinstance(syntax_node, (*_FUNCTIONS, ast.ClassDef, ast.Module)) and (
                docstring := ast.get_docstring(syntax_node)
            ):
                self._add_docstring(path, syntax_node, docstring)
        for token in tokenize.generate_tokens(io.StringIO(source_text).readline):
            if token.type == tokenize.COMMENT:
                self.comments += token.line.lstrip().startswith("#")
            elif token.type == tokenize.NAME:
                self._identifiers.add(token.string)
            elif token.type == tokenize.STRING and not token.string.startswith('"""'):
                self._identifiers.update(re.findall(r"\w+", token.string))

    def _add_local(self, path: Path, node: ast.Name) -> None:
        self.locals += 1
        self.letters += len(node.id)
        if node.id in VAGUE:
            self.places["vague locals"].append(Place(path, node.lineno, node.id))

    def _add_name(self, path: Path, node: ast.AST, name: str) -> None:
        self.names += 1
        if BANNED & {word.lower() for word in _WORD_OF_NAME.findall(name)}:
            self.places["banned names"].append(Place(path, getattr(node, "lineno", 1), name))

    def _add_docstring(self, path: Path, node: ast.AST, text: str) -> None:
        self.docstrings += 1
        line_number, name = getattr(node, "lineno", 1), getattr(node, "name", path.stem)
        if opening := OPENINGS.match(text):
            self.places["openings"].append(Place(path, line_number, f"{name}: {opening[0]} …"))
        for word in sorted(BANNED & set(_WORD.findall(text.lower()))):
            self.places["banned words"].append(Place(path, line_number, f"{name}: {word}"))
        self._quoted += (Place(path, line_number, quoted) for quoted in _CODE_NAME.findall(text))

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Measure, value and goal, once all files are read."""
        self.places["missing names"] = [place for place in self._quoted if place.text not in self._identifiers]
        vague_count = len(self.places["vague locals"])
        yield "vague locals", f"{vague_count / max(1, self.locals):.1%} of {self.locals}", "≤ 1%"
        yield "mean length of a local's name", f"{self.letters / max(1, self.locals):.1f}", "≥ 8"
        yield "whole-line comments", f"{self.comments / max(1, self.lines):.1%} of {self.lines} lines", "≥ 4%"
        for measure in ("openings", "banned words", "missing names"):
            yield measure, f"{len(self.places[measure])} in {self.docstrings} docstrings", "0"
        yield "banned names", f"{len(self.places['banned names'])} in {self.names} names", "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=("vague locals", "openings", "banned words", "missing names", "banned names"))
    parser.add_argument("folders", nargs="*", default=["agentrl"], metavar="FOLDER")
    options = parser.parse_args()
    measures = Measures()
    for source_path in sources(options.folders):
        measures.add(source_path)
    measure_rows = list(measures.rows())
    if options.list:
        for counted_place in measures.places[options.list]:
            print(f"{counted_place.path}:{counted_place.line}: {counted_place.text}")
        return
    for measure, measured, goal in measure_rows:
        print(f"{measure:32}{measured:28}{goal}")


if __name__ == "__main__":
    sys.exit(main())
