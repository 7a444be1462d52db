"""The commands on reward sources, as `agentrl.cli` offers them. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.completion import run_folders

_RUN = Annotated[Path, typer.Argument(autocompletion=run_folders, help="A run directory")]


def rewards(path: _RUN, as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """Show the scores, duration and cost of each reward source of a run, and the means of the environment's reward
    functions in its first and last ten steps."""
    from agentrl.env.gymnasium_wrappers import printable
    from agentrl.run.reward_services import by_function, failures, reports
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    with RunStore.read(RunDir.open(path).store_path) as store:
        sources, failed = list(reports(store)), failures(store)
        functions = by_function([row.values for row in store.metrics.values("step")])
    if as_json:
        document = {"sources": sources, "failures": failed}
        rows = {name: [asdict(reward) for reward in many] for name, many in document.items()}
        print(json.dumps({**rows, "functions": functions}, indent=2))
        return
    table = Table("source", "version", "turns", "counted", "mean", "least", "most", "s a turn", "calls")
    for report in sources:
        numbers = [f"{value:.3f}" for value in (report.mean, report.least, report.most, report.took_s)]
        table.add_row(
            report.source, str(report.version), str(report.turns), str(report.counted), *numbers, f"{report.cost:g}"
        )
    console = tables.console()
    if sources or not functions:
        console.print(table if sources else "no reward source scored a turn of this run")
    for failure in failed:
        console.print(printable(str(failure)), markup=False, highlight=False)
    if texts := [(failure.source, text) for failure in failed for text in failure.texts]:
        unscored = Table("source", "text without a score", "turns", "why", title="texts that never got a score")
        for source, text in texts:
            unscored.add_row(*(escape(printable(cell)) for cell in (source, text.text, str(text.turns), text.reason)))
        console.print(unscored)
    if functions:
        means = Table("reward function", "first steps", "last steps")
        for name, mean in functions.items():
            means.add_row(escape(name), f"{mean['first']:.3f}", f"{mean['last']:.3f}")
        console.print(means)


def rescore(path: _RUN, source: Annotated[str, typer.Option(help="Its name in the run file")]) -> None:
    """Have a source score a stored run again, as a version of its own; what was trained stays as it was."""
    import trio

    from agentrl.run.reward_services import rescore as score_again
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    with RunStore.open(run.store_path) as store:
        version, failed = trio.run(score_again, run.config(), store, source)
    print(f"scored as version {version} of {source}, {failed} turns failed; see: agentrl rewards {path}")
