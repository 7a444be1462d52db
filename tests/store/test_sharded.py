"""A store of several databases keeps what every store keeps; what is its own."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from agentrl.errors import LeaseLost, StoreAway, StoreError, UsageError
from agentrl.records import GroupState, StopReason
from agentrl.store import Quorum, RunStore
from agentrl.store.asynchronous.writers import desk_of
from agentrl.store.audit.audit import audit
from agentrl.store.copy_database import move
from agentrl.store.databases.open_store import ADDRESS, STORE, part
from agentrl.store.sharded.placement import home
from agentrl.testing import postgres_copy, store_rows
from agentrl.testing.outside_audit import OutsideAuditor

from .conformance import *  # noqa: F403  (the tests)
from .conformance import Again, Offer
from .play import START, admit, play, play_all, serve, task, turn
from .server import Server

postgres = pytest.importorskip("agentrl.store.databases.postgres.postgres")  # its driver is an extra
ShardedStore = pytest.importorskip("agentrl.store.sharded.store").ShardedStore

pytestmark = pytest.mark.postgres


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ADDRESS


@pytest.fixture(params=[1, 3])
async def offer(path: Path, server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Offer]:
    with (
        RunStore.create(path, "{}", url=[server.url] * request.param) as other,
        RunStore.open(path) as writer,
        RunStore.read(path) as reader,
    ):
        serve(other, 0)
        assert len(reader.shards) == request.param
        async with desk_of(writer, reader) as desk:
            yield Offer(rollout=desk, rewards=desk, learner=other, control=other, read=reader)


@pytest.fixture
def store_again(path: Path) -> Again:
    return lambda: RunStore.open(path)


@pytest.fixture
def store(path: Path, server: Server) -> Generator[RunStore]:
    with RunStore.create(path, "{}", url=[server.url] * 3) as store:
        serve(store, 0)
        yield store


CONTROL = {
    "attempt", "current_version", "is_undone", "knows_version", "latest_checkpoint", "meta",
    "metrics", "now", "path", "push_times", "record", "run_id", "set_meta", "sources", "step_of", "tasks_started",
    "version_at", "weights_path",
}  # fmt: skip
"""What belongs to no group: the control store answers."""

BY_OTHERS = {
    "ready_count", "members_dropped", "signal", "wait_for_work", "shares", "create", "open", "read",
    "aboard", "came_in", "check_in", "claim_of", "claimable", "follow", "leave", "next_untrained", "offered", "played",
    "remote", "retake", "still_leads", "take_in", "versions_here",
}  # fmt: skip
"""Made of calls that are there for all databases, or of one database alone."""


def test_every_call_is_of_all_databases_or_of_the_control_store() -> None:
    """A call that is added to the store has its place here, or silently sees a part of the groups."""
    calls = {name for name, _ in inspect.getmembers(RunStore) if not name.startswith("_")}
    overridden = {name for kind in ShardedStore.__mro__[:2] for name in vars(kind)}
    assert calls - overridden == CONTROL | BY_OTHERS


def test_numbers_are_of_their_database_and_in_the_order_of_admission(store: RunStore) -> None:
    admit(store, limit=2, max_lag=9)
    store.add_groups([task(0)] * 4, size=3, purpose="eval:a")
    store.add_groups([task(0)], size=1, purpose="eval:b")
    admit(store, limit=3, max_lag=9)
    train = [store.group(id) for id in sorted({one.group_id for one in store.episodes("train")})]
    assert [one.task.index for one in train] == [0, 1, 2, 3, 4]
    for at, own in enumerate(store.shards):
        rows = own.episodes()
        assert rows and all(home(row.id, 3) == home(row.group_id, 3) == at for row in rows)
    evaluated = {home(row.group_id, 3) for row in store.episodes("eval:a")}
    assert len(evaluated) == 1, "an evaluation is whole or not there"
    assert {home(group.id, 3) for group in train} == {0, 1, 2}
    claims = store.claim("w", 99, lease_s=30.0)
    ids = [claim.group_id for claim in claims if claim.purpose == "train"]
    assert ids == sorted(ids) and len(claims) == 23


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


class Fuse:
    """Kills the process after so many commits, counted over all databases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        commit = postgres.Postgres._commit

        def burn(db: Any) -> None:
            commit(db)
            self.left -= 1
            if self.left == 0:
                raise Killed

        monkeypatch.setattr(postgres.Postgres, "_commit", burn)


