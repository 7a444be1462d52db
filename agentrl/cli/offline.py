"""The commands beside a run: `agentrl retrain`, `export`, `trace` and `sft`.

Nothing heavy is imported before they run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.completion import run_folders
from agentrl.cli.strict import Strict
from agentrl.errors import UsageError
from agentrl.host.quick_imports import quick_imports

if TYPE_CHECKING:
    from agentrl.offline.retrain_step import Retrained


def export(
    run: Annotated[
        Path,
        typer.Argument(
            autocompletion=run_folders, help="A folder of agentrl train or agentrl sft; it may go on meanwhile"
        ),
    ],
    hf: Annotated[Path, typer.Option(help="The folder to write, as Hugging Face lays it out; new or empty")],
    step: Annotated[int | None, typer.Option(min=1, help="Of which step; default: the newest checkpoint")] = None,
    role: Annotated[str | None, typer.Option(help="The model of this role, where it trained one of its own")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="A whole model, where an adapter was trained")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of its matrices; auto: that of the model")
    ] = "auto",
) -> None:
    """Write what a run has trained as a folder for transformers, PEFT or an engine."""
    with quick_imports():
        from agentrl.offline.export_model import export as write

    print(write(run, hf, step=step, role=role, merge=merge, dtype=dtype))


def trace(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", autocompletion=run_folders, help="A run directory; it may go on meanwhile")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write, compressed if it ends with .gz; default: RUN/trace.json.gz")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send spans to this OpenTelemetry endpoint instead")
    ] = None,
) -> None:
    """Write when a run's episodes, turns, environments, steps and syncs of weights were, for ui.perfetto.dev; or send
    them to OpenTelemetry."""
    import itertools
    import time

    from agentrl.offline.chrome_trace import write_trace
    from agentrl.offline.otel_export import export_spans, otlp_exporter
    from agentrl.offline.run_spans import episode_spans, learner_spans
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    if out is not None and otlp is not None:
        raise UsageError("--out writes a file, --otlp sends spans: give one of them")
    folder = RunDir.open(run)
    out = out or run / "trace.json.gz"
    with RunStore.read(folder.store_path) as store:
        learner, episodes = learner_spans(store), episode_spans(store, time.time())
        if otlp is not None:
            spans, exporter = itertools.chain(learner, episodes), otlp_exporter(otlp)
            sent = export_spans(spans, exporter, run=str(run), model=folder.config().model)
            print(f"{sent} spans are at {otlp}")
            return
        events = write_trace(learner, episodes, out)
    print(f"{events} events in {out}: open it on https://ui.perfetto.dev, which keeps it in the browser")


def sft(
    file: Annotated[Path | None, typer.Argument(help="The file of settings (TOML), see docs/how-to/sft.md")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.lr=1e-5")] = None,
    out: Annotated[Path | None, typer.Option(help="Its folder; default runs/NAME")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on in this folder")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run of agentrl sft that is there")] = False,
    strict: Strict = False,
) -> None:
    """Train a model on demonstrations: a warm start for agentrl train."""
    with quick_imports():
        from agentrl.offline import sft as training

    if (file is None) == (resume is None):
        raise UsageError("give either a file of settings or --resume FOLDER")
    if resume is not None and (out or overwrite):
        raise UsageError("--resume goes on in its own folder: leave out --out and --overwrite")
    if resume is not None:
        folder, last = resume, training.resume(resume, settings or [], notify=print)
    else:
        assert file is not None
        config = training.load(file, settings or [])
        folder = out or Path("runs") / config.name
        last = training.train(config, folder, notify=print, overwrite=overwrite)
    print(f"checkpoint: {last}\nbegin a run with it: agentrl train RUN_FILE --set model={folder}")


def retrain(
    path: Annotated[
        Path, typer.Argument(autocompletion=run_folders, help="A run directory; the run may go on meanwhile")
    ],
    step: Annotated[int, typer.Option(min=1, help="The optimizer step to train again")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Train this step otherwise: algo.clip_low=0.1, train.lr=1e-5")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the weights here, as a checkpoint folder")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write what happens to each token, as JSON lines")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Train one step of a run again, from its store; exit code 1 if the weights are not those that the run had."""
    with quick_imports():
        from agentrl.offline.retrain_step import retrain as train_again
    from agentrl.run.run_folder import RunDir

    run = RunDir.open(path)
    again = train_again(
        run, step, settings=settings or [], out=out, dump=dump, notify=lambda line: print(line, file=sys.stderr)
    )
    if as_json:
        tables.print_json({**asdict(again), "equal": again.equal})
    else:
        console = tables.console()
        console.print(_table(again))
        for line in lines(again):
            console.print(line, markup=False, highlight=False)
    # With other settings the weights are meant to differ: then a difference is the result and no failure.
    if not again.equal and not again.settings:
        raise SystemExit(1)


def _table(again: Retrained) -> Table:
    begun = again.begun or "the weights that the run began with"
    title = f"step {again.step}: {again.groups} groups, {again.episodes} episodes, from {begun}"
    table = Table("metric", "in the run", "again", "", title=title, title_justify="left")
    was, now = (dict(_leaves(metrics)) for metrics in (again.recorded or {}, again.metrics))
    for name, value in now.items():
        if not name.startswith(("seconds.", "use.")):
            recorded = was.get(name)
            table.add_row(
                name,
                _format_value(recorded),
                _format_value(value),
                "" if again.recorded is None or recorded == value else "differs",
            )
    return table


def lines(again: Retrained) -> Iterator[str]:
    """Yield the lines to print below the table."""
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
        yield f"{of}: the run recorded no hash of its weights, nothing was compared"
    yield from (f"not as in the run: {note}" for note in again.notes)
    if again.out is not None:
        yield f"weights: {again.out}"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _format_value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return "-" if value is None else str(value)
