"""The `agentrl` command from its first moment on: Ctrl-C while Python imports the rest is one line, and no traceback.

It stands beside the package because importing anything of the package takes that half second. Until the command line
is there the process owns nothing, so it may end on the spot.
"""

import os
import signal


def main() -> None:
    """Entry point of the `agentrl` command."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background of a shell it is ignored
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from agentrl.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: object) -> None:
    os.write(2, b"agentrl: stopped by Ctrl-C\n")
    os._exit(130)
