"""`python -m tests.cli_page` writes docs/reference/cli.md: every command, with its arguments and options."""

from __future__ import annotations

import html
from pathlib import Path

import typer.main
from typer.cli import get_docs_for_click

from agentrl.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
_HEAD = """\
# The command line

For those who know the command and want its options. `agentrl COMMAND --help` prints the same. A failure is one line,
and an exit code other than 0. `python -m tests.cli_page` writes this page, and a test compares it with the program.
"""


def page() -> str:
    program = typer.main.get_command(app)
    made = get_docs_for_click(obj=program, ctx=typer.Context(program), name="agentrl")
    _, _, commands = html.unescape(made).partition("\n## ")
    commands = commands.replace("```console\n$ ", "```text\n").replace("\n* `", "\n- `")
    # Every command has this option, and the head of the page says so.
    commands = commands.replace("\n- `--help`: Show this message and exit.", "").replace("**Options**:\n\n\n", "")
    return f"{_HEAD}\n## {commands.strip()}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
