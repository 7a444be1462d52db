"""Serve a page of runs, or figures of them: the socket, the bounds of clients, the address. Knows no route."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from agentrl.engine.embedded.bounded_protocol import BoundedProtocol
from agentrl.errors import UsageError
from agentrl.http.bounds import Connections, ServerBounds
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.web_page import Visitors, loopback_hosts, web_page

PORT = 8642
_ENDS_S = 5.0  # for answers under way
_BOUNDS = ServerBounds(connections=256, head_s=10.0, body_bytes=1 << 20, body_s=30.0)
"""Bounds of a server on a machine with many users: half requests of one user must not keep the owner out."""


@contextmanager
def served(places: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0, steer: bool = True) -> Generator[str]:
    """Serve a page of the runs in `places` from a thread while the block goes on; its address, with the token. Port 0
    takes a free one; without `steer` it only looks. Raises UsageError for an address that is not to be had."""
    # 192 random bits, anew for each server, so that an address in a shell's history opens nothing tomorrow.
    visitors = Visitors(token=secrets.token_urlsafe(24), hosts=loopback_hosts(host), steer=steer)
    opened_runs = OpenedRuns(places)
    try:
        with in_thread(web_page(opened_runs, visitors), host, port, ends=opened_runs.closing.set) as url:
            # In the fragment, which a browser sends to no server and puts into no Referer; in the query it would
            # stand in logs.
            yield f"{url}/#token={visitors.token}"
    finally:
        opened_runs.close()


@contextmanager
def in_thread(app: Any, host: str, port: int, *, ends: Callable[[], object] = lambda: None) -> Generator[str]:
    """Serve an ASGI application from a thread while the block goes on; the URL. `ends` is called when the block ends,
    before the thread is waited for. Raises UsageError for an address that is not to be had."""
    # Bound here and not by uvicorn: that one calls `sys.exit` if the port is taken, which nobody can catch in a
    # thread, and a free port (0) has to be known before the address is printed.
    listener = _listener(host, port)
    server_config = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, connections=Connections(_BOUNDS), bounds=_BOUNDS),  # pyright: ignore[reportArgumentType]
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        # With these headers a client could claim any address, and be counted as many peers.
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    http_server = uvicorn.Server(server_config)
    # A thread with a loop of its own: whoever opens the page may be a command that does other work, under trio or
    # under nothing, and the page has to answer meanwhile. A daemon, so that an answer that hangs does not hold up the
    # end of the process.
    server_thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    server_thread.start()
    try:
        yield _url(host, listener)
    finally:
        # First the long answers are told to end: uvicorn waits for them, and news would otherwise be sent for as long
        # as the page is open.
        ends()
        http_server.should_exit = True
        server_thread.join(_ENDS_S)
        listener.close()


def _listener(host: str, port: int) -> socket.socket:
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(address_family, socket.SOCK_STREAM)
    # Or the port of a page that was closed a moment ago would be refused for a minute, by its connections in
    # TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def _url(host: str, listener: socket.socket) -> str:
    # Nobody can open 0.0.0.0 from elsewhere; the host's name is the best guess at what others call this machine.
    shown_host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    port = listener.getsockname()[1]
    return f"http://[{shown_host}]:{port}" if ":" in shown_host else f"http://{shown_host}:{port}"
