"""A TCP proxy before a server, which can cut its connections, swallow what they carry, or delay it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path

_CHUNK = 1 << 16


class Proxy:
    """Listens at `port` of this host, and carries bytes to a server's socket. `delay_s` is for each chunk, each way."""

    def __init__(self, target: Path) -> None:
        self.delay_s = 0.0
        self._target = target
        self._carries = threading.Event()
        self._carries.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """From now on nothing arrives, and nobody is told; `carry` ends it."""
        self._carries.clear()

    def carry(self) -> None:
        self._carries.set()

    def cut(self) -> None:
        """End all connections there are now, from both sides."""
        pairs, self._pairs = self._pairs, []
        for each in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.carry()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(os.fspath(self._target))
                self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self.delay_s:
                    time.sleep(self.delay_s)
                self._carries.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def before(target: Path) -> Generator[Proxy]:
    """A proxy before the socket at `target`, until the end of the block."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
