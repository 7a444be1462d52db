"""The command `agentrl compare`. Imports nothing heavy before it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from agentrl import notices
from agentrl.cli import tables
from agentrl.cli.completion import run_folders
from agentrl.cli.strict import Strict
from agentrl.cli.tables import print_line
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from agentrl.run.comparison.compare import Comparison, Side

_PLAN = "With --plan: "


def compare(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A B [C...]]",
            autocompletion=run_folders,
            help="Runs (RUN:before for another moment), folders of agentrl eval --out, files of JSON lines",
        ),
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="The held-out set of the runs, if they have several")] = None,
    groups: Annotated[
        list[str] | None, typer.Option("--group", metavar="NAME=RUN,RUN", help="Runs that differ by their seed alone")
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Look while tasks are played, as often as you like")
    ] = False,
    plan: Annotated[int | None, typer.Option(help="Say what so many tasks can show, before they are played")] = None,
    samples: Annotated[int | None, typer.Option(help=f"{_PLAN}episodes of a task; default: 1")] = None,
    base_rate: Annotated[float | None, typer.Option(help=f"{_PLAN}success of the first model; default: 0.5")] = None,
    correlation: Annotated[
        float | None, typer.Option(help=f"{_PLAN}of two episodes of a model on a task; default: 0.5")
    ] = None,
    across: Annotated[
        float | None, typer.Option(help=f"{_PLAN}of episodes of the two models on a task; default: 0.4")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw the differences with their intervals: a PNG, SVG or PDF file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    strict: Strict = False,
) -> None:
    """Say whether a difference between models is real: on the same tasks, paired, with intervals. With --plan N, say
    which difference N tasks can show."""
    assumptions = {"samples": samples, "base_rate": base_rate, "correlation": correlation, "across": across}
    assumptions = {
        option_name: option_value for option_name, option_value in assumptions.items() if option_value is not None
    }
    if plan is not None:
        if places or groups or sequential or held_out or picture:
            raise UsageError(
                "--plan compares nothing yet: leave out runs, --group, --held-out, --sequential and --plot"
            )
        _show_plan(plan, assumptions, as_json=as_json)
        return
    if assumptions:
        listed_options = ", ".join(f"--{option_name.replace('_', '-')}" for option_name in assumptions)
        raise UsageError(f"{listed_options}: only with --plan N; leave it out to compare results")
    if places and groups:
        raise UsageError("--group names all that is compared: leave out the other runs, or make groups of them")
    from agentrl.run.comparison.compare import compare as compare_sides

    with notices.gathered():
        compared_sides = _sides(places or [], groups or [], held_out)
    comparisons, remarks = compare_sides(compared_sides, sequential=sequential)
    if picture is not None:
        from agentrl.run.comparison.plot import draw

        draw(comparisons, picture)
    if as_json:
        model_documents = [
            compared_model.document() for compared_side in compared_sides for compared_model in compared_side.models
        ]
        comparison_documents = [asdict(comparison) for comparison in comparisons]
        print(json.dumps({"models": model_documents, "comparisons": comparison_documents, "notes": remarks}, indent=2))
        return
    for comparison in comparisons:
        _show(comparison)
    for remark in remarks:
        print_line(remark)


def _sides(places: list[str], groups: list[str], held_out: str | None) -> list[Side]:
    from agentrl.run.comparison.compare import Side
    from agentrl.run.comparison.results import read

    compared_sides = [Side(name=results_place, models=[read(results_place, held_out)]) for results_place in places]
    for group_option in groups:
        group_name, _, listed_runs = group_option.partition("=")
        run_places = [listed_run for listed_run in listed_runs.split(",") if listed_run]
        if not group_name or not run_places or len(set(run_places)) < len(run_places):
            raise UsageError(f"--group {group_option}: give NAME=RUN,RUN with each run once")
        compared_sides.append(
            Side(name=group_name, models=[read(run_place, held_out) for run_place in run_places], is_group=True)
        )
    return compared_sides


def _show(pair: Comparison) -> None:
    from agentrl.run.comparison.compare import in_units, is_share

    print_line(pair.sentence)
    measure_table = Table("measure", escape(pair.a), escape(pair.b), "difference", "95% interval", "p", "tasks")
    for measure in pair.measures:
        figures = (measure.a, measure.b, measure.difference, measure.low, measure.high)
        first_figure, second_figure, difference, low_bound, high_bound = (
            in_units(measure.name, figure) for figure in figures
        )
        measure_name = f"{measure.name}, %" if is_share(measure.name) else measure.name
        measure_table.add_row(
            measure_name,
            first_figure,
            second_figure,
            difference,
            f"{low_bound} to {high_bound}",
            "-" if measure.p is None else f"{measure.p:.2g}",
            str(measure.n),
        )
    tables.console().print(measure_table)
    for cause, left_out_count in pair.left_out.items():
        print_line(f"Left out: {left_out_count} {cause}")
    for measure in pair.measures:
        if measure.left_out:
            print_line(f"Left out of {measure.name}: {measure.left_out} tasks that lack it")


def _show_plan(tasks: int, assumed: Mapping[str, Any], *, as_json: bool) -> None:
    from agentrl.statistics.power import POWER, Design

    design = Design(tasks=tasks, **assumed)
    smallest = design.smallest_difference()
    if as_json:
        document: dict[str, Any] = {**asdict(design), "power": POWER, "smallest_difference": smallest}
        print(json.dumps(document, indent=2))
        return
    plan_size = f"{tasks} tasks with {design.samples} sample{'s' * (design.samples > 1)} of each model"
    if smallest is None:
        print_line(
            f"{plan_size} show no difference from {design.base_rate:.1%} with {POWER:.0%} power: play more tasks."
        )
    else:
        print_line(
            f"{plan_size} show a difference of {100 * smallest:.1f} points with {POWER:.0%} power: from"
            f" {design.base_rate:.1%} to {design.base_rate + smallest:.1%}."
        )
    print_line(
        f"Assumed (--base-rate, --correlation, --across): success of the first model {design.base_rate:g}; correlation"
        f" of two episodes of a model on a task {design.correlation:g}, of the two models {design.across:g}."
    )
