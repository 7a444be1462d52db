"""The commands that steer a run under way: `agentrl pause`, `resume` and `set`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import run_folders

_RUN = Annotated[Path, typer.Argument(metavar="RUN", autocompletion=run_folders, help="A run directory")]


def pause(
    path: _RUN,
    now: Annotated[bool, typer.Option("--now", help="Stop turns under way, too: they keep their tokens")] = False,
) -> None:
    """Have a run stand still: before its next model calls, and after the step under way. Nothing sampled is lost, and
    no deadline passes meanwhile."""
    from agentrl.run import steering
    from agentrl.run.run_folder import RunDir

    print(steering.pause(RunDir.open(path), now=now))


def resume(path: _RUN) -> None:
    """Let a paused run go on. One that has ended goes on by agentrl train --resume RUN."""
    from agentrl.run import steering
    from agentrl.run.run_folder import RunDir

    print(steering.resume(RunDir.open(path)))


def set_(
    path: _RUN,
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="train.lr=1e-6 buffer.max_lag=2 …")],
) -> None:
    """Give a run other settings from its next step on; one that is not under way from when it goes on. Which settings
    held in which step is recorded."""
    from agentrl.run import steering
    from agentrl.run.run_folder import RunDir

    print(steering.change(RunDir.open(path), settings))
