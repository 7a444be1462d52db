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
    from agentrl.store import RunStore


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

    run_folder = RunDir.open(path)
    with RunStore.open(run_folder.store_path) as run_store:
        group_id = run_store.groups.fork(episode, turn=turn, k=k)
        resume_command = _go_on(path, run_folder, run_store)
    print(
        f"group {group_id}: {k} continuations of episode {episode} from turn {turn} on, played as soon as the run goes"
        " on"
    )
    print(f"if it does not run now: {resume_command}")


def export_episodes(
    path: _RUN,
    out: Annotated[Path, typer.Option(help="The file to write")],
    form: Annotated[
        Literal["messages", "tokens", "atif", "inspect", "verifiers", "parquet"],
        typer.Option("--format", help="messages, tokens: demonstrations; the others: for programs that read these"),
    ] = "messages",
    best_of: Annotated[int | None, typer.Option(min=1, help="The best of the first N episodes of a task")] = None,
    min_outcome: Annotated[float | None, typer.Option(help="Only those with such an outcome, or a better one")] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="At most so many of a task, the best ones")] = None,
) -> None:
    """Write a run's finished episodes to a file: demonstrations for agentrl sft, or what Harbor, Inspect, verifiers or
    pandas read."""
    from agentrl.offline.episode_export import Choice, select
    from agentrl.offline.episode_formats import write_episodes
    from agentrl.run.run_folder import RunDir
    from agentrl.store import RunStore

    run_folder = RunDir.open(path)
    episode_choice = Choice(best_of=best_of, min_outcome=min_outcome, per_task=per_task)
    with RunStore.read(run_folder.store_path) as run_store:
        if form not in ("messages", "tokens"):
            members = episode_choice.of(run_store.reads)
            episode_count = write_episodes(run_store.reads, members, form, out, run_folder.config())
            print(f"{episode_count} episodes in {out}")
            return
        exported = select(run_store.reads, episode_choice, form, out, splits_thoughts=_writes_thoughts(run_folder))
    print(f"{exported.written} episodes in {out}")
    if exported.branches:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(exported.branches.items()))
        print(f"{exported.branches.total()} turns in it begin a branch ({kinds})")
    if exported.broken_calls:
        print(f"{exported.broken_calls} turns in it hold a call that is not well-formed: they stand as text")
    if exported.cut:
        print(f"{exported.cut} turns in it were cut by their length: they are context (weight 0)")
    if exported.untaught:
        print(f"{exported.untaught} are not in it: each of their turns was cut by its length, or masked")
    if exported.rewritten:
        print(f"{exported.rewritten} are not in it: no single conversation; --format tokens has them")
    if exported.texts:
        print(f"{exported.texts} are not in it: recorded as text, without tokens; --format messages has them, marked")
    if exported.dropped:
        print(
            f"{exported.dropped} are not in it: retention dropped their tokens (buffer.keep_steps);"
            " try --format messages"
        )


def _writes_thoughts(run: RunDir) -> bool:
    """Whether the template of the run's model writes thoughts; no if the model is gone."""
    from agentrl.models.resolve import renderer_of

    try:
        return renderer_of(run.config()).writes_thoughts
    except UsageError:
        return False


def _go_on(path: Path, run: RunDir, store: RunStore) -> str:
    """Return the command that resumes the run. A run that has trained all of its steps needs one more."""
    from agentrl.errors import StoreError

    try:
        trained_steps = store.versions.current_version().step
    except StoreError:  # no engine serves any weights yet
        trained_steps = 0
    return f"agentrl train --resume {path}" + f" --set train.steps={trained_steps + 1}" * (
        trained_steps >= run.config().train.steps
    )


def add_commands(app: typer.Typer) -> None:
    """Offer them on the command line."""
    app.command()(fork)
    app.command()(export_episodes)


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
    run_folder = RunDir.open(path)
    with run_folder.lock(), supervising(run_folder.store_path, of_copy=True):  # what gives a copy its own
        old_place, row_count = move(path, None if to == "sqlite" else to, time.time)
    print(f"{row_count} rows copied; {run_folder.store_path} names the store from now on, {old_place} the old one")
