"""The command `agentrl demos`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.completion import environment_ids


def demos(
    env: Annotated[str, typer.Argument(autocompletion=environment_ids, help="Environment id")],
    out: Annotated[Path, typer.Option(help="The file, JSON lines for the data of agentrl sft")],
    n: Annotated[int, typer.Option(min=1, help="Demonstrations, one for each task")] = 500,
    mistakes: Annotated[float, typer.Option(min=0, max=1, help="Share in which an oracle acts that errs")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first task")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Constructor argument: key=value")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file that is there")] = False,
) -> None:
    """Write demonstrations of an environment's oracles, for agentrl sft."""
    from agentrl.config import apply_override
    from agentrl.offline.oracle_demonstrations import write

    env_kwargs: dict[str, Any] = {}
    for assignment in settings or []:
        apply_override(env_kwargs, assignment)
    report_every, reported = max(1, n // 10), 0

    def progress(written: int) -> None:
        nonlocal reported
        if written // report_every > reported:
            reported = written // report_every
            print(f"{written} of {n}", file=sys.stderr)

    counts = write(env, n, out, mistakes=mistakes, seed=seed, kwargs=env_kwargs, overwrite=overwrite, progress=progress)
    left_out = f"; {counts.left_out} tasks had none" if counts.left_out else ""
    print(f"{counts.demonstrations} demonstrations, {counts.mistaken} of them with mistakes: {out}{left_out}")
