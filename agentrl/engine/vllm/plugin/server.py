"""vLLM's HTTP server with a lifeline: `python -m agentrl.engine.vllm.plugin.server ARGUMENTS OF THE API SERVER`.

Runs in vLLM's interpreter. The server ends in order when standard input closes, however its owner went, and is killed
with all its processes a grace later if it has not. Standard library only, besides the module it runs.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

from agentrl.engine.vllm.plugin import HOST_VARIABLE

_GRACE_S = 6.0
SERVER = "vllm.entrypoints.openai.api_server"


def _watch() -> None:
    while os.read(0, 4096):
        pass
    # SIGTERM first: vLLM removes its shared memory and sockets in an orderly end, and leaves them in /dev/shm after
    # SIGKILL.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    # Only a group of our own: started by hand, the group is a shell's job and may hold other programs.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve until SIGTERM or the end of standard input."""
    os.environ[HOST_VARIABLE] = str(os.getpid())
    # A thread that blocks in the kernel: it works while the main thread computes, hangs, or imports for a minute.
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
