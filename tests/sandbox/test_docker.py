"""The docker backend keeps every promise, resists every attack, and leaves no container, however its owner ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.protocols import Limits, SandboxSpec
from agentrl.sandbox.docker import backend as docker
from agentrl.sandbox.docker import container_commands
from agentrl.sandbox.docker.backend import Docker
from agentrl.sandbox.warm_python import WarmPython

from .conftest import IMAGE, env
from .promises import ROOMS, keep, named

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]


@pytest.fixture
async def backend(docker_engine: str) -> AsyncGenerator[Docker]:
    backend = Docker(image=IMAGE, base_url=docker_engine)
    yield backend
    await backend.aclose()


OVER_A_SOCKET = (  # where the connection or the count of processes is another than over TLS
    "stdin arrives, all 256 byte values, and ends",
    "a megabyte of stdin passes while the command writes as it reads",
    "without stdin a reader sees the end at once",
    "a command that does not read its megabyte of stdin is no failure",
    "a timeout ends the command soon and is flagged; what it wrote before is kept",
    "cancelling the caller ends the command; the box is as good as before",
    "five megabytes pass through write and read",
    "a background process answers what it is sent, line by line",
    "outliving the end of a command by a double fork with a session of its own",
    "a thread bomb",
    "endless output on stdout and stderr",
)


@pytest.mark.medium
async def test_keeps_promise(backend: Docker) -> None:
    """`test_keeps_every_promise` has all of them, `test_docker_tls` those that pass a connection over TLS."""
    await keep(backend, named(OVER_A_SOCKET))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("room", ROOMS)
async def test_keeps_every_promise(room: str, backend: Docker) -> None:
    await keep(backend, ROOMS[room])


@pytest.mark.medium
async def test_runs_that_only_compute_are_forks_in_a_container(backend: Docker) -> None:
    """The image has no `_ctypes` on some machines: then nothing runs warm, and nothing breaks."""
    has_ctypes = await (await backend.create(SandboxSpec())).exec(["python3", "-I", "-S", "-c", "import _ctypes"])
    warm = WarmPython(
        backend,
        SandboxSpec(),
        before="import posix, sys\ncode = sys.stdin.buffer.read()\n",
        after="exec(code)\nposix.write(1, b'done')\nposix._exit(0)\n",
        deadline_s=60.0,
    )
    said = [await warm.run(code) for code in (b"1 + 1", b"import os\nos.getpid()", b"1 + 1")]
    assert said == ([b"done", None, b"done"] if has_ctypes.exit_code == 0 else [None] * 3)


OWNER = """
import os, signal, sys, trio
from agentrl.sandbox.docker.backend import Docker, DockerEngine

call, done = DockerEngine.call, []

async def dying_after(engine, function, *arguments, **options):
    result = await call(engine, function, *arguments, **options)
    done.append(function.__name__)
    if done[-1] == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

async def main():
    DockerEngine.call = dying_after
    box = await Docker(image=sys.argv[1], base_url=sys.argv[2]).create()
    await box.start(["sleep", "60"])
    print("ready", flush=True)
    await box.exec(["sleep", "60"], timeout_s=60)

