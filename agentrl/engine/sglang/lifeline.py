"""Starts SGLang's server so that it ends with its owner: when standard input closes, its process group is ended.

SGLang's own interpreter runs this file by its path, so it needs nothing but the standard library. The key comes in the
environment and goes to the server in an argument that no list of processes shows.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

KEY = "AGENTRL_ENGINE_KEY"  # as `agentrl.records.EngineKey.VALUE`
_GRACE_S = 5.0  # for the server to end in order


def _end_with_stdin() -> None:
    # Not through sys.stdin: a thread inside it at the interpreter's end is a fatal error.
    while os.read(0, 4096):
        pass
    if os.getpgrp() != os.getpid():  # started by hand: the group is a shell's
        os._exit(0)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """The arguments are those of `sglang.launch_server`."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Taken out of the environment, which the server's children inherit and `/proc` shows to the same user for as long
    # as they live. `sys.argv` is this interpreter's own list: the kernel's copy of the command line, which everybody
    # can read, stays as it was.
    api_key = os.environ.pop(KEY, "")
    sys.argv += [f"--api-key={api_key}"] if api_key else []  # in one word: a key may begin with a dash
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # its children import this module anew
    main()
