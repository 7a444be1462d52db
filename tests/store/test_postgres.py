"""The store in PostgreSQL keeps what every store keeps; what is its own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from agentrl.cli.episodes import copy as store_copy
from agentrl.config import parse
from agentrl.errors import StoreBusy, StoreError, UsageError
from agentrl.records import GroupState, StopReason, Task
from agentrl.run.resume_overrides import change
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import supervise
from agentrl.store import Claim, Ending, RunStore
from agentrl.store.async_calls import Waiting
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS, STORE
from agentrl.store.episodes import leases
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import PHASE
from tests.parts.outside_audit import OutsideAuditor

from .conformance import *  # noqa: F403  (the tests)
from .conformance import Again, Offer
from .model import Model
from .play import START, admit, answer, serve, turn
from .server import Server
from .test_entries import *  # noqa: F403  (the tests)
from .test_entries import begun, errors
from .test_model import StoreMachine

postgres = pytest.importorskip("agentrl.store.databases.postgres.postgres")  # its driver is an extra
from agentrl.store.databases.postgres import address, connection, session, sql  # noqa: E402
from agentrl.store.databases.postgres.sql import translated  # noqa: E402

Address = address.Address
move = pytest.importorskip("agentrl.store.copy_database").move

pytestmark = pytest.mark.postgres


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ADDRESS


@pytest.fixture
async def offer(path: Path, server: Server) -> AsyncIterator[Offer]:
    with (
        RunStore.create(path, "{}", url=server.url) as other,
        RunStore.open(path) as writer,
        RunStore.read(path) as reader,
    ):
        serve(other, 0)
        async with JournalWriter(writer, reader) as desk:
            yield Offer(rollout=desk, rewards=desk, learner=other, control=other, read=reader)


@pytest.fixture
def store_again(path: Path) -> Again:
    return lambda: RunStore.open(path)


def turns(store: RunStore) -> int:
    with store._db.read():  # pyright: ignore[reportPrivateUsage]
        return store._db.rows("SELECT COUNT(*) FROM turns")[0][0]  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def store(path: Path, server: Server) -> Generator[RunStore]:
    with RunStore.create(path, "{}", url=server.url) as store:
        serve(store, 0)
        yield store


def claim(store: RunStore, n: int = 99) -> list[Claim]:
    admit(store, limit=2)
    return store.leases.claim("w", n, lease_s=1e9)


def test_any_text_of_a_policy_is_kept(store: RunStore) -> None:
    """NUL, which no text of PostgreSQL holds, and half a surrogate pair, which is not UTF-8."""
    one = claim(store)[0]
    hostile = "a\0b\ud800c'; DROP TABLE turns; --"
    store.journal.begin(one.episode_id, one.fence, ({"role": "user", "content": hostile},))
    journaled = replace(turn(0, 1), text=hostile)
    store.journal.journal_turn(one.episode_id, one.fence, journaled)
    step = replace(answer(0, last=True), info={"said": hostile}, rewards={"a": 1.0})
    store.journal.journal_step(one.episode_id, one.fence, 0, step)
    store.journal.finish(
        one.episode_id, one.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True, detail="x")
    )
    read = store.reads.trajectory(one.episode_id)
    assert read.turns[0].text == hostile
    assert read.start[0]["content"] == hostile
    assert audit(store).violations == []


def test_law_1_a_server_that_fell_comes_back_with_all_that_was_written(store: RunStore, server: Server) -> None:
    one = claim(store)[0]
    with RunStore.read(store.path) as reader:
        signal = reader.signal("rollout")
        assert signal.changed() and not signal.changed()
        server.stop("immediate")
        server.start()
        store.journal.begin(one.episode_id, one.fence, START)
        assert reader.groups.counts() == store.groups.counts() != {}
        assert any(signal.changed() for _ in range(10)), "something may have been written while nobody listened"


def test_the_wait_for_work_holds_in_a_process_of_thousands_of_descriptors(store: RunStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), max(before[1], 4096)))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):  # select() takes no descriptor above 1,023
            held.callback(os.close, os.dup(0))
        with RunStore.read(store.path) as reader:
            reader.wait_for_work("learner", 5.0)
            reader.wait_for_work("learner", 0.01)
            wakes = reader.signal("learner").wakes
            assert wakes is not None and wakes > 1023


def test_while_the_server_is_away_a_write_waits_no_longer_than_for_a_lock(store: RunStore, server: Server) -> None:
    store.hurry(0.5)
    server.stop()
    try:
        with pytest.raises(
            StoreError, match=r"the database does not answer .* failed.*: start it; .* 0\.5 s .*--resume"
        ):
            store.set_meta("a", "b")
    finally:
        server.start()
    store.set_meta("a", "b")
    assert store.meta("a") == "b"


def test_law_2_a_session_that_ends_within_a_transaction_leaves_nothing_of_it(store: RunStore, server: Server) -> None:
    one = claim(store)[0]
    store.journal.begin(one.episode_id, one.fence, START)
    db = store._db  # pyright: ignore[reportPrivateUsage]
    with RunStore.open(store.path) as other, pytest.raises(StoreError, match="terminat"), db.write():
        pid = db.rows("SELECT pg_backend_pid()")[0][0]
        db.execute("UPDATE groups SET state = 'failed'")
        with other._db.read():  # pyright: ignore[reportPrivateUsage]
            other._db.rows("SELECT pg_terminate_backend(?)", (pid,))  # pyright: ignore[reportPrivateUsage]
        db.rows("SELECT 1")
    assert store.groups.counts() == {GroupState.RUNNING: 2}
    store.journal.journal_turn(one.episode_id, one.fence, turn(0, 1))
    assert turns(store) == 1


def test_a_notification_that_is_lost_delays_nobody_for_long(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.store.databases.postgres.connection._LOOK_S", 0.05)
    watch = store._db.upkeep.watch()  # pyright: ignore[reportPrivateUsage]
    assert watch.written()
    store.set_meta("a", "b")
    watch._connection.execute("UNLISTEN *")  # type: ignore[attr-defined]
    list(watch._connection.notifies(timeout=0))  # type: ignore[attr-defined]
    until = time.monotonic() + 60
    while not watch.written():
        assert time.monotonic() < until
    watch.close()


def test_law_4_closing_waits_for_no_thread_that_waits_for_the_server(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres.Postgres, "close_s", 0.01)
    holds, over = threading.Event(), threading.Event()
    with RunStore.open(store.path) as other:
        db: Any = other._db  # pyright: ignore[reportPrivateUsage]

        def hold() -> None:
            with db._transactions.lock:
                holds.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert holds.wait(60)
        other.close()
        assert not db.driver.session.connection.closed, "somebody uses it"
        over.set()
        thread.join()
    assert db.driver.session.connection.closed


async def test_who_waits_sleeps_until_the_server_notifies_also_beside_another(store: RunStore) -> None:
    with RunStore.read(store.path) as reader:
        signal, waiting = reader.signal("rollout"), Waiting(reader)
        assert signal.changed()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(waiting, "rollout", 3600.0)
                await trio.testing.wait_all_tasks_blocked()
                assert signal.wakes is not None
                PHASE.set(store, "drain")
                await waiting("rollout", 3600.0)
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("asked", [True, False], ids=["after an answer", "between statements"])
def test_a_writer_that_hangs_gives_the_lock_up(store: RunStore, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    for module in (address, session):
        monkeypatch.setattr(module, "SILENT_S", 1.0)
    with RunStore.open(store.path) as stopped:
        db = stopped._db  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StoreError, match=r"terminating connection|server closed the connection"), db.write():
            db.execute("UPDATE meta SET value = 'half' WHERE key = 'config'")
            if asked:
                db.rows("SELECT 1")
            store.set_meta("a", "b")  # it waits until the server has ended the silent session
            db.rows("SELECT 1")
    assert (store.meta("a"), store.meta("config")) == ("b", "{}")


def test_a_lock_that_is_held_for_too_long_is_named_with_what_to_do(store: RunStore) -> None:
    with RunStore.open(store.path) as other:
        other.hurry(0.2)
        with store._db.write(), pytest.raises(StoreBusy, match=r"for over 0\.2 s: .*pg_terminate_backend.*--resume"):  # pyright: ignore[reportPrivateUsage]
            other.set_meta("a", "b")
        other.set_meta("a", "b")


def test_processes_journal_at_once_and_what_needs_the_store_alone_waits_for_them(store: RunStore) -> None:
    one, two, *_ = claim(store)
    for each in (one, two):
        store.journal.begin(each.episode_id, each.fence, START)
    with RunStore.open(store.path) as other, store._db.write(shared=True):  # pyright: ignore[reportPrivateUsage]
        store._db.execute("UPDATE episodes SET detail = 'x' WHERE id = ?", (one.episode_id,))  # pyright: ignore[reportPrivateUsage]
        other.hurry(0.1)
        other.journal.journal_turn(two.episode_id, two.fence, turn(0, 1))
        with pytest.raises(StoreBusy):
            other.journal.finish(
                two.episode_id, two.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
            )
    assert turns(store) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_of_writes_that_are_committed_together_one_that_fails_is_undone_alone(store: RunStore, shared: bool) -> None:
    one, two, *_ = claim(store)
    for each in (one, two):
        store.journal.begin(each.episode_id, each.fence, START)
    calls = [
        partial(store.journal.journal_turn, each.episode_id, each.fence, turn(n, 1)) for each, n in ((one, 0), (two, 0))
    ]
    wrong = partial(store.journal.journal_turn, one.episode_id, one.fence, turn(5, 1))
    broken = partial(store._db.execute, "INSERT INTO meta VALUES ('config', '')")  # pyright: ignore[reportPrivateUsage]

    def refused() -> None:
        """The database finds it wrong, perhaps after the next statement was sent."""
        with store._db.write(shared=True):  # pyright: ignore[reportPrivateUsage]
            broken()

    first, *failed, last = store.together([calls[0], wrong, refused, calls[1]], shared=shared)
    assert first.error is None and last.error is None
    assert "turn 5 cannot follow turn 0" in str(failed[0].error) and "duplicate key" in str(failed[1].error)
    assert turns(store) == 2 and store.meta("config") == "{}"
    again = store.together([partial(store.journal.journal_turn, one.episode_id, one.fence, turn(1, 1))], shared=shared)
    assert again[0].error is None and turns(store) == 3


def test_many_turns_take_as_many_statements_as_two(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes they are; and any value of a row comes back from an array."""
    claims, sent = begun(store, 12), list[bytes]()
    store.versions.step_of(1)  # a version's step is read once
    send = connection.Pipeline._send
    monkeypatch.setattr(
        connection.Pipeline, "_send", lambda self, sql, *rest: sent.append(sql) or send(self, sql, *rest)
    )
    odd = replace(turn(0, 1), text="a\0b\ud800c", experts=None, started_s=1e300)
    for few in (claims[:2], claims[2:]):
        before = len(sent)
        assert errors(store, *(store.journal.turn_entry(one.episode_id, one.fence, odd) for one in few)) == [""] * len(
            few
        )
        assert len(sent) - before <= 10, sent[before:]  # two of them once in a session
    monkeypatch.setattr(sql, "_MOST_BYTES", 150)
    answers = [store.journal.step_entry(one.episode_id, one.fence, 0, answer(n)) for n, one in enumerate(claims)]
    before = len(sent)
    assert errors(store, *answers) == [""] * len(claims)
    assert 2 < sum(b"INTO steps" in sql for sql in sent[before:]) < len(claims), "divided, and not row by row"
    (own,) = store.reads.trajectory(claims[-1].episode_id).turns
    assert (own.text, own.started_s, own.parent) == (odd.text, 1e300, None)
    assert own.step == answer(11) and own.token_ids == odd.token_ids


