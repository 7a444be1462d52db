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
    run_folder = RunDir.open(run)
    out = out or run / "trace.json.gz"
    with RunStore.read(run_folder.store_path) as run_store:
        spans_of_learner, spans_of_episodes = learner_spans(run_store), episode_spans(run_store, time.time())
        if otlp is not None:
            all_spans, exporter = itertools.chain(spans_of_learner, spans_of_episodes), otlp_exporter(otlp)
            span_count = export_spans(all_spans, exporter, run=str(run), model=run_folder.config().model)
            print(f"{span_count} spans are at {otlp}")
            return
        event_count = write_trace(spans_of_learner, spans_of_episodes, out)
    print(f"{event_count} events in {out}: open it on https://ui.perfetto.dev, which keeps it in the browser")


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
        out_folder, checkpoint_path = resume, training.resume(resume, settings or [], notify=print)
    else:
        assert file is not None
        sft_config = training.load(file, settings or [])
        out_folder = out or Path("runs") / sft_config.name
        checkpoint_path = training.train(sft_config, out_folder, notify=print, overwrite=overwrite)
    print(f"checkpoint: {checkpoint_path}\nbegin a run with it: agentrl train RUN_FILE --set model={out_folder}")


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

    run_folder = RunDir.open(path)
    retrained = train_again(
        run_folder, step, settings=settings or [], out=out, dump=dump, notify=lambda line: print(line, file=sys.stderr)
    )
    if as_json:
        tables.print_json({**asdict(retrained), "equal": retrained.equal})
    else:
        console = tables.console()
        console.print(_table(retrained))
        for result_line in lines(retrained):
            console.print(result_line, markup=False, highlight=False)
    # With other settings the weights are meant to differ: then a difference is the result and no failure.
    if not retrained.equal and not retrained.settings:
        raise SystemExit(1)


def _table(again: Retrained) -> Table:
    start_weights = again.begun or "the weights that the run began with"
    table_title = f"step {again.step}: {again.groups} groups, {again.episodes} episodes, from {start_weights}"
    metric_table = Table("metric", "in the run", "again", "", title=table_title, title_justify="left")
    recorded_metrics, retrained_metrics = (
        dict(_leaves(metric_tree)) for metric_tree in (again.recorded or {}, again.metrics)
    )
    for metric_name, metric_value in retrained_metrics.items():
        if not metric_name.startswith(("seconds.", "use.")):
            recorded_value = recorded_metrics.get(metric_name)
            metric_table.add_row(
                metric_name,
                _format_value(recorded_value),
                _format_value(metric_value),
                "" if again.recorded is None or recorded_value == metric_value else "differs",
            )
    return metric_table


def lines(again: Retrained) -> Iterator[str]:
    """Yield the lines to print below the table."""
    step_label, difference = f"step {again.step}", again.difference
    if difference is not None:
        tensor_names = ", ".join(difference.tensors[:3]) + (", …" if len(difference.tensors) > 3 else "")
        since_text = "" if difference.step == again.step else f" since step {difference.step}"
        counts = f"{len(difference.tensors)} of {difference.of} tensors"
        yield f"{step_label}: the weights DIFFER{since_text} from the run's, in {counts}: {tensor_names}"
    if again.settings:
        yield f"{step_label}: trained otherwise on purpose ({', '.join(again.settings)}): its weights are not the run's"
    elif again.equal:
        yield f"{step_label}: the weights of all {again.tensors} tensors are bit-equal to those of the run"
    elif difference is None:
        yield f"{step_label}: the run recorded no hash of its weights, nothing was compared"
    yield from (f"not as in the run: {deviation}" for deviation in again.notes)
    if again.out is not None:
        yield f"weights: {again.out}"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for metric_name, metric_value in values.items():
        if isinstance(metric_value, dict):
            yield from _leaves(cast("dict[str, Any]", metric_value), f"{prefix}{metric_name}.")
        else:
            yield prefix + metric_name, metric_value


def _format_value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return "-" if value is None else str(value)
