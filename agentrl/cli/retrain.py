"""The command `agentrl retrain`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from agentrl.cli import tables

if TYPE_CHECKING:
    from agentrl.offline.retrain_step import Retrained


def retrain(
    path: Annotated[Path, typer.Argument(help="A run directory; the run may go on meanwhile")],
    step: Annotated[int, typer.Option(min=1, help="The optimizer step to train again")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Train this step otherwise: algo.clip_low=0.1, train.lr=1e-5")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the weights here, as a checkpoint folder")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write what happens to each token, as JSON lines")] = None,
) -> None:
    """Train one step of a run again, from its store; exit code 1 if the weights are not those that the run had."""
    from agentrl.offline.retrain_step import retrain as train_again
    from agentrl.run.run_folder import RunDir

    run = RunDir.open(path)
    again = train_again(
        run, step, settings=settings or [], out=out, dump=dump, told=lambda line: print(line, file=sys.stderr)
    )
    console = tables.console()
    console.print(_table(again))
    for line in lines(again):
        console.print(line, markup=False, highlight=False)
    if not again.equal and not again.settings:
        raise SystemExit(1)


def _table(again: Retrained) -> Table:
    begun = again.begun or "the weights that the run began with"
    title = f"step {again.step}: {again.groups} groups, {again.episodes} episodes, from {begun}"
    table = Table("metric", "in the run", "again", "", title=title, title_justify="left")
    was, now = (dict(_leaves(metrics)) for metrics in (again.recorded or {}, again.metrics))
    for name, value in now.items():
        if not name.startswith(("seconds.", "use.")):
            told = was.get(name)
            table.add_row(name, _said(told), _said(value), "" if again.recorded is None or told == value else "differs")
    return table


def lines(again: Retrained) -> Iterator[str]:
    """What is to say below the table."""
    of, wrong = f"step {again.step}", again.difference
    if wrong is not None:
        names = ", ".join(wrong.tensors[:3]) + (", …" if len(wrong.tensors) > 3 else "")
        since = "" if wrong.step == again.step else f" since step {wrong.step}"
        yield f"{of}: the weights DIFFER{since} from the run's, in {len(wrong.tensors)} of {wrong.of} tensors: {names}"
    if again.settings:
        yield f"{of}: trained otherwise on purpose ({', '.join(again.settings)}): its weights are not the run's"
    elif again.equal:
        yield f"{of}: the weights of all {again.tensors} tensors are bit-equal to those of the run"
    elif wrong is None:
        yield f"{of}: the run recorded no hash of its weights, nothing was compared (train.hash_every = 1 records one)"
    yield from (f"not as in the run: {note}" for note in again.notes)
    if again.out is not None:
        yield f"weights: {again.out}"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _said(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return "-" if value is None else str(value)
