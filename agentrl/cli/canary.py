"""The command `agentrl canary`. Imports nothing heavy before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from agentrl.cli import tables
from agentrl.cli.server_key import server_key
from agentrl.cli.tables import print_line
from agentrl.errors import EngineError, UsageError

if TYPE_CHECKING:
    from agentrl.canary.examine import Report


def canary(
    url: Annotated[str, typer.Argument(metavar="URL", help="A vLLM, SGLang or OpenAI-compatible server")],
    model: Annotated[str, typer.Option(help="The folder or id of the model that it should serve")],
    adapter: Annotated[Path | None, typer.Option(help="The folder of the LoRA adapter over it")] = None,
    candidates: Annotated[
        list[str] | None, typer.Option(help="A folder, model or adapter, that it may serve instead; may be repeated")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's, or adapter's, name there; default: its only one")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, typer.Option(help="Default: the model folder's own")
    ] = None,
    logprobs: Annotated[
        Literal["raw", "processed"] | None, typer.Option(help="What log-probs of sampled tokens must be")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(min=64, help="Tokens of context; default: all that fit")] = None,
    key_variable: Annotated[str | None, typer.Option(help="With the server's key; default: OPENAI_API_KEY")] = None,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Of each request")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Say whether a server computes with the weights of a folder, and what is wrong if not. Changes nothing there. Exit
    code 0: it does; 1: a fault, named; 2: it could not tell."""
    from agentrl.canary.examine import Subject, examine
    from agentrl.config.sections import check_url
    from agentrl.models.resolve import model_dir

    subject = Subject(
        url=check_url("URL", url),
        model=model_dir(model),
        adapter=None if adapter is None else _adapter(adapter),
        candidates=[_candidate(candidate) for candidate in candidates or []],
        name=name,
        key=server_key(key_variable),
        dtype=dtype,
        expected_mode=logprobs,
        max_depth=max_depth,
        deadline_s=deadline_s,
    )
    try:
        canary_report = examine(subject, lambda line: print(line, file=sys.stderr, flush=True))
    except EngineError as error:  # not there, too late, or it makes no sense: nothing was found out
        raise UsageError(str(error)) from error
    if as_json:
        tables.print_json(canary_report.document(subject))
    else:
        _show(canary_report)
    if canary_report.faults:
        raise SystemExit(1)
    if canary_report.unknown:
        raise SystemExit(2)


def _adapter(folder: Path) -> Path:
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(f"--adapter {folder}: no adapter_config.json is there; give the folder of a LoRA adapter")
    return folder


def _candidate(place: str) -> Path:
    from agentrl.models.resolve import model_dir

    candidate_folder = Path(place)
    return candidate_folder if (candidate_folder / "adapter_config.json").is_file() else model_dir(place)


def _show(report: Report) -> None:
    from agentrl.canary.verdict import FIXES

    limit_kind = "rms" if report.dtype == "bfloat16" else "max"
    depth_table = Table("depth", "mean |Δ|", "max |Δ|", "bfloat16 here", "its max", f"limit ({limit_kind})", "")
    for depth_row in report.depths:
        depth_figures = (
            depth_row.mean,
            depth_row.max,
            depth_row.rounding_mean,
            depth_row.rounding_max,
            depth_row.limit,
        )
        depth_table.add_row(
            f"{depth_row.depth:,}",
            *(f"{figure:.2g}" for figure in depth_figures),
            "" if depth_row.is_near else "too far",
        )
    if report.depths:
        tables.console().print(depth_table)
        print_line("|Δ|: nats between the server's log-probs and the folder's in float32, of tokens up to that depth.")
    if report.mode is not None:
        print_line(f"Log-probs of sampled tokens are {report.mode}.")
    for report_line in report.remarks:
        print_line(report_line)
    for fault in report.faults:
        print_line(f"{fault.name}: {fault.evidence}")
        print_line(f"    {FIXES[fault.name]}")
    for report_line in report.unknown:
        print_line(f"could not tell: {report_line}")
    if not report.faults and not report.unknown:
        print_line(f"the server computes with these weights, up to the rounding of {report.dtype}")
