"""The commands on single episodes of a run, and on its store (`agentrl store …`); heavy imports wait until they are
needed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.completion import episode_numbers, run_folders
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from agentrl.run.run_folder import RunDir
    from agentrl.store.interfaces import Versions


_RUN = Annotated[Path, typer.Argument(autocompletion=run_folders, help="A run directory")]


def fork(
    path: _RUN,
    episode: Annotated[int, typer.Argument(autocompletion=episode_numbers, help="The episode's number")],
    turn: Annotated[int, typer.Option(help="The first turn that is played anew, from 1 on (the first turn is 0)")],
    k: Annotated[int, typer.Option(help="How many continuations")] = 4,
) -> None:
    """Play an episode on from one of its turns, K times, as siblings of a new training group."""
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    with RunStore.open(run.store_path) as store:
        group = store.fork(episode, turn=turn, k=k)
        go_on = _go_on(path, run, store)
    print(
        f"group {group}: {k} continuations of episode {episode} from turn {turn} on, played as soon as the run goes on"
    )
    print(f"if it does not run now: {go_on}")


def export_episodes(
    path: _RUN,
    out: Annotated[Path, typer.Option(help="The file to write")],
    form: Annotated[
        Literal["moving", "messages", "tokens", "atif", "inspect", "verifiers", "parquet"],
        typer.Option(
            "--format",
            help="moving: untrained ones, for another run; messages, tokens: demonstrations; the others: for programs"
            " that read these",
        ),
    ] = "moving",
    best_of: Annotated[int | None, typer.Option(min=1, help="The best of the first N episodes of a task")] = None,
    min_outcome: Annotated[float | None, typer.Option(help="Only those with such an outcome, or a better one")] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="At most so many of a task, the best ones")] = None,
) -> None:
    """Write a run's untrained episodes to a file, unfinished ones with their tokens and snapshots; or, with another
    --format, its finished ones: demonstrations for agentrl sft, or what Harbor, Inspect, verifiers or pandas read."""
    from agentrl.offline.episode_export import export_episodes as write
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run = RunDir.open(path)
    if form != "moving":
        _export_demonstrations(run, out, form, best_of, min_outcome, per_task)
        return
    if (best_of, min_outcome, per_task) != (None, None, None):
        raise UsageError("--best-of, --min-outcome and --per-task choose demonstrations: give --format messages too")
    with RunStore.open(run.store_path) as store:
        moved = write(run.config(), store, out)
    print(f"{moved.groups} groups with {moved.episodes} episodes, {moved.unfinished} of them unfinished, in {out}")
    if moved.left:
        print(f"{moved.left} late episodes are not in it: their groups were trained without them")
    if moved.large:
        print(f"{moved.large} groups are not in it: an episode of theirs is too large to be moved")
    if moved.groups:
        print(f"take them into another run: agentrl import-episodes OTHER_RUN {out}")


def _export_demonstrations(
    run: RunDir,
    out: Path,
    form: Literal["messages", "tokens", "atif", "inspect", "verifiers", "parquet"],
    best_of: int | None,
    min_outcome: float | None,
    per_task: int | None,
) -> None:
    from agentrl.offline.episode_export import Choice, select
    from agentrl.offline.episode_formats import write_episodes
    from agentrl.store import RunStore

    choice = Choice(best_of=best_of, min_outcome=min_outcome, per_task=per_task)
    with RunStore.read(run.store_path) as store:
        if form not in ("messages", "tokens"):
            print(f"{write_episodes(store, choice.of(store), form, out, run.config())} episodes in {out}")
            return
        told = select(store, choice, form, out)
    print(f"{told.written} episodes in {out}")
    if told.rewritten:
        print(f"{told.rewritten} are not in it: no single conversation; --format tokens has them")
    if told.dropped:
        print(
            f"{told.dropped} are not in it: retention dropped their tokens (buffer.keep_steps); try --format messages"
        )


def import_episodes(
    path: _RUN,
    file: Annotated[Path, typer.Argument(help="A file of agentrl export-episodes")],
    without_snapshots: Annotated[bool, typer.Option(help="Replay environments instead")] = False,
) -> None:
    """Take another run's untrained episodes in; they go on with the run. Same model and tasks."""
    from agentrl.offline.episode_export import import_episodes as read
    from agentrl.run.run_folder import RunDir
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


store = typer.Typer(no_args_is_help=True, help="The store of a run.")


@store.callback()
def _store() -> None:
    """The store of a run."""


@store.command("copy")
def copy(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", autocompletion=run_folders, help="The run's directory; the run must not be under way"
        ),
    ],
    to: Annotated[str, typer.Option("--to", help="postgresql://user@host/database, or sqlite: a file in the folder")],
) -> None:
    """Copy a run's store to PostgreSQL or back to a file; the run goes on with the copy, the old store is kept."""
    from agentrl.run.run_folder import RunDir
    from agentrl.store.copy_database import move
    from agentrl.store.databases.open_store import supervising

    if to != "sqlite" and not to.startswith(("postgresql://", "postgres://")):
        raise UsageError(f"--to {to}: give postgresql://user@host/database, or sqlite")
    run = RunDir.open(path)
    with run.lock(), supervising(run.store_path, of_copy=True):  # what gives a copy its own
        kept, rows = move(path, None if to == "sqlite" else to, time.time)
    print(f"{rows} rows copied; {run.store_path} names the store from now on, {kept} the old one")
