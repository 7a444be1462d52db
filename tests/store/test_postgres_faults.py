"""What a run's processes keep while the network to their PostgreSQL server, or the server itself, fails them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from agentrl.errors import LeaseLost, StoreError
from agentrl.records import StopReason
from agentrl.store import Ending, RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS
from agentrl.store.journal_writer import JournalWriter

from .play import START, admit, answer, play_all, serve, turn
from .proxy import Proxy, before
from .server import Server, running

postgres = pytest.importorskip("agentrl.store.databases.postgres.postgres")  # its driver is an extra
addresses = pytest.importorskip("agentrl.store.databases.postgres.address")
session = pytest.importorskip("agentrl.store.databases.postgres.connection")

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture
def proxy(server: Server) -> Generator[Proxy]:
    with before(server.folder / ".s.PGSQL.5432") as proxy:
        yield proxy


@pytest.fixture
def near(tmp_path: Path, server: Server) -> Generator[RunStore]:
    """The run as a process beside the server has it."""
    with RunStore.create(tmp_path / "near" / ADDRESS, "{}", url=server.url) as store:
        serve(store, 0)
        yield store


@pytest.fixture
def far(near: RunStore, tmp_path: Path, proxy: Proxy) -> Generator[RunStore]:
    """The same run through the proxy."""
    address = addresses.Address.read(near.path)
    there = tmp_path / "far" / ADDRESS
    there.parent.mkdir()
    address._replace(url=f"postgresql://agentrl@127.0.0.1:{proxy.port}/agentrl?sslmode=disable").write(there)
    with RunStore.open(there) as store:
        yield store


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "near").mkdir()
    for module in (postgres, addresses):
        monkeypatch.setattr(module, "CONNECT_S", 2.0)  # libpq takes no less


def test_law_2_a_connection_that_is_cut_between_two_writes_costs_nothing(far: RunStore, proxy: Proxy) -> None:
    admit(far, limit=2)
    first, *_ = far.leases.claim("w", 4, lease_s=1e9)
    far.journal.begin(first.episode_id, first.fence, START)
    for index in range(3):
        proxy.cut()
        far.journal.journal_turn(first.episode_id, first.fence, turn(index, 1))
        far.journal.journal_step(first.episode_id, first.fence, index, answer(index, last=index == 2))
    far.journal.finish(first.episode_id, first.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    assert len(far.reads.trajectory(first.episode_id).turns) == 3 and audit(far).violations == []


def test_law_2_a_connection_that_is_cut_within_a_write_leaves_nothing_of_it(far: RunStore, proxy: Proxy) -> None:
    db = far._db  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreError, match=r"the database does not answer"), db.write():
        db.execute("UPDATE meta SET value = 'half' WHERE key = 'config'")
        db.rows("SELECT 1")
        proxy.cut()
        db.rows("SELECT 1")
    assert far.meta("config") == "{}"


@pytest.mark.medium
@pytest.mark.parametrize("what", ["read", "write", "together", "commit"])
def test_law_4_a_network_that_swallows_everything_holds_no_call_for_longer_than_its_deadline(
    far: RunStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 0.2)
    db = far._db  # pyright: ignore[reportPrivateUsage]
    began = time.monotonic()

    def commit() -> None:
        with db.write():
            db.execute("UPDATE meta SET value = 'half' WHERE key = 'config'")
            db.rows("SELECT 1")
            proxy.swallow()

    def together() -> None:
        (result,) = far.together([lambda: far.set_meta("a", "b")])
        assert result.error is not None
        raise result.error

    if what != "commit":
        proxy.swallow()
    far.hurry(0.1)
    with pytest.raises(StoreError, match=r"the database does not answer.* start it"):
        {"read": far.groups.counts, "write": lambda: far.set_meta("a", "b"), "together": together, "commit": commit}[
            what
        ]()
    assert time.monotonic() - began < 60
    proxy.carry()
    monkeypatch.setattr(session, "ANSWER_S", 60.0)
    far.hurry(60.0)
    far.set_meta("after", "well")
    assert far.meta("after") == "well"


@pytest.mark.medium
def test_law_2_a_worker_that_comes_back_from_a_partition_writes_nothing_over_its_successor(
    near: RunStore, far: RunStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(near, limit=1)
    old = far.leases.claim("far", 1, lease_s=10.0, now=0.0)[0]
    far.journal.begin(old.episode_id, old.fence, START)
    far.journal.journal_turn(old.episode_id, old.fence, turn(0, 1))
    monkeypatch.setattr(session, "ANSWER_S", 0.2)
    proxy.swallow()
    far.hurry(0.1)
    with pytest.raises(StoreError):
        far.journal.journal_step(old.episode_id, old.fence, 0, answer(0))
    monkeypatch.setattr(session, "ANSWER_S", 60.0)  # for `near`, too
    new = near.leases.claim("near", 1, lease_s=1e9, now=60.0)[0]
    assert new.episode_id == old.episode_id and len(new.turns) == 1
    proxy.carry()
    far.hurry(60.0)
    for late in (
        lambda: far.journal.journal_step(old.episode_id, old.fence, 0, answer(0)),
        lambda: far.journal.journal_turn(old.episode_id, old.fence, turn(1, 1)),
        lambda: far.journal.finish(
            old.episode_id, old.fence, Ending(stop_reason=StopReason.DONE, outcome=0.0, success=False)
        ),
    ):
        with pytest.raises(LeaseLost):
            late()
    near.journal.journal_step(new.episode_id, new.fence, 0, answer(0))
    near.journal.journal_turn(new.episode_id, new.fence, turn(1, 1))
    assert audit(near).violations == []


@pytest.mark.medium
def test_law_2_a_learner_that_comes_back_from_a_partition_trains_nothing_twice(
    near: RunStore, far: RunStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(near, limit=2)
    play_all(near)
    far.lineage.lead()
    assert far.buffer.take(1, 1, max_lag=1)
    monkeypatch.setattr(session, "ANSWER_S", 0.2)
    proxy.swallow()
    far.hurry(0.1)
    with pytest.raises(StoreError):
        far.versions.mint_version(1)
    monkeypatch.setattr(session, "ANSWER_S", 60.0)  # for `near`, too
    near.lineage.lead()
    near.lineage.rollback(0)
    assert near.buffer.take(1, 1, max_lag=1)
    proxy.carry()
    far.hurry(60.0)
    for late in (
        lambda: far.versions.mint_version(1),
        lambda: far.buffer.take(2, 1, max_lag=1),
        lambda: far.lineage.rollback(0),
    ):
        with pytest.raises(LeaseLost, match="another learner has begun"):
            late()
    near.lineage.checkpoint(1, near.versions.mint_version(1), "/checkpoints/1")
    assert near.lineage.episodes_of(1) == [1, 2] and near.lineage.episodes_of(2) == [] and audit(near).violations == []


def test_over_a_slow_network_a_turn_waits_for_one_answer(
    far: RunStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(far, limit=8)
    claims = far.leases.claim("w", 8, lease_s=1e9)
    far.together([partial(far.journal.begin, one.episode_id, one.fence, START) for one in claims], shared=True)
    far.versions.step_of(1)
    proxy.delay_s = 0.02
    waits, wait = list[None](), session.DeadlineConnection.wait
    monkeypatch.setattr(
        session.DeadlineConnection, "wait", lambda *given, **named: [waits.append(None), wait(*given, **named)][1]
    )
    calls = [partial(far.journal.journal_turn, one.episode_id, one.fence, turn(0, 1)) for one in claims]
    results = far.together(calls, shared=True)
    assert [result.error for result in results] == [None] * 8
    assert len(waits) <= 8 + 8, "one for each turn; begin, numbers of turns, and commit for all"


@pytest.mark.medium
async def test_a_server_that_is_restarted_at_once_costs_the_episodes_under_way_nothing(
    near: RunStore, server: Server
) -> None:
    admit(near, limit=2)
    with RunStore.open(near.path) as writer, RunStore.read(near.path) as reader:
        async with JournalWriter(writer, reader) as desk:
            claims = await desk.claim("w", 4, lease_s=1e9)
            for one in claims:
                await desk.begin(one.episode_id, one.fence, START)
                await desk.journal_turn(one.episode_id, one.fence, turn(0, 1))
            server.stop("immediate")
            server.start()
            for one in claims:
                await desk.journal_step(one.episode_id, one.fence, 0, answer(0, last=True))
                await desk.finish(
                    one.episode_id, one.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
                )
    assert (
        near.buffer.take(1, 2, max_lag=1)
        and near.lineage.episodes_of(1) == [1, 2, 3, 4]
        and audit(near).violations == []
    )
