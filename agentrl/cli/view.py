"""The command `agentrl view`, as `agentrl.cli` offers it. Imports nothing heavy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UsageError


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run directories, or folders of such; default: runs")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; by default only this machine can reach it")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8642,
    browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser")] = False,
) -> None:
    """Show runs on a web page, live while they go on: curves, episodes turn by turn, tokens. It only looks. The address
    ends in a token, without which nobody reads a run."""
    from agentrl.view.page_server import served

    places = runs or [Path("runs")]
    if not runs and not places[0].is_dir():
        raise UsageError("there is no folder runs here: name run directories")
    with served(places, host=host, port=port) as address:
        print(f"{address}\nCtrl-C ends the page, and no run", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("the page is closed")
