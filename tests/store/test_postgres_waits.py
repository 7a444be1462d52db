"""How often a call waits for the server: as often for many episodes as for one. And what its session keeps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import StoreError
from agentrl.records import StopReason
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS
from agentrl.store.episodes.endings import Ending

from .play import START, admit, answer, play_all, serve, turn
from .server import Server

session = pytest.importorskip("agentrl.store.databases.postgres.connection")  # its driver is an extra

pytestmark = pytest.mark.postgres

Count = Callable[[Callable[[], Any]], int]


@pytest.fixture
def store(tmp_path: Path, server: Server) -> Generator[RunStore]:
    with RunStore.create(tmp_path / ADDRESS, "{}", url=server.url) as store:
        serve(store, 0)
        yield store


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """How often a call waits for an answer."""
    waits, wait = list[None](), session.DeadlineConnection.wait

    def counted(self: Any, gen: Any, *arguments: Any, **named: Any) -> Any:
        waits.append(None)
        return wait(self, gen, *arguments, **named)

    monkeypatch.setattr(session.DeadlineConnection, "wait", counted)

    def of(call: Callable[[], Any]) -> int:
        before = len(waits)
        call()
        return len(waits) - before

    return of


def database(store: RunStore) -> Any:
    return store._db  # pyright: ignore[reportPrivateUsage]


def test_a_look_waits_for_its_answer_and_for_its_end(store: RunStore, count: Count) -> None:
    assert count(lambda: store.meta("config")) == 2


def test_many_ends_and_claims_wait_no_more_often_than_one(store: RunStore, count: Count) -> None:
    admit(store, group_size=4, groups_per_step=4, limit=4)
    claims = store.leases.claim("w", 1, lease_s=1e9)
    assert count(lambda: claims.extend(store.leases.claim("w", 15, lease_s=1e9, ahead=4))) == 6
    for claim in claims:
        store.journal.begin(claim.episode_id, claim.fence, START)
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1, step=answer(0, last=True)))
    ending = Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
    ends = [store.journal.end_entry(claim.episode_id, claim.fence, ending) for claim in claims]
    assert count(lambda: ends[0]()) == 3  # the lock, how they stand, the end
    assert count(lambda: store.together(ends[1:])) == 4  # and what four groups have to close with
    assert store.buffer.ready_count() == 4 and audit(store).violations == []
    assert count(lambda: store.buffer.take(1, 4, max_lag=1)) < 20
    assert len(store.lineage.episodes_of(1)) == 16


def test_what_was_prepared_outlasts_a_rollback(store: RunStore) -> None:
    """psycopg forgets what it prepared after a rollback, by a command that forgets everybody's."""
    admit(store, limit=1)
    one = store.leases.claim("w", 1, lease_s=1e9)[0]
    store.journal.begin(one.episode_id, one.fence, START)
    store.journal.journal_turn(one.episode_id, one.fence, turn(0, 1, step=answer(0)))
    for _ in range(8):  # psycopg prepares this, if it prepares anything
        database(store).driver.session.connection.execute("SELECT 1")
    with pytest.raises(StoreError, match="division by zero"), database(store).write():
        database(store).rows("SELECT 1 / 0")
    for index in (1, 2):
        store.journal.journal_turn(one.episode_id, one.fence, turn(index, 1, step=answer(index)))
    assert len(store.leases.reload(one).turns) == 3


def test_every_table_whose_rows_have_numbers_gives_them(store: RunStore) -> None:
    """The lineage's are given under another name, since its table was made anew."""
    admit(store, limit=1)
    play_all(store)
    store.buffer.take(1, 1, max_lag=1)
    db = database(store)
    for table in ("groups", "episodes", "turns", "lineage", "outages", "metrics"):
        with db.write():
            ((last,),) = db.rows(f"SELECT COALESCE(MAX(id), 0) FROM {table}")
            first, second, third = db.numbers(table, 3)
            assert last < first < second < third


def test_a_statement_that_failed_unheard_commits_nothing(store: RunStore) -> None:
    """Its error came with rows that somebody asked for, and was swallowed."""
    db = database(store)
    with pytest.raises(StoreError, match="a statement of the transaction failed"), db.write():
        db.execute("UPDATE meta SET value = 'half' WHERE key = 'config'")
        with pytest.raises(session.psycopg.Error):
            db.rows("SELECT 1 / 0")
    assert store.meta("config") == "{}"
    store.set_meta("a", "b")
    assert store.meta("a") == "b"
