"""Boxes elsewhere: the promises over calls of our own, and on a container that only `docker exec` reaches; connections
that break, and what is left of a box whose owner was killed."""

from __future__ import annotations

import base64
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.errors import SandboxError, SandboxLost, SandboxUnavailable, UsageError
from agentrl.protocols import Limits, SandboxSpec
from agentrl.sandbox.remote import box as remote_box
from agentrl.sandbox.remote import helper_calls
from agentrl.sandbox.remote.box import RemoteBackend
from agentrl.sandbox.remote.helper_calls import ProviderBox
from agentrl.sandbox.remote.inspect_sandboxes import Inspect
from agentrl.sandbox.remote.swe_rex import SweRex
from agentrl.testing.sandbox.case import must_vanish

from .conftest import IMAGE, docker_engine, env  # noqa: F401  (a fixture)
from .promises import ROOMS, WITHOUT_WALLS, keep


class Here:
    """A box that is a process of this machine: what a provider's library does, without one."""

    own_machine = True
    most_wait_s = 1.0

    def __init__(self) -> None:
        self.calls = 0
        self.fails: Callable[[int], bool] = lambda call: False  # after the call was made

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        self.calls += 1
        call = self.calls
        with trio.fail_after(deadline_s):
            done = await trio.run_process(list(argv), capture_stdout=True, check=False)
        if self.fails(call):
            raise ConnectionError("the connection broke")
        return done.stdout.decode()

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None:
        await trio.Path(path).write_text(text)

    async def close(self) -> None: ...


class HereBackend(RemoteBackend):
    name = "here"

    def __init__(self, make: Callable[[], Any] = Here) -> None:
        super().__init__()
        self.make, self.made = make, list[Any]()

    async def connect(self, spec: SandboxSpec) -> ProviderBox:
        self.made.append(self.make())
        return self.made[-1]


@pytest.fixture
async def here() -> AsyncGenerator[HereBackend]:
    backend = HereBackend()
    yield backend
    await backend.aclose()


# --- connections that break


@pytest.mark.medium
async def test_a_broken_connection_costs_a_command_nothing(here: HereBackend) -> None:
    """The answer of every second call is lost after the call was made: each counts once all the same."""
    box = await here.create()
    (remote,) = here.made
    counting = "import sys; open('runs', 'a').write('x'); sys.stdout.write(sys.stdin.read()); sys.exit(3)"
    remote.fails = lambda call: remote.calls > started + 1 and call % 2 == 0
    for _ in range(3):
        started = remote.calls
        result = await box.exec(["python3", "-c", counting], stdin=b"said")
        assert (result.exit_code, result.stdout) == (3, b"said")
    started = 1 << 30
    assert await box.read("runs") == b"xxx"


@pytest.mark.medium
async def test_a_process_gets_each_byte_once_over_a_connection_that_breaks(here: HereBackend) -> None:
    box = await here.create()
    (remote,) = here.made
    process = await box.start(["cat"])
    remote.fails = lambda call: call % 2 == 0
    seen = b""
    for number in range(4):
        await process.send(b"%d\n" % number)
        while not seen.endswith(b"%d\n" % number):
            seen += await process.receive(5.0)
    assert seen == b"0\n1\n2\n3\n"
    remote.fails = lambda call: False
    assert (await process.kill()).exit_code == 137


async def test_law_8_output_is_whole_also_where_its_supervisor_had_no_time_to_read_it(
    here: HereBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one read lies in the pipe when the command ends, and on a busy machine the time to read is over."""
    text = helper_calls._helper()  # pyright: ignore[reportPrivateUsage]
    assert "DRAIN_S = 1.0" in text
    monkeypatch.setattr(helper_calls, "_helper", lambda: text.replace("DRAIN_S = 1.0", "DRAIN_S = 0.0"))
    box = await here.create(SandboxSpec(limits=Limits(output_bytes=4 << 20)))
    large = "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20); os.write(1, b'x' * 1_000_000)"
    result = await box.exec(["python3", "-c", large])
    assert (len(result.stdout), result.truncated) == (1_000_000, False)


async def test_a_command_whose_start_was_not_answered_is_lost_and_not_run_twice(here: HereBackend) -> None:
    box = await here.create()
    (remote,) = here.made
    remote.fails = lambda call: True
    with pytest.raises(SandboxLost, match="here: a call was not answered: ConnectionError: the connection broke"):
        await box.exec(["true"])
    remote.fails = lambda call: False


async def test_a_box_without_python_says_so() -> None:
    class Mute(Here):
        async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
            return "sh: python3: not found"

    backend = HereBackend(Mute)
    with pytest.raises(SandboxLost, match="it needs python3"):
        await backend.create()
    await backend.aclose()


@pytest.mark.parametrize("do", ["snapshot", "fork", "read"])
async def test_a_box_that_is_closed_under_a_call_names_no_path(here: HereBackend, do: str) -> None:
    """Its folders are gone as the call arrives: that is not a file which the policy named wrongly."""
    box = await here.create()
    (remote,) = here.made
    execute = remote.execute

    async def closes_first(argv: Sequence[str], *, deadline_s: float) -> str:
        remote.execute = execute
        await box.close()
        return await execute(argv, deadline_s=deadline_s)

    remote.execute = closes_first
    with pytest.raises(SandboxError, match="the box is closed"):
        await (box.read("f") if do == "read" else getattr(box, do)())


# --- what is left


@pytest.mark.medium
def test_nothing_is_left_of_a_box_whose_owner_was_killed(tmp_path: Path) -> None:
    mark = f"mark{uuid.uuid4().hex}"
    program = f"""
import sys, trio
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from sandbox.test_remote import HereBackend
async def main():
    box = await HereBackend().create()
    await box.start(["sh", "-c", "setsid sleep 1000 & exec sleep 1000", "{mark}"])
    await box.exec(["sh", "-c", "exit 0", "{mark}"])
    print(box._work, flush=True)
    await trio.sleep_forever()
trio.run(main)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "X": mark})
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().decode().strip())
    assert folder.is_dir()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    trio.run(must_vanish, mark)
    deadline = time.monotonic() + 120
    while folder.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the janitor removes it after the processes
    assert not folder.parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
