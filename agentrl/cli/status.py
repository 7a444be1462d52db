"""The command `agentrl status`: one run, or all runs of a folder. Imports nothing heavy."""

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


def status(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            autocompletion=run_folders,
            help="A run directory, or folders of runs; default: runs",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for a run, a JSON list for folders")
    ] = False,
) -> None:
    """Say what a run does now, and what to type next; for a folder, list its runs, those that began last first.
    Changes nothing."""
    from agentrl.run.run_folder import RunDir

    places = places or [Path("runs")]
    for place in places:
        if not place.is_dir():
            raise UsageError(f"{place} is no folder: name a run or the folder of your runs; agentrl train makes one")
    # A run has a store in it, a folder of runs has none: `agentrl status` alone lists ./runs.
    if len(places) == 1 and RunDir(places[0]).store_path.exists():
        _show_run(places[0], as_json=as_json)
    else:
        _list_runs(places, as_json=as_json)


def _show_run(path: Path, *, as_json: bool) -> None:
    from agentrl.env.gymnasium_wrappers import printable
    from agentrl.run.reporting import status as run_status
    from agentrl.run.run_folder import RunDir

    now = run_status.status(RunDir.open(path))
    if as_json:
        print(json.dumps(now))
        return
    for text in run_status.lines(now):
        for line in text.splitlines():  # it may hold names and errors that a policy or its programs wrote
            print(printable(line))


def _list_runs(places: list[Path], *, as_json: bool) -> None:
    from agentrl.view import run_answers
    from agentrl.view.opened_runs import OpenedRuns

    rows: list[dict[str, Any]] = []
    opened = OpenedRuns(places)
    try:
        for run in opened.all():
            try:
                rows.append(run_answers.line(run))
            # One folder that cannot be read must not hide the runs beside it.
            except AgentRLError as error:
                rows.append({"id": run.id, "path": str(run.run.path), "error": str(error)})
    finally:
        opened.close()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("run", "state", "step", "left", "success", "held-out", "environment", "tags")
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    tables.console().print(table if rows else "no runs are here: agentrl train FILE begins one")


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
