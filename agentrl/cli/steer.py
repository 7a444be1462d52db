"""The commands that steer a run under way: `agentrl pause`, `resume`, `set` and `requeue`. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import asdict
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


def requeue(
    path: _RUN,
    failed: Annotated[bool, typer.Option("--failed", help="All that failed or is no longer retried")] = False,
    groups: Annotated[list[int] | None, typer.Option("--group", metavar="ID", help="Only of this group; again")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be played again, and change nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Play again what failed because of infrastructure, and what a run no longer retries: in a run under way, or in one
    that stopped when it goes on. What a step has taken stays as it is, and each thing is played again once."""
    from agentrl.errors import UsageError
    from agentrl.run import steering
    from agentrl.run.run_folder import RunDir

    if not failed and not groups:
        raise UsageError(f"say what: agentrl requeue {path} --failed, or --group ID")
    run_folder = RunDir.open(path)
    requeued = steering.requeue(run_folder, groups or None, dry_run=dry_run)
    text_lines = steering.requeued_lines(run_folder, requeued, dry_run=dry_run)
    for output_line in [json.dumps({**asdict(requeued), "dry_run": dry_run})] if as_json else text_lines:
        print(output_line)