def test_a_box_of_a_machine_of_its_own_ends_without_its_owner(tmp_path: Path) -> None:
    """The watch in a namespace of processes of its own, as in a container: it ends process 1 after the silence."""
    request = {
        "do": "touch",
        "state": str(tmp_path),
        "seconds": 1.0,
        "not_in": remote_box._own_processes(),
        "uid": None,
    }
    text = base64.b64encode(json.dumps(request).encode()).decode()
    (tmp_path / "helper.py").write_text(helper_calls._helper())
    # nobody inside can end process 1, but it ends with its child
    inside = f"{sys.executable} -I {tmp_path}/helper.py {text}; sleep 10000; exit 5"
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inside],
        stdout=subprocess.PIPE,
        timeout=500,
        check=False,
    )
    assert b'{"watched": true}' in done.stdout and done.returncode == 5
    assert time.monotonic() - began < 400


def test_a_watch_never_ends_this_machine(tmp_path: Path) -> None:
    request = {"do": "touch", "state": str(tmp_path), "seconds": 0.0, "not_in": remote_box._own_processes()}
    text = base64.b64encode(json.dumps(request).encode()).decode()
    done = subprocess.run([sys.executable, "-I", "-c", helper_calls._helper(), text], capture_output=True, check=True)
    assert b'{"watched": false}' in done.stdout


# --- what the adapters refuse


async def test_a_box_that_is_to_have_no_network_is_not_made_open() -> None:
    backends: list[RemoteBackend] = [SweRex(deployment="modal"), Inspect(kind="k8s")]
    for backend in [*backends, Inspect(kind="docker", config="compose.yaml")]:
        with pytest.raises(SandboxUnavailable, match="network=true"):
            await backend.create()
    with pytest.raises(SandboxUnavailable, match="docker needs an image"):
        await Inspect(kind="docker").create()
    with pytest.raises(UsageError, match="choose one of local, docker"):
        SweRex(deployment="moon")


# --- the promises


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("room", WITHOUT_WALLS)
async def test_a_box_behind_calls_keeps_promise(room: str, here: HereBackend) -> None:
    await keep(here, WITHOUT_WALLS[room])


PROVIDERS = (  # walls that a provider's container has or has not: no program in it can make them
    "ptrace, process_vm_readv, bpf, perf, userfaultfd, keyrings, kexec, modules, io_uring",
    "names, datagrams to the outside, raw and packet sockets",
    "filling the disk from the work folder with many files",
    "filling the disk from /tmp and /dev/shm",
    "locks and watches on the system's files, which other boxes and the host use too",
    "a hundred thousand empty files",
    "memory in no address space: sockets, pipes, files without a name, System V's segments",
)


class InContainer(Here):
    """A container without a network, which only `docker exec` as root reaches: as inspect_ai's docker boxes are."""

    own_machine = False

    def __init__(self, engine: str, spec: SandboxSpec) -> None:
        super().__init__()
        self.name, self._env = f"agentrl-remote-{uuid.uuid4().hex}", env(engine)
        limits = [f"--memory={spec.limits.memory_bytes}", f"--pids-limit={spec.limits.pids + 24}", "--network=none"]
        walls = ["--security-opt=no-new-privileges", "--init", "--rm", "-d", f"--name={self.name}"]
        command = ["docker", "run", *limits, *walls, IMAGE, "sleep", "100000"]
        subprocess.run(command, env=self._env, check=True, capture_output=True, timeout=60)

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        command = ["docker", "exec", "-u", "0", self.name, *argv]
        with trio.fail_after(deadline_s):
            done = await trio.run_process(command, capture_stdout=True, check=False, env=self._env)
        return done.stdout.decode()

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None:
        command = ["docker", "exec", "-i", "-u", "0", self.name, "sh", "-c", 'cat > "$0"', path]
        await trio.run_process(command, stdin=text.encode(), env=self._env)

    async def close(self) -> None:
        await trio.run_process(["docker", "rm", "-f", self.name], capture_stdout=True, env=self._env)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.docker
@pytest.mark.parametrize("room", ROOMS)
async def test_a_container_behind_calls_keeps_promise(room: str, docker_engine: str) -> None:  # noqa: F811
    class Backend(HereBackend):
        async def connect(self, spec: SandboxSpec) -> ProviderBox:
            return await trio.to_thread.run_sync(InContainer, docker_engine, spec)

    backend = Backend()
    try:
        await keep(backend, [case for case in ROOMS[room] if case.name not in PROVIDERS])
    finally:
        await backend.aclose()


def test_limits_are_named_as_resource_names_them() -> None:
    for name, bound in remote_box._bounds(Limits()).items():
        assert isinstance(getattr(resource, name), int) and bound >= 0
