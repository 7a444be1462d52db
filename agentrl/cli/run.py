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

    run_folder, print_lines = RunDir.open(path), _tell_json if as_json else _tell
    read_positions: dict[Path, int] = {}
    first_logs = _chosen(run_folder, part)
    if not first_logs and not follow:
        print(f"{path} has no logs: its processes write them while it is under way", file=sys.stderr)
    for log_path in first_logs:
        with log_path.open("rb") as log_file:
            print_lines(log_path, *_last(log_file, n))
            read_positions[log_path] = log_file.tell()
    while follow:
        is_live = holder(run_folder).kind != "nobody"  # before the look: what was written until the end is shown
        for log_path in _chosen(run_folder, part):
            with log_path.open("rb") as log_file:
                position = read_positions.get(log_path, 0)
                log_file.seek(
                    position if position <= os.fstat(log_file.fileno()).st_size else 0
                )  # an attempt began its log anew
                print_lines(log_path, *log_file.read(_TAIL).decode(errors="replace").splitlines())
                read_positions[log_path] = log_file.tell()
        if not is_live:
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

    run_folder = RunDir.open(path)
    run_config = run_folder.config()
    with RunStore.read(run_folder.store_path) as run_store:
        task_rows = (
            failed_tasks.as_rows(run_store.metrics.failed_tasks(), run_config)
            if failed
            else failed_tasks.all_rows(run_store, run_config)
        )
    if as_json:
        print(json.dumps(task_rows, indent=2))
        return
    if not task_rows:
        print("no episode failed through no doing of the policy" if failed else "no episode has ended")
        return
    console = tables.console()
    console.print(failed_tasks.table(task_rows) if failed else failed_tasks.tasks_table(task_rows))
    if failed and (hint_line := failed_tasks.skip_hint(task_rows, path)):
        console.print(hint_line, markup=False, highlight=False, soft_wrap=True)


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
    logs_by_part = {log_path.stem: log_path for log_path in sorted(run.logs.glob("*.log"))}
    if part is None:
        return list(logs_by_part.values())
    if part not in logs_by_part:
        raise UsageError(f"{run.path} has no log {part!r}; it has: {', '.join(logs_by_part) or 'none'}")
    return [logs_by_part[part]]


def _last(file: IO[bytes], n: int) -> list[str]:
    """The last n lines, of the last MiB at most."""
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - _TAIL))
    last_lines = file.read(_TAIL).decode(errors="replace").splitlines()
    return last_lines[-n:] if n else []


def _tell(log: Path, *lines: str) -> None:
    """Print what a policy and its programs printed, without control characters: none reaches the terminal."""
    from agentrl.host.terminal_text import printable

    for log_line in lines:
        print(printable(f"{log.stem}: {log_line}"), flush=True)


def _tell_json(log: Path, *lines: str) -> None:
    """Print each line as an object with its `process`: a line of JSON with its own keys (time, level, message), a line
    of text as a `message` alone."""
    for log_line in lines:
        if log_line.strip():
            log_record = json_log.read(log_line) or {"message": log_line}
            print(json.dumps({"process": log.stem, **log_record}), flush=True)


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

    typed_settings = settings or []
    run_config = configuration.load(file, ["cluster.launcher=ray", *typed_settings])
    run_path = (out or Path("runs") / run_config.name).absolute()
    # Looked at here, although the folder is the cluster's: with a shared disk it is the same one, and the refusal comes
    # before a job waits in a queue for it.
    if RunDir(run_path).store_path.exists():
        raise UsageError(
            f"{run_path} holds a run: give another --out, or agentrl train --resume {run_path} on the cluster"
        )
    job_id = submitting.submit(address, submitting.entrypoint(file, run_path, typed_settings), deadline_s=deadline_s)
    print(f"job {job_id} of {address} trains in {run_path}")
    print(f"next      agentrl status {run_path}; agentrl logs {run_path} --follow; agentrl stop {run_path}")
