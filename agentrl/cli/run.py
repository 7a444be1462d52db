"""The commands `agentrl logs`, `tasks`, `scale`, `stop` and `submit`. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from agentrl.cli.completion import run_folders
from agentrl.errors import UsageError
from agentrl.host import json_log

if TYPE_CHECKING:
    from agentrl.run.run_folder import RunDir


_RUN = Annotated[Path, typer.Argument(metavar="RUN", autocompletion=run_folders, help="A run directory")]
_TAIL = 1 << 20  # bytes at a log's end that are searched for its last lines
_POLL_S = 0.2


def logs(
    path: _RUN,
    part: Annotated[str | None, typer.Argument(help="learner, worker-0, engine-0 …; default: all")] = None,
    n: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines of each log")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, of text too")] = False,
) -> None:
    """Show the last lines of a run's logs, one log for each of its processes."""
    from agentrl.run.reporting.status import holder
    from agentrl.run.run_folder import RunDir

    run, tell = RunDir.open(path), _tell_json if as_json else _tell
    read: dict[Path, int] = {}
    first_logs = _chosen(run, part)
    if not first_logs and not follow:
        print(f"{path} has no logs: its processes write them while it is under way", file=sys.stderr)
    for log in first_logs:
        with log.open("rb") as file:
            tell(log, *_last(file, n))
            read[log] = file.tell()
    while follow:
        live = holder(run).kind != "nobody"  # before the look: what was written until the end is shown
        for log in _chosen(run, part):
            with log.open("rb") as file:
                position = read.get(log, 0)
                file.seek(
                    position if position <= os.fstat(file.fileno()).st_size else 0
                )  # an attempt began its log anew
                tell(log, *file.read(_TAIL).decode(errors="replace").splitlines())
                read[log] = file.tell()
        if not live:
            return
        # Polled, as a log may lie on a network's disk, whose changes the kernel of this machine reports to nobody.
        time.sleep(_POLL_S)


def tasks(
    path: _RUN,
    failed: Annotated[bool, typer.Option("--failed", help="Only tasks of which an episode failed")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """List a run's tasks: how many of their episodes ended, with which success. With --failed, those that failed
    through no doing of the policy: why, where and how often."""
    from agentrl.cli import tables
    from agentrl.run.reporting import failed_tasks
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    config = run.config()
    with RunStore.read(run.store_path) as store:
        rows = (
            failed_tasks.as_rows(store.metrics.failed_tasks(), config)
            if failed
            else failed_tasks.all_rows(store, config)
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("no episode failed through no doing of the policy" if failed else "no episode has ended")
        return
    console = tables.console()
    console.print(failed_tasks.table(rows) if failed else failed_tasks.tasks_table(rows))
    if failed and (line := failed_tasks.skip_hint(rows, path)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def stop(
    path: _RUN,
    deadline_s: Annotated[float, typer.Option(min=0, help="How long to wait for its end")] = 120.0,
) -> None:
    """End a run in order, as Ctrl-C does where it was started. It can be resumed."""
    from agentrl.run.reporting.status import stop as end
    from agentrl.run.run_folder import RunDir

    print(end(RunDir.open(path), deadline_s))


def scale(
    path: _RUN,
    engines: Annotated[int | None, typer.Option(help="Engines of each model that learns, at least 1")] = None,
    workers: Annotated[int | None, typer.Option(help="Rollout workers, at least 1")] = None,
) -> None:
    """Change how many engines and workers a run has, while it goes on. Nothing sampled is lost, and a run that is
    resumed keeps the numbers."""
    from agentrl.run.reporting.status import scale as ask
    from agentrl.run.run_folder import RunDir

    print(ask(RunDir.open(path), engines=engines, workers=workers))


def _chosen(run: RunDir, part: str | None) -> list[Path]:
    logs_by_part = {log.stem: log for log in sorted(run.logs.glob("*.log"))}
    if part is None:
        return list(logs_by_part.values())
    if part not in logs_by_part:
        raise UsageError(f"{run.path} has no log {part!r}; it has: {', '.join(logs_by_part) or 'none'}")
    return [logs_by_part[part]]


def _last(file: IO[bytes], n: int) -> list[str]:
    """The last n lines, of the last MiB at most."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    lines = file.read(_TAIL).decode(errors="replace").splitlines()
    return lines[-n:] if n else []


def _tell(log: Path, *lines: str) -> None:
    """Print what a policy and its programs printed, without control characters: none reaches the terminal."""
    from agentrl.env.gymnasium_wrappers import printable

    for line in lines:
        print(printable(f"{log.stem}: {line}"), flush=True)


def _tell_json(log: Path, *lines: str) -> None:
    """Print each line as an object with its `process`: a line of JSON with its own keys (time, level, message), a line
    of text as a `message` alone."""
    for line in lines:
        if line.strip():
            row = json_log.read(line) or {"message": line}
            print(json.dumps({"process": log.stem, **row}), flush=True)


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

    typed = settings or []
    config = configuration.load(file, ["cluster.launcher=ray", *typed])
    place = (out or Path("runs") / config.name).absolute()
    # Looked at here, although the folder is the cluster's: with a shared disk it is the same one, and the refusal comes
    # before a job waits in a queue for it.
    if RunDir(place).store_path.exists():
        raise UsageError(f"{place} holds a run: give another --out, or agentrl train --resume {place} on the cluster")
    job = submitting.submit(address, submitting.entrypoint(file, place, typed), deadline_s=deadline_s)
    print(f"job {job} of {address} trains in {place}")
    print(f"next      agentrl status {place}; agentrl logs {place} --follow; agentrl stop {place}")
