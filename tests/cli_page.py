"""`python -m tests.cli_page` writes docs/reference/cli.md: every command, with its arguments and options."""

from __future__ import annotations

import html
import re
from pathlib import Path

import typer.main
from typer.cli import get_docs_for_click

from agentrl.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
_HEAD = """\
# The command line

For those who know the command and want its options. `agentrl COMMAND --help` prints the same. A failure is one line,
and an exit code other than 0. Arguments stand before options, in their order. Commands on a run take its directory
first, as their examples show.

Commands that report take `--json` ([what they print then](json.md)). Commands that read your data (`train`, `eval`,
`validate`, `sft`, `compare`) take `--strict`, which refuses unused input, as `AGENTRL_STRICT=1` does.
"""
_KINDS = {"list[str]": "text", "list[Path]": "path", "str": "text", "int range": "integer", "int": "integer"}
_KINDS |= {"float range": "number", "float": "number"}
"""What a reader calls the values that typer names by their Python types."""


def page() -> str:
    program = typer.main.get_command(app)
    made = get_docs_for_click(obj=program, ctx=typer.Context(program), name="agentrl")
    _, _, commands = html.unescape(made).partition("\n## ")
    # The head of the page explains these arguments and options once.
    commands = re.sub(r"\n\* `(RUN|path) <path>`: A run directory  \[required\]$", "", commands, flags=re.M)
    commands = re.sub(r"\n\* `--(help`: Show this message|json`: Print JSON$|strict`: ).*", "", commands, flags=re.M)
    # A group's only command has its own part.
    commands = re.sub(r"\*\*Commands\*\*:\n+(\* .*\n+)+", "", commands)
    commands = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*\n```\n\n", "", commands)
    commands = re.sub(r"\*\*(Arguments|Options)\*\*:\n+", "", commands).replace("\n* `", "\n- `")
    commands = re.sub(r"(?m)^(- `.*)\n\n(?=- `)", r"\1\n", commands)
    commands = re.sub(r"Examples?:\n\n((?:agentrl .*\n+)+)", _examples, commands)
    commands = re.sub(r" / --no-(\S+)`(.*)  \[default: no-\1\]", r"`\2", commands)
    commands = re.sub(r"<([^<>|]+)>`", lambda kind: f"<{_KINDS.get(kind[1], kind[1])}>`", commands)
    return f"{_HEAD}\n## {commands.strip()}\n"


def _examples(lines: re.Match[str]) -> str:
    return "```text\n" + re.sub("\n+", "\n", lines[1]) + "```\n\n"


if __name__ == "__main__":
    PAGE.write_text(page())
