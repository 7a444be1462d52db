"""Where torch keeps what it compiles. The next process runs what lies there, so nobody else may write there.

Torch's own choice is a folder of a known name in the temporary folder, in which another user of the machine can lay
code before the first process of ours makes it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Which folder it is, as torch reads it."""


def place(otherwise: Path | None = None) -> str:
    """The folder for all processes of this user: that of the variable, or one in the temporary folder. If others could
    write to that, `otherwise`, or a new folder."""
    if variable_folder := os.environ.get(VARIABLE):
        return variable_folder
    shared_folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    with suppress(FileExistsError):
        shared_folder.mkdir(mode=0o700)
    # `lstat` after `mkdir`, and both are needed: the folder may have been there before, as a link or as somebody
    # else's, and then what lies in it would be run by us.
    status = shared_folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return str(shared_folder)
    return str(otherwise or tempfile.mkdtemp(prefix="agentrl-compiled-"))


def choose() -> None:
    """Have torch use that folder in this process. Call it before something is compiled."""
    os.environ[VARIABLE] = place()
