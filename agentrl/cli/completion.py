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
    folder_names = [*_below(incomplete), *(_below(f"runs/{incomplete}") if "/" not in incomplete else ())]
    return sorted(dict.fromkeys(folder_name for folder_name in folder_names if _PLAIN.fullmatch(folder_name)))


def _below(incomplete: str) -> Iterator[str]:
    parent_part, separator, name_prefix = incomplete.rpartition("/")
    parent_folder = Path(parent_part + separator).expanduser() if separator else Path()
    try:
        subfolders = [
            child_path
            for child_path in parent_folder.iterdir()
            if child_path.name.startswith(name_prefix) and child_path.is_dir()
        ]
    except OSError:
        return
    for child_path in subfolders:
        is_run = any((child_path / store_name).exists() for store_name in _STORES)
        if is_run or (name_prefix and not child_path.name.startswith(".")) or child_path.name == "runs":
            yield parent_part + separator + child_path.name + ("" if is_run else "/")


def environment_ids(incomplete: str) -> list[str]:
    """Ids of installed environments that begin so."""
    from agentrl import registry

    return [environment_id for environment_id in registry.ids("environments") if environment_id.startswith(incomplete)]


def episode_numbers(context: typer.Context, incomplete: str) -> list[str]:
    """Numbers of episodes of the run that the line names that begin so, the newest ones. None where its store is no
    file, is in use, or does not answer within half a second: whoever waits for a shell is not kept."""
    run_path, deadline = context.params.get("path"), time.monotonic() + _PATIENCE_S
    if run_path is None or not re.fullmatch(r"\d*", incomplete):
        return []
    store_path = Path(run_path).expanduser().absolute() / "store.sqlite"
    id_query = "SELECT id FROM episodes WHERE CAST(id AS TEXT) LIKE ? ORDER BY id DESC LIMIT ?"
    try:
        with closing(sqlite3.connect(f"{store_path.as_uri()}?mode=ro", uri=True, timeout=_PATIENCE_S)) as connection:
            # A connection's timeout bounds the wait for a lock only. A long search in a large store is ended by this.
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            return [
                str(episode_number) for (episode_number,) in connection.execute(id_query, (f"{incomplete}%", _MOST))
            ]
    except (sqlite3.Error, OSError, ValueError):
        return []