def test_a_claim_reads_no_row_for_each_episode_that_runs(store: RunStore) -> None:
    """Also in a new table, which the server believes to be empty."""
    store.groups.add_groups([Task(index=n, env="e", seed=n) for n in range(10)], size=60, purpose="eval")
    assert len(store.leases.claim("many", 600, lease_s=1e9)) == 600
    with store._db.read():  # pyright: ignore[reportPrivateUsage]
        explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + translated(leases._CLAIMABLE)
        (found,) = store._db.driver.session.pipeline.send(explain, (time.time(), "me", 8, 1e9, 0, 1))  # type: ignore[attr-defined]
    steps = [found[0][0]["Plan"]]
    for step in steps:
        steps += step.get("Plans", [])
    read = [step for step in steps if step.get("Index Name") != "episodes_waiting"]  # it holds those just claimed, too
    assert max(step["Actual Rows"] * step["Actual Loops"] for step in read) < 100


@pytest.mark.parametrize("after", ["WHERE a.x = 1", "LEFT JOIN c ON c.y = b.y WHERE a.x = 1", "JOIN c ON c.y = b.y"])
def test_a_join_that_begins_with_its_left_side_ends_where_the_next_begins(after: str) -> None:
    inner = "(SELECT * FROM t WHERE x = a.x AND y > 2 OFFSET 0)"
    found = translated(f"SELECT * FROM a CROSS JOIN t b ON b.x = a.x AND b.y > 2 {after}").decode()
    assert found == f"SELECT * FROM a CROSS JOIN LATERAL {inner} b {after}"


