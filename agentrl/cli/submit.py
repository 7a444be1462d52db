"""The command `agentrl submit`, as `agentrl.cli` offers it. Imports nothing heavy before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def submit(
    file: Annotated[Path, typer.Argument(help="A run file (TOML)")],
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard: http://HEAD:8265")
    ],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder, at this path on the cluster")] = None,
    deadline_s: Annotated[float, typer.Option(min=0, help="How long to wait for its start")] = 60.0,
) -> None:
    """Start a run on a Ray cluster, as a job of its own that nobody's terminal ends."""
    from agentrl import config as configuration
    from agentrl.errors import UsageError
    from agentrl.run.cluster import submit as submitting
    from agentrl.run.run_folder import RunDir

    given = settings or []
    config = configuration.load(file, ["cluster.launcher=ray", *given])
    place = (out or Path("runs") / config.name).absolute()
    if RunDir(place).store_path.exists():
        raise UsageError(f"{place} holds a run: give another --out, or agentrl train --resume {place} on the cluster")
    job = submitting.submit(address, submitting.entrypoint(file, place, given), deadline_s=deadline_s)
    print(f"job {job} of {address} trains in {place}")
    print(f"next      agentrl status {place}; agentrl logs {place} --follow; agentrl stop {place}")
