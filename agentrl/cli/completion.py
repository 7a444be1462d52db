"""What the shell offers behind TAB: folders of runs, ids of environments. A name that is odd is offered as it is: the
shell quotes nothing for us, so names with characters that it would read are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PLAIN = re.compile(r"[\w./@%+=:,~-]+")
_STORES = ("store.sqlite", "store.address")


def run_folders(incomplete: str) -> list[str]:
    """Folders of runs that begin so, and folders to look into. Without a slash those in `runs` are offered, too."""
    found = [*_below(incomplete), *(_below(f"runs/{incomplete}") if "/" not in incomplete else ())]
    return sorted(dict.fromkeys(name for name in found if _PLAIN.fullmatch(name)))


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