def test_a_run_moves_to_the_database_and_back_and_nothing_of_it_changes(tmp_path: Path, server: Server) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with RunStore.create(run / STORE, '{"a": 1}') as store:
        serve(store, 0)
        for one in claim(store)[:3]:
            store.journal.begin(one.episode_id, one.fence, START)
            store.journal.journal_turn(
                one.episode_id, one.fence, replace(turn(0, 1), text="half \ud800" if one.member else "é")
            )
            store.journal.journal_step(one.episode_id, one.fence, 0, answer(0, last=True))
            store.journal.finish(
                one.episode_id, one.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
            )
        store.buffer.take(1, 1, max_lag=1)
        store.metrics.record("step", 1, {"loss": 0.5})
        before = dump(run / STORE)
    kept, rows = move(run, server.url, time.time)
    assert kept == run / f"{STORE}.old" and rows == sum(map(len, before.values()))
    with RunStore.open(run / ADDRESS) as there:
        assert audit(there).violations == []
        assert there.groups.counts() == {GroupState.TAKEN: 1, GroupState.RUNNING: 1}
        admit(there, limit=2)  # numbers go on after the highest
        assert sum(there.groups.counts().values()) > 2
    with RunStore.open(kept) as old, RunStore.create(tmp_path / ADDRESS, "{}", url=server.url):
        assert sum(old.groups.counts().values()) == 2, "the old store stays as it was"
    move(run, None, time.time)
    with RunStore.open(run / STORE) as back:
        assert audit(back).violations == []
        assert OutsideAuditor(run / STORE).look() == []
    after = dump(run / STORE)
    assert {table: before[table] for table in ("turns", "tokens", "lineage", "metrics")} == {
        table: after[table] for table in ("turns", "tokens", "lineage", "metrics")
    }
    with pytest.raises(UsageError, match=r"run has no store\.address: its store is a file already"):
        move(run, None, time.time)


