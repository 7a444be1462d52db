"""What the documents say is true: every fenced block is run or checked, every path and name they mention exists.

How a block is checked follows from its language:

    python   run, the blocks of one document in order in one fresh interpreter; after `<!-- file: PATH -->` it must
             also stand verbatim in that file
    sh       each command is looked up: `make` targets, `agentrl` command lines (parsed by the real command line, not
             run), scripts that exist
    toml     validated as a run file (`model` and `env` may be left out); after `<!-- pyproject -->` the entry-point
             groups must be ours; after `<!-- sft -->` it is a file of `agentrl sft`
    json     parsed
    sql      run on a new run store
    text     a picture; after `<!-- tree -->` the first word of each line is a path that must exist, after
             `<!-- file: PATH -->` each line is one of that file's, so that a drawing is that of the code
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest
from each_case import each_case

from agentrl import config, registry
from agentrl.conformance import child as conformance
from agentrl.errors import ConfigError
from agentrl.offline import sft
from agentrl.store import RunStore
from tests import cli_page

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("docs", "examples", "environments", "tools", "benchmarks")
HISTORY = ROOT / "CHANGELOG.md"  # it speaks of what was
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))} - {HISTORY})
OUR_FOLDERS = ("agentrl/", "environments/", "tools/", "examples/", "benchmarks/", "tests/", "docs/", "requirements/")
ENDINGS = ("/", ".py", ".md", ".toml", ".txt", ".sh", ".svg")
ENTRY_POINT_GROUPS = {f"agentrl.{kind}" for kind in get_args(registry.Kind)} | {conformance.GROUP}
PYTHON_DEADLINE_S = 500


def of_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
NOTE = re.compile(r"<!-- (?P<kind>file: (?P<path>\S+)|tree|pyproject|sft) -->\s*\Z")
LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
INLINE = re.compile(r"`(?P<code>[^`\n]+)`")
HEADING = re.compile(r"^#+ +(?P<title>.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, its text, and the note that stood right before it."""

    document: Path
    line: int
    language: str
    body: str
    note: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{of_root(self.document)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    found: list[Block] = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
        note = NOTE.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 1
        kind, path = (note["kind"], note["path"] or "") if note else ("", "")
        found.append(Block(document, line, match["language"].strip(), body, kind, path))
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


# --- checks: each returns what is wrong, empty if nothing is -----------------------------------------------------


def check_sh(block: Block) -> list[str]:
    lines = block.body.replace("\\\n", " ").splitlines()
    commands = [command for line in lines for command in line.split(" && ")]
    return [f"{block}: {wrong}" for command in commands if (wrong := wrong_command(command))]


@functools.cache
def wrong_command(line: str) -> str:
    """Why this command line cannot be right; empty if it can."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Za-z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return ""
    ours = [word for word in words if word.startswith(OUR_FOLDERS) and word.endswith(ENDINGS)]
    if gone := [word for word in ours if not (ROOT / word).exists()]:
        return f"no file {gone[0]}"
    program = words[0].removeprefix(".venv/bin/")
    known: dict[str, Callable[[list[str]], str]] = {
        "agentrl": wrong_agentrl,
        "make": wrong_make,
        "python": wrong_script,
        "bash": wrong_script,
        "pip": lambda arguments: "" if arguments[:1] == ["install"] else f"unknown pip command {line!r}",
        "git": lambda arguments: "" if arguments[:1] == ["clone"] else f"unknown git command {line!r}",
        "ray": lambda arguments: "" if arguments[:1] in (["start"], ["stop"]) else f"unknown ray command {line!r}",
        "docker": lambda arguments: "" if arguments[:1] in (["build"], ["push"]) else f"unknown: {line!r}",
        "kubectl": lambda arguments: "" if {"apply", "create", "logs"} & {*arguments} else f"unknown: {line!r}",
        "sbatch": lambda arguments: wrong_script(arguments[-1:]),
        ".": lambda arguments: "" if arguments == [".venv/bin/activate"] else f"unknown: {line!r}",
        "cd": lambda _: "",
        "ruff": lambda _: "",
    }
    return known[program](words[1:]) if program in known else f"{program!r} is a command that this test cannot check"


@functools.cache
def idle_program() -> Any:
    """The real command line, with commands that do nothing in the place of ours."""
    import typer.main

    from agentrl.cli import main

    program = typer.main.get_command(main.app)
    groups: list[Any] = [program]
    for command in groups:
        groups += getattr(command, "commands", {}).values()
        command.callback = lambda **_: None
    return program


def wrong_agentrl(arguments: list[str]) -> str:
    """Have the real command line parse the arguments."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            idle_program().main(arguments, prog_name="agentrl", standalone_mode=False)
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            return f"agentrl {shlex.join(arguments)}: {error.format_message()}"
    return ""


@functools.cache
def make_targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text()
    while variables := re.findall(r"^(\w+) := ([^\s$]+)$", makefile, re.M):  # a value may name another variable
        for name, value in variables:
            makefile = re.sub(rf"^{name} := .*\n", "", makefile, flags=re.M).replace(f"$({name})", value)
    return frozenset(re.findall(r"^([\w./-]+):", makefile, re.M))


def wrong_make(arguments: list[str]) -> str:
    asked = [word for word in arguments if "=" not in word]
    return "" if set(asked) <= make_targets() else f"no such target: make {shlex.join(asked)}"


def wrong_script(arguments: list[str]) -> str:
    if arguments[0] == "-m":
        return "" if importlib.util.find_spec(arguments[1]) else f"no module {arguments[1]}"
    return "" if (ROOT / arguments[0]).is_file() else f"no file {arguments[0]}"


def check_toml(block: Block) -> list[str]:
    try:
        document = tomllib.loads(block.body)
        if block.note == "pyproject":
            groups = document["project"]["entry-points"].keys()
            return [f"{block}: no entry-point group {group}" for group in groups - ENTRY_POINT_GROUPS]
        if block.note == "sft":
            sft.parse(document)
            return []
        named = {} if "tasks" in document else {"env": {"id": "any"}}
        config.parse({"model": "agentrl/tiny-coder", **named, **document})
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        return [f"{block}: {error}"]
    return []


def check_json(block: Block) -> list[str]:
    try:
        json.loads(block.body)
    except ValueError as error:
        return [f"{block}: {error}"]
    return []


def check_sql(block: Block) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        RunStore.create(path, "{}").close()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            try:
                connection.execute(block.body)
            except sqlite3.Error as error:
                return [f"{block}: {error}"]
    return []


def check_text(block: Block) -> list[str]:
    if block.file:
        if not (ROOT / block.file).is_file():
            return [f"{block}: no {block.file}"]
        lines = {line.strip() for line in (ROOT / block.file).read_text().splitlines()}
        return [
            f"{block}: {block.file} has no line {line.strip()!r}"
            for line in block.body.splitlines()
            if line.strip() not in lines
        ]
    if block.note != "tree":
        return []
    wrong: list[str] = []
    folders: list[tuple[int, str]] = []
    for line in filter(str.strip, block.body.splitlines()):
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = Path(*(folder for _, folder in folders), name)
        if not (ROOT / path).exists():
            wrong.append(f"{block}: no {path}")
        if name.endswith("/"):
            folders.append((indent, name))
    return wrong


def check_python(block: Block) -> list[str]:
    """Only what needs no run; `test_python_blocks_run` runs them."""
    if not block.file:
        return []
    if not (ROOT / block.file).is_file():
        return [f"{block}: no {block.file}"]
    return [] if block.body in (ROOT / block.file).read_text() else [f"{block}: {block.file} does not hold this text"]


CHECKS = {
    "sh": check_sh,
    "toml": check_toml,
    "json": check_json,
    "sql": check_sql,
    "text": check_text,
    "python": check_python,
}


def check(block: Block) -> list[str]:
    if block.language not in CHECKS:
        return [f"{block}: language {block.language!r} is none of {', '.join(CHECKS)}"]
    return CHECKS[block.language](block)


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def broken_links(document: Path) -> list[str]:
    broken: list[str] = []
    for match in LINK.finditer(prose(document)):
        path, _, anchor = unquote(match["target"]).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists():
            broken.append(f"{of_root(document)}: {match['target']} is not there")
        elif anchor and anchor not in {slug(title) for title in HEADING.findall(prose(target))}:
            broken.append(f"{of_root(document)}: {match['target']} names no heading")
    return broken


def unknown_names(document: Path) -> list[str]:
    """Inline code that looks like a path of ours, a dotted name of ours or a command of ours, and is none. A command
    may be named without what it asks for."""
    unknown: list[str] = []
    for match in INLINE.finditer(prose(document)):
        code = match["code"]
        if code.startswith(OUR_FOLDERS) and code.endswith(ENDINGS):
            unknown += [] if any(ROOT.glob(code.rstrip("/"))) else [code]
        elif re.fullmatch(r"agentrl(_\w+)?(\.\w+)+(\(\))?", code):
            name = code.removesuffix("()")
            unknown += [] if name in ENTRY_POINT_GROUPS or resolves(name) else [code]
        elif re.match(r"(make|agentrl) [a-z]", code):
            wrong = wrong_command(code)
            unknown += [wrong] if wrong and not re.search(r": Missing|requires an argument", wrong) else []
    return [f"{of_root(document)}: {name}" for name in unknown]


def resolves(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


# --- the documents ------------------------------------------------------------------------------------------------


def test_every_block_is_right() -> None:
    assert [wrong for block in BLOCKS for wrong in check(block)] == []


TRAINS = [ROOT / "docs" / "reference" / "python.md"]
"""Documents whose blocks train, and take longer than a quick test may."""


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path in TRAINS else [], id=of_root(path))
        for path in dict.fromkeys(block.document for block in BLOCKS if block.language == "python")
    ],
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    code = "\n".join(block.body for block in blocks_of(document) if block.language == "python")
    script = tmp_path / "document.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PYTHON_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_links_and_names() -> None:
    """The program writes the page of commands itself."""
    names = [name for page in DOCUMENTS if page != cli_page.PAGE for name in unknown_names(page)]
    assert [link for page in DOCUMENTS for link in broken_links(page)] + names == []


