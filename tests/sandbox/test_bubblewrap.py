"""The bubblewrap backend keeps every promise, resists every attack, and leaves nothing, however its owner ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.protocols import BoxProcess, Limits, SandboxSpec
from agentrl.sandbox.bubblewrap.backend import Bubblewrap, BubblewrapBox
from agentrl.testing.sandbox import CASES
from tests.parts.kill_sweep import left_by, sweep

from . import rootfs
from .promises import ROOMS, keep

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
async def backend() -> AsyncGenerator[Bubblewrap]:
    backend = Bubblewrap()
    yield backend
    await backend.aclose()


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that the user ids of boxes reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.medium
@pytest.mark.parametrize("room", ROOMS)
async def test_keeps_promise(room: str, backend: Bubblewrap) -> None:
    await keep(backend, ROOMS[room])


@pytest.mark.medium
async def test_keeps_promise_without_control_groups() -> None:
    backend = Bubblewrap(control_groups=False)
    try:
        await keep(backend, [case for case in CASES if "memory" in case.name or "fork" in case.name])
    finally:
        await backend.aclose()


async def test_box_as_a_whole_is_bounded_by_its_control_group(backend: Bubblewrap) -> None:
    """Twenty processes of 40 MB each pass the bound of one process, not that of the box."""
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    spec = SandboxSpec(limits=Limits(memory_bytes=200 << 20, disk_bytes=1 << 20, wall_s=600))
    box = await backend.create(spec)
    program = "b = bytearray(40 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nimport time; time.sleep(600)"
    started = [await box.start(["python3", "-c", program]) for _ in range(20)]
    ended = list[int]()

    async def wait_for(process: BoxProcess) -> None:
        if result := await process.wait():
            ended.append(result.exit_code)
            nursery.cancel_scope.cancel()

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for process in started:
                nursery.start_soon(wait_for, process)
    assert ended and set(ended) == {137}


OWNER = """
import os, signal, sys, trio
from agentrl.sandbox.bubblewrap import bwrap_process as namespace
from agentrl.sandbox.bubblewrap.backend import Bubblewrap, BubblewrapBox

def dying_after(function, when=lambda *arguments: True):
    def call(*arguments, **options):
        result = function(*arguments, **options)
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

async def main():
    backend = Bubblewrap(control_groups=None if sys.argv[3] == "groups" else False)
    box = await backend.create()
    await box.snapshot()
    process = await box.start(["sh", "-c", f"setsid sleep {sys.argv[2]} & echo ready; sleep {sys.argv[2]}"])
    await process.receive()
    if sys.argv[1] == "spawned":
        namespace.HostProcess.__init__ = dying_after(namespace.HostProcess.__init__)
    if sys.argv[1] == "let go":
        os.write = dying_after(os.write, lambda fd, data: data == b"x")
    print("ready", flush=True)
    if sys.argv[1] != "leave":
        await box.exec(["sleep", sys.argv[2]], timeout_s=60)
    sys.exit()

trio.run(main)
"""


@pytest.mark.parametrize("groups", ["groups", "no groups"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGKILL to the group", "leave", "spawned", "let go"])
def test_law_4_nothing_outlives_its_owner(how: str, groups: str) -> None:
    """`spawned` and `let go`: killed while a box is being made, when neither bwrap nor its process 1 has asked the
    kernel yet to die with its parent."""
    marker = f"4321.{os.getpid()}"
    argv = [sys.executable, "-c", OWNER, how, marker, groups]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0) as owner:
        assert owner.stdout and owner.stdout.readline() == b"ready\n"
        if how == "SIGKILL":
            assert len(left_by(owner.pid, marker)) > (3 if groups == "groups" else 2)
            owner.kill()
        elif how == "SIGKILL to the group":
            os.killpg(owner.pid, signal.SIGKILL)
        owner.wait(timeout=60)
        deadline = time.monotonic() + 60
        while left := left_by(owner.pid, marker):  # for the end of processes that are not ours there is no event
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


EACH_CALL = """
import sys, trio
from agentrl.host import janitor as owner
from agentrl.sandbox.bubblewrap.backend import Bubblewrap
from tests.parts.kill_sweep import killed_after_each_call

