"""Finds a port for a server that will start soon. Standard library only."""

from __future__ import annotations

import secrets
import socket

_PORTS = range(20_000, 32_768)  # below the ports that systems assign by themselves
_TRIES = 1000


def free_port(host: str = "127.0.0.1", *, first: int | None = None) -> int:
    """A port of `host` that is free now, and that the system does not assign by itself; `first` if it is free.

    A server takes seconds to listen on it, and again after a restart: a port from the system's own range could be
    assigned to another process by then."""
    for attempt in range(_TRIES):
        # By chance and not in order: two runs that start together would otherwise both find the same port free, since
        # neither listens on it yet.
        tried_port = first if first is not None and attempt == 0 else secrets.choice(_PORTS)
        with socket.socket() as probe_socket:
            try:
                probe_socket.bind((host, tried_port))
            except OSError:
                continue
            return tried_port
    with socket.socket() as probe_socket:  # raises the error if `host` is wrong
        probe_socket.bind((host, 0))
        return probe_socket.getsockname()[1]