def dump(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return {table: sorted(connection.execute(f"SELECT * FROM {table}"), key=repr) for (table,) in tables.fetchall()}


def test_the_servers_tables_are_those_of_the_file(tmp_path: Path, store: RunStore) -> None:
    with RunStore.create(tmp_path / STORE, "{}") as file, file._db.read(), store._db.read():  # pyright: ignore[reportPrivateUsage]
        assert file._db.upkeep.tables() == store._db.upkeep.tables()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:secret@host/runs", "the store's URL holds a password: leave it out"),
        ("postgresql://me:secret@host/runs?secret=1", "none of PostgreSQL: give postgresql://user@host/database"),
        ("postgresql://me@host/runs?sslpassword=secret", "holds a password: leave it out"),
        ("postgresql://host", "names no database: give postgresql://user@host/database"),
        ("mysql://me:secret@host/runs", "give postgresql://user@host/database"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_made(path: Path, url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        RunStore.create(path, "{}", url=url)
    assert "secret" not in str(error.value) and not path.exists()


def test_a_database_that_cannot_be_reached_is_one_line(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError) as error:
        RunStore.create(path, "{}", url=f"postgresql://me@/runs?host={tmp_path}")
    assert "\n" not in str(error.value) and not path.exists()


def test_a_run_that_is_overwritten_leaves_no_tables_behind(tmp_path: Path, server: Server) -> None:
    document = {"model": "m", "env": {"id": "e"}, "cluster": {"store": server.url}}
    run = RunDir.create(tmp_path / "run", parse(document))
    assert run.store_path.name == ADDRESS and RunDir.open(run.path).config() == run.config()
    old = Address.read(run.store_path)
    again = RunDir.create(tmp_path / "run", parse(document), overwrite=True)
    assert Address.read(again.store_path).schema != old.schema
    with RunStore.open(again.store_path) as store, store._db.read():  # pyright: ignore[reportPrivateUsage]
        schemas = {name for (name,) in store._db.rows("SELECT nspname FROM pg_namespace")}  # pyright: ignore[reportPrivateUsage]
    assert old.schema not in schemas and Address.read(again.store_path).schema in schemas


def test_a_copied_folder_shares_no_store_and_a_moved_one_keeps_its_own(tmp_path: Path, server: Server) -> None:
    document = {"model": "m", "env": {"id": "e"}, "cluster": {"store": server.url}}
    run = RunDir.create(tmp_path / "run", parse(document))
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
    moved = RunDir(run.path.rename(tmp_path / "moved"))
    change(moved, ["train.steps=9"])  # and from now on it is at home there
    copy = RunDir(shutil.copytree(moved.path, tmp_path / "copy"))
    for refused in (
        partial(change, copy, ["train.steps=10"]),
        partial(trio.run, supervised, copy),
        partial(RunDir.create, copy.path, parse(document), overwrite=True),
    ):
        with pytest.raises(
            UsageError, match=f"copy is a copy of .*moved, .* agentrl store copy {copy.path} --to sqlite"
        ):
            refused()
    store_copy(copy.path, "sqlite")  # as the message says
    change(copy, ["train.steps=11"])
    RunDir.create(copy.path, parse(document | {"cluster": {}}), overwrite=True)
    with RunStore.open(moved.store_path):
        assert moved.config().train.steps == 9


async def supervised(run: RunDir) -> None:
    async with supervise(run):
        pass


def test_a_run_that_never_began_leaves_no_tables_behind(tmp_path: Path, server: Server) -> None:
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}, "cluster": {"store": server.url}}))
    address = Address.read(run.store_path)
    run.discard()
    with address.connect() as connection:
        assert connection.execute("SELECT to_regnamespace($1)", (address.schema,)).fetchone() == (None,)


