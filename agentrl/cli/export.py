"""The command `agentrl export`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A folder of agentrl train or agentrl sft; it may go on meanwhile")],
    hf: Annotated[Path, typer.Option(help="The folder to write, as Hugging Face lays it out; new or empty")],
    step: Annotated[int | None, typer.Option(min=1, help="Of which step; default: the newest checkpoint")] = None,
    role: Annotated[str | None, typer.Option(help="The model of this role, where it trained one of its own")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="A whole model, where an adapter was trained")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of its matrices; auto: that of the model")
    ] = "auto",
) -> None:
    """Write what a run has trained as a folder for transformers, PEFT or an engine."""
    from agentrl.offline.export_model import export as write

    print(write(run, hf, step=step, role=role, merge=merge, dtype=dtype))
