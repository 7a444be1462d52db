"""Each fault that chaos injects is real: its victim sees it, and a fault without effect is said to have none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError, EngineTimeout
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams
from agentrl.testing import faults
from agentrl.testing.faults import JUNK, NoEffect, WallClock
from agentrl.testing.http import listening
from agentrl.testing.vllm_server import FakeVLLM

DEADLINE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's and a server's end of one connection, both ours."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


@pytest.fixture
def named(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket, str]]:
    """The same over a Unix socket, with its path."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted, path


def test_a_connection_over_a_unix_socket_is_cut_and_garbled_as_any(
    named: tuple[socket.socket, socket.socket, str],
) -> None:
    client, server, path = named
    assert faults.cut_connections([os.getpid()], [f"{path}2"]) == [] and faults.serves(os.getpid(), [path])
    (garbled,) = faults.garble(os.getpid(), [path], JUNK[0])
    assert client.recv(100) == JUNK[0]
    assert faults.still_open([garbled]) == [garbled]
    (cut,) = faults.cut_connections([os.getpid()], [path])
    assert cut.remote == path and (client.recv(10), server.recv(10)) == (b"", b"")
    server.close()
    assert faults.still_open([garbled]) == []


def test_a_connection_that_is_cut_ends_at_both_sides_and_others_do_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    port = server.getsockname()[1]
    assert faults.cut_connections([os.getpid()], [port + 1]) == []
    server.send(b"before")
    assert client.recv(10) == b"before"
    (cut,) = faults.cut_connections([os.getpid()], [port])
    assert (cut.remote, cut.local) == (port, client.getsockname()[1])
    assert (client.recv(10), server.recv(10)) == (b"", b"")


def test_garbled_bytes_arrive_and_a_client_that_leaves_is_seen_to(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    (garbled,) = faults.garble(os.getpid(), [server.getsockname()[1]], JUNK[0])
    assert client.recv(100) == JUNK[0]
    assert faults.still_open([garbled]) == [garbled]
    client.close()
    assert faults.still_open([garbled]) == []


def test_a_process_that_cannot_be_stopped_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        with faults.stopped(victim.pid):
            assert faults.state(victim.pid) == "T"
        ticks = iter(range(100))
        clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda seconds: None)
        monkeypatch.setattr(faults, "time", clock)  # in that module alone: threads of others have the real one
        monkeypatch.setattr(faults, "os", SimpleNamespace(kill=lambda pid, number: None))
        with pytest.raises(NoEffect, match="was stopped and goes on"), faults.stopped(victim.pid):
            pass


def test_a_clock_that_is_moved_is_moved_in_every_process_that_has_it() -> None:
    clock = WallClock()
    code = "import time\nwhile input(): print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.variables},
    ) as process:
        assert process.stdin and process.stdout

        def asked() -> list[float]:
            process.stdin.write("?\n")
            process.stdin.flush()
            return [float(word) for word in process.stdout.readline().split()]

        for ahead_s in (0.0, 3600.0, -7200.0, 0.0):
            clock.set(ahead_s)
            wall, wall_ns, monotonic = asked()
            assert abs(wall - time.time() - ahead_s) < DEADLINE_S and abs(wall_ns - wall) < DEADLINE_S
            assert abs(monotonic - time.monotonic()) < DEADLINE_S
        process.stdin.write("\n")
    clock.close()


@pytest.mark.bubblewrap
def test_a_small_file_system_is_full_for_as_long_as_it_should(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from agentrl.testing import faults; folder = pathlib.Path(sys.argv[1])\n"
        "with faults.full_disk(folder):\n"
        "    try: (folder / 'more').write_bytes(b'x')\n"
        "    except OSError as error: print(error.strerror)\n"
        "(folder / 'after').write_bytes(bytes(1 << 20)); print(sorted(path.name for path in folder.iterdir()))"
    )
    disk = ["bwrap", "--dev-bind", "/", "/", "--size", str(8 << 20), "--tmpfs", str(tmp_path), "--"]
    done = subprocess.run(
        [*disk, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "No space left on device\n['after', 'more']\n"


@pytest.mark.parametrize("junk", range(len(JUNK)))
async def test_garbage_in_an_engines_answer_is_an_engines_failure_and_its_connection_is_left(junk: int) -> None:
    fake = FakeVLLM()
    fake.fail("hang", after=4)
    async with listening(fake) as url, aclosing(EngineClient(url)) as client, trio.open_nursery() as nursery:
        began = trio.Event()
        request = GenerateRequest(
            request_id="r",
            session="s",
            token_ids=(1, 2),
            sampling=SamplingParams(max_tokens=9),
            deadline_s=DEADLINE_S,
            on_chunk=lambda _: began.set(),
        )
        garbled: list[faults.Connection] = []

        async def disturb() -> None:
            await began.wait()
            garbled.extend(faults.garble(os.getpid(), [int(url.rpartition(":")[2])], JUNK[junk]))

        nursery.start_soon(disturb)
        with pytest.raises(EngineError) as error:
            await client.generate(request)
        assert not isinstance(error.value, EngineTimeout)
        assert len(garbled) == 1 and faults.still_open(garbled) == []
