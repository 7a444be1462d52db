"""Where a Docker engine is, and how to speak with it: a unix socket, plain TCP, or TLS in which both sides show a
certificate. Owns docker's own variables (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH) and what the user reads
when they are wrong. Knows nothing of the docker SDK and of boxes.

TLS always verifies the engine: there is no setting that turns this off. The input of a command ends while its output
goes on: over TLS that is a close_notify of ours alone, as `docker` sends it. trio's SSLStream has no such half-close.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import trio

from agentrl.errors import SandboxUnavailable

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
                    await self._flush()  # the other side reads why
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
        """Return the bytes that have come, b"" after the other side's close_notify. An end without one raises
        trio.BrokenResourceError: somebody in between may have cut it."""
        self._decrypt()
        while not (self._read or self._ended):
            await self._fetch()
            self._decrypt()
        received = bytes(self._read[:max_bytes])
        del self._read[: len(received)]
        return received

    async def aclose(self) -> None:
        await self._tcp.aclose()

    def _decrypt(self) -> None:
        """Everything that has arrived, so that none of it waits inside OpenSSL."""
        try:
            while plain_bytes := self._tls.read(_CHUNK):
                self._read += plain_bytes
            self._ended = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as tls_error:
            # What was received whole is given out first; the next call meets the error again.
            if not self._read:
                raise trio.BrokenResourceError(str(tls_error)) from tls_error

    async def _fetch(self) -> None:
        if tcp_bytes := await self._tcp.receive_some(_CHUNK):
            self._incoming.write(tcp_bytes)
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
    except ssl.SSLError as tls_error:
        raise trio.BrokenResourceError(str(tls_error)) from tls_error


CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"  # docker's names
_DEFAULT = "unix:///var/run/docker.sock"
_ANSWER_S = 30.0
_WRONG_NAME = {62, 64}  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """`url` is `unix:///path` or `tcp://host:port`. With TLS, `certificates` is the folder and `tls` made of it."""

    url: str
    setting: str
    certificates: Path | None = None
    certificates_setting: str = "DOCKER_CERT_PATH"
    tls: ssl.SSLContext | None = None

    @classmethod
    def find(cls, base_url: str | None, cert_path: str | os.PathLike[str] | None) -> EngineAddress:
        """The address of the settings, or else of docker's variables. Raises SandboxUnavailable."""
        setting_name = "base_url" if base_url else "DOCKER_HOST"
        engine_url = base_url or os.environ.get("DOCKER_HOST") or _DEFAULT
        if cert_path is not None:
            certificate_folder, folder_setting = Path(cert_path), "cert_path"
        else:
            certificate_folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
            folder_setting = "DOCKER_CERT_PATH" if os.environ.get("DOCKER_TLS_VERIFY") else ""
        try:
            url_parts = urlsplit(engine_url)
            host_name, port_number = url_parts.hostname, url_parts.port
        except ValueError as url_error:
            raise SandboxUnavailable(f"{setting_name} = {engine_url!r}: {url_error}; give tcp://host:port") from None
        if url_parts.scheme == "unix":
            if cert_path is not None:
                raise SandboxUnavailable(
                    f"cert_path = {str(certificate_folder)!r}: {engine_url} is no tcp:// address, so leave it out"
                )
            return cls(url=engine_url, setting=setting_name)
        if url_parts.scheme != "tcp":
            raise SandboxUnavailable(
                f"{setting_name} = {engine_url!r}: only unix:// and tcp:// addresses are supported"
            )
        host_name = f"[{host_name}]" if host_name and ":" in host_name else host_name or "localhost"
        if not folder_setting:
            return cls(url=f"tcp://{host_name}:{port_number or 2375}", setting=setting_name)
        return cls(
            url=f"tcp://{host_name}:{port_number or 2376}",
            setting=setting_name,
            certificates=certificate_folder,
            certificates_setting=folder_setting,
            tls=_context(certificate_folder, folder_setting),
        )

    def lost(self, why: str) -> str:
        """Say in one line that the engine does not answer, with the command that looks for it."""
        return f"no docker engine answers at {self.url} ({' '.join(why.split())}); look: {self.command('version')}"

    def command(self, *words: str) -> str:
        """Return the command line with which docker's own client speaks with this engine."""
        docker_flags = ["--host", self.url]
        if certificate_folder := self.certificates:
            docker_flags += ["--tlsverify", "--tlscacert", f"{certificate_folder / CA}"]
            docker_flags += [
                "--tlscert",
                f"{certificate_folder / CERTIFICATE}",
                "--tlskey",
                f"{certificate_folder / KEY}",
            ]
        return shlex.join(["docker", *docker_flags, *words])

    async def connect(self) -> trio.abc.HalfCloseableStream:
        """A connection to the engine. Raises OSError, trio.BrokenResourceError."""
        url_parts = urlsplit(self.url)
        if url_parts.scheme == "unix":
            return await trio.open_unix_socket(url_parts.path)
        host_name = url_parts.hostname or ""
        tcp_stream = await trio.open_tcp_stream(host_name, url_parts.port or 0)
        if self.tls is None:
            return tcp_stream
        tls_stream = TlsStream(tcp_stream, self.tls, host_name)
        try:
            await tls_stream.handshake()
        except BaseException:
            await trio.aclose_forcefully(tls_stream)
            raise
        return tls_stream

    def api_version(self) -> str:
        """Ask the engine for the version of its API. Blocks. Raises SandboxUnavailable with what to do."""
        silence = f"no docker engine answers at {self.url}"
        http_connection = http.client.HTTPConnection("docker", timeout=_ANSWER_S)
        try:
            http_connection.sock = self._socket()
            http_connection.request("GET", "/_ping")
            ping_answer = http_connection.getresponse()
            answer_text = ping_answer.read(1 << 12).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as http_error:
            is_silent = isinstance(http_error, TimeoutError)
            problem = f"nothing within {_ANSWER_S:.0f} s" if is_silent else f"{type(http_error).__name__}: {http_error}"
            start_hint = f"{problem}; start it, or correct {self.setting}; look: {self.command('version')}"
            problem = self._hint(http_error) or start_hint
            raise SandboxUnavailable(f"{silence}: {' '.join(problem.split())}") from http_error
        finally:
            http_connection.close()
        api_version = ping_answer.getheader("Api-Version")
        if ping_answer.status == 400 and "HTTPS" in answer_text:
            raise SandboxUnavailable(
                f"{silence} in plain HTTP, it speaks TLS: set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH (or cert_path) "
                f"to the folder of {CA}, {CERTIFICATE} and {KEY}"
            )
        if ping_answer.status != 200 or not api_version:
            problem = f"{ping_answer.status} {' '.join(answer_text.split())[:200]!r}"
            raise SandboxUnavailable(f"{silence}: what is there says {problem}; correct {self.setting}")
        return api_version

    def _socket(self) -> socket.socket:
        url_parts = urlsplit(self.url)
        if url_parts.scheme == "unix":
            plain_socket = socket.socket(socket.AF_UNIX)
            plain_socket.settimeout(_ANSWER_S)
            try:
                plain_socket.connect(url_parts.path)
            except OSError:
                plain_socket.close()
                raise
            return plain_socket
        plain_socket = socket.create_connection((url_parts.hostname, url_parts.port), timeout=_ANSWER_S)
        return self.tls.wrap_socket(plain_socket, server_hostname=url_parts.hostname) if self.tls else plain_socket

    def _hint(self, error: Exception) -> str:
        """Explain an error of TLS and what to do; empty if the error is not about TLS."""
        if self.tls is None:
            return ""
        folder_setting = f"{self.certificates_setting} = {str(self.certificates)!r}"
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in _WRONG_NAME:
                return (
                    f"its certificate is for another name ({error.verify_message}); name the host in {self.setting} as "
                    "the certificate does, or make one whose subjectAltName has this name"
                )
            problem = f"its certificate is not trusted ({error.verify_message})"
            return f"{problem}; {CA} of {folder_setting} must be the engine's CA"
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            return (
                f"no TLS is spoken there; give the engine's TLS port (usually 2376) in {self.setting}, or leave "
                f"{'cert_path' if self.certificates_setting == 'cert_path' else 'DOCKER_TLS_VERIFY'} out"
            )
        if isinstance(error, ssl.SSLError | ConnectionResetError | BrokenPipeError | http.client.RemoteDisconnected):
            end_reason = error.reason if isinstance(error, ssl.SSLError) else type(error).__name__
            return (
                f"it ends the connection ({end_reason}); {CERTIFICATE} of {folder_setting} must be signed by the "
                "engine's CA (--tlscacert) and not be out of date"
            )
        return ""


def _context(folder: Path, setting: str) -> ssl.SSLContext:
    """Trusts the folder's CA alone, checks names, and shows the folder's certificate."""
    for file_name in (CA, CERTIFICATE, KEY):
        if not (folder / file_name).is_file():
            raise SandboxUnavailable(
                f"{setting} = {str(folder)!r}: there is no {file_name}; TLS needs {CA}, {CERTIFICATE} and {KEY} there"
            )
    try:
        # With `cafile` alone: the CAs of the system are not trusted beside it. An engine gives root on its machine to
        # whoever speaks to it, and a certificate that any public CA signs is too little for that.
        tls_context = ssl.create_default_context(cafile=folder / CA)
        tls_context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")  # never asks on the terminal
    except (OSError, ValueError) as error:
        raise SandboxUnavailable(
            f"{setting} = {str(folder)!r}: {CA}, {CERTIFICATE} or {KEY} cannot be used ({error}); give PEM files, "
            "the key of this certificate and without a password"
        ) from error
    return tls_context
