"""The folders of a run's checkpoints: their names, which of them are complete, which is the newest.

Standard library only: processes without torch use it too. Of a checkpoint's content it knows only the file that is
written last: `agentrl.learner.checkpoints.checkpoint` writes checkpoints, `agentrl.run.start_point` goes on from them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

STATE: Final = "state.json"
"""The file of a checkpoint that says what it trained. A folder without it is no checkpoint."""

_NAME: Final = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The name of the folder of optimizer step `step`."""
    return f"step-{step:08d}"


def of_role(checkpoint: Path, role: str) -> Path:
    """Where a checkpoint keeps the model of a role that has its own."""
    return checkpoint / "roles" / role


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first; empty if there is no such folder. Drafts and renamed folders
    do not count."""
    if not root.is_dir():
        return []
    return sorted(
        (each for each in root.iterdir() if _NAME.fullmatch(each.name) and (each / STATE).is_file()), key=step_of
    )


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`; None without one."""
    return next(reversed(complete(root)), None)
