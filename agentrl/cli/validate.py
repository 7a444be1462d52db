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
    load: Annotated[
        int | None, typer.Option(min=1, help=f"{_OUT}tasks graded again while all processors are busy; default: none")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help=f"{_OUT}write a page (HTML) for the maintainer of the set here")
    ] = None,
    strict: Strict = False,
) -> None:
    """Play an environment's oracles (gold, no-op …) for real; exit code 1 if one gets another outcome than it must.
    With --out FOLDER, say of each task whether its reward can be trusted, and why not."""
    from agentrl.env.checks.validate import validate as play_oracles

    env_kwargs = _arguments(settings or [])
    task_seeds = None if every else range(seed, seed + n)
    only_with_out = {
        "--repeat": repeat,
        "--held-out": held_out,
        "--task-s": task_s,
        "--jobs": jobs,
        "--load": load,
        "--page": page,
    }
    if out is not None:
        from agentrl.env.checks.tasks.check_set import SetPlan

        set_plan = SetPlan(
            env_id=env,
            kwargs=env_kwargs,
            seeds=task_seeds,
            out=out,
            skip=drop or out / "tasks.skip",
            held_out=_arguments(held_out) if held_out else None,
            repeat=repeat or 3,
            task_s=task_s or 900.0,
            jobs=jobs or os.cpu_count() or 1,
            loaded=load or 0,
        )
        _check_set(set_plan, page, as_json=as_json)
        return
    if misplaced_options := [option_name for option_name, option_value in only_with_out.items() if option_value]:
        raise UsageError(
            f"{', '.join(misplaced_options)}: only with --out FOLDER; leave it out to play the oracles alone"
        )
    validation = play_oracles(env, seeds=task_seeds, kwargs=env_kwargs)
    dropped_count = None if drop is None else validation.drop(drop)
    if as_json:
        tables.print_json({"env": env, "right": not validation.faults, **asdict(validation)})
    else:
        _show_validation(validation, drop, dropped_count)
    if validation.faults:
        raise SystemExit(1)


def _arguments(settings: list[str]) -> dict[str, Any]:
    from agentrl.config import apply_override

    constructor_kwargs: dict[str, Any] = {}
    for assignment in settings:
        apply_override(constructor_kwargs, assignment)
    return constructor_kwargs


def _check_set(plan: SetPlan, page: Path | None, *, as_json: bool) -> None:
    from agentrl.env.checks.tasks.check_set import check_set
    from agentrl.env.checks.tasks.page import page_of

    if page is not None and not page.parent.is_dir():
        raise UsageError(f"--page {page}: there is no folder {page.parent}; make it first")
    verdicts = check_set(plan)
    if page is not None:
        page.write_text(page_of(plan, verdicts), encoding="utf-8")
    if as_json:
        tables.print_json({"env": plan.env_id, "right": verdicts.right, **asdict(verdicts)})
    else:
        _show_verdicts(verdicts)
    if not verdicts.right:
        raise SystemExit(1)


def _show_verdicts(checked: SetVerdict) -> None:
    from agentrl.env.checks.tasks.verdicts import ORDER, REASONS

    verdict_table = Table("verdict", "tasks", "reason", "tasks with it", "what it means")
    for verdict in reversed(ORDER):
        verdict_reasons = [
            verdict_reason for verdict_reason in checked.by_reason if REASONS[verdict_reason][0] == verdict
        ]
        task_count = str(checked.by_verdict.get(verdict, 0))
        verdict_table.add_row(
            verdict, task_count, *("", "", "") if not verdict_reasons else _reason(checked, verdict_reasons[0])
        )
        for verdict_reason in verdict_reasons[1:]:
            verdict_table.add_row("", "", *_reason(checked, verdict_reason))
    tables.console().print(verdict_table)
    for checked_task in sorted(checked.tasks, key=lambda task: ORDER.index(task.verdict)):
        for finding in checked_task.findings:
            sentence = (
                f"{checked_task.verdict}: {checked_task.task}: {finding.reason}: {' '.join(finding.evidence.split())}"
            )
            print_line(sentence)
    for task_fault in checked.bad:
        print_line(f"no task: {task_fault.task}: {task_fault.reason}")
    if (flake_rate := checked.flakes) is not None:
        interval = f"{flake_rate.share:.1%}, 95% interval {flake_rate.low:.1%} to {flake_rate.high:.1%}"
        print_line(f"repeated plays with another outcome: {flake_rate.count} of {flake_rate.n} ({interval})")
    for checked_task in checked.tasks:
        if checked_task.alone_s is not None and checked_task.loaded_s is not None:
            deadline_s = checked_task.grader_deadline_s
            deadline = f" of {deadline_s:g} s" if deadline_s is not None else ""
            seconds = f"{checked_task.alone_s:.1f} s alone, {checked_task.loaded_s:.1f} s with all processors busy"
            print_line(f"grader of {checked_task.task}: {seconds}{deadline}")
    if (majority := checked.majority) is not None:
        sentence = (
            f"the most frequent answer {checked.majority_answer[:40]!r} wins {majority.count} of {majority.n} tasks"
        )
        interval = f"{majority.share:.1%}, 95% interval {majority.low:.1%} to {majority.high:.1%}"
        chance_note = ": more than chance" if checked.suspicious else ""
        print_line(f"{sentence} ({interval}; chance {checked.chance:.1%}){chance_note}")
    if checked.skip is not None:
        skip_path = checked.skip
        print_line(f"leave these tasks out by the environment's argument skip = {skip_path}, or by")
        wrong_ids = [checked_task.id for checked_task in checked.wrong]
        listed_ids = ", ".join(f'"{task_id}"' for task_id in wrong_ids[:MOST_IDS])
        more_ids = f", and {len(wrong_ids) - MOST_IDS} more ids of {skip_path}" if wrong_ids[MOST_IDS:] else ""
        print_line(f"rollout.skip_tasks = [{listed_ids}]{more_ids}")


def _reason(checked: SetVerdict, reason: str) -> tuple[str, str, str]:
    from agentrl.env.checks.tasks.verdicts import REASONS

    return reason, str(checked.by_reason[reason]), REASONS[reason][1]


def _show_validation(validation: Validation, drop: Path | None, dropped: int | None) -> None:
    oracle_table = Table("oracle", "must get", "episodes", "held", "turns", "seeds where it did not")
    for oracle_tally in validation.tallies:
        missed_text = ", ".join(
            f"{missed_seed} (got {outcome})" for missed_seed, outcome in list(oracle_tally.missed.items())[:10]
        )
        mean_turns = f"{oracle_tally.turns / oracle_tally.episodes:.1f}"
        oracle_table.add_row(
            oracle_tally.name,
            f"{oracle_tally.expected:g}",
            str(oracle_tally.episodes),
            str(oracle_tally.held),
            mean_turns,
            missed_text or "-",
        )
    if validation.tallies:
        tables.console().print(oracle_table)
    if validation.tests:
        print_line(f"test ids: {validation.absent} of {validation.tests} are not in the log of the gold patch")
    for fault_kind, task_faults in (
        ("no task", validation.bad),
        ("failed", validation.failed),
        ("missed", validation.missed),
    ):
        for task_fault in task_faults[:20]:
            task_label = "" if task_fault.task in task_fault.reason else f"{task_fault.task}: "
            print_line(f"{fault_kind}: {task_label}{task_fault.reason}")
        if task_faults[20:]:
            print_line(f"{fault_kind}: {len(task_faults) - 20} more" + ("" if drop else "; --drop FILE writes all"))
    if drop is not None:
        print_line(f"{dropped} tasks are in {drop}: leave them out by --set skip={drop}")
