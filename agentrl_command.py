"""The `agentrl` command from its first moment on: Ctrl-C while Python imports the rest is one line, and no traceback.

It stands beside the package because importing anything of the package takes that half second. Until the command line
is there the process owns nothing, so it may end on the spot.
"""

import _signal  # pyright: ignore  # not `signal`: it imports enum, and a Ctrl-C meanwhile would be a traceback
import os


def _leave(number: int, frame: object) -> None:
    os.write(2, b"agentrl: stopped by Ctrl-C\n")
    os._exit(130)


_OURS = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # in the background of a shell it is ignored
if _OURS:
    _signal.signal(_signal.SIGINT, _leave)


def main() -> None:
    """Entry point of the `agentrl` command."""
    from agentrl.cli.main import main as run

    if _OURS:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    run()