owner.reap = lambda home: []  # nobody else cleans up here

async def main():
    backend = Bubblewrap()
    box = await backend.create()
    await box.snapshot()
    process = await box.start(["sh", "-c", f"setsid sleep {sys.argv[1]} & echo ready; sleep {sys.argv[1]}"])
    await process.receive()
    await backend.aclose()

for pid in killed_after_each_call(lambda: trio.run(main)):
    print(pid)
"""


@pytest.mark.medium
def test_law_4_holds_at_every_instant() -> None:
    """Killed after each folder, control group and process that it made: nobody but its own janitor cleans up."""
    marker = f"4324.{os.getpid()}"
    assert sweep(EACH_CALL, marker) > 20


async def test_close_leaves_nothing(backend: Bubblewrap) -> None:
    before = set(left_by(os.getpid(), "4322.1"))  # another test of this process may keep a backend open
    box = await backend.create(SandboxSpec(files={"f": b"1"}))
    twin = await box.fork()
    await box.snapshot()
    await twin.start(["sleep", "4322.1"])
    assert [found for found in left_by(os.getpid(), "4322.1") if "agentrl-boxes" in found]
    await backend.aclose()
    await backend.aclose()
    assert set(left_by(os.getpid(), "4322.1")) <= before


async def test_missing_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        await Bubblewrap().create()


async def test_broken_host_is_no_result_of_the_policy(backend: Bubblewrap) -> None:
    """Law 3: a box that cannot be set up raises; nothing that a command could have said is read as its result."""
    box = await backend.create()
    assert backend._host is not None  # pyright: ignore[reportPrivateUsage]
    backend._host.filter_file.write_bytes(b"")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(SandboxError, match="could not set up"):
        await box.exec(["true"])


async def test_image_is_a_folder_with_a_root_file_system(backend: Bubblewrap, public_path: Path) -> None:
    rootfs.build(public_path, rootfs.SHELL)
    box = await backend.create(SandboxSpec(image=str(public_path)))
    result = await box.exec(["sh", "-c", "ls /usr/bin; cat /etc/passwd"])
    assert b"nobody" in result.stdout and b"python" not in result.stdout, result
    with pytest.raises(SandboxUnavailable, match="prlimit"):
        await backend.create(SandboxSpec(image=str(public_path / "tmp")))


async def test_open_network_is_the_host_s(backend: Bubblewrap) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        box = await backend.create(SandboxSpec(network=True))
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=60)"
        assert (await box.exec(["python3", "-c", program])).exit_code == 0


async def test_readonly_folders_of_the_host(public_path: Path) -> None:
    (public_path / "data").write_text("shared")
    backend = Bubblewrap(readonly={str(public_path): "/data"})
    try:
        box = await backend.create()
        result = await box.exec(["sh", "-c", "cat /data/data; echo x > /data/data"])
        assert (result.stdout, result.exit_code) == (b"shared", 2), result
    finally:
        await backend.aclose()


@pytest.mark.parametrize("how", ["cancelled", "timed out", "box closed"])
async def test_command_ended_before_its_box_stands_leaves_no_zombie(how: str, backend: Bubblewrap) -> None:
    """bwrap has forked already when it has not yet reported: killed in between, that process would become ours."""

    async def run(box: BubblewrapBox, timeout_s: float) -> None:
        with suppress(SandboxError):
            await box.exec(["sleep", "60"], timeout_s=timeout_s)

    box = await backend.create()
    before = len(own_children())
    for number in range(40):
        moment = 0.0003 * (number % 20)
        if how == "cancelled":
            with trio.move_on_after(moment):
                await run(box, 60)
        elif how == "timed out":
            await run(box, moment)
        else:
            other = await backend.create()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, other, 60)
                await trio.sleep(moment)
                await other.close()
    assert len(own_children()) <= before  # one of another test may end


def own_children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
