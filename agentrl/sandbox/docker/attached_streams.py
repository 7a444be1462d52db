"""The attached streams of a command in a container: docker's multiplexed frames over a hijacked HTTP connection.

Knows nothing of the docker SDK, whose own sockets lose what was read together with the headers. A frame is
`[kind, 0, 0, 0, size (4 bytes, big endian)]` and `size` bytes; kind 1 is stdout, 2 stderr (Docker Engine API, "Attach
to a container", hijacking and stream format)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping

import h11
import trio

from agentrl.errors import SandboxError, SandboxLost
from agentrl.sandbox.docker.engine_address import EngineAddress
from agentrl.sandbox.host_process import Output

_CHUNK = 1 << 16
_HEADER = 8
_PAUSE_S = 0.001  # between chunks that are thrown away
_ANSWER_S = 60.0


async def hijack(
    address: EngineAddress, path: str, body: Mapping[str, object], *, output_bytes: int = 0
) -> AttachedStreams:
    """POST `body` to an engine and take the connection over.

    Raises SandboxError if the engine refuses, SandboxLost if it does not answer."""
    try:
        with trio.fail_after(_ANSWER_S):
            engine_stream = await address.connect()
            try:
                first_bytes = await _upgrade(engine_stream, path, json.dumps(body).encode())
            except BaseException:
                with trio.CancelScope(shield=True):
                    await engine_stream.aclose()
                raise
    except (OSError, trio.BrokenResourceError, trio.TooSlowError, h11.ProtocolError) as stream_error:
        reason = f"no answer in {_ANSWER_S:.0f} s" if isinstance(stream_error, trio.TooSlowError) else str(stream_error)
        raise SandboxLost(address.lost(reason)) from stream_error
    return AttachedStreams(engine_stream, first_bytes, output_bytes=output_bytes)


async def _upgrade(stream: trio.abc.HalfCloseableStream, path: str, body: bytes) -> bytes:
    """Ask for the connection; the bytes that came right after the answer."""
    http_connection = h11.Connection(h11.CLIENT)
    headers = {"Host": "docker", "Connection": "Upgrade", "Upgrade": "tcp", "Content-Type": "application/json"}
    headers["Content-Length"] = str(len(body))
    upgrade_request = h11.Request(method="POST", target=path, headers=list(headers.items()))
    http_events = (upgrade_request, h11.Data(body), h11.EndOfMessage())
    await stream.send_all(b"".join(filter(None, map(http_connection.send, http_events))))
    refusal_status, refusal_text = 0, b""
    while True:
        next_event = http_connection.next_event()
        if next_event is h11.NEED_DATA:
            http_connection.receive_data(bytes(await stream.receive_some(_CHUNK)))
        elif isinstance(next_event, h11.InformationalResponse) and next_event.status_code == 101:
            # The engine may send the first frames in the same packet as its headers. This is what the SDK's own sockets
            # lose, and the reason for speaking HTTP here.
            return http_connection.trailing_data[0]
        elif isinstance(next_event, h11.Response):
            refusal_status = next_event.status_code
        elif isinstance(next_event, h11.Data):
            refusal_text += next_event.data
        else:
            raise SandboxError(
                f"docker: {path} was refused ({refusal_status}): {refusal_text.decode(errors='replace').strip()}"
            )


class AttachedStreams:
    """Both directions of one command. Has the parts that `Background` uses of a `HostProcess`."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, received: bytes, *, output_bytes: int) -> None:
        """Take over a connection, and the bytes that were read from it before."""
        self._stream, self._received = stream, received
        self.stdout, self.stderr = Output(output_bytes), Output(output_bytes)
        self.changed = trio.Event()
        self.drained = False
        self.broken = self.fed = False  # the connection broke off; something was sent
        self._in_frame = False
        self.ended = trio.Event()

    @property
    def is_cut(self) -> bool:
        """Whether the end of the output is missing: the connection ended within a frame, or it broke off although the
        engine had no reason to. It has one where nobody read the input to its end."""
        return self.ended.is_set() and (self._in_frame or (self.broken and not self.fed))

    async def send(self, data: bytes) -> None:
        """Write to stdin; nothing happens if the command has ended."""
        self.fed = self.fed or bool(data)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_all(data)

    async def feed(self, data: bytes) -> None:
        """Write all of `data` to stdin and end it."""
        await self.send(data)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            await self._stream.send_eof()

    async def drain(self) -> None:
        """Read frames until the other side ends; bytes beyond the bound are thrown away, slowly."""
        unread_bytes, self._received = bytearray(self._received), b""
        missing_bytes, frame_output = 0, self.stdout
        with self._until_broken():
            while True:
                while len(unread_bytes) >= (1 if missing_bytes else _HEADER):
                    if missing_bytes == 0:
                        frame_output = self.stderr if unread_bytes[0] == 2 else self.stdout
                        missing_bytes = int.from_bytes(unread_bytes[4:_HEADER])
                        del unread_bytes[:_HEADER]
                    frame_bytes = unread_bytes[:missing_bytes]
                    frame_output.add(frame_bytes)
                    missing_bytes -= len(frame_bytes)
                    del unread_bytes[: len(frame_bytes)]
                self._in_frame = bool(missing_bytes or unread_bytes)
                self._tell()
                if frame_output.truncated:
                    # Not stopped altogether: a command whose output nobody reads blocks for ever, and is then scored as
                    # one that hangs. Read without a pause, `yes` would take a processor of ours until its deadline.
                    await trio.sleep(_PAUSE_S)
                new_bytes = await self._stream.receive_some(_CHUNK)
                if not new_bytes:
                    break
                unread_bytes += new_bytes
        self.ended.set()
        self.drained = not (self.broken or self._in_frame)
        self._tell()

    @contextlib.contextmanager
    def _until_broken(self) -> Generator[None]:
        try:
            yield
        except trio.BrokenResourceError:
            self.broken = True
        except trio.ClosedResourceError:
            pass

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await self._stream.aclose()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