def missing_tests(page: str) -> list[str]:
    """The tests that a page names, as `FILE::NAME`, and that are not there."""
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", page)
    files = {file: (ROOT / file).read_text() if (ROOT / file).is_file() else "" for file, _ in named}
    return [f"{file}::{name}" for file, name in named if f"def {name}(" not in files[file]]


def test_each_yes_of_ours_in_the_comparison_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "explanation" / "comparison.md").read_text()
    evidence = (ROOT / "benchmarks" / "peers.md").read_text()
    ours = [row.split(" | ")[-1] for row in page.splitlines() if row.startswith("| ")][2:]
    letters = [re.search(r"\((\w)\) \|$", cell) for cell in ours]
    assert None not in letters and len(letters) > 10
    rows = {match[1]: match[2] for match in re.finditer(r"^\| (\w) \| (.*) \|$", evidence, re.M)}
    assert [letter[1] for letter in letters if letter and "::test_" not in rows.get(letter[1], "")] == []
    assert missing_tests(evidence) == []


def test_the_page_of_commands_is_that_of_the_program() -> None:
    assert cli_page.PAGE.read_text() == cli_page.page(), "write it anew: python -m tests.cli_page"


def test_every_table_of_the_store_is_explained(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "store.md").read_text()
    RunStore.create(tmp_path / "store.sqlite", "{}").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        assert [name for (name,) in tables if f"\n| `{name}` |" not in text] == []


