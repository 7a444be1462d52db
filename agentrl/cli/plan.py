"""The commands `agentrl plan` and `simulate`. Nothing heavy is imported before they run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from agentrl.cli import tables
from agentrl.errors import UsageError
from agentrl.host.quick_imports import quick_imports

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.planning.plan import Plan, Work
    from agentrl.planning.simulate.measured import MeasuredRun


def plan(
    file: Annotated[Path, typer.Argument(help="The run file (TOML)")],
    gpu: Annotated[str, typer.Option(help="A name, as h100 or l40s; or name,TFLOP/s,GB,GB/s of another")] = "h100",
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="GPUs in total")] = 1,
    row: Annotated[int | None, typer.Option(min=2, help="Tokens of an episode; default: rollout.max_context")] = None,
    sampled: Annotated[float, typer.Option(min=0.01, max=0.99, help="Share of them that the policy samples")] = 0.4,
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the peak that the learner reaches")] = 0.1,
    mbu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the bandwidth that an engine reaches")] = 0.5,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU for an hour, for the cost")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Say what a run needs of GPUs: memory, tokens a second, how to divide them, cost. Nothing is downloaded but the
    model's configuration, if it is a folder not even that; exit code 1 if it does not fit."""
    from agentrl import config as configuration

    with quick_imports():
        from agentrl.planning import plan as planning

    of = planning.gpu_of(gpu)
    config, chosen = planning.started(configuration.load(file, settings), of, n)
    work = planning.Work(row=row or config.rollout.max_context, sampled=sampled, mfu=mfu, mbu=mbu)
    planned = planning.plan(config, of, n, work)
    if as_json:
        best = None if planned.best is None else {**asdict(planned.best), "step_s": planned.best.step_s}
        print(json.dumps({"chosen": chosen, **asdict(planned), "best": best}, indent=2))
        if best is None:
            raise SystemExit(1)
        return
    console = tables.console()
    if chosen:
        values = ", ".join(f"{key} = {value!r}" for key, value in chosen.items())
        console.print(f"As train chooses on such a machine with vLLM: {values}", markup=False, highlight=False)
    for line in _describe(planned, work, price):
        console.print(line, markup=False, highlight=False)
    console.print(_table(planned))
    if planned.best is None:
        for change in dict.fromkeys(planning.changes(config, of, n, work)):
            console.print(f"It fits with {change}", markup=False, highlight=False)
        raise SystemExit(1)


def _describe(planned: Plan, work: Work, price: float | None) -> list[str]:
    parts = ("weights", "frozen", "gradients", "optimizer", "activations", "temporary")
    sizes = ", ".join(f"{name} {getattr(planned.held, name) / 1e9:.2f}" for name in parts)
    host = f" In host memory wait {planned.held.host / 1e9:.2f} GB of the optimizer." if planned.held.host else ""
    learners = 1 if planned.best is None else planned.best.learners
    each = (
        ""
        if planned.best is None or learners < 2
        else (
            f" Divided over the {learners} GPUs of the best way, each holds {planned.best.learner_bytes / 1e9:.2f} GB."
        )
    )
    lines = [
        f"A learner on one GPU of {planned.gpu.memory_gb:g} GB holds {planned.held.total / 1e9:.2f} GB: {sizes}."
        f"{host}{each}",
        f"Assumed: episodes of {work.row} tokens, {work.sampled:.0%} of them sampled, the others a prompt that the "
        f"group shares; {work.mfu:.0%} of {planned.gpu.tflops:g} TFLOP/s in the learner, {work.mbu:.0%} of "
        f"{planned.gpu.gb_per_s:g} GB/s in an engine; tools and rewards take no time; no group "
        "is skipped for want of signal.",
    ]
    best = planned.best
    if best is None:
        return [*lines, "It does not fit."]
    if best.host_bytes:
        lines.append(
            f"By turns: {best.engine_bytes / 1e9:.2f} GB on the GPU while the engine samples, "
            f"{best.learner_bytes / 1e9:.2f} while the learner steps; {best.host_bytes / 1e9:.2f} GB wait in host "
            f"memory, and a step spends {best.swap_s:.3g} s on bringing one and the other there."
        )
    room_mb = int(best.cache_room) >> 20
    if best.at_once < planned.max_running and room_mb > 1.1 * planned.cache_mb:
        lines.append(
            f"Keys and values of {best.at_once} episodes at once, of rollout.max_running = {planned.max_running}, fill "
            f"engine.kv_cache_mb = {planned.cache_mb}: there is room for --set engine.kv_cache_mb={room_mb}"
        )
    hours = planned.n * best.step_s * 1000 / 3600
    cost = "" if price is None else f", {hours * price:.3g} at {price:g} an hour"
    return [
        *lines,
        f"Best: {_name(best.engines, best.learners)}, {best.step_s:.3g} s a step, "
        f"{planned.tokens_per_step / best.step_s:,.0f} sampled tokens/s, buffer.max_lag = {best.max_lag}; 1,000 steps "
        f"take {hours:.3g} GPU hours{cost}.",
    ]


def _name(engines: int, learners: int) -> str:
    return f"{engines} for engines, {learners} for the learner" if engines else "one GPU for both"


def _table(planned: Plan) -> Table:
    table = Table("engines + learner", "fits", "learner GB", "engine GB", "episodes at once", "learner s", "engines s")
    for name in ("sampled tokens/s", "max_lag"):
        table.add_column(name)
    for split in planned.splits:
        table.add_row(
            f"{split.engines} + {split.learners}"
            if split.engines
            else "1, by turns"
            if split.host_bytes
            else "1, shared",
            "yes" if split.fits else "no",
            f"{split.learner_bytes / 1e9:.1f}",
            f"{split.engine_bytes / 1e9:.1f}",
            str(split.at_once),
            *(
                (f"{split.learner_s:.3g}", f"{split.engine_s:.3g}", f"{planned.tokens_per_step / split.step_s:,.0f}")
                if split.fits
                else ("-", "-", "-")
            ),
            str(split.max_lag) if split.fits else "-",
        )
    return table


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
    steps: Annotated[int | None, typer.Option(min=2, help="Simulated steps; default: for 8,000 episodes")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn times")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value")] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file too; -: print only them")
    ] = None,
) -> None:
    """Play a run in virtual time: what lag, quorum, slots and split of GPUs would give."""
    from agentrl.planning.simulate.sweep import Wishes, advice, limits, not_reproduced, plan, run_all, table

    config = _config(file, run, settings or [])
    wishes = Wishes(
        episode=episode,
        step_s=step_s,
        slots=slots,
        max_lag=max_lag,
        close=close,
        gpus=gpus,
        scale_batch=scale_batch,
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
        # The measured number beside the simulated one: whoever reads the table has to see how far the model is from the
        # run it was fitted to.
        simulated_idle = next(row.result.idle for row in rows if row.case.present)
        console.print(
            f"* your settings. The run's learner was idle {measured.idle:.1%} of its time; here: {simulated_idle:.1%}."
        )
    else:
        console.print("* your settings")
    for line in limits(config, None if episode else measured):
        console.print(line, markup=False, highlight=False)
    other = "" if measured is None or file is not None or settings else not_reproduced(rows, measured.idle)
    # Advice is left out where the run itself was not reproduced: what a simulation says of other settings is worth no
    # more than what it says of these.
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
    from agentrl.run.run_folder import RunDir
    from agentrl.run.take_orders import returns_of
    from agentrl.store import RunStore

    folder = RunDir.open(run)
    config = folder.config()
    with RunStore.read(folder.store_path) as store:
        return measure(store, config.buffer, end=config.train.steps, returns=returns_of(config))
