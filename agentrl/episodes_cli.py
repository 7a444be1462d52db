"""The commands on single episodes of a run, as `agentrl.cli` offers them; heavy imports wait until they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_RUN = Annotated[Path, typer.Argument(help="A run directory")]


def fork(
    path: _RUN,
    episode: Annotated[int, typer.Argument(help="The episode's number")],
    turn: Annotated[int, typer.Option(help="The first turn that is played anew, from 1 on (the first turn is 0)")],
    k: Annotated[int, typer.Option(help="How many continuations")] = 4,
) -> None:
    """Play an episode on from one of its turns, K times, as siblings of a new training group."""
    from agentrl.runtime.rundir import RunDir
    from agentrl.store import RunStore

    with RunStore.open(RunDir.open(path).store_path) as store:
        group = store.fork(episode, turn=turn, k=k)
    print(
        f"group {group}: {k} continuations of episode {episode} from turn {turn} on, played as soon as the run goes on"
    )
    print(f"if it does not run now: agentrl train --resume {path}")


def add_commands(app: typer.Typer) -> None:
    """Offer them on the command line."""
    app.command()(fork)
