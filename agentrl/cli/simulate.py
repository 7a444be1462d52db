"""The command `agentrl simulate`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli import tables
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.planning.simulate.measured import MeasuredRun


def simulate(
    file: Annotated[Path | None, typer.Argument(help="The run file (TOML); default: that of --from")] = None,
    run: Annotated[Path | None, typer.Option("--from", help="A finished run to take all times from")] = None,
    episode: Annotated[str, typer.Option(help="Episode seconds: lognormal:SIGMA[:MEAN], pareto:ALPHA[:MEAN]")] = "",
    step_s: Annotated[float | None, typer.Option(help="Seconds of an optimizer step")] = None,
    slots: Annotated[str, typer.Option(help="Episodes at once, as 64,512; default: rollout.max_running")] = "",
    max_lag: Annotated[str, typer.Option(help="Lag bounds, as 0,1,2,4; default: that of the run file")] = "",
    close: Annotated[str, typer.Option(help="When groups close, as full,7/8 or 6/8@10 (10 s later)")] = "full,6/8",
    gpus: Annotated[int, typer.Option(min=0, help="Compare all splits of so many GPUs")] = 0,
    scale_batch: Annotated[bool, typer.Option(help="Let buffer.groups_per_step grow with the slots")] = False,
    others: Annotated[bool, typer.Option(help="Also what other systems do with stragglers")] = True,
    steps: Annotated[int | None, typer.Option(min=2, help="Simulated steps; default: for 8,000 episodes")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn times")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file too; -: print only them")
    ] = None,
) -> None:
    """Play a run in virtual time: what lag, quorum, slots and split of GPUs would give."""
    from agentrl.planning.simulate.sweep import advice, not_reproduced, run_all, table
    from agentrl.planning.simulate.sweep_cases import Wishes, limits, plan

    config = _config(file, run, settings or [])
    wishes = Wishes(
        episode=episode,
        step_s=step_s,
        slots=slots,
        max_lag=max_lag,
        close=close,
        gpus=gpus,
        scale_batch=scale_batch,
        others=others,
        steps=steps,
        seed=seed,
    )
    measured = None if run is None else _measured(run)
    console = tables.console()
    rows = run_all(plan(config, wishes, measured))
    if str(out) == "-":
        print(json.dumps([row.document() for row in rows], indent=2))
        return
    console.print(table(rows))
    if measured is not None:
        own = next(row.found.idle for row in rows if row.case.present)
        console.print(f"* your settings. The run's learner was idle {measured.idle:.1%} of its time; here: {own:.1%}.")
    else:
        console.print("* your settings")
    for line in limits(config, None if episode else measured):
        console.print(line, markup=False, highlight=False)
    other = "" if measured is None or file is not None or settings else not_reproduced(rows, measured.idle)
    if line := other or advice(rows):
        console.print(line, markup=False, highlight=False)
    if out is not None:
        try:
            out.write_text(json.dumps([row.document() for row in rows], indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {str(out)!r} cannot be written: {error.strerror}") from error


def _config(file: Path | None, run: Path | None, settings: list[str]) -> RunConfig:
    from agentrl import config as configuration
    from agentrl.run.run_folder import RunDir

    if file is not None:
        return configuration.load(file, settings)
    if run is None:
        raise UsageError("give a run file, a finished run (--from RUN), or both")
    document = RunDir.open(run).config().model_dump(mode="json")
    for override in settings:
        configuration.apply_override(document, override)
    return configuration.parse(document)


def _measured(run: Path) -> MeasuredRun:
    from agentrl.planning.simulate.measured import measure
    from agentrl.planning.simulate.sweep import START_UP
    from agentrl.run.order_by_name import returns_of
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    folder = RunDir.open(run)
    config = folder.config()
    lag, end = config.buffer.max_lag, config.train.steps
    with RunStore.read(folder.store_path) as store:
        return measure(store, start_up=lag + START_UP, end=end, max_lag=lag, returns=returns_of(config))
