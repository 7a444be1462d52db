"""The commands on reward sources, as `agentrl.cli` offers them. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.completion import episode_numbers, run_folders

if TYPE_CHECKING:
    from agentrl.store import Scored

_RUN = Annotated[Path, typer.Argument(autocompletion=run_folders, help="A run directory")]


def rewards(
    path: _RUN,
    episode: Annotated[
        int | None, typer.Option(autocompletion=episode_numbers, help="Its scores alone, and why they are that")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show the scores, duration and cost of each reward source of a run, and the means of the environment's reward
    functions in its first and last ten steps."""
    from agentrl.host.terminal_text import printable
    from agentrl.run.reporting.reward_figures import by_function, failures, reports
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    with RunStore.read(RunDir.open(path).store_path) as run_store:
        if episode is not None:
            _print_scores(run_store.scores.recorded(episode=episode), as_json)
            return
        source_reports, source_failures = list(reports(run_store)), failures(run_store)
        functions = by_function([step_row.values for step_row in run_store.metrics.values("step")])
    if as_json:
        document = {"sources": source_reports, "failures": source_failures}
        report_rows = {
            row_label: [asdict(source_row) for source_row in source_rows] for row_label, source_rows in document.items()
        }
        print(json.dumps({**report_rows, "functions": functions}, indent=2))
        return
    source_table = Table("source", "version", "turns", "counted", "mean", "least", "most", "s a turn", "calls")
    for source_report in source_reports:
        score_cells = [
            f"{figure:.3f}"
            for figure in (source_report.mean, source_report.least, source_report.most, source_report.took_s)
        ]
        source_table.add_row(
            source_report.source,
            str(source_report.version),
            str(source_report.turns),
            str(source_report.counted),
            *score_cells,
            f"{source_report.cost:g}",
        )
    console = tables.console()
    if source_reports or not functions:
        console.print(source_table if source_reports else "no reward source scored a turn of this run")
    for source_failure in source_failures:
        console.print(printable(str(source_failure)), markup=False, highlight=False)
    if failed_texts := [
        (source_failure.source, failed_text)
        for source_failure in source_failures
        for failed_text in source_failure.texts
    ]:
        unscored = Table("source", "text without a score", "turns", "why", title="texts that never got a score")
        for source_name, failed_text in failed_texts:
            unscored.add_row(
                *(
                    escape(printable(cell_text))
                    for cell_text in (source_name, failed_text.text, str(failed_text.turns), failed_text.reason)
                )
            )
        console.print(unscored)
    if functions:
        mean_table = Table("reward function", "first steps", "last steps")
        for row_label, function_means in functions.items():
            mean_table.add_row(escape(row_label), f"{function_means['first']:.3f}", f"{function_means['last']:.3f}")
        console.print(mean_table)


def _print_scores(scores: Sequence[Scored], as_json: bool) -> None:
    """Print the scores of an episode, turn by turn, each with what its source says of it."""
    from agentrl.host.terminal_text import printable

    if as_json:
        print(json.dumps([asdict(score) for score in scores], indent=2))
        return
    if not scores:
        print("no reward source scored a turn of this episode")
        return
    score_table = Table("turn", "source", "version", "score", "why")
    for score in scores:
        reason = "\n".join(printable(line) for line in score.reason.split("\n"))
        version = str(score.version) if score.counts else f"{score.version}, not counted"
        score_table.add_row(score.turn_id, escape(score.source), version, f"{score.value:.3f}", escape(reason))
    tables.console().print(score_table)


def rescore(path: _RUN, source: Annotated[str, typer.Option(help="Its name in the run file")]) -> None:
    """Have a source score a stored run again, as a version of its own; what was trained stays as it was."""
    import trio

    from agentrl.run.reward_services import rescore as score_again
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run_folder = RunDir.open(path)
    with RunStore.open(run_folder.store_path) as run_store:
        score_version, failed_turns = trio.run(score_again, run_folder.config(), run_store, source)
    print(f"scored as version {score_version} of {source}, {failed_turns} turns failed; see: agentrl rewards {path}")
