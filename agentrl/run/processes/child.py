"""The child side of supervision: `python -m agentrl.run.processes.child ROLE RUN_DIR [INDEX]`.

A child ignores Ctrl-C (its owner ends it), watches its lifeline, and writes its one line of error to the file that its
owner reads.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from agentrl.host import json_log
from agentrl.host.quick_imports import quick_imports
from agentrl.run.processes.exit_status import run_role
from agentrl.run.processes.heartbeat import DUMP


def main() -> None:
    """Dispatch to the role's module, imported only here: a worker never loads torch."""
    child_role, run_path, *arguments = sys.argv[1:]
    json_log.adopt()
    faulthandler.enable()  # a process that crashes in a library's code writes its stacks to its log
    faulthandler.register(DUMP)  # and one that hangs before it is killed
    if child_role == "worker":
        from agentrl.run.processes.worker_process import serve

        sys.exit(run_role(child_role, lambda: serve(Path(run_path), int(arguments[0]))))
    with quick_imports():
        from agentrl.run.processes.learner_process import learn

    sys.exit(run_role(child_role, lambda: learn(Path(run_path))))


if __name__ == "__main__":
    main()