def test_law_2_killed_between_any_two_databases_all_is_trained_once(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a run is killed after one commit more than the step before, and goes on as a restarted run does."""
    fuse, how = Fuse(monkeypatch), {"group_size": 1, "groups_per_step": 3, "max_lag": 1}
    path, kills = store.path, 0

    def one_step(store: RunStore, step: int, *, after: int) -> None:
        fuse.left = after
        store.lead()
        store.release_all()
        if store.stands_beyond(step - 1):
            store.rollback(step - 1, ahead=6)
        admit(store, **how)
        left, fuse.left = fuse.left, -1  # the journal of one episode is a matter of one database
        play_all(store, turns=1)
        fuse.left = left
        groups = store.take(step, 3, max_lag=1)
        assert groups is not None
        assert sorted(one.episode_id for group in groups for one in group.trajectories) == store.lineage(step)
        version = store.mint_version(step)
        store.confirm_version(version)
        store.checkpoint(step, version, f"/checkpoints/{step}")
        store.retain(step, keep_steps=1, keep_sample=0.0)

    step, after = 1, 0
    while fuse.left <= 0:
        after += 1
        try:
            one_step(store, step, after=after)
        except Killed:
            kills += 1
            fuse.left = -1
            store.close()
            store = RunStore.open(path)
            latest = store.latest_checkpoint()
            step = 1 if latest is None else latest.step + 1
            one_step(store, step, after=-1)
        step += 1
        fuse.left = max(fuse.left, 0)
        assert audit(store).violations == []
    assert kills > 20
    tasks = [row.task.index for row in store.episodes("train")]
    assert sorted(tasks) == list(range(len(tasks))), "a task was lost, or started twice"
    trained = [id for one in range(1, step) for id in store.lineage(one)]
    assert len(trained) == len(set(trained)) == 3 * (step - 1) == store.episodes_trained()
    assert {one.meta("attempt") for one in store.shards} == {str(store.attempt)}
    store.close()


def test_a_learner_that_comes_back_is_refused_by_each_database(store: RunStore) -> None:
    admit(store, limit=3, max_lag=9)
    play_all(store)
    store.lead()
    with RunStore.open(store.path) as second:
        second.lead()
    for shard in store.shards:
        with pytest.raises(LeaseLost):
            shard.take(1, 1, max_lag=9)
    with pytest.raises(LeaseLost):
        store.take(1, 3, max_lag=9)
    assert store.lineage(1) == []


def test_one_outage_of_the_engines_counts_once(store: RunStore) -> None:
    admit(store, limit=3, max_lag=9)
    for claim in store.claim("w", 99, lease_s=30.0):
        play(store, claim, stop=StopReason.ENGINE_FAILED, outcome=None)
    found = store.failures()
    assert (found.failed, found.ended, found.outages, found.in_a_row) == (6, 6, 1, 1)
    assert store.drops() == {"engine_failed": 3}


def test_a_database_that_is_away_holds_up_its_own_episodes_alone(path: Path, server: Server) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS second")
        admin.execute("CREATE DATABASE second")
        urls = [server.url, server.url.replace("/agentrl?", "/second?")]
        with RunStore.create(path, "{}", url=urls) as store:
            serve(store, 0)
            admit(store, limit=2)
            here, *_, there = store.claim("w", 99, lease_s=30.0)
            assert (home(here.group_id, 2), home(there.group_id, 2)) == (0, 1)
            store.hurry(0.3)
            admin.execute("ALTER DATABASE second ALLOW_CONNECTIONS false")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'second'")
            store.begin(here.episode_id, here.fence, START)
            for call in (
                lambda: store.begin(there.episode_id, there.fence, START),
                lambda: store.claim("other", 1, lease_s=30.0),
                lambda: store.take(1, 1, max_lag=1),
                lambda: admit(store, limit=1),
            ):
                with pytest.raises(StoreAway, match=r"store\.1\.address: the database does not answer"):
                    call()
            admin.execute("ALTER DATABASE second ALLOW_CONNECTIONS true")
            store.begin(there.episode_id, there.fence, START)
            store.journal_turn(there.episode_id, there.fence, turn(0, 1))
            assert audit(store).violations == []
        admin.execute("DROP DATABASE second WITH (FORCE)")


def test_a_store_that_lacks_a_database_is_refused(store: RunStore, tmp_path: Path) -> None:
    last = part(store.path, 2)
    kept = last.read_text()
    last.unlink()
    with pytest.raises(StoreError, match=r"store\.address names database 0/3 .* has 2 address files: put the run's"):
        RunStore.open(store.path)
    last.write_text(part(store.path, 1).read_text())
    with pytest.raises(StoreError, match=r"store\.2\.address names database 1/3"):
        RunStore.read(store.path)
    last.write_text(kept)
    RunStore.read(store.path).close()


def test_a_database_that_cannot_be_had_leaves_nothing_in_the_others(path: Path, server: Server) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        schemas = "SELECT COUNT(*) FROM pg_namespace WHERE nspname LIKE 'agentrl%'"
        before = admin.execute(schemas).fetchone()
        with pytest.raises(StoreError, match="nowhere"):
            RunStore.create(path, "{}", url=[server.url, server.url.replace("/agentrl?", "/nowhere?")])
        assert admin.execute(schemas).fetchone() == before
    assert list(path.parent.iterdir()) == []


def test_what_needs_one_database_says_how_to_get_it_and_that_has_all_rows(store: RunStore) -> None:
    admit(store, limit=4, max_lag=9)
    play_all(store)
    taken = store.take(1, 3, max_lag=9) or []
    store.checkpoint(1, store.mint_version(1), "/checkpoints/1")
    with pytest.raises(UsageError, match=rf"in 3 databases, .*: agentrl store copy {store.path.parent} --to sqlite"):
        store.together([])
    before = (store.counts(), store.endings(), [store.trajectory(row.id) for row in store.episodes()])
    run = store.path.parent
    move(run, None, store._db.clock)  # pyright: ignore[reportPrivateUsage]
    assert sorted(one.name for one in run.glob("store.*address*")) == [
        "store.1.address.old",
        "store.2.address.old",
        "store.address.old",
    ]
    with RunStore.open(run / STORE) as whole:
        assert (whole.counts(), whole.endings(), [whole.trajectory(row.id) for row in whole.episodes()]) == before
        assert whole.counts() == {GroupState.TRAINED: 3, GroupState.SCORED: 1}
        assert audit(whole).violations == []
        again = whole.retake(1)
        assert [(one.id, one.trajectories) for one in again] == [(one.id, one.trajectories) for one in taken]
        whole.rollback(0)
        assert len(whole.take(1, 4, max_lag=9) or []) == 4


def played(store: RunStore) -> None:
    """A step of three groups is trained, three groups wait, and a checkpoint is made."""
    store.lead()
    admit(store, group_size=2, groups_per_step=3, max_lag=1)
    play_all(store)
    assert store.take(1, 3, max_lag=1) is not None
    store.checkpoint(1, serve(store, 1), "/nowhere")


def test_the_outside_auditor_reads_all_databases_as_one(store: RunStore) -> None:
    played(store)
    auditor = OutsideAuditor(store.path)
    assert auditor.look(ended=True) == []
    turns = [shard._db.rows("SELECT COUNT(*) FROM turns")[0][0] for shard in store.shards]  # pyright: ignore[reportPrivateUsage]
    assert auditor.turns == sum(turns) and all(turns)
    admit(store, group_size=2, groups_per_step=3, max_lag=1)
    play_all(store)
    assert auditor.look() == [] and auditor.turns > sum(turns)
    rows = "SELECT MIN(l.episode_id), MIN(t.id) FROM lineage l JOIN turns t ON t.episode_id = l.episode_id"
    for shard in store.shards[1:]:  # what is broken in one that is not the control store
        db = shard._db  # pyright: ignore[reportPrivateUsage]
        ((episode, turn_id),) = db.rows(rows)
        with db.write():
            db.execute("UPDATE turns SET text = 'another' WHERE id = ?", (turn_id,))
            db.execute("UPDATE episodes SET fence = fence - 1 WHERE id = ?", (episode,))
        assert f"law 1: turn {turn_id} was changed" in (found := auditor.look())
        assert any(one.startswith(f"fence of episode {episode} fell") for one in found)


def test_the_outside_auditor_waits_for_a_rollback_that_is_half_done(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(store)
    store.record("step", 1, {"tokens_scored": 10**6, "tokens_stale": 0})  # undone with the others
    auditor, (control, *others) = OutsideAuditor(store.path), store.shards
    assert len(auditor.look()) == 1
    for shard in reversed(others):
        shard.rollback(0)
    waits = list[float]()

    def goes_on(seconds: float) -> None:
        waits.append(seconds)
        control.rollback(0)

    monkeypatch.setattr(postgres_copy, "time", SimpleNamespace(sleep=goes_on, monotonic=time.monotonic))
    assert auditor.look() == [] and len(waits) == 1


def test_one_value_of_several_databases_is_the_highest_and_none_while_one_is_away(store: RunStore, path: Path) -> None:
    played(store)
    newest = "SELECT COALESCE(MAX(id), 0) FROM turns"
    each = [shard._db.rows(newest)[0][0] for shard in store.shards]  # pyright: ignore[reportPrivateUsage]
    assert store_rows.ask(path, newest) == max(each) and len(set(each)) == 3
    assert store_rows.ask(path, "SELECT value FROM meta WHERE key = ?", "attempt") == "1"
    third = part(path, 2)
    third.write_text(third.read_text().replace("/agentrl?", "/nothing?"))
    assert store_rows.ask(path, newest) is None


def test_a_step_is_taken_again_from_all_databases(store: RunStore) -> None:
    """With a group whose members are late, one that is skipped, and a database that gives a step nothing."""
    store.lead()
    how = {"group_size": 3, "groups_per_step": 2, "max_lag": 2}
    admit(store, **how)
    claims = store.claim("w", 99, lease_s=30.0)
    groups = sorted({claim.group_id for claim in claims})
    late = [claim for claim in claims if claim.group_id == groups[0]][2:]
    for claim in claims:
        if claim not in late:
            outcome = 1.0 if claim.group_id == groups[3] else float(claim.member)
            play(store, claim, outcome=outcome)
    store.expire(time.time(), 600.0, close_policy=Quorum(2, 0.0))
    first = store.take(1, 2, max_lag=2, skip_at_most=1)
    serve(store, 1)
    for claim in late:
        play(store, claim, outcome=0.5)
    second = store.take(2, 2, max_lag=2, skip_at_most=1)
    assert first and second and any(group.skipped for group in (*first, *second))
    assert any(one.group_id == groups[0] for group in second for one in group.trajectories)
    for step, taken in ((1, first), (2, second)):
        again = store.retake(step)
        assert [(one.id, one.skipped, one.trajectories, one.left_out) for one in again] == [
            (one.id, one.skipped, one.trajectories, one.left_out) for one in taken
        ]
    assert store.steps_trained() == {1: "", 2: ""}
    with pytest.raises(StoreError, match="step 3 cannot be taken again"):
        store.retake(3)
