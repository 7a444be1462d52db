"""Several hosts share one store in PostgreSQL: whose clock counts, and who supervises."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.cli.episodes import copy as store_copy
from agentrl.config import parse
from agentrl.errors import RunFailed, UsageError
from agentrl.run.resume_overrides import change
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import Supervisor, run_to_end
from agentrl.store import RunStore
from agentrl.store.databases import open_store
from agentrl.store.databases.open_store import ADDRESS, NOTE

from .play import admit, serve
from .server import Server

Address = pytest.importorskip("agentrl.store.databases.postgres.postgres").Address  # its driver is an extra
pytestmark = pytest.mark.postgres

DEADLINE_S = 60
HOST = """if True:
    import sys, time
    real, skew_s = time.time, float(sys.argv[2])
    time.time = lambda: real() + skew_s  # before anything of ours is imported: the clock of this host
    from agentrl.store import RunStore
    with RunStore.open(sys.argv[1]) as store:
        claims = store.leases.claim("worker-of-" + sys.argv[2], 8, lease_s=float(sys.argv[3]))
        print([claim.episode_id for claim in claims])
        print(store._db.clock() - real())
"""


def claims(path: Path, *, skew_s: float, lease_s: float = 120.0) -> tuple[list[int], float]:
    """What a worker of a host whose clock is so far ahead claims, and how far the time that it goes by is."""
    done = subprocess.run(
        [sys.executable, "-c", HOST, str(path), str(skew_s), str(lease_s)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    ids, ahead_s = done.stdout.splitlines() if done.returncode == 0 else pytest.fail(done.stderr)
    return [int(id) for id in ids.strip("[]").split(", ") if id], float(ahead_s)


@pytest.fixture
def path(tmp_path: Path, server: Server) -> Path:
    path = tmp_path / ADDRESS
    with RunStore.create(path, "{}", url=server.url) as store:
        serve(store, 0)
        admit(store)
    return path


def test_a_host_whose_clock_is_ahead_claims_no_episode_twice(path: Path) -> None:
    first, _ = claims(path, skew_s=0)
    second, ahead_s = claims(path, skew_s=600)
    assert first and second == []
    assert abs(ahead_s) < 5, "of the server, which is on this machine"


@pytest.mark.medium
def test_nor_does_its_lease_hold_for_longer_when_it_is_gone(path: Path) -> None:
    first, _ = claims(path, skew_s=600, lease_s=1.0)
    deadline = time.monotonic() + DEADLINE_S
    with RunStore.open(path) as store:
        while not (found := store.leases.claim("next", 8, lease_s=120.0)):
            assert time.monotonic() < deadline, "it would be ten minutes"
            time.sleep(0.1)
    assert [claim.episode_id for claim in found] == first


def test_the_servers_time_is_asked_for_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts on by itself drifts, or the server's is set."""
    from agentrl.store.databases.postgres import session

    with RunStore.open(path) as store:
        server: Any = store._db.driver.session  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage]
        server._ahead_s -= 100.0
        store.set_meta("key", "value")
        assert store.now() < time.time() - 90.0, "it was asked for just now"
        host_s = session._host_s  # pyright: ignore[reportPrivateUsage]
        server._clock_set_s = host_s() - session._CLOCK_S - 1.0  # pyright: ignore[reportPrivateUsage]
        store.set_meta("key", "another value")
        assert abs(store.now() - time.time()) < 5
        assert store.meta("key") == "another value"


# --- who supervises


@pytest.fixture
def folders(tmp_path: Path, server: Server) -> tuple[RunDir, RunDir]:
    """The folder of a run, as each of two machines that share no disk has it."""
    config = parse({"model": "agentrl/tiny-coder", "env": {"id": "e"}, "cluster": {"store": server.url}})
    first = RunDir.create(tmp_path / "first" / "run", config)
    second = RunDir(tmp_path / "second" / "run")
    shutil.copytree(first.path, second.path)
    (second.path / NOTE).write_text("/on/another/machine\n")
    return first, second


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.store.databases.postgres.supervisor_lock._FREED_S", 0.5)


async def nothing(_: Supervisor) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.medium
def test_the_second_supervisor_of_a_run_is_refused_by_name_and_changes_nothing(
    folders: tuple[RunDir, RunDir], soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folders
    tries: dict[str, Callable[[], object]] = {
        "train": lambda: run_to_end(second, nothing),
        "resume": lambda: change(second, ["train.steps=2000"]),
        "copy": lambda: store_copy(second.path, "sqlite"),
        "overwrite": lambda: RunDir.create(second.path, second.config(), overwrite=True),
    }
    name = f"process {os.getpid()} on {socket.gethostname()} (folder {first.path})"
    with open_store.supervising(first.store_path) as check, RunStore.open(first.store_path) as store:
        store.set_meta("phase", "train")
        for tried, call in tries.items():
            with pytest.raises(UsageError) as refused:
                call()
            assert f"{name} supervises this run: end it there first" in str(refused.value), tried
            check()
        assert (store.meta("phase"), second.store_path.exists()) == ("train", True)
    assert f"agentrl: {name} supervises this run: it is waited for, 0.5 s at most" in capsys.readouterr().err
    run_to_end(second, nothing)  # the first one has ended


def test_a_supervisor_goes_on_when_the_database_is_back(folders: tuple[RunDir, RunDir], server: Server) -> None:
    first, second = folders
    with open_store.supervising(first.store_path) as check:
        server.stop("immediate")
        check()  # it is waited for elsewhere
        server.start()
        check()
        with pytest.raises(UsageError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("agentrl.store.databases.postgres.supervisor_lock._FREED_S", 0.0)
            with open_store.supervising(second.store_path):
                pass


def test_one_that_lost_the_run_to_another_ends_with_its_name(folders: tuple[RunDir, RunDir], soon: None) -> None:
    """It was cut off for so long that the database let it go."""
    first, second = folders
    with open_store.supervising(first.store_path) as check:
        address = Address.read(first.store_path)
        with address.connect() as session:
            session.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        with open_store.supervising(second.store_path):
            deadline = time.monotonic() + DEADLINE_S
            with pytest.raises(RunFailed, match=re.escape(f"(folder {second.path}) supervises this run now")):
                while time.monotonic() < deadline:
                    check()
                    time.sleep(0.05)
