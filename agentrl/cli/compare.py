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
    assumed = {"samples": samples, "base_rate": base_rate, "correlation": correlation, "across": across}
    assumed = {name: value for name, value in assumed.items() if value is not None}
    if plan is not None:
        if places or groups or sequential or held_out or picture:
            raise UsageError(
                "--plan compares nothing yet: leave out runs, --group, --held-out, --sequential and --plot"
            )
        _show_plan(plan, assumed, as_json=as_json)
        return
    if assumed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in assumed)
        raise UsageError(f"{options}: only with --plan N; leave it out to compare results")
    if places and groups:
        raise UsageError("--group names all that is compared: leave out the other runs, or make groups of them")
    from agentrl.run.comparison.compare import compare as compare_sides

    with notices.gathered():
        sides = _sides(places or [], groups or [], held_out)
    comparisons, remarks = compare_sides(sides, sequential=sequential)
    if picture is not None:
        from agentrl.run.comparison.plot import draw

        draw(comparisons, picture)
    if as_json:
        models = [model.document() for side in sides for model in side.models]
        pairs = [asdict(pair) for pair in comparisons]
        print(json.dumps({"models": models, "comparisons": pairs, "notes": remarks}, indent=2))
        return
    for pair in comparisons:
        _show(pair)
    for remark in remarks:
        print_line(remark)


def _sides(places: list[str], groups: list[str], held_out: str | None) -> list[Side]:
    from agentrl.run.comparison.compare import Side
    from agentrl.run.comparison.results import read

    sides = [Side(name=place, models=[read(place, held_out)]) for place in places]
    for group in groups:
        name, _, members = group.partition("=")
        runs = [member for member in members.split(",") if member]
        if not name or not runs or len(set(runs)) < len(runs):
            raise UsageError(f"--group {group}: give NAME=RUN,RUN with each run once")
        sides.append(Side(name=name, models=[read(run, held_out) for run in runs], is_group=True))
    return sides


def _show(pair: Comparison) -> None:
    from agentrl.run.comparison.compare import in_units, is_share

    print_line(pair.sentence)
    table = Table("measure", escape(pair.a), escape(pair.b), "difference", "95% interval", "p", "tasks")
    for row in pair.measures:
        values = (row.a, row.b, row.difference, row.low, row.high)
        a, b, difference, low, high = (in_units(row.name, value) for value in values)
        name = f"{row.name}, %" if is_share(row.name) else row.name
        table.add_row(name, a, b, difference, f"{low} to {high}", "-" if row.p is None else f"{row.p:.2g}", str(row.n))
    tables.console().print(table)
    for cause, number in pair.left_out.items():
        print_line(f"Left out: {number} {cause}")
    for row in pair.measures:
        if row.left_out:
            print_line(f"Left out of {row.name}: {row.left_out} tasks that lack it")


def _show_plan(tasks: int, assumed: Mapping[str, Any], *, as_json: bool) -> None:
    from agentrl.statistics.power import POWER, Design

    design = Design(tasks=tasks, **assumed)
    smallest = design.smallest_difference()
    if as_json:
        document: dict[str, Any] = {**asdict(design), "power": POWER, "smallest_difference": smallest}
        print(json.dumps(document, indent=2))
        return
    size = f"{tasks} tasks with {design.samples} sample{'s' * (design.samples > 1)} of each model"
    if smallest is None:
        print_line(f"{size} show no difference from {design.base_rate:.1%} with {POWER:.0%} power: play more tasks.")
    else:
        print_line(
            f"{size} show a difference of {100 * smallest:.1f} points with {POWER:.0%} power: from"
            f" {design.base_rate:.1%} to {design.base_rate + smallest:.1%}."
        )
    print_line(
        f"Assumed (--base-rate, --correlation, --across): success of the first model {design.base_rate:g}; correlation"
        f" of two episodes of a model on a task {design.correlation:g}, of the two models {design.across:g}."
    )
