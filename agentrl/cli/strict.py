"""The option `--strict` of the commands that read data."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from agentrl.notices import STRICT_VARIABLE


def _pass_to_processes(strict: bool) -> bool:
    """Processes of a run read the variable, too."""
    if strict:
        os.environ[STRICT_VARIABLE] = "1"
    return strict


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        envvar=STRICT_VARIABLE,
        callback=_pass_to_processes,
        help="Refuse unused input, in the place of naming it",
    ),
]
