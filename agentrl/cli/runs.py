"""The command `agentrl runs`. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.completion import run_folders
from agentrl.errors import AgentRLError, UsageError


def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            autocompletion=run_folders,
            help="Folders of runs, or run directories; default: runs",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list")] = False,
) -> None:
    """List runs, those that began last first: state, steps, success, tags."""
    from agentrl.view import run_answers
    from agentrl.view.opened_runs import OpenedRuns

    for place in places or [Path("runs")]:
        if not place.is_dir():
            raise UsageError(f"{place} is no folder: name the folder of your runs; agentrl train makes one")
    found: list[dict[str, Any]] = []
    opened = OpenedRuns(places or [Path("runs")])
    try:
        for one in opened.all():
            try:
                found.append(run_answers.line(one))
            except AgentRLError as error:
                found.append({"id": one.id, "path": str(one.run.path), "error": str(error)})
    finally:
        opened.close()
    if as_json:
        print(json.dumps(found))
        return
    table = Table("run", "state", "step", "left", "success", "held-out", "environment", "tags")
    for row in found:
        table.add_row(*map(escape, _cells(row)))
    tables.console().print(table if found else "no runs are here: agentrl train FILE begins one")


def _cells(row: dict[str, Any]) -> list[str]:
    from agentrl.run.reporting.status import duration

    if "error" in row:
        return [row["id"], f"cannot be read: {row['error']}", *[""] * 6]
    held_out = row["held_out"]
    return [
        row["id"],
        row["state"],
        f"{row['step']}/{row['steps']}",
        "" if row["eta_s"] is None else duration(row["eta_s"]),
        "" if row["success"] is None else f"{row['success']:.2f}",
        f"{held_out[-1][1]:.2f}" if held_out else "",
        row["env"],
        ", ".join(row.get("tags") or []),
    ]
