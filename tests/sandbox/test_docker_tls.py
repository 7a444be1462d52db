"""An engine over TLS is used like any other, and what is wrong with its certificates is said in one line."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.docker.backend import Docker
from agentrl.testing.sandbox import CASES

from .certificates import Authority
from .conftest import IMAGE, TlsEngine
from .promises import keep
from .test_docker import OWNER, containers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

VARIABLES = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
# The promises whose bytes, deadlines and streams pass the connection; the walls around a box are those of any engine.
OVER_THE_WIRE = (
    "stdout and stderr are kept apart",
    "a megabyte of stdin passes",
    "a timeout ends the command soon",
    "cancelling the caller ends the command",
    "five megabytes pass through write and read",
    "reading what is missing",
    "a tree comes in with its modes",
    "a tree goes out as it came in",
    "restore brings back content",
    "a packed box goes on in another",
    "four commands run in one box at the same time",
    "a background process answers what it is sent",
    "closing a box ends a command that runs in it",
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def backend(tls_engine: TlsEngine) -> AsyncGenerator[Docker]:
    backend = Docker(image=IMAGE, base_url=tls_engine.url, cert_path=tls_engine.folder)
    yield backend
    await backend.aclose()


@pytest.mark.medium
@pytest.mark.timeout(600)
async def test_keeps_promise_over_tls(backend: Docker) -> None:
    """On an engine of which nothing is known but its address: no file of it is read."""
    cases = [case for case in CASES if case.name.startswith(OVER_THE_WIRE)]
    assert len(cases) >= len(OVER_THE_WIRE)
    await keep(backend, cases)


async def test_docker_s_own_variables_lead_to_an_engine_over_tls(
    tls_engine: TlsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CA that other programs are told to trust does not take the place of the engine's."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", __file__)
    for name, value in zip(VARIABLES, (tls_engine.url, "1", str(tls_engine.folder)), strict=True):
        monkeypatch.setenv(name, value)
    backend = Docker(image=IMAGE)
    result = await (await backend.create(SandboxSpec())).exec(["wc", "-c"], stdin=b"0123456789")
    await backend.aclose()
    assert (result.exit_code, result.stdout.strip()) == (0, b"10")


DYING_OVER_TLS = OWNER.replace("base_url=sys.argv[2]", "base_url=sys.argv[2], cert_path=sys.argv[4]")


@pytest.mark.parametrize("after", ["the end", "_create"])
def test_law_4_no_container_outlives_its_owner_over_tls(tls_engine: TlsEngine, after: str) -> None:
    """`_create`: nobody has started the container yet, so the janitor removes it, over TLS too."""
    assert DYING_OVER_TLS != OWNER
    argv = [sys.executable, "-c", DYING_OVER_TLS, IMAGE, tls_engine.url, after, str(tls_engine.folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        if after == "the end":
            assert owner.stdout and owner.stdout.readline() == b"ready\n"
            assert len(containers(tls_engine.local, owner.pid)) == 1
            owner.kill()
        assert owner.wait(timeout=60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while left := containers(tls_engine.local, owner.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


# --- what is wrong, in one line ---------------------------------------------------------------------------------


async def refusal(url: str, folder: Path | None) -> str:
    with pytest.raises(SandboxUnavailable) as caught:
        await Docker(image=IMAGE, base_url=url, cert_path=folder).create()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tls_engine: TlsEngine, tmp_path: Path) -> Path:
    """A copy of the right certificates, for a test to spoil."""
    return Path(shutil.copytree(tls_engine.folder, tmp_path / "certificates"))


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
async def test_a_missing_file_is_named(tls_engine: TlsEngine, folder: Path, name: str) -> None:
    (folder / name).unlink()
    text = await refusal(tls_engine.url, folder)
    assert f"cert_path = '{folder}': there is no {name}" in text


async def test_a_missing_file_of_the_variables_names_the_variable(
    tls_engine: TlsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    assert f"DOCKER_CERT_PATH = '{tmp_path}': there is no ca.pem" in await refusal(tls_engine.url, None)


async def test_a_key_of_another_certificate_is_said(tls_engine: TlsEngine, folder: Path, tmp_path: Path) -> None:
    Authority("another").issue(tmp_path)
    shutil.copy(tmp_path / "key.pem", folder / "key.pem")
    assert "ca.pem, cert.pem or key.pem cannot be used" in await refusal(tls_engine.url, folder)


async def test_an_engine_of_another_authority_is_not_trusted(
    tls_engine: TlsEngine, folder: Path, tmp_path: Path
) -> None:
    Authority("another").issue(tmp_path)
    shutil.copy(tmp_path / "ca.pem", folder / "ca.pem")
    text = await refusal(tls_engine.url, folder)
    assert "its certificate is not trusted" in text and f"ca.pem of cert_path = '{folder}' must be" in text


async def test_a_certificate_that_the_engine_does_not_know_is_refused(
    tls_engine: TlsEngine, folder: Path, tmp_path: Path
) -> None:
    Authority("another").issue(tmp_path)
    for name in ("cert.pem", "key.pem"):
        shutil.copy(tmp_path / name, folder / name)
    text = await refusal(tls_engine.url, folder)
    assert "it ends the connection" in text and "cert.pem of cert_path" in text and "--tlscacert" in text


async def test_an_engine_s_certificate_for_another_host_is_refused(tls_engine: TlsEngine) -> None:
    text = await refusal(tls_engine.url.replace("127.0.0.1", "localhost"), tls_engine.folder)
    assert "its certificate is for another name" in text and "'localhost'" in text and "base_url" in text


async def test_plain_http_to_an_engine_over_tls_says_which_variables_to_set(tls_engine: TlsEngine) -> None:
    text = await refusal(tls_engine.url, None)
    assert "it speaks TLS: set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH" in text


class Plain(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def plain_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Plain) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def test_tls_to_an_engine_without_it_never_falls_back(tls_engine: TlsEngine, plain_port: int) -> None:
    text = await refusal(f"tcp://127.0.0.1:{plain_port}", tls_engine.folder)
    assert "no TLS is spoken there" in text and "usually 2376" in text and "leave cert_path out" in text


async def test_a_server_that_is_no_engine_is_said(plain_port: int) -> None:
    assert "correct base_url" in await refusal(f"tcp://127.0.0.1:{plain_port}", None)


async def test_nobody_at_the_address_is_said(tls_engine: TlsEngine) -> None:
    text = await refusal("tcp://127.0.0.1:1", tls_engine.folder)
    assert "no docker engine answers at tcp://127.0.0.1:1: ConnectionRefusedError" in text and "base_url" in text


async def test_certificates_for_a_unix_socket_make_no_sense(tls_engine: TlsEngine) -> None:
    assert "leave it out" in await refusal(tls_engine.local, tls_engine.folder)
