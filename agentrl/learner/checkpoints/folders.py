"""The folders of a run's checkpoints: their names, which of them are complete, which is the newest.

Standard library only: processes without torch use it too. Of a checkpoint's content it knows only the file that is
written last: `agentrl.learner.checkpoints.checkpoint` writes checkpoints, `agentrl.run.start_point` goes on from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agentrl.errors import FormatError

FORMAT: Final = 1
"""The format of checkpoints, which STATE names."""

STATE: Final = "state.json"
"""The file of a checkpoint that says what it trained. A folder without it is no checkpoint."""

DIGESTS: Final = "SHA256SUMS"
"""The file of a checkpoint that has the digest of each of its other files, by its path in the folder."""

# Eight digits, so that names sort as steps do in any listing; more are allowed, and `step_of` sorts by number.
_NAME: Final = re.compile(r"step-(\d{8,})")


def write_state(folder: Path, state: Mapping[str, object]) -> None:
    """Write STATE, with the format."""
    (folder / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """Read STATE. Raises FormatError if the checkpoint has another format, OSError or ValueError if it is damaged."""
    state_record: dict[str, Any] = json.loads((folder / STATE).read_text())
    if state_record.get("format", 0) != FORMAT:
        raise FormatError(folder, "checkpoint format", state_record.get("format", 0), FORMAT)
    return state_record


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
        (
            checkpoint
            for checkpoint in root.iterdir()
            if _NAME.fullmatch(checkpoint.name) and (checkpoint / STATE).is_file()
        ),
        key=step_of,
    )


def named(root: Path) -> list[Path]:
    """The folders under `root` that were written as checkpoints, oldest first, also those that lost their STATE."""
    if not root.is_dir():
        return []
    named_folders = (checkpoint for checkpoint in root.iterdir() if _NAME.fullmatch(checkpoint.name))
    return sorted(
        (
            checkpoint
            for checkpoint in named_folders
            if (checkpoint / STATE).is_file() or (checkpoint / DIGESTS).is_file()
        ),
        key=step_of,
    )


def newest_written(root: Path) -> Path | None:
    """The newest folder under `root` that was written as a checkpoint; None without one. One that lost its STATE is
    damaged: whoever passed over it would measure or export an older step without a word."""
    return next(reversed(named(root)), None)


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`; None without one."""
    return next(reversed(complete(root)), None)
