"""The command that hurts a run on purpose, as `agentrl.cli` offers it. Imports nothing heavy before it is needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli import tables

_SETTINGS = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")]
_RESTART_GROUPS = Annotated[
    bool, typer.Option(help="Interrupted groups start anew; with --compare, in a further run with the same faults")
]
_RESTART_DATABASE = Annotated[
    str, typer.Option(help="The shell's command that restarts the PostgreSQL server of the run's store")
]
_ONLY = Annotated[list[str] | None, typer.Option(help="Only this fault, as kill:worker; may be given again")]


def chaos(
    file: Annotated[Path, typer.Argument(help="The run file (TOML)")],
    faults: Annotated[int, typer.Option(min=1, help="How often the run is hurt")] = 10,
    seed: Annotated[int, typer.Option(help="Decides the faults and their times")] = 0,
    out: Annotated[Path, typer.Option(help="Run directory")] = Path("runs/chaos"),
    every_s: Annotated[float, typer.Option(help="Mean seconds between two faults")] = 60.0,
    only: _ONLY = None,
    disk_mb: Annotated[int, typer.Option(min=0, help="Size of the disk that is filled; 0: none is")] = 512,
    compare: Annotated[bool, typer.Option(help="Run it undisturbed as well, and show both")] = False,
    restart_groups: _RESTART_GROUPS = False,
    restart_database: _RESTART_DATABASE = "",
    settings: _SETTINGS = None,
) -> None:
    """Hurt a run on purpose (kill, stop, slow down, cut off, fill its disk …) and audit it; exit code 1 if it does not
    hold."""
    from agentrl.config import load
    from agentrl.errors import UsageError
    from agentrl.offline.chaos import Hurts, hurt, on_a_small_disk

    what = Hurts(
        file=file,
        out=out,
        faults=faults,
        seed=seed,
        every_s=every_s,
        only=tuple(only or ()),
        settings=tuple(settings or ()),
        compare=compare,
        restart_groups=restart_groups,
        restart_database=restart_database,
    )
    config = load(file, settings)  # before anything is made: a mistyped setting leaves no folder behind
    if not 0 < every_s < math.inf:
        raise UsageError(f"--every-s {every_s:g}: must be a number of seconds above 0, such as 60")
    what.check(config, disk_mb)
    console = tables.console()
    status = on_a_small_disk(what, disk_mb)
    if status is None:
        status = 0 if hurt(what, console) else 1
    if status:
        raise SystemExit(status)
