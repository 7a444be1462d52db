"""Suggestions of the shell behind TAB: folders of runs, ids of environments, numbers of episodes. A name that is odd is
offered as it is: the shell quotes nothing for us, so names with characters that it would read are left out."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import typer

_PLAIN = re.compile(r"[\w./@%+=:,~-]+")
_STORES = ("store.sqlite", "store.address")
_MOST = 100  # numbers that are offered
_PATIENCE_S = 0.5


def run_folders(incomplete: str) -> list[str]:
    """Folders of runs that begin so, and folders to look into. Without a slash those in `runs` are offered, too."""
    names = [*_below(incomplete), *(_below(f"runs/{incomplete}") if "/" not in incomplete else ())]
    return sorted(dict.fromkeys(name for name in names if _PLAIN.fullmatch(name)))


def _below(incomplete: str) -> Iterator[str]:
    head, slash, tail = incomplete.rpartition("/")
    folder = Path(head + slash).expanduser() if slash else Path()
    try:
        inside = [path for path in folder.iterdir() if path.name.startswith(tail) and path.is_dir()]
    except OSError:
        return
    for path in inside:
        is_run = any((path / store).exists() for store in _STORES)
        if is_run or (tail and not path.name.startswith(".")) or path.name == "runs":
            yield head + slash + path.name + ("" if is_run else "/")


def environment_ids(incomplete: str) -> list[str]:
    """Ids of installed environments that begin so."""
    from agentrl import registry

    return [id for id in registry.ids("environments") if id.startswith(incomplete)]


def episode_numbers(context: typer.Context, incomplete: str) -> list[str]:
    """Numbers of episodes of the run that the line names that begin so, the newest ones. None where its store is no
    file, is in use, or does not answer within half a second: whoever waits for a shell is not kept."""
    path, deadline = context.params.get("path"), time.monotonic() + _PATIENCE_S
    if path is None or not re.fullmatch(r"\d*", incomplete):
        return []
    store = Path(path).expanduser().absolute() / "store.sqlite"
    ask = "SELECT id FROM episodes WHERE CAST(id AS TEXT) LIKE ? ORDER BY id DESC LIMIT ?"
    try:
        with closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True, timeout=_PATIENCE_S)) as file:
            # A connection's timeout bounds the wait for a lock only. A long search in a large store is ended by this.
            file.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            return [str(number) for (number,) in file.execute(ask, (f"{incomplete}%", _MOST))]
    except (sqlite3.Error, OSError, ValueError):
        return []
