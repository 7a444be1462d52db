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
    for run_place in places:
        if not run_place.is_dir():
            raise UsageError(
                f"{run_place} is no folder: name a run or the folder of your runs; agentrl train makes one"
            )
    # A run has a store in it, a folder of runs has none: `agentrl status` alone lists ./runs.
    if len(places) == 1 and RunDir(places[0]).store_path.exists():
        _show_run(places[0], as_json=as_json)
    else:
        _list_runs(places, as_json=as_json)


def _show_run(path: Path, *, as_json: bool) -> None:
    from agentrl.host.terminal_text import printable
    from agentrl.run.reporting import status as run_status
    from agentrl.run.run_folder import RunDir

    run_state = run_status.status(RunDir.open(path))
    if as_json:
        print(json.dumps(run_state))
        return
    for status_text in run_status.lines(run_state):
        for status_line in status_text.splitlines():  # it may hold names and errors that a policy or its programs wrote
            print(printable(status_line))


def _list_runs(places: list[Path], *, as_json: bool) -> None:
    from agentrl.view import run_answers
    from agentrl.view.opened_runs import OpenedRuns

    run_rows: list[dict[str, Any]] = []
    opened_runs = OpenedRuns(places)
    try:
        for opened_run in opened_runs.all():
            try:
                run_rows.append(run_answers.line(opened_run))
            # One folder that cannot be read must not hide the runs beside it.
            except AgentRLError as error:
                run_rows.append({"id": opened_run.id, "path": str(opened_run.run.path), "error": str(error)})
    finally:
        opened_runs.close()
    if as_json:
        print(json.dumps(run_rows))
        return
    run_table = Table("run", "state", "step", "left", "success", "held-out", "environment", "tags")
    for run_row in run_rows:
        run_table.add_row(*map(escape, _cells(run_row)))
    tables.console().print(run_table if run_rows else "no runs are here: agentrl train FILE begins one")


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
