"""A TLS connection, as its client, either direction of which ends by itself. Knows nothing of what it carries.

The input of a command ends while its output goes on: over TLS that is a `close_notify` of ours alone, as `docker` sends
it. trio's SSLStream has no such half-close. Nothing here weakens what the `SSLContext` demands of the other side.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Generator

import trio

_CHUNK = 1 << 16


class TlsStream(trio.abc.HalfCloseableStream):
    """Takes over a TCP connection. One task may receive while others send."""

    def __init__(self, tcp: trio.abc.Stream, context: ssl.SSLContext, name: str) -> None:
        """`name` is the host's, which its certificate must hold."""
        self._tcp = tcp
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._sending = trio.Lock()
        self._read = bytearray()
        self._ended = False

    async def handshake(self) -> None:
        """Agree on keys and check the certificate. Raises ssl.SSLError."""
        while True:
            try:
                self._tls.do_handshake()
                return await self._flush()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fetch()
            except ssl.SSLError:
                with contextlib.suppress(trio.BrokenResourceError):
                    await self._flush()  # the other side is told why
                raise

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`. Raises trio.BrokenResourceError, trio.ClosedResourceError."""
        async with self._sending:
            for start in range(0, len(data), _CHUNK):
                with _as_trio_says():
                    self._tls.write(memoryview(data)[start : start + _CHUNK])
                await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        async with self._sending:
            await self._tcp.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End our direction; what the other side sends can still be received."""
        async with self._sending:
            self._decrypt()  # else `unwrap` finds data where it wants the other side's end, and gives up
            with _as_trio_says(), contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
            await self._flush()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come, b"" after the other side's `close_notify`. An end without one raises
        trio.BrokenResourceError: somebody in between may have cut it."""
        self._decrypt()
        while not (self._read or self._ended):
            await self._fetch()
            self._decrypt()
        data = bytes(self._read[:max_bytes])
        del self._read[: len(data)]
        return data

    async def aclose(self) -> None:
        await self._tcp.aclose()

    def _decrypt(self) -> None:
        """Everything that has arrived, so that none of it waits inside OpenSSL."""
        try:
            while part := self._tls.read(_CHUNK):
                self._read += part
            self._ended = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as error:
            if not self._read:
                raise trio.BrokenResourceError(str(error)) from error

    async def _fetch(self) -> None:
        if chunk := await self._tcp.receive_some(_CHUNK):
            self._incoming.write(chunk)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        await self._tcp.send_all(self._outgoing.read())


@contextlib.contextmanager
def _as_trio_says() -> Generator[None]:
    try:
        yield
    except ssl.SSLWantReadError:
        raise
    except ssl.SSLError as error:
        raise trio.BrokenResourceError(str(error)) from error
