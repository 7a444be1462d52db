"""An engine on another machine that hangs, vanishes or breaks off: the host's doing, in time, and said in one line."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import trio
import trio.testing
from store.proxy import Proxy, before

from agentrl import config
from agentrl.errors import ConfigError, SandboxLost, SandboxUnavailable
from agentrl.host import clocks
from agentrl.protocols import SandboxSpec
from agentrl.sandbox import shared_backend
from agentrl.sandbox.docker import backend as docker
from agentrl.sandbox.docker import engine_address
from agentrl.sandbox.docker.backend import Docker, DockerEngine
from agentrl.sandbox.docker.container import Container
from agentrl.sandbox.docker.container_commands import ContainerCommand

from .conftest import IMAGE, TlsEngine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]


@pytest.fixture
def wire(tls_engine: TlsEngine) -> Iterator[Proxy]:
    with before(urlsplit(tls_engine.url).port or 0) as proxy:
        yield proxy


@pytest.fixture
async def backend(tls_engine: TlsEngine, wire: Proxy) -> AsyncGenerator[Docker]:
    backend = Docker(image=IMAGE, base_url=f"tcp://127.0.0.1:{wire.port}", cert_path=tls_engine.folder)
    yield backend
    wire.carry()
    await backend.aclose()


def engine_of(backend: Docker, *, call_s: float) -> DockerEngine:
    """The backend's engine, whose calls have so long from now on."""
    engine = backend._engine
    assert engine is not None
    engine._client.api.timeout = call_s
    return engine


async def runs(box: Container) -> ContainerCommand:
    """The command of a box, once it has written something."""
    deadline = trio.current_time() + 60.0
    while trio.current_time() < deadline:
        for command in box._commands._running:
            if command.streams.stdout.take():
                return command
        await trio.sleep(0.01)
    raise AssertionError("no command began")


def typed(text: str) -> str:
    """What the command prints that an error told the user to type."""
    command = shlex.split(text.partition("look: ")[2])
    assert command[0] == "docker", text
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.medium
async def test_an_engine_that_never_answers_is_said_within_its_deadline(
    tls_engine: TlsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_address, "_ANSWER_S", 1.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody ever answers
        port = silent.getsockname()[1]
        backend = Docker(image=IMAGE, base_url=f"tcp://127.0.0.1:{port}", cert_path=tls_engine.folder)

        async def ask() -> None:
            with pytest.raises(SandboxUnavailable, match="nothing within 1 s; start it, or correct base_url") as caught:
                await backend.create()
            said.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # one asked for all
            silent.accept()
    assert len(said) == 10
    assert f"--host tcp://127.0.0.1:{port} --tlsverify --tlscacert {tls_engine.folder}/ca.pem" in said[0]


@pytest.mark.slow
async def test_law_3_a_host_that_vanishes_under_a_command_takes_no_time_of_the_policy(
    backend: Docker, wire: Proxy
) -> None:
    """The command's deadline and the policy's pass while nobody answers, and it is a failure of the host all the same.
    What the error says to type works once the host is back."""
    box = await backend.create()
    engine_of(backend, call_s=6.0)
    lost: list[SandboxLost] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(SandboxLost) as caught:
                with clocks.watch(policy_s=5.0) as watch:
                    await box.exec(["sh", "-c", "echo began; sleep 60"], timeout_s=4.5)
                assert watch.over is None
            lost.append(caught.value)

        nursery.start_soon(run)
        await runs(box)
        wire.swallow()
    assert "no docker engine answers" in str(lost[0]) and "\n" not in str(lost[0])
    wire.carry()
    assert "Server:" in typed(str(lost[0]))
    await box.close()


@pytest.mark.medium
async def test_law_3_a_connection_that_breaks_under_a_command_gives_no_result(backend: Docker, wire: Proxy) -> None:
    box = await backend.create()
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(SandboxLost, match="its output is not whole"):
                await box.exec(["sh", "-c", "echo began; exec sleep 60"])

        nursery.start_soon(run)
        connection: Any = (await runs(box)).streams._stream
        wire.reset(connection._tcp.socket.getsockname()[1])
    assert await box.alive() and (await box.exec(["true"])).exit_code == 0


@pytest.mark.medium
async def test_calls_that_waited_while_nobody_answered_fail_at_once(
    backend: Docker, wire: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last of a hundred boxes would learn it after four deadlines, and the last of thousands after an hour."""
    box = await backend.create()
    engine = engine_of(backend, call_s=1.0)
    inspect, made = engine._client.api.inspect_container, []
    monkeypatch.setattr(engine._client.api, "inspect_container", lambda name: (made.append(name), inspect(name))[1])
    lost: list[SandboxLost] = []

    async def ask() -> None:
        with pytest.raises(SandboxLost) as caught:
            await engine.is_running(box.name)
        lost.append(caught.value)

    wire.swallow()
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
    assert len(lost) == 100 and len(made) <= docker._THREADS
    wire.carry()
    engine_of(backend, call_s=60.0)
    assert await engine.is_running(box.name), "whoever asks later asks anew"


# --- what a box can reach ---------------------------------------------------------------------------------------

KNOCK = """
import os, socket, sys
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, int(sys.argv[1])), timeout=2)
    except OSError:
        continue
    print("reached", host)
