"""A port for a server that is yet to start. Standard library only."""

from __future__ import annotations

import secrets
import socket

_PORTS = range(20_000, 32_768)  # below those that systems give to whoever asks for any port, or connects
_TRIES = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody has now, and that the system gives nobody unasked.

    A server takes seconds to listen on it, again when it is started anew: a port that the system hands out by itself
    could be somebody else's by then."""
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:  # raises what is wrong with the host
        probe.bind((host, 0))
        return probe.getsockname()[1]
