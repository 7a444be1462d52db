"""How a child ends: one line for its owner, and an exit status that says whether to start it again."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agentrl.errors import AgentRLError, DiskFull, RunFailed, StoreBusy, StoreDamaged, matters
from agentrl.host.disk_space import is_full

ENDS_THE_RUN = 3
"""Exit status of a child that says, on purpose, that the run cannot go on: starting it again would not help."""

_FINAL = (RunFailed, StoreBusy, StoreDamaged)


def run_role(role: str, main: Callable[[], None]) -> int:
    """Run a child's body; its failure becomes one line in $AGENTRL_ERROR_FILE and an exit status. If several errors
    were raised at once, the line is the most important one; the log has them all."""
    # Ctrl-C goes to the whole terminal's foreground group. The supervisor alone answers it and ends its children in
    # order; a learner that died of it in the middle of a write would be a crash.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main()
    except BaseException as raised:
        main_error = matters(raised)
        if isinstance(main_error, SystemExit) and main_error.code in (0, None):
            return 0
        # An OSError from any library, torch's file writer for one, may be a full disk. Its own exit status keeps it
        # from costing a restart: the next process would find the same disk.
        if is_full(main_error) and not isinstance(main_error, DiskFull):
            main_error = DiskFull(f"no space left on the disk: free some ({main_error})")
        if isinstance(main_error, AgentRLError):
            leave_note(str(main_error))
            with suppress(OSError):  # the log may lie on the disk that is full
                print(f"agentrl {role}: {main_error}", file=sys.stderr)
            return ENDS_THE_RUN if isinstance(main_error, _FINAL) else main_error.exit_code
        with suppress(OSError):
            traceback.print_exception(raised)
        leave_note(f"{type(main_error).__name__}: {' '.join(str(main_error).split())}")
        return 1
    return 0


def give_up(role: str, why: str) -> None:
    """End this process with that error, from any thread."""
    leave_note(why)
    with suppress(OSError):
        print(f"agentrl {role}: {why}", file=sys.stderr, flush=True)
    # Not `sys.exit`, which raises in this thread alone: the one that hangs, in a collective of NCCL for example, would
    # keep the process.
    os._exit(1)


def leave_note(line: str) -> None:
    """Tell whoever keeps this process alive, if anybody does, that it ends on purpose, and why."""
    note_path = os.environ.get("AGENTRL_ERROR_FILE")
    if note_path:
        with suppress(OSError):
            Path(note_path).write_text(line + "\n")
