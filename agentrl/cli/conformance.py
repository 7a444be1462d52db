"""The command `agentrl conformance`. Imports nothing heavy before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.tables import print_line
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.conformance.cases import Case
    from agentrl.conformance.conduct import Report


def conformance(
    trainer: Annotated[
        str, typer.Option(help="agentrl, trl, verifiers, one of a package, or module:object")
    ] = "agentrl",
    python: Annotated[Path | None, typer.Option(help="The Python that has the trainer; default: this one")] = None,
    case: Annotated[list[str] | None, typer.Option(help="One case alone; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Hold a trainer to what it must never train on, with a scripted engine and a tiny model, without a GPU. Exit code
    0: no case breaks; 1: one does."""
    from agentrl.conformance.conduct import conduct

    if python is not None and not python.is_file():
        raise ConfigError("--python", str(python), "give the path of a Python: ENVIRONMENT/bin/python")
    report = conduct(
        trainer,
        _chosen(case),
        python=None if python is None else str(python.absolute()),
        notify=lambda name: print(name, file=sys.stderr, flush=True),
    )
    if as_json:
        tables.print_json(report.document())
    else:
        _show(report)
    if report.broken:
        raise SystemExit(1)


def _chosen(names: list[str] | None) -> list[Case]:
    from agentrl.conformance.cases import CASES

    for name in names or ():
        if name not in {each.name for each in CASES}:
            raise ConfigError("--case", name, f"give one of {', '.join(each.name for each in CASES)}")
    return [each for each in CASES if not names or each.name in names]


def _show(report: Report) -> None:
    from agentrl.host.terminal_text import printable

    table = Table("case", "verdict", "evidence")
    for result in report.results:
        table.add_row(result.case.name, result.verdict.outcome, printable(result.verdict.evidence).replace("[", r"\["))
    tables.console().print(table)
    print_line(", ".join([report.trainer, *(f"{name} {version}" for name, version in report.versions.items())]))
