"""The commands on single episodes of a run, as `agentrl.cli` offers them; heavy imports wait until they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentrl.runtime.rundir import RunDir
    from agentrl.store.roles import Versions

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

    run = RunDir.open(path)
    with RunStore.open(run.store_path) as store:
        group = store.fork(episode, turn=turn, k=k)
        go_on = _go_on(path, run, store)
    print(
        f"group {group}: {k} continuations of episode {episode} from turn {turn} on, played as soon as the run goes on"
    )
    print(f"if it does not run now: {go_on}")


def export_episodes(path: _RUN, out: Annotated[Path, typer.Option(help="The file to write")]) -> None:
    """Write a run's untrained episodes to a file, unfinished ones with their tokens and snapshots."""
    from agentrl.runtime.moving import export_episodes as write
    from agentrl.runtime.rundir import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    with RunStore.open(run.store_path) as store:
        moved = write(run.config(), store, out)
    print(f"{moved.groups} groups with {moved.episodes} episodes, {moved.unfinished} of them unfinished, in {out}")
    if moved.left:
        print(f"{moved.left} late episodes are not in it: their groups were trained without them")
    if moved.large:
        print(f"{moved.large} groups are not in it: an episode of theirs is too large to be moved")
    if moved.groups:
        print(f"take them into another run: agentrl import-episodes OTHER_RUN {out}")


def import_episodes(
    path: _RUN,
    file: Annotated[Path, typer.Argument(help="A file of agentrl export-episodes")],
    without_snapshots: Annotated[bool, typer.Option(help="Replay environments instead")] = False,
) -> None:
    """Take another run's untrained episodes in; they go on with the run. Same model and tasks."""
    from agentrl.runtime.moving import import_episodes as read
    from agentrl.runtime.rundir import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    with RunStore.open(run.store_path) as store:
        moved = read(run.config(), store, file, snapshots=not without_snapshots)
        go_on = _go_on(path, run, store)
    again = f"; {moved.known} had come in before" if moved.known else ""
    print(f"{moved.groups} groups with {moved.episodes} episodes came in, {moved.unfinished} of them unfinished{again}")
    print(f"if the run does not go on by itself now: {go_on}")


def _go_on(path: Path, run: RunDir, store: Versions) -> str:
    """What to type for the run to go on. A run that has trained all of its steps needs one more."""
    from agentrl.errors import StoreError

    try:
        done = store.current_version().step
    except StoreError:  # no engine serves any weights yet
        done = 0
    return f"agentrl train --resume {path}" + f" --set train.steps={done + 1}" * (done >= run.config().train.steps)


def add_commands(app: typer.Typer) -> None:
    """Offer them on the command line."""
    app.command()(fork)
    app.command()(export_episodes)
    app.command()(import_episodes)
