"""The command `agentrl health`. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import run_folders
from agentrl.errors import AgentRLError, UsageError


def health(
    path: Annotated[Path, typer.Argument(metavar="RUN", autocompletion=run_folders, help="A run directory")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Say what goes wrong in a run: the cause, the figures that show it, and what to type. Changes nothing. Exit code
    0: nothing does; 1: there is advice; 2: the run cannot be read."""
    from agentrl.host.terminal_text import printable
    from agentrl.run.health.examine import examine
    from agentrl.run.health.run_facts import facts_of
    from agentrl.run.run_folder import RunDir

    try:
        run_facts = facts_of(RunDir.open(path))
    except UsageError:
        raise
    except (AgentRLError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    findings = examine(run_facts)
    if as_json:
        advice_documents = [finding.document(path) for finding in findings]
        print(
            json.dumps({"run": str(path), "step": run_facts.step, "healthy": not findings, "advice": advice_documents})
        )
    elif not findings:
        healthy_text = f"{run_facts.step} steps and {len(run_facts.episodes)} of the newest episodes show nothing wrong"
        print(
            f"{path}: {healthy_text}"
            if run_facts.episodes
            else f"{path}: no episode has ended, so there is nothing to judge"
        )
    for finding in () if as_json else findings:
        print(printable(f"{finding.name}: {finding.cause}"))
        print(printable(f"    {finding.evidence}"))
        for command_line in finding.typed(path):
            print(printable(f"    $ {command_line}"))
    if findings:
        raise SystemExit(1)
