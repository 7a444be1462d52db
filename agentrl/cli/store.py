"""The commands `agentrl store …`, as `agentrl.cli` offers them. Nothing heavy is imported before they run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UsageError

store = typer.Typer(no_args_is_help=True, help="The store of a run.")


@store.callback()
def _store() -> None:
    """The store of a run."""


@store.command("copy")
def copy(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory; the run must not be under way")],
    to: Annotated[str, typer.Option("--to", help="postgresql://user@host/database, or sqlite: a file in the folder")],
) -> None:
    """Copy a run's store to PostgreSQL or back to a file; the run goes on with the copy, the old store is kept."""
    from agentrl.run.run_folder import RunDir
    from agentrl.store.copy_database import move
    from agentrl.store.databases.open_store import supervising

    if to != "sqlite" and not to.startswith(("postgresql://", "postgres://")):
        raise UsageError(f"--to {to}: give postgresql://user@host/database, or sqlite")
    run = RunDir.open(path)
    with run.lock(), supervising(run.store_path, of_copy=True):  # what gives a copy its own
        kept, rows = move(path, None if to == "sqlite" else to, time.time)
    print(f"{rows} rows copied; {run.store_path} names the store from now on, {kept} the old one")
