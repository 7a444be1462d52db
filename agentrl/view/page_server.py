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
    visitors = Visitors(token=secrets.token_urlsafe(24), hosts=loopback_hosts(host), steer=steer)
    runs = OpenedRuns(places)
    try:
        with in_thread(web_page(runs, visitors), host, port, ends=runs.closing.set) as url:
            yield f"{url}/#token={visitors.token}"
    finally:
        runs.close()


@contextmanager
def in_thread(app: Any, host: str, port: int, *, ends: Callable[[], object] = lambda: None) -> Generator[str]:
    """Serve an ASGI application from a thread while the block goes on; the URL. `ends` is called when the block ends,
    before the thread is waited for. Raises UsageError for an address that is not to be had."""
    listener = _listener(host, port)
    config = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, connections=Connections(_BOUNDS), bounds=_BOUNDS),  # pyright: ignore[reportArgumentType]
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    thread.start()
    try:
        yield _url(host, listener)
    finally:
        ends()
        server.should_exit = True
        thread.join(_ENDS_S)
        listener.close()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    port = listener.getsockname()[1]
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
