"""Serve a page of runs: the socket, the address with the token, an end by Ctrl-C. Knows no route."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from agentrl.errors import UsageError
from agentrl.view.opened_runs import OpenedRuns
from agentrl.view.web_page import Visitors, loopback_hosts, web_page

PORT = 8642
_ENDS_S = 5.0  # for answers under way


@contextmanager
def served(places: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0, steer: bool = True) -> Generator[str]:
    """Serve a page of the runs in `places` from a thread while the block goes on; its address, with the token. Port 0
    takes a free one; without `steer` it only looks. Raises UsageError for an address that is not to be had."""
    visitors = Visitors(token=secrets.token_urlsafe(24), hosts=loopback_hosts(host), steer=steer)
    runs, listener = OpenedRuns(places), _listener(host, port)
    config = uvicorn.Config(
        web_page(runs, visitors),
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=256,
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    thread.start()
    try:
        yield f"{_url(host, listener)}/#token={visitors.token}"
    finally:
        runs.closing.set()
        server.should_exit = True
        thread.join(_ENDS_S)
        listener.close()
        runs.close()


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