@pytest.mark.parametrize("schema", ["public; DROP TABLE meta", "agentrl_", 'agentrl_a"b'])
def test_an_address_file_that_somebody_changed_reaches_no_statement(path: Path, server: Server, schema: str) -> None:
    path.write_text(json.dumps({"url": server.url, "schema": schema}))
    with pytest.raises(UsageError, match="no schema of ours"):
        RunStore.open(path)


class OnServer(StoreMachine):
    """The model, crashes between any two statements included, over the server."""

    url = ""

    def make_store(self, folder: Path) -> RunStore:
        return RunStore.create(folder / ADDRESS, "{}", url=self.url, clock=self.clock)

    def connected(self) -> Any:
        return self.store._db.driver.session  # type: ignore[attr-defined]

    def both(self, real: Callable[[], Any], imagined: Callable[[Model], Any], crash: Any = None) -> Any:
        """What a crash undid leaves gaps in the numbers here, which break no law: the next ones are as the model's."""
        found = super().both(real, imagined, crash)
        for table in ("groups", "episodes") if crash is not None else ():
            last = f"(SELECT COALESCE(MAX(id), 0) + 1 FROM {table})"
            self.store._db.row(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {last}, false)")
        return found


@pytest.mark.medium
def test_law_2_the_store_is_its_model_through_any_crash(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnServer, "url", server.url)
    run_state_machine_as_test(OnServer, settings=settings(max_examples=4, stateful_step_count=40))
