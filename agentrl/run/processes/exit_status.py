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
        error = matters(raised)
        if isinstance(error, SystemExit) and error.code in (0, None):
            return 0
        # An OSError from any library, torch's file writer for one, may be a full disk. Its own exit status keeps it
        # from costing a restart: the next process would find the same disk.
        if is_full(error) and not isinstance(error, DiskFull):
            error = DiskFull(f"no space left on the disk: free some ({error})")
        if isinstance(error, AgentRLError):
            leave_note(str(error))
            with suppress(OSError):  # the log may lie on the disk that is full
                print(f"agentrl {role}: {error}", file=sys.stderr)
            return ENDS_THE_RUN if isinstance(error, _FINAL) else error.exit_code
        with suppress(OSError):
            traceback.print_exception(raised)
        leave_note(f"{type(error).__name__}: {' '.join(str(error).split())}")
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
    target = os.environ.get("AGENTRL_ERROR_FILE")
    if target:
        with suppress(OSError):
            Path(target).write_text(line + "\n")
