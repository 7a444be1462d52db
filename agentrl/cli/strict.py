"""The option `--strict` of the commands that read data."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from agentrl.notices import STRICT_VARIABLE


def _tell_processes(wanted: bool) -> bool:
    """Processes of a run read the variable, too."""
    if wanted:
        os.environ[STRICT_VARIABLE] = "1"
    return wanted


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        envvar=STRICT_VARIABLE,
        callback=_tell_processes,
        help="Refuse input that holds something unused, in the place of naming it",
    ),
]
