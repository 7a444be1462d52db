"""A TCP proxy before a server, which can cut its connections, swallow what they carry, or delay it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path

_CHUNK = 1 << 16


class Proxy:
    """Listens at `port` of this host, and carries bytes to a server's socket, or to its port here. `delay_s` is for
    each chunk, each way."""

    def __init__(self, target: Path | int) -> None:
        self.delay_s = 0.0
        self._target = target
        self._carries = threading.Event()
        self._carries.set()
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}  # by the port of the client
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
        pairs, self._pairs = self._pairs, {}
        for each in (end for pair in pairs.values() for end in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def reset(self, client: int) -> None:
        """Break the connection off that comes from this port (RST), without an orderly end."""
        for each in self._pairs.pop(client):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):  # the thread of the other end has ended it
                each.shutdown(socket.SHUT_RD)  # a thread in `recv` holds it open
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.carry()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, (_, client) = self._listener.accept()
                if isinstance(self._target, int):
                    far = socket.create_connection(("127.0.0.1", self._target))
                else:
                    far = socket.socket(socket.AF_UNIX)
                    far.connect(os.fspath(self._target))
                self._pairs[client] = (near, far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_CHUNK):
                if self.delay_s:
                    time.sleep(self.delay_s)
                self._carries.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)  # whoever has said all may still listen
        except OSError:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def before(target: Path | int) -> Generator[Proxy]:
    """A proxy before the socket or the port `target`, until the end of the block."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
