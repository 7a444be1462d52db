"""The commands `agentrl view` and `agentrl metrics`, as `agentrl.cli` offers it. Imports nothing heavy."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import run_folders
from agentrl.errors import UsageError

_RUNS = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...", autocompletion=run_folders, help="Run directories, or folders of such; default: runs"
    ),
]
_HOST = Annotated[str, typer.Option(help="Where to listen; by default only this machine can reach it")]


def view(
    runs: _RUNS = None,
    host: _HOST = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8642,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run; nothing has to be trained")] = False,
    bundle: Annotated[Path | None, typer.Option(help="Write one run's page here as static files, and end")] = None,
    most: Annotated[int, typer.Option(min=1, help="Episodes in a bundle, of each purpose the newest")] = 500,
    steer: Annotated[bool, typer.Option(help="Whether the page may pause a run and change its settings")] = True,
    browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser")] = False,
) -> None:
    """Show runs on a web page, live while they go on: curves, episodes turn by turn, tokens. It pauses a run or changes
    its settings if you ask it to. The address ends in a token, without which nobody reads or steers a run."""
    from agentrl.view.page_server import served
    from agentrl.view.recorded_run import recorded_run

    if demo and runs:
        raise UsageError("--demo shows a recorded run: leave the run directories out")
    with ExitStack() as exit_stack:
        run_places = [exit_stack.enter_context(recorded_run())] if demo else runs or [Path("runs")]
        for run_place in run_places:
            if not run_place.is_dir():
                correction = "give run directories, or a folder of such; agentrl view --demo shows a recorded run"
                raise UsageError(f"{run_place} is no folder: {correction}")
        if bundle is not None:
            _write_bundle(run_places, bundle, most)
            return
        page_address = exit_stack.enter_context(served(run_places, host=host, port=port, steer=steer and not demo))
        print(f"{page_address}\nCtrl-C ends the page, and no run", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(page_address)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("the page is closed")


def metrics(
    runs: _RUNS = None,
    host: _HOST = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 9464,
) -> None:
    """Serve figures of runs for Prometheus, until Ctrl-C: steps, metrics, groups, episodes, engines. It only looks."""
    from agentrl.view.run_gauges import exported

    run_places = runs or [Path("runs")]
    for run_place in run_places:
        if not run_place.is_dir():
            raise UsageError(f"{run_place} is no folder: give run directories, or a folder of such")
    with exported(run_places, host=host, port=port) as metrics_address:
        print(f"{metrics_address}\nCtrl-C ends it, and no run", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("no figures any more")


def _write_bundle(places: list[Path], out: Path, most: int) -> None:
    from agentrl.view.bundle import write_bundle

    if len(places) != 1:
        raise UsageError(f"--bundle {out}: it has one run; give one run directory")
    episode_count = write_bundle(places[0], out, most=most)
    print(f"{out} has the page with {episode_count} episodes, for any web server: python -m http.server -d {out}")


@contextmanager
def beside(run: Path, *, serves: bool) -> Generator[None]:
    """Serve a run's page and print its address while the block trains the run; do nothing if its user declined the
    page."""
    if not serves:
        yield
        return
    from agentrl.view.page_server import served

    with served([run]) as page_address:
        print(f"see it on {page_address}", flush=True)
        yield
