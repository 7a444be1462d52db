"""The newest checkpoint whose files hold the bytes that were written; damaged ones are set aside.

A damaged checkpoint is renamed rather than removed: a person may want what is left of it, and the run that goes on from
the one before writes its step again. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import RunFailed
from agentrl.learner.checkpoints import digests
from agentrl.learner.checkpoints.folders import STATE, named

_ASIDE = "damaged-"


def newest_intact(root: Path, progress: Callable[[], None] = lambda: None) -> tuple[Path | None, str]:
    """The newest intact checkpoint under `root` (None if it has no checkpoint), and one line about the damaged ones
    that are newer and were renamed, empty if there are none. Raises RunFailed if all are damaged: to begin again from
    the initial weights is a person's decision."""
    faults = dict[Path, str]()
    intact: Path | None = None
    for folder in reversed(named(root)):
        reason = _fault(folder, progress)
        if reason is None:
            intact = folder
            break
        faults[folder] = reason
    if not faults:
        return intact, ""
    if intact is None:
        folder, reason = next(iter(faults.items()))
        others = "" if len(faults) == 1 else f" and {len(faults) - 1} older ones, which are damaged too,"
        hint = f"move {folder}{others} away to begin again from the initial weights, or put a copy of the file back"
        raise RunFailed(f"{folder}/{reason}: {hint}; no intact checkpoint is before it")
    renamed = [
        f"checkpoint {folder.name} is damaged ({reason}) and is called {_set_aside(folder).name} now"
        for folder, reason in faults.items()
    ]
    return intact, f"{'; '.join(renamed)}; the run goes on from {intact.name}"


def _fault(folder: Path, progress: Callable[[], None]) -> str | None:
    """Describe the damage of a checkpoint, beginning with the name of the file; None for an intact one."""
    try:
        json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError):
        return f"{STATE} cannot be read"
    return digests.fault(folder, progress)


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint, so that no reader takes it for one."""
    names = (f"{_ASIDE}{folder.name}{f'-{number}' if number else ''}" for number in range(1_000_000))
    aside = next(path for name in names if not (path := folder.with_name(name)).exists())
    return folder.rename(aside)
