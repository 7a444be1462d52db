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
    fault_by_folder = dict[Path, str]()
    intact_folder: Path | None = None
    for checkpoint_folder in reversed(named(root)):
        reason = _fault(checkpoint_folder, progress)
        if reason is None:
            intact_folder = checkpoint_folder
            break
        fault_by_folder[checkpoint_folder] = reason
    if not fault_by_folder:
        return intact_folder, ""
    if intact_folder is None:
        checkpoint_folder, reason = next(iter(fault_by_folder.items()))
        other_count = len(fault_by_folder) - 1
        others = f" and {other_count} older ones, which are damaged too," if other_count else ""
        away = f"move {checkpoint_folder}{others} away to begin again from the initial weights"
        correction = f"{away}, or put a copy of the file back"
        raise RunFailed(f"{checkpoint_folder}/{reason}: {correction}; no intact checkpoint is before it")
    renaming_lines = [
        f"checkpoint {damaged.name} is damaged ({reason}) and is called {_set_aside(damaged).name} now"
        for damaged, reason in fault_by_folder.items()
    ]
    return intact_folder, f"{'; '.join(renaming_lines)}; the run goes on from {intact_folder.name}"


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
    aside_names = (
        f"{_ASIDE}{folder.name}{f'-{copy_number}' if copy_number else ''}" for copy_number in range(1_000_000)
    )
    free_path = next(
        aside_path for aside_name in aside_names if not (aside_path := folder.with_name(aside_name)).exists()
    )
    return folder.rename(free_path)