print("docker" in " ".join(os.environ).lower(), os.path.exists(sys.argv[2]), os.path.exists("/var/run/docker.sock"))
"""


async def test_a_box_reaches_neither_its_engine_nor_the_keys_to_it(tls_engine: TlsEngine) -> None:
    backend = Docker(image=IMAGE, base_url=tls_engine.url, cert_path=tls_engine.folder)
    port = urlsplit(tls_engine.url).port or 0
    hosts = ["127.0.0.1", "localhost", "172.17.0.1", "host.docker.internal", socket.gethostname()]
    hosts += {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    socket.create_connection(("127.0.0.1", port), timeout=5).close()  # from here it can be reached
    words = ["python3", "-c", KNOCK, str(port), str(tls_engine.folder), *hosts]
    result = await (await backend.create()).exec(words)
    await backend.aclose()
    assert result.stdout == b"False False False\n", result


async def test_a_box_with_a_network_has_no_engine_beside_it_that_asks_for_no_certificate(tls_engine: TlsEngine) -> None:
    with before(Path(urlsplit(tls_engine.local).path)) as plain:
        backend = Docker(image=IMAGE, base_url=f"tcp://127.0.0.1:{plain.port}")
        assert (await (await backend.create()).exec(["true"])).exit_code == 0
        with pytest.raises(SandboxUnavailable, match="--tlsverify, and give cert_path"):
            await backend.create(SandboxSpec(network=True))
        await backend.aclose()


# --- the setting of a run file ----------------------------------------------------------------------------------


def read(folder: Path, **settings: str) -> config.RunConfig:
    return config.parse({"model": "m", "env": {"id": "e"}, "sandbox": {"docker": settings}}, folder=folder)


async def test_the_run_file_says_where_the_engine_of_shared_boxes_is(tls_engine: TlsEngine) -> None:
    """`cert_path` is taken from the folder of the run file, and survives being stored with the run."""
    read_at = read(tls_engine.folder.parent, base_url=tls_engine.url, cert_path=tls_engine.folder.name, image=IMAGE)
    shared_backend.configure(config.from_json(config.to_json(read_at)).sandbox.arguments())
    boxes = shared_backend.shared("docker")
    await boxes.enter()
    box = await boxes.create(SandboxSpec())
    result = await box.exec(["id", "-u"])
    await boxes.leave()
    assert result.exit_code == 0 and int(result.stdout) >= 20_000


@pytest.mark.parametrize(
    ("settings", "field", "hint"),
    [
        ({"base_url": "tcp://h:2376"}, "cert_path", "give the folder of ca.pem, cert.pem and key.pem"),
        ({"base_url": "ssh://h"}, "base_url", "give tcp://HOST:2376 or unix:///PATH"),
        ({"base_url": "boxes:2376"}, "base_url", "give tcp://HOST:2376 or unix:///PATH"),
        ({"cert_path": "c"}, "cert_path", "give base_url = 'tcp://HOST:2376' as well"),
        ({"base_url": "unix:///s", "cert_path": "c"}, "cert_path", "or leave it out"),
    ],
)
def test_an_engine_that_cannot_be_meant_is_refused(
    tmp_path: Path, settings: dict[str, str], field: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        read(tmp_path, **settings)
    assert caught.value.field == f"sandbox.docker.{field}"


@pytest.mark.slow
def test_a_run_whose_certificates_are_missing_ends_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "train", "run.toml", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and f"cert_path = '{tmp_path}/certificates': there is no ca.pem" in done.stderr, done


RUN = """
model = "agentrl/tiny-coder"
[env]
id = "agentrl/CodeRepair-v0"
kwargs = { sandbox = "docker", image = "none:1" }
[sandbox.docker]
base_url = "tcp://127.0.0.1:1"
cert_path = "certificates"
"""


async def test_a_box_that_hangs_in_its_engine_stops_no_other_boxs_calls(
    backend: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is there, and one container's calls end at their deadline while another's wait for the thread."""
    box = await backend.create()
    engine = engine_of(backend, call_s=1.0)
    engine._threads = trio.CapacityLimiter(1)
    inspect, began, waits = engine._client.api.inspect_container, trio.Event(), threading.Event()

    def hangs(name: str) -> Any:
        if name != "hangs":
            return inspect(name)
        trio.from_thread.run_sync(began.set)
        waits.wait(60)
        raise requests.exceptions.ReadTimeout

    monkeypatch.setattr(engine._client.api, "inspect_container", hangs)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(SandboxLost, match="is there, and left a call unanswered"):
                await engine.is_running("hangs")

        async def other() -> None:
            assert await engine.is_running(box.name)

        nursery.start_soon(ask)
        await began.wait()
        nursery.start_soon(other)
        await trio.testing.wait_all_tasks_blocked()
        waits.set()
