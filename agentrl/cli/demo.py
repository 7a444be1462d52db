"""The command `agentrl demo`, as `agentrl.cli` offers it: a first run, chosen so that this machine can train it.

It owns the choice of the run and the lines around it. The runs are those of `examples/`, which a wheel carries beside
this file, so that the demo needs no checkout. Nothing heavy is imported before it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from agentrl.cli import tables
from agentrl.cli.view import beside
from agentrl.errors import AgentRLError

_PACKAGED = Path(__file__).with_name("demo_runs")  # pyproject.toml copies them there when it builds a wheel
_RUNS = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "examples"


class DemoRun(NamedTuple):
    """A run that the demo can train: its run file, what it shows, settings that the file lacks, and what the rows of
    its table mean."""

    file: Path
    summary: str
    settings: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


CODER = DemoRun(
    _RUNS / "tiny_coder.toml",
    "a model of a million parameters learns to repair small Python modules, which run in bubblewrap boxes",
    rows=(
        "held_out: functions that training never shows",
        "held_out_templates: kinds of functions that training never shows, which is much harder",
        "shuffled_tests: a control that cannot be solved, since its visible tests are another task's: it stays near 0",
    ),
)
# The machine of many newcomers has no user namespaces: a Mac, or most containers. A demo that lets a model's code run
# without walls would teach the wrong habit, so this one has no code to run.
LOCKSMITH = DemoRun(
    _RUNS / "tiny_locksmith.toml", "a model of 130,000 parameters learns to open a lock with eight dials"
)
REAL = DemoRun(
    _RUNS / "laptop_llm.toml",
    "SmolLM2, a language model of 135 million parameters, learns to answer sums in twelve tokens",
    settings=(f'env.id="{_RUNS / "laptop_llm.py"}:Sums"',),  # the file names it from a checkout
)


def choose(*, real: bool) -> tuple[DemoRun, str]:
    """Return the run to train on this machine, and why it is not the usual one; "" if it is."""
    from agentrl.cli.doctor import bubblewrap

    if real:
        return REAL, ""
    bubblewrap_check = bubblewrap()
    if bubblewrap_check.works:
        return CODER, ""
    return (
        LOCKSMITH,
        f"bubblewrap: {bubblewrap_check.seen}, so the demo has no code to run; agentrl doctor says what is missing",
    )


def demo(
    real: Annotated[bool, typer.Option("--real", help="Train a pretrained language model, SmolLM2-135M")] = False,
    page: Annotated[bool, typer.Option("--view", help="Serve a web page of the run, as agentrl view does")] = False,
    out: Annotated[Path, typer.Option(help="Run directory")] = Path("runs/demo"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: section.key=value, such as train.steps=10")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run that is there")] = False,
) -> None:
    """Train a first agent on this machine, in minutes and without a GPU. Ends with a table, a plot and what to do
    next."""
    from agentrl import config as configuration
    from agentrl.run.reporting import report
    from agentrl.run.reporting.live_view import LiveView
    from agentrl.run.trainer import Trainer

    demo_run, reason = choose(real=real)
    if reason:
        print(reason, flush=True)
    print(f"{demo_run.summary}: {demo_run.file}", flush=True)
    run_config = configuration.load(demo_run.file, [*demo_run.settings, *(settings or [])])
    trainer = Trainer(config=run_config, out=out, overwrite=overwrite)
    with beside(out, serves=page):
        run_summary = trainer.train(LiveView())
    report.show(tables.console(), out, run_summary)
    for comment_line in demo_run.rows:
        print(comment_line)
    for next_command, purpose in (
        (f"agentrl view {out} --open", "its episodes turn by turn, on a page"),
        (f"agentrl play {run_config.env.id}", "play the model's part yourself"),
        ("agentrl new env my_env", "a package with an environment of your own, and a run file that trains it"),
    ):
        print(f"next: {next_command}  # {purpose}")
    if run_summary["unmeasured"]:
        correction = f"fix it and run: agentrl eval {out}"
        raise AgentRLError(f"the run is trained, and not measured: {run_summary['unmeasured']}; {correction}")
