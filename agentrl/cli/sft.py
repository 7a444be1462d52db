"""The command `agentrl sft`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UsageError


def sft(
    file: Annotated[Path | None, typer.Argument(help="The file of settings (TOML), see docs/how-to/sft.md")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.lr=1e-5")] = None,
    out: Annotated[Path | None, typer.Option(help="Its folder; default runs/NAME")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on in this folder")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run of agentrl sft that is there")] = False,
) -> None:
    """Train a model on demonstrations: a warm start for agentrl train."""
    from agentrl.offline import sft as training

    if (file is None) == (resume is None):
        raise UsageError("give either a file of settings or --resume FOLDER")
    if resume is not None and (out or overwrite):
        raise UsageError("--resume goes on in its own folder: leave out --out and --overwrite")
    if resume is not None:
        folder, last = resume, training.resume(resume, settings or [], told=print)
    else:
        assert file is not None
        config = training.load(file, settings or [])
        folder = out or Path("runs") / config.name
        last = training.train(config, folder, told=print, overwrite=overwrite)
    print(f"checkpoint: {last}\nbegin a run with it: agentrl train RUN_FILE --set model={folder}")
