"""Law 7: fast is measured. A page that says so names the command that measured it, and that command is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RESULTS = sorted((ROOT / "benchmarks").glob("*.md"))
CLAIM = re.compile(
    r"[\d.,]+\s?(?:\u00d7|times)\s(?:as\s)?(?:faster|fast|slower|quicker|the\s(?:speed|throughput))", re.IGNORECASE
)
NAMED = re.compile(r"agentrl ([a-z]+)(?: ([a-z_]+))?|benchmarks/([a-z_]+)\.(?:md|py)")


def sections(page: str) -> Iterator[str]:
    yield from re.split(r"^#+ ", page, flags=re.MULTILINE)


def commands() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


def measured_by(text: str) -> set[str]:
    """The commands and benchmarks named in a text that exist."""
    found: set[str] = set()
    for command, benchmark, file in NAMED.findall(text):
        if command == "bench" and (ROOT / "benchmarks" / f"{benchmark}.py").exists():
            found.add(f"bench {benchmark}")
        elif command in commands() - {"bench"}:
            found.add(command)
        elif file and ((ROOT / "benchmarks" / f"{file}.py").exists() or (ROOT / "benchmarks" / f"{file}.md").exists()):
            found.add(file)
    return found


def unmeasured(page: str) -> list[str]:
    """The claims of speed in the sections of a page that name no way to measure them."""
    return [claim for part in sections(page) if not measured_by(part) for claim in CLAIM.findall(part)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_law_7_a_claim_of_speed_names_a_benchmark_that_is_there(page: Path) -> None:
    assert unmeasured(page.read_text()) == []


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_law_7_a_page_of_results_names_the_command_that_gave_them(page: Path) -> None:
    assert measured_by(page.read_text())
    missing = [
        name
        for name in re.findall(r"agentrl bench ([a-z_]+)", page.read_text())
        if f"bench {name}" not in measured_by(page.read_text())
    ]
    assert missing == []


def test_law_7_a_claim_without_a_benchmark_is_found() -> None:
    assert unmeasured("# Speed\nIt is 12 times faster than before.\n## Where\nagentrl bench store") == [
        "12 times faster"
    ]
    assert unmeasured("# Speed\nIt is 12\u00d7 faster (`agentrl bench nothing`).") == ["12\u00d7 faster"]
    assert unmeasured("# Speed\nIt is 12 times as fast: `agentrl bench store`.") == []