# --- the checks themselves, on documents that are wrong -------------------------------------------------------------


def block(language: str, body: str, note: str = "", file: str = "") -> Block:
    return Block(ROOT / "README.md", 1, language, body, note, file)


@each_case(
    "wrong, says",
    [
        (block("sh", "make demmo\n"), "no such target: make demmo"),
        (block("sh", "curl somewhere | sh\n"), "cannot check"),
        (block("sh", "python examples/no_such.py\n"), "no file examples/no_such.py"),
        (block("sh", "agentrl train examples/no_such.toml\n"), "no file examples/no_such.toml"),
        (block("sh", "agentrl train --outt there\n"), "No such option: --outt"),
        (block("sh", "agentrl trian x.toml\n"), "No such command 'trian'"),
        (block("toml", "[train]\nsteps = 'ten'\n"), "train.steps"),
        (block("toml", "[trian]\nsteps = 10\n"), "did you mean 'train'"),
        (block("toml", "model = 'm'\ndata = ['x']\nheldout = []\n", "sft"), "did you mean 'held_out'"),
        (block("toml", '[project.entry-points."agentrl.boxes"]\nmine = "a:B"\n', "pyproject"), "group agentrl.boxes"),
        (block("json", "{'a': 1}\n"), "Expecting property name"),
        (block("sql", "SELECT tokens FROM groups;\n"), "no such column: tokens"),
        (block("text", "tests/      here\n  no.py     not\n", "tree"), "no tests/no.py"),
        (block("python", "x = 1\n", "file: Makefile", "Makefile"), "Makefile does not hold this text"),
        (block("text", "VENV := .venv\na ──► b\n", "file: Makefile", "Makefile"), "Makefile has no line"),
        (block("text", "a ──► b\n", "file: gone.py", "gone.py"), "no gone.py"),
        (block("rust", "fn main() {}\n"), "language 'rust'"),
    ],
)
def test_a_wrong_block_is_found(wrong: Block, says: str) -> None:
    assert len(found := check(wrong)) == 1 and says in found[0]


def test_wrong_links_and_names_are_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# One title\n[a](page.md#one-title) [b](page.md#two) [c](gone.md) [d](https://example.org)\n"
        "`agentrl/records.py` `agentrl/gone.py` `agentrl.records.Turn` `agentrl.records.Gone` `make demmo`\n"
        "`agentrl/CodeRepair-v0` `agentrl.environments`\n"
        "```text\n[e](inside_a_block.md)\n```\n"
    )
    assert broken_links(document) == ["page.md: page.md#two names no heading", "page.md: gone.md is not there"]
    assert unknown_names(document) == [
        "page.md: agentrl/gone.py",
        "page.md: agentrl.records.Gone",
        "page.md: no such target: make demmo",
    ]
