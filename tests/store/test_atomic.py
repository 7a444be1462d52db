"""Every call that writes is all or nothing: it is killed before and after each of its statements in turn (law 2)."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.records import StopReason
from agentrl.store import Ending, EnvSnapshot, RunStore, Source
from agentrl.store.audit import audit

from .fuse import Fuse, Killed
from .play import START, Clock, admit, answer, part, play, play_all, serve, task, turn


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups 1 and 2 trained in step 1, 3 and 4 taken for step 2, 5 and 6 scored, 7 stale by step 4, 8 with one member
    ended and one of two turns that is unanswered (episode 16), 9 begun, 10 waiting; an evaluation that runs."""
    path = tmp_path_factory.mktemp("atomic") / "store.sqlite"
    with RunStore.create(path, "{}", clock=Clock()) as store:
        serve(store, 0)
        admit(store, limit=10, max_lag=9)
        claims = store.leases.claim("a", 18, lease_s=30.0)
        one, two, three = serve(store, 1), serve(store, 2), serve(store, 3)
        for claim in claims[:15]:
            play(store, claim, version={7: 1}.get(claim.group_id, three))
        store.buffer.take(1, 2, max_lag=9)
        store.lineage.checkpoint(1, one, "/checkpoints/1")
        store.buffer.take(2, 2, max_lag=9)
        for claim in claims[15:]:
            store.journal.begin(claim.episode_id, claim.fence, START)
        store.journal.journal_turn(16, 1, turn(0, three, step=answer(0)))
        store.journal.journal_turn(16, 1, turn(1, two))
        store.groups.add_groups([task(0)], size=1, purpose="eval@3")
        store.leases.claim("a", 1, lease_s=30.0)
        store.versions.mint_version(4)
    return path


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of a group that were played and wait for a source: turn 1 of the first is yet to be scored."""
    path = tmp_path_factory.mktemp("held") / "store.sqlite"
    with RunStore.create(path, "{}", clock=Clock()) as store:
        serve(store, 0)
        admit(store, limit=1)
        store.scores.declare_sources([Source(name="prm", late="neutral")])
        play_all(store)
        for turn_id in ("1.0.0", "2.0.0", "2.0.1"):
            store.scores.score(turn_id, "prm", 2.0)
    return path


HELD_WRITES: dict[str, Callable[[RunStore], Any]] = {
    "score": lambda store: store.scores.score("1.0.1", "prm", 1.0),
    "expire_sources": lambda store: store.scores.expire_sources(1e6),
    "declare_sources": lambda store: store.scores.declare_sources([]),
    "release_all": lambda store: store.deaths.release_all(),
}

WRITES: dict[str, Callable[[RunStore], Any]] = {
    "admit": lambda store: admit(store, limit=3, max_lag=9),
    "add_groups": lambda store: store.groups.add_groups([task(0), task(1)], size=2, purpose="eval"),
    "claim": lambda store: store.leases.claim("b", 9, lease_s=30.0, now=1e6),
    "renew": lambda store: store.leases.renew("b", lease_s=30.0),
    "release_worker": lambda store: store.deaths.release_worker("a"),
    "release_all": lambda store: store.deaths.release_all(),
    "begin": lambda store: store.journal.begin(17, 1, ()),
    "journal_turn": lambda store: store.journal.journal_turn(17, 1, turn(0, 1, step=answer(0))),
    "journal_partial": lambda store: store.journal.journal_partial(17, 1, part(turn(0, 1, 5), 0, 2)),
    "keep_snapshot": lambda store: store.journal.keep_snapshot(16, 1, EnvSnapshot(turn=0, data=b"box")),
    "journal_step": lambda store: store.journal.journal_step(16, 1, 1, answer(1)),
    "restart_episode": lambda store: store.journal.restart_episode(16, 1, "cannot replay"),
    "restart_group": lambda store: store.journal.restart_group(16, 1, 9),
    "finish": lambda store: store.journal.finish(
        16, 1, Ending(stop_reason=StopReason.TIME_LIMIT, outcome=0.0, success=False)
    ),
    "take": lambda store: store.buffer.take(4, 2, max_lag=1),
    "expire": lambda store: store.buffer.expire(1e6, 600.0),
    "mint_version": lambda store: store.versions.mint_version(5),
    "confirm_version": lambda store: store.versions.confirm_version(5),
    "checkpoint": lambda store: store.lineage.checkpoint(2, 3, "/checkpoints/2"),
    "rollback": lambda store: store.lineage.rollback(1),
    "rollback to nothing": lambda store: store.lineage.rollback(0),
    "retain": lambda store: store.lineage.retain(9, keep_steps=0, keep_sample=0.0),
    "record": lambda store: store.metrics.record("step", 1, {"loss": 0.5}),
    "set_meta": lambda store: store.set_meta("phase", "stop"),
    "swap_meta": lambda store: store.swap_meta("wanted_settings", "", "[1]"),
}


def rows(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


def opened(source: Path, folder: Path) -> RunStore:
    """A copy of `source`, opened by what is always the same life at the same time."""
    folder.mkdir()
    shutil.copy(source, folder / "store.sqlite")
    store = RunStore.open(folder / "store.sqlite", clock=Clock(2000.0))
    store.leases._life = "life"  # pyright: ignore[reportPrivateUsage]
    return store


@pytest.mark.parametrize("name", WRITES)
def test_law_2_a_write_is_all_or_nothing_wherever_it_is_killed(busy: Path, tmp_path: Path, name: str) -> None:
    check(busy, tmp_path, WRITES[name])


@pytest.mark.parametrize("name", HELD_WRITES)
def test_law_2_what_a_source_says_joins_wholly_or_not_at_all(held: Path, tmp_path: Path, name: str) -> None:
    check(held, tmp_path, HELD_WRITES[name])


def check(source: Path, tmp_path: Path, write: Callable[[RunStore], Any]) -> None:
    """Kill `write` before and after each of its statements, on copies of the store at `source`."""
    before = rows(source)
    with opened(source, tmp_path / "whole") as store:
        write(store)
    after = rows(tmp_path / "whole" / "store.sqlite")
    assert after != before
    done: list[bool] = []
    killed = True
    while killed:
        store = opened(source, tmp_path / str(len(done)))
        database: Any = store._db  # pyright: ignore[reportPrivateUsage]
        connection = database.driver.connection
        database.driver.connection = Fuse(connection, len(done) // 2, after=bool(len(done) % 2))
        try:
            write(store)
            killed = False
        except Killed:
            pass
        if connection.in_transaction:
            connection.execute("ROLLBACK")  # what the system does to the locks of a dead process
        connection.close()
        left = rows(store.path)
        assert left in (before, after)
        done.append(left == after)
        with RunStore.open(store.path) as again:
            assert audit(again).violations == []
    assert done == sorted(done)  # once it is done it stays done
    assert (done[0], done[-1]) == (False, True)
