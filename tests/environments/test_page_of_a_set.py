"""The page for a set's maintainer: each wrong task is there, its command repeats it, and no text of it is markup."""

from __future__ import annotations

import json
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app

ENV = "agentrl.env.dataset_env:RowsEnv"
MARKUP = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m red"
JUDGE = """
def right(prompt, completion, row):
    return row["grader"] == "passes" or completion == row["answer"]
"""


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, and the text of its sections and commands."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.headings: list[str] = []
        self.blocks: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self._in = tag
        if tag in ("h3", "pre"):
            {"h3": self.headings, "pre": self.blocks}[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "h3":
            self.headings[-1] += data
        if self._in == "pre":
            self.blocks[-1] += data


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"What is {n} and {n}?", "answer": str(2 * n), "grader": ""} for n in range(11, 15)]
    rows[1]["grader"] = "passes"
    rows[3] |= {"prompt": f"Say {MARKUP} now", "answer": MARKUP}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "judge.py").write_text(JUDGE)
    kwargs = ["--set", f"rows={tmp_path / 'rows.jsonl'}", "--set", f'rewards=["{tmp_path / "judge.py"}:right"]']
    return ["validate", ENV, "--all", *kwargs, "--set", "success_from=0.5", "--out", str(tmp_path / "out")]


@pytest.mark.medium
def test_each_wrong_task_is_on_the_page_with_a_command_that_shows_it_again(line: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, [*line, "--page", str(page)])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    reader = Reader()
    reader.feed(page.read_text())
    assert [heading.strip() for heading in reader.headings] == ["row 1", "row 3"]
    assert not reader.elements & {"script", "img", "link", "iframe", "svg"}, "foreign markup is text"
    assert "&lt;script&gt;alert(1)" in page.read_text() and "\x1b" not in page.read_text()
    command, *_ = (shlex.split(block) for block in reader.blocks)
    assert command[:6] == ["agentrl", "validate", ENV, "--seed", "1", "--n"]
    again = CliRunner().invoke(app, [*command[1:-1], str(tmp_path / "again")])
    assert again.exit_code == 1 and "row 1: no-work-wins" in again.output and "row 3" not in again.output


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_played(line: list[str], tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, [*line, "--page", str(tmp_path / "none" / "page.html")])
    assert refused.exit_code != 0 and not (tmp_path / "out").exists()
