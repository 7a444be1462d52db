"""The command `agentrl validate`. Imports nothing heavy before it runs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.completion import environment_ids
from agentrl.cli.strict import Strict
from agentrl.cli.tables import print_line
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from agentrl.env.checks.tasks.check_set import SetPlan, SetVerdict
    from agentrl.env.checks.validate import Validation

_OUT: Final = "With --out: "
MOST_IDS: Final = 20
"""Ids of tasks to leave out that a summary names; the file has all."""


def validate(
    env: Annotated[str, typer.Argument(autocompletion=environment_ids, help="Environment id")],
    n: Annotated[int, typer.Option(min=1, help="Tasks")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first task")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Constructor argument: key=value")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task of the set, in place of --n and --seed")] = False,
    drop: Annotated[Path | None, typer.Option(help="Write the tasks that are not right here, for skip = FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Give each task a verdict, and keep the results in this folder: it goes on")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help=f"{_OUT}plays of a solution; default: 3")] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help=f"{_OUT}argument that makes the held-out tasks: key=value")
    ] = None,
    task_s: Annotated[float | None, typer.Option(min=1, help=f"{_OUT}most seconds of a task; default: 900")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help=f"{_OUT}tasks at once; default: processors")] = None,
    strict: Strict = False,
) -> None:
    """Play an environment's oracles (gold, no-op …) for real; exit code 1 if one gets another outcome than it must.
    With --out FOLDER, say of each task whether its reward can be trusted, and why not."""
    from agentrl.env.checks.validate import validate as play_oracles

    kwargs = _arguments(settings or [])
    seeds = None if every else range(seed, seed + n)
    only_with_out = {"--repeat": repeat, "--held-out": held_out, "--task-s": task_s, "--jobs": jobs}
    if out is not None:
        from agentrl.env.checks.tasks.check_set import SetPlan

        plan = SetPlan(
            env_id=env,
            kwargs=kwargs,
            seeds=seeds,
            out=out,
            skip=drop or out / "tasks.skip",
            held_out=_arguments(held_out) if held_out else None,
            repeat=repeat or 3,
            task_s=task_s or 900.0,
            jobs=jobs or os.cpu_count() or 1,
        )
        _check_set(plan, as_json=as_json)
        return
    if options := [name for name, value in only_with_out.items() if value]:
        raise UsageError(f"{', '.join(options)}: only with --out FOLDER; leave it out to play the oracles alone")
    validation = play_oracles(env, seeds=seeds, kwargs=kwargs)
    dropped = None if drop is None else validation.drop(drop)
    if as_json:
        tables.print_json({"env": env, "right": not validation.faults, **asdict(validation)})
    else:
        _show_validation(validation, drop, dropped)
    if validation.faults:
        raise SystemExit(1)


def _arguments(settings: list[str]) -> dict[str, Any]:
    from agentrl.config import apply_override

    kwargs: dict[str, Any] = {}
    for setting in settings:
        apply_override(kwargs, setting)
    return kwargs


def _check_set(plan: SetPlan, *, as_json: bool) -> None:
    from agentrl.env.checks.tasks.check_set import check_set

    verdicts = check_set(plan)
    if as_json:
        tables.print_json({"env": plan.env_id, "right": verdicts.right, **asdict(verdicts)})
    else:
        _show_verdicts(verdicts)
    if not verdicts.right:
        raise SystemExit(1)


def _show_verdicts(checked: SetVerdict) -> None:
    from agentrl.env.checks.tasks.verdicts import ORDER, REASONS

    table = Table("verdict", "tasks", "reason", "tasks with it", "what it means")
    for verdict in reversed(ORDER):
        reasons = [reason for reason in checked.by_reason if REASONS[reason][0] == verdict]
        count = str(checked.by_verdict.get(verdict, 0))
        table.add_row(verdict, count, *("", "", "") if not reasons else _reason(checked, reasons[0]))
        for reason in reasons[1:]:
            table.add_row("", "", *_reason(checked, reason))
    tables.console().print(table)
    for task in sorted(checked.tasks, key=lambda task: ORDER.index(task.verdict)):
        for finding in task.findings:
            words = f"{task.verdict}: {task.task}: {finding.reason}: {' '.join(finding.evidence.split())}"
            print_line(words)
    for fault in checked.bad:
        print_line(f"no task: {fault.task}: {fault.reason}")
    if (flakes := checked.flakes) is not None:
        interval = f"{flakes.share:.1%}, 95% interval {flakes.low:.1%} to {flakes.high:.1%}"
        print_line(f"repeated plays with another outcome: {flakes.count} of {flakes.n} ({interval})")
    if (majority := checked.majority) is not None:
        words = f"the most frequent answer {checked.majority_answer[:40]!r} wins {majority.count} of {majority.n} tasks"
        interval = f"{majority.share:.1%}, 95% interval {majority.low:.1%} to {majority.high:.1%}"
        ends = ": more than chance" if checked.suspicious else ""
        print_line(f"{words} ({interval}; chance {checked.chance:.1%}){ends}")
    if checked.skip is not None:
        name = checked.skip
        print_line(f"leave these tasks out by the environment's argument skip = {name}, or by")
        wrong = [task.id for task in checked.wrong]
        listed = ", ".join(f'"{id}"' for id in wrong[:MOST_IDS])
        more = f", and {len(wrong) - MOST_IDS} more ids of {name}" if wrong[MOST_IDS:] else ""
        print_line(f"rollout.skip_tasks = [{listed}]{more}")


def _reason(checked: SetVerdict, reason: str) -> tuple[str, str, str]:
    from agentrl.env.checks.tasks.verdicts import REASONS

    return reason, str(checked.by_reason[reason]), REASONS[reason][1]


def _show_validation(validation: Validation, drop: Path | None, dropped: int | None) -> None:
    table = Table("oracle", "must get", "episodes", "held", "turns", "seeds where it did not")
    for tally in validation.tallies:
        missed = ", ".join(f"{seed} (got {got})" for seed, got in list(tally.missed.items())[:10])
        turns = f"{tally.turns / tally.episodes:.1f}"
        table.add_row(tally.name, f"{tally.expected:g}", str(tally.episodes), str(tally.held), turns, missed or "-")
    if validation.tallies:
        tables.console().print(table)
    if validation.tests:
        print_line(f"test ids: {validation.absent} of {validation.tests} are not in the log of the gold patch")
    for kind, faults in (("no task", validation.bad), ("failed", validation.failed), ("missed", validation.missed)):
        for fault in faults[:20]:
            name = "" if fault.task in fault.reason else f"{fault.task}: "
            print_line(f"{kind}: {name}{fault.reason}")
        if faults[20:]:
            print_line(f"{kind}: {len(faults) - 20} more" + ("" if drop else "; --drop FILE writes all"))
    if drop is not None:
        print_line(f"{dropped} tasks are in {drop}: leave them out by --set skip={drop}")
