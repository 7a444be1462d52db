"""In PostgreSQL the tables that hold the bytes are in parts: retention drops tables, and leaves what it keeps."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS, STORE
from tests.parts.outside_audit import OutsideAuditor

from .play import START, admit, answer, play, serve, turn
from .server import Server

parts = pytest.importorskip("agentrl.store.databases.postgres.partitions")  # its driver is an extra
postgres = pytest.importorskip("agentrl.store.databases.postgres.postgres")
move = pytest.importorskip("agentrl.store.copy_database").move

pytestmark = pytest.mark.postgres

SAMPLE = 0.3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ADDRESS


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has room for 16 turns."""
    monkeypatch.setattr(parts, "TURNS", 16)
    monkeypatch.setattr(parts, "_AHEAD", 4)


@pytest.fixture
def store(path: Path, server: Server, small: None) -> Generator[RunStore]:
    with RunStore.create(path, "{}", url=server.url) as store:
        serve(store, 0)
        yield store


def rows(store: RunStore, sql: str) -> list[tuple[Any, ...]]:
    with store._db.read():  # pyright: ignore[reportPrivateUsage]
        return store._db.rows(sql)  # pyright: ignore[reportPrivateUsage]


def ranges(store: RunStore) -> list[tuple[int, int]]:
    """The parts that the server has, which are those that are listed."""
    listed = [(start, until) for start, until in rows(store, "SELECT start, until FROM parts ORDER BY start")]
    for table in ("tokens", "experts", "artifacts"):
        of = f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{table}'::regclass"
        assert sorted(name for (name,) in rows(store, of)) == sorted(f"{table}_{start}" for start, _ in listed)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(listed)), "no gap"
    return listed


def train(store: RunStore, step: int, *, keep_steps: int = 1, retain: bool = True) -> None:
    """Four groups of two episodes of two turns are played, trained in a step, and no longer kept after the next."""
    admit(store, groups_per_step=4, limit=4)
    for claim in store.leases.claim("w", 99, lease_s=1e9):
        play(store, claim, version=step)
    assert store.buffer.take(step, 4, max_lag=9) is not None
    store.lineage.checkpoint(step, serve(store, step), f"/checkpoints/{step}")
    if retain:
        store.lineage.retain(step, keep_steps=keep_steps, keep_sample=SAMPLE)


def kept(store: RunStore) -> tuple[set[int], set[int]]:
    """The groups whose tokens are kept, and those that have any."""
    said = {id for (id,) in rows(store, "SELECT id FROM groups WHERE tokens_dropped = 0")}
    of = "JOIN turns t ON t.id = k.turn_id JOIN episodes e ON e.id = t.episode_id"
    found = {id for (id,) in rows(store, f"SELECT DISTINCT e.group_id FROM tokens k {of}")}
    assert found == {id for (id,) in rows(store, f"SELECT DISTINCT e.group_id FROM experts k {of}")}
    return said, found


def test_law_1_retention_drops_parts_and_every_group_that_it_keeps_is_whole(store: RunStore) -> None:
    sizes = list[int]()
    for step in range(1, 13):
        train(store, step)
        said, found = kept(store)
        assert said <= found, "what is kept is there"
        sizes.append(len(found - said))
    assert max(sizes) <= 8, "what is dropped stays until half of its part is: two steps at most"
    listed = ranges(store)
    assert len(listed) < 12 and max(until - start for start, until in listed) >= 48, "parts with little left are one"
    assert rows(store, "SELECT COUNT(*) FROM groups WHERE tokens_dropped = 1") > [(20,)]
    assert audit(store).violations == [] and OutsideAuditor(store.path).look() == []
    with store._db.read():  # pyright: ignore[reportPrivateUsage]
        assert {"tokens", "experts"} < store._db.upkeep.tables().keys() and "parts" not in store._db.upkeep.tables()  # pyright: ignore[reportPrivateUsage]


def test_law_1_who_reads_sees_all_that_is_kept_while_retention_waits(store: RunStore) -> None:
    """A dropped table is gone for an older look at the store too, so retention leaves it until nobody reads."""
    for step in (1, 2, 3):
        train(store, step, retain=False)
    before, said = ranges(store), kept(store)[1]
    with RunStore.read(store.path) as reader, reader._db.read():  # pyright: ignore[reportPrivateUsage]
        reader._db.rows("SELECT 1")  # a read begins with what it first asks  # pyright: ignore[reportPrivateUsage]
        assert store.lineage.retain(3, keep_steps=0, keep_sample=SAMPLE) > 0
        assert ranges(store) == before
        tokens = reader._db.rows("SELECT COUNT(*) FROM tokens")  # pyright: ignore[reportPrivateUsage]
        assert tokens == [(48,)]
    assert kept(store)[1] == said
    assert store.lineage.retain(3, keep_steps=0, keep_sample=SAMPLE) == 0, (
        "nothing more to drop, and now it is given back"
    )
    assert kept(store)[0] <= kept(store)[1] < said and audit(store).violations == []


def test_two_writers_that_need_a_new_part_make_one(store: RunStore) -> None:
    admit(store, groups_per_step=20, limit=20)
    one, two, *_ = store.leases.claim("w", 99, lease_s=1e9)
    for claim in (one, two):
        store.journal.begin(claim.episode_id, claim.fence, START)
    for index in range(11):
        store.journal.journal_turn(one.episode_id, one.fence, turn(index, 1, step=answer(index)))
    with RunStore.open(store.path) as other:
        thread = threading.Thread(target=other.journal.journal_turn, args=(two.episode_id, two.fence, turn(0, 1)))
        with store._db.write(shared=True):  # pyright: ignore[reportPrivateUsage]
            store._db.driver.partitions.room(14)  # type: ignore[attr-defined]
            thread.start()
            until, waits = time.monotonic() + 60, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while not store._db.row(waits):  # pyright: ignore[reportPrivateUsage]
                assert time.monotonic() < until
        thread.join(60)
    assert ranges(store) == [(0, 16), (16, 32)] and rows(store, "SELECT COUNT(*) FROM turns") == [(12,)]


def test_a_copy_has_only_what_is_kept_and_a_copy_back_goes_into_parts(store: RunStore, server: Server) -> None:
    for step in (1, 2, 3):
        train(store, step, retain=False)
    with RunStore.read(store.path) as reader, reader._db.read():  # pyright: ignore[reportPrivateUsage]
        reader._db.rows("SELECT 1")  # pyright: ignore[reportPrivateUsage]
        store.lineage.retain(3, keep_steps=0, keep_sample=SAMPLE)
    said, found = kept(store)
    assert said < found
    run = store.path.parent
    store.close()
    move(run, None, time.time)
    with contextlib.closing(sqlite3.connect(run / STORE)) as file:
        assert file.execute("SELECT COUNT(*) FROM tokens").fetchone() == (4 * len(said),)
    (run / f"{ADDRESS}.old").unlink()
    move(run, server.url, time.time)
    with RunStore.open(run / ADDRESS) as back:
        assert kept(back) == (said, said) and len(ranges(back)) > 2
        train(back, 4)
        assert audit(back).violations == []
