"""A run whose worker and learner, engine and database are on three hosts, with a slow and lossy network between them,
which parts one after the other from the rest. The fence of the store holds for who comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from store.play import START, admit, answer, turn
from store.server import Server, running

from agentrl.errors import LeaseLost, StoreError
from agentrl.models.resolve import model_dir
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS

from . import network
from .network import Network
from .test_run import DEADLINE_S, command, last_step, run_file, wait_for_step, wait_until

addresses = pytest.importorskip("agentrl.store.databases.postgres.address")
session = pytest.importorskip("agentrl.store.databases.postgres.connection")

pytestmark = [pytest.mark.netns, pytest.mark.postgres, pytest.mark.slow]

T = TypeVar("T")
ONE_WAY_S, AWAY_S = 0.01, 3.0  # of a frame, and of a partition
PORT = 7001


@pytest.fixture(scope="module")
def hosts() -> Generator[Network]:
    with network.hosts("run", "engine", "database") as found:
        yield found


@pytest.fixture(scope="module")
def server(hosts: Network) -> Generator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder,
        running(Path(folder), on=hosts.on("database")) as server,
    ):
        yield server


@pytest.fixture(autouse=True)
def distance(hosts: Network) -> Generator[None]:
    """One frame of a hundred is lost."""
    hosts.order("delay", ONE_WAY_S)
    hosts.order("loss", 0.01)
    yield
    for order in ("delay", "loss"):
        hosts.order(order, 0.0)
    for name in hosts.address:
        hosts.order("mend", name)


def url(hosts: Network) -> str:
    return f"postgresql://agentrl@{hosts.address['database']}/agentrl?sslmode=disable"


# --- the fence --------------------------------------------------------------------------------------------------


@contextmanager
def far_store(hosts: Network, near: RunStore, folder: Path) -> Generator[tuple[RunStore, Callable[..., T]]]:
    """The run's store as the host `run` reaches it, and what calls it from there."""
    folder.mkdir()
    addresses.Address.read(near.path)._replace(url=url(hosts)).write(folder / ADDRESS)
    with ThreadPoolExecutor(1) as thread:

        def there(call: Callable[..., T], *arguments: object, **options: object) -> T:
            return thread.submit(call, *arguments, **options).result(timeout=120)

        there(hosts.enter, "run")
        store = there(RunStore.open, folder / ADDRESS)
        yield store, there
        there(store.close)


@pytest.mark.long
def test_law_2_who_comes_back_from_a_partition_writes_nothing_over_its_successor(
    hosts: Network, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that holds an episode, and a learner that has taken a step, on a host that is cut off."""
    (tmp_path / "near").mkdir()
    with RunStore.create(tmp_path / "near" / ADDRESS, "{}", url=server.url) as near:
        near.versions.mint_version(0)
        near.versions.confirm_version(1)
        admit(near, limit=2)
        with far_store(hosts, near, tmp_path / "far") as (far, there):
            old = there(far.leases.claim, "far", 1, lease_s=10.0, now=0.0)[0]
            there(far.journal.begin, old.episode_id, old.fence, START)
            there(far.lineage.lead)
            monkeypatch.setattr(session, "ANSWER_S", 0.5)
            hosts.order("cut", "run")
            there(far.hurry, 0.1)
            with pytest.raises(StoreError):
                there(far.journal.journal_turn, old.episode_id, old.fence, turn(0, 1))
            monkeypatch.setattr(session, "ANSWER_S", 60.0)
            new = near.leases.claim("near", 1, lease_s=1e9, now=60.0)[0]
            assert new.episode_id == old.episode_id
            near.lineage.lead()
            hosts.order("mend", "run")
            there(far.hurry, 60.0)
            with pytest.raises(LeaseLost):
                there(far.journal.journal_turn, old.episode_id, old.fence, turn(0, 1))
            with pytest.raises(LeaseLost, match="another learner has begun"):
                there(far.versions.mint_version, 1)
        near.journal.begin(new.episode_id, new.fence, START)
        near.journal.journal_turn(new.episode_id, new.fence, turn(0, 1))
        near.journal.journal_step(new.episode_id, new.fence, 0, answer(0))
        assert audit(near).violations == []


# --- a whole run ------------------------------------------------------------------------------------------------


def reaches(hosts: Network, name: str, port: int) -> bool:
    """Whether the host `run` reaches a server; if not, that takes `AWAY_S`."""
    words = (hosts.address[name], port, AWAY_S)
    knock = "import socket, sys\nsocket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"
    knocking = hosts.on("run", sys.executable, "-c", knock, *words)
    return subprocess.run(knocking, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0


def test_law_2_a_run_on_three_hosts_goes_on_after_each_was_cut_off(
    hosts: Network, server: Server, tmp_path: Path
) -> None:
    run, address = RunDir(tmp_path / "run"), hosts.address["engine"]
    model = model_dir("agentrl/tiny-coder")
    engine = [
        sys.executable,
        "-m",
        "agentrl.engine.embedded",
        "--no-key",
        "--model",
        model,
        "--host",
        address,
        "--port",
        PORT,
    ]
    engine += ["--max-batch", 16, "--kv-cache-mb", 64, "--max-model-len", 1024]
    file = run_file(
        tmp_path,
        "agentrl/Calculator-v0",
        engine={"urls": [f"http://{address}:{PORT}"], "liveness_deadline_s": 10.0},
        cluster={"store": url(hosts)},
        train={"steps": 5000, "checkpoint_every": 5},
        eval={"sets": [], "every": 0},
    )
    train = hosts.on("run", *command("train", file, "--out", run.path))
    with (
        (tmp_path / "engine.log").open("wb") as log,
        ended(subprocess.Popen(hosts.on("engine", *engine), stdout=log, stderr=log, cwd=tmp_path)),
        ended(subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process,
    ):
        wait_for_step(run.path, 1, process)
        for name, port in (("database", 5432), ("engine", PORT)):
            wait_until(lambda name=name, port=port: reaches(hosts, name, port), process)  # a slow host may take long
            hosts.order("cut", name)
            assert not reaches(hosts, name, port)
            hosts.order("mend", name)
            wait_for_step(run.path, last_step(run) + 2, process)  # one more than may have been under way
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, errors + output
    looked = command("audit", run.path, "--json")
    done = subprocess.run(hosts.on("run", *looked), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["violations"] == []


@contextmanager
def ended(process: subprocess.Popen[T]) -> Generator[subprocess.Popen[T]]:
    """The process, which is killed at the end if it still runs."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
