"""The command `agentrl fleet`, as `agentrl.cli` offers it. Nothing heavy is imported before it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def fleet(file: Annotated[Path, typer.Argument(help="The fleet file (TOML), see docs/how-to/fleet.md")]) -> None:
    """Serve engines that several runs share through adapters, until Ctrl-C. Prints each tenant's lines for its run."""
    from agentrl.host.nonblocking_output import waiting_for_no_reader
    from agentrl.run.serving import shared_engines

    config = shared_engines.load(file)
    with waiting_for_no_reader():
        shared_engines.run(config, partial(print, flush=True))
