"""A process that dies with its owner: the owner holds the other end of its standard input. Standard library only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

_LIFELINE_GRACE_S = 5.0


def watch_lifeline(on_end: Callable[[], None]) -> None:
    """Call `on_end` when standard input ends, and exit the process after a grace period in any case."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        timer = threading.Timer(_LIFELINE_GRACE_S, os._exit, args=(70,))
        timer.daemon = True
        timer.start()
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
