"""The database goes away under a store, and comes back: no call is lost, and none is made twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from agentrl.errors import StoreAway, StoreError
from agentrl.records import GroupState, Task
from agentrl.store import Claim, RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS
from agentrl.store.journal_writer import JournalWriter
from tests.parts.outside_audit import OutsideAuditor

from .play import START, admit, answer, play_all, serve, turn
from .server import Server

pytestmark = pytest.mark.postgres


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ADDRESS


@pytest.fixture
def store(path: Path, server: Server) -> Generator[RunStore]:
    with RunStore.create(path, "{}", url=server.url) as store:
        serve(store, 0)
        yield store


@pytest.fixture
def one(store: RunStore) -> Claim:
    """An episode that has begun."""
    admit(store, limit=1)
    claim = store.leases.claim("w", 99, lease_s=1e9)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    return claim


def database(store: RunStore) -> Any:
    return store._db  # pyright: ignore[reportPrivateUsage]


def turns(store: RunStore, claim: Claim) -> int:
    return len(store.leases.reload(claim).turns)


def crash(server: Server) -> None:
    server.stop("immediate")
    server.start()


def at_commit(monkeypatch: pytest.MonkeyPatch, store: RunStore, act: Callable[[Callable[[], None]], None]) -> None:
    """The next COMMIT is `act`'s affair, which is given what commits."""
    driver = database(store).driver
    commit = driver._end
    left = [act]

    def run(command: str) -> None:
        if left:
            left.pop()(partial(commit, command))
        else:
            commit(command)

    monkeypatch.setattr(driver, "_end", run)


SAYS_SO = psycopg.errors.CrashShutdown("terminating connection because of crash of another server process")
ENDS = psycopg.OperationalError("consuming input failed: server closed the connection unexpectedly")


@pytest.mark.parametrize("how", ["call", "together", "alone"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("error", [SAYS_SO, ENDS], ids=["it says so", "it ends"])
def test_law_2_a_write_whose_end_was_not_heard_is_made_once(
    store: RunStore, one: Claim, server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool, how: str
) -> None:
    """The server falls after it has committed and before it says so, or right before it would have."""

    def falls(commit: Callable[[], None]) -> None:
        if kept:
            commit()
        crash(server)
        raise error

    journal = partial(store.journal.journal_turn, one.episode_id, one.fence, turn(0, 1))
    at_commit(monkeypatch, store, falls)
    if how == "alone":  # a write that needs the store for itself
        store.groups.add_groups([Task(index=0, env="e", seed=0)], size=1, purpose="eval")
        assert store.groups.counts("eval") == {GroupState.WAITING: 1}
        journal()
    elif how == "call":
        journal()
    else:
        results = store.together([journal, partial(store.meta, "config")], shared=True)
        assert [result.error for result in results] == [None, None]
    assert turns(store, one) == 1
    assert audit(store).violations == [] == OutsideAuditor(store.path).look()


def test_while_nobody_can_say_whether_a_write_was_kept_it_is_not_made_again(
    store: RunStore, one: Claim, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def falls(commit: Callable[[], None]) -> None:
        commit()
        server.stop("immediate")
        store.hurry(0.3)
        raise psycopg.errors.CrashShutdown("crash")

    at_commit(monkeypatch, store, falls)
    try:
        with pytest.raises(StoreError, match=r"may have kept the last write or not: start it, .*--resume") as error:
            store.journal.journal_turn(one.episode_id, one.fence, turn(0, 1))
        assert not isinstance(error.value, StoreAway)
        assert capfd.readouterr().err.count("it is waited for, 0.3 s at most") == 1
    finally:
        server.start()
    assert turns(store, one) == 1


def test_law_2_members_are_taken_once_although_the_server_falls_before_they_are_read(
    store: RunStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(store, limit=1)
    play_all(store)

    def falls(commit: Callable[[], None]) -> None:
        commit()
        crash(server)

    at_commit(monkeypatch, store, falls)
    groups = store.buffer.take(1, 1, max_lag=1) or []
    assert len(groups) == 1 and groups[0].trajectories
    assert sorted(each.episode_id for each in groups[0].trajectories) == sorted(store.lineage.episodes_of(1))


async def test_a_worker_goes_on_while_the_database_is_away_and_its_calls_are_made_when_it_is_back(
    store: RunStore, one: Claim, server: Server
) -> None:
    with RunStore.open(store.path) as writer, RunStore.read(store.path, away_s=0) as reader:
        async with JournalWriter(writer, reader) as desk:
            server.stop("immediate")
            began: list[str] = []

            async def call(what: Callable[[], Any], name: str) -> None:
                await what()
                began.append(name)

            with trio.fail_after(300):
                async with trio.open_nursery() as nursery:
                    journal = partial(desk.journal_turn, one.episode_id, one.fence, turn(0, 1))
                    nursery.start_soon(call, journal, "turn")
                    await trio.testing.wait_all_tasks_blocked()
                    step = partial(desk.journal_step, one.episode_id, one.fence, 0, answer(0))
                    nursery.start_soon(call, step, "step")
                    nursery.start_soon(call, partial(desk.meta, "config"), "meta")
                    while not writer.waits:  # noqa: ASYNC110  a thread's doing; the loop turns: this test goes on
                        await trio.sleep(0.01)
                    assert began == []
                    await trio.to_thread.run_sync(server.start)
    assert sorted(began) == ["meta", "step", "turn"]
    assert [each.step is not None for each in store.leases.reload(one).turns] == [True]


def test_a_read_of_a_loop_waits_for_nothing_and_any_other_until_the_server_is_back(
    store: RunStore, server: Server
) -> None:
    with RunStore.read(store.path, away_s=0) as reader:
        assert reader.lineage.attempt == 1
        server.stop("immediate")
        with pytest.raises(StoreAway):
            reader.groups.counts()
        with pytest.raises(StoreAway):
            RunStore.open(store.path)

        def start() -> None:
            until = time.monotonic() + 60
            while not store.waits and time.monotonic() < until:
                time.sleep(0.01)
            server.start()

        thread = threading.Thread(target=start)
        thread.start()
        assert store.lineage.attempt == 1
        thread.join()
        assert reader.groups.counts() == store.groups.counts()
