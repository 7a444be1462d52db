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

    gpu_kind = planning.gpu_of(gpu)
    run_config, chosen_settings = planning.started(configuration.load(file, settings), gpu_kind, n)
    workload = planning.Work(row=row or run_config.rollout.max_context, sampled=sampled, mfu=mfu, mbu=mbu)
    gpu_plan = planning.plan(run_config, gpu_kind, n, workload)
    if as_json:
        best_split = None if gpu_plan.best is None else {**asdict(gpu_plan.best), "step_s": gpu_plan.best.step_s}
        print(json.dumps({"chosen": chosen_settings, **asdict(gpu_plan), "best": best_split}, indent=2))
        if best_split is None:
            raise SystemExit(1)
        return
    console = tables.console()
    if chosen_settings:
        chosen_text = ", ".join(
            f"{setting_key} = {setting_value!r}" for setting_key, setting_value in chosen_settings.items()
        )
        console.print(f"As train chooses on such a machine with vLLM: {chosen_text}", markup=False, highlight=False)
    for text_line in _describe(gpu_plan, workload, price):
        console.print(text_line, markup=False, highlight=False)
    console.print(_table(gpu_plan))
    if gpu_plan.best is None:
        for fitting_change in dict.fromkeys(planning.changes(run_config, gpu_kind, n, workload)):
            console.print(f"It fits with {fitting_change}", markup=False, highlight=False)
        raise SystemExit(1)


def _describe(planned: Plan, work: Work, price: float | None) -> list[str]:
    memory_parts = ("weights", "frozen", "gradients", "optimizer", "activations", "temporary")
    size_text = ", ".join(f"{part_name} {getattr(planned.held, part_name) / 1e9:.2f}" for part_name in memory_parts)
    host_sentence = (
        f" In host memory wait {planned.held.host / 1e9:.2f} GB of the optimizer." if planned.held.host else ""
    )
    learners = 1 if planned.best is None else planned.best.learners
    division_sentence = (
        ""
        if planned.best is None or learners < 2
        else (
            f" Divided over the {learners} GPUs of the best way, each holds {planned.best.learner_bytes / 1e9:.2f} GB."
        )
    )
    plan_lines = [
        f"A learner on one GPU of {planned.gpu.memory_gb:g} GB holds {planned.held.total / 1e9:.2f} GB: {size_text}."
        f"{host_sentence}{division_sentence}",
        f"Assumed: episodes of {work.row} tokens, {work.sampled:.0%} of them sampled, the others a prompt that the "
        f"group shares; {work.mfu:.0%} of {planned.gpu.tflops:g} TFLOP/s in the learner, {work.mbu:.0%} of "
        f"{planned.gpu.gb_per_s:g} GB/s in an engine; tools and rewards take no time; no group "
        "is skipped for want of signal.",
    ]
    best_split = planned.best
    if best_split is None:
        return [*plan_lines, "It does not fit."]
    if best_split.host_bytes:
        plan_lines.append(
            f"By turns: {best_split.engine_bytes / 1e9:.2f} GB on the GPU while the engine samples, "
            f"{best_split.learner_bytes / 1e9:.2f} while the learner steps; {best_split.host_bytes / 1e9:.2f} GB wait"
            f" in host memory, and a step spends {best_split.swap_s:.3g} s on bringing one and the other there."
        )
    cache_room_mb = int(best_split.cache_room) >> 20
    if best_split.at_once < planned.max_running and cache_room_mb > 1.1 * planned.cache_mb:
        plan_lines.append(
            f"Keys and values of {best_split.at_once} episodes at once, of rollout.max_running = {planned.max_running},"
            f" fill engine.kv_cache_mb = {planned.cache_mb}: there is room for --set engine.kv_cache_mb={cache_room_mb}"
        )
    gpu_hours = planned.n * best_split.step_s * 1000 / 3600
    cost_text = "" if price is None else f", {gpu_hours * price:.3g} at {price:g} an hour"
    return [
        *plan_lines,
        f"Best: {_name(best_split.engines, best_split.learners)}, {best_split.step_s:.3g} s a step, "
        f"{planned.tokens_per_step / best_split.step_s:,.0f} sampled tokens/s, buffer.max_lag = {best_split.max_lag};"
        f" 1,000 steps take {gpu_hours:.3g} GPU hours{cost_text}.",
    ]


def _name(engines: int, learners: int) -> str:
    return f"{engines} for engines, {learners} for the learner" if engines else "one GPU for both"


def _table(planned: Plan) -> Table:
    split_table = Table(
        "engines + learner", "fits", "learner GB", "engine GB", "episodes at once", "learner s", "engines s"
    )
    for column_name in ("sampled tokens/s", "max_lag"):
        split_table.add_column(column_name)
    for gpu_split in planned.splits:
        split_table.add_row(
            f"{gpu_split.engines} + {gpu_split.learners}"
            if gpu_split.engines
            else "1, by turns"
            if gpu_split.host_bytes
            else "1, shared",
            "yes" if gpu_split.fits else "no",
            f"{gpu_split.learner_bytes / 1e9:.1f}",
            f"{gpu_split.engine_bytes / 1e9:.1f}",
            str(gpu_split.at_once),
            *(
                (
                    f"{gpu_split.learner_s:.3g}",
                    f"{gpu_split.engine_s:.3g}",
                    f"{planned.tokens_per_step / gpu_split.step_s:,.0f}",
                )
                if gpu_split.fits
                else ("-", "-", "-")
            ),
            str(gpu_split.max_lag) if gpu_split.fits else "-",
        )
    return split_table


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

    run_config = _config(file, run, settings or [])
    sweep_wishes = Wishes(
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
    result_rows = run_all(plan(run_config, sweep_wishes, measured))
    if str(out) == "-":
        print(json.dumps([result_row.document() for result_row in result_rows], indent=2))
        return
    console.print(table(result_rows))
    if measured is not None:
        # The measured number beside the simulated one: whoever reads the table has to see how far the model is from the
        # run it was fitted to.
        simulated_idle = next(result_row.result.idle for result_row in result_rows if result_row.case.present)
        console.print(
            f"* your settings. The run's learner was idle {measured.idle:.1%} of its time; here: {simulated_idle:.1%}."
        )
    else:
        console.print("* your settings")
    for text_line in limits(run_config, None if episode else measured):
        console.print(text_line, markup=False, highlight=False)
    fit_warning = "" if measured is None or file is not None or settings else not_reproduced(result_rows, measured.idle)
    # Advice is left out where the run itself was not reproduced: what a simulation says of other settings is worth no
    # more than what it says of these.
    if text_line := fit_warning or advice(result_rows):
        console.print(text_line, markup=False, highlight=False)
    if out is not None:
        try:
            out.write_text(
                json.dumps([result_row.document() for result_row in result_rows], indent=2) + "\n", encoding="utf-8"
            )
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

    run_folder = RunDir.open(run)
    run_config = run_folder.config()
    with RunStore.read(run_folder.store_path) as run_store:
        return measure(run_store, run_config.buffer, end=run_config.train.steps, returns=returns_of(run_config))