trio.run(main)
"""


def command_line(address: str, *words: str) -> str:
    """What `docker WORDS` prints."""
    command = ["docker", *words]
    return subprocess.run(command, env=env(address), check=True, capture_output=True, text=True, timeout=60).stdout


def containers(address: str, owner: int) -> list[str]:
    """Id and owner of each container that a process labelled as its own."""
    form = '{{.ID}} {{.Label "agentrl.owner"}}'
    listing = command_line(address, "ps", "--all", "--format", form)
    return [line for line in listing.splitlines() if line.split(" ")[1].startswith(f"{owner}.")]


@pytest.mark.parametrize("after", ["the end", "_create", "start"])
def test_law_4_no_container_outlives_its_owner(docker_engine: str, after: str) -> None:
    """`_create`: killed when the engine has made a container that nobody has started yet."""
    argv = [sys.executable, "-c", OWNER, IMAGE, docker_engine, after]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        if after == "the end":
            assert owner.stdout and owner.stdout.readline() == b"ready\n"
            assert len(containers(docker_engine, owner.pid)) == 1
            owner.kill()
        assert owner.wait(timeout=60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while left := containers(docker_engine, owner.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.mark.medium
async def test_containers_of_dead_owners_are_reaped(docker_engine: str, backend: Docker) -> None:
    """What the engine did not clear away itself, the next owner on this host does; never what others own."""
    await backend.create()
    (own,) = containers(docker_engine, os.getpid())
    labels = json.loads(command_line(docker_engine, "inspect", "--format", "{{json .Config.Labels}}", own.split()[0]))
    kept = {**labels, "agentrl.owner": f"1.{labels['agentrl.owner'].split('.', 1)[1]}", "agentrl.host": "elsewhere"}
    dead = {**labels, "agentrl.owner": "999999999.1." + ".".join(labels["agentrl.owner"].split(".")[2:])}
    made = [run_container(docker_engine, each) for each in (kept, dead)]
    other = Docker(image=IMAGE, base_url=docker_engine)
    await other.create()
    await other.aclose()
    listing = command_line(docker_engine, "ps", "--all", "--no-trunc", "--format", "{{.ID}}")
    command_line(docker_engine, "rm", "-f", made[0])
    assert (made[0] in listing, made[1] in listing) == (True, False)


def run_container(address: str, labels: dict[str, str]) -> str:
    flags = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
    return command_line(address, "run", "--detach", "--network", "none", *flags, IMAGE, "sleep", "60").strip()


async def test_no_engine_says_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable, match="no docker engine answers at unix:///nonexistent"):
        await Docker(image=IMAGE, base_url="unix:///nonexistent/docker.sock").create()


async def test_ssh_engines_are_refused_in_plain_words() -> None:
    with pytest.raises(SandboxUnavailable, match="only unix:// and tcp://"):
        await Docker(image=IMAGE, base_url="ssh://host").create()


async def test_image_must_be_named_and_present(docker_engine: str) -> None:
    backend = Docker(base_url=docker_engine)
    with pytest.raises(SandboxUnavailable, match="needs an image"):
        await backend.create()
    with pytest.raises(SandboxError, match="no-such-image"):
        await backend.create(SandboxSpec(image="no-such-image:1"))
    await backend.aclose()


async def test_container_that_vanished_is_the_host_s_failure(docker_engine: str, backend: Docker) -> None:
    """Law 3: no command of the policy can remove its container."""
    box = await backend.create()
    command_line(docker_engine, "rm", "-f", box.name)
    with pytest.raises(SandboxError):
        await box.exec(["true"])


async def test_memory_that_ran_out_is_told_where_the_engine_s_clock_is_another(
    backend: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our clock is an hour ahead of the engine's."""
    ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    for module in (docker, container_commands):
        monkeypatch.setattr(module, "time", ahead)
    limits = Limits(memory_bytes=64 << 20, disk_bytes=1 << 20)
    box = await backend.create(SandboxSpec(limits=limits))
    result = await box.exec(["python3", "-c", "bytearray(1 << 30)"])
    assert (result.exit_code, result.oom) == (137, True)


STOPS_OTHERS = """
import fcntl, os, signal
refused = 0
for stop in (lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: fcntl.fcntl(0, 10, signal.SIGSTOP)):
    try: stop()
    except PermissionError: refused += 1
print(refused, flush=True)
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) not in (1, os.getpid()):
            try: os.kill(int(pid), signal.SIGSTOP)
            except OSError: pass
"""


@pytest.mark.medium
async def test_law_3_a_process_cannot_stop_those_that_the_engine_starts(backend: Docker) -> None:
    """One that is stopped before it runs hangs the engine's calls, which looks like a host that failed."""
    box = await backend.create(SandboxSpec(files={"f": b"x"}))
    process = await box.start(["python3", "-c", STOPS_OTHERS])
    assert await process.receive() == b"2\n"
    for _ in range(3):
        assert await box.read("f") == b"x"
        assert (await box.exec(["true"])).exit_code == 0
    assert await process.wait(timeout_s=0) is None


async def test_processes_are_counted_without_asking_the_engine_where_its_groups_can_be_read(
    backend: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await backend.create()
    engine = backend._engine
    assert engine is not None
    counter = engine._counters[box.name]

    def counted() -> int:
        """How many there are once none comes or goes: a command of the engine's has helpers as it starts."""
        found = [-1, len(engine._client.api.top(box.name)["Processes"])]
        while found[-1] != found[-2]:
            found.append(len(engine._client.api.top(box.name)["Processes"]))
        return found[-1]

    idle = counted()
    assert await engine.processes(box.name) == idle
    process = await box.start(["sh", "-c", "sleep 60 & echo up; sleep 60"])
    assert await process.receive() == b"up\n"
    more = counted()
    assert more > idle
    assert counter is None or int(counter.read_text()) >= more
    engine._counters[box.name] = None
    assert await engine.processes(box.name) == more
    for said, found in (({"Processes": None}, 0), ({"Processes": []}, 0)):  # docker's and podman's, of one that ended
        with monkeypatch.context() as patched:
            patched.setattr(engine._client.api, "top", lambda _, said=said: said)
            assert await engine.processes(box.name) == found
    for name, ask in (
        ("top", engine.processes),
        ("inspect_container", engine.is_running),
        ("exec_inspect", engine.state),
    ):
        with monkeypatch.context() as patched, pytest.raises(SandboxError, match=r"docker: .*KeyError"):
            patched.setattr(engine._client.api, name, lambda _: {})
            await ask(box.name)
    await box.close()
    assert box.name not in engine._counters
