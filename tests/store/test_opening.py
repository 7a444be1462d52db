"""Making and opening a store: schema versions, wrong files, a full disk. One clear line each, and nothing lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.errors import DiskFull, StoreError, StoreVersionError, UsageError
from agentrl.records import Step
from agentrl.store import Replays, RunStore, schema
from agentrl.store.audit import audit
from agentrl.store.databases.sqlite import named

from .older import old_group, older_store
from .play import START, Clock, admit, answer, play_all, serve, turn


def columns(path: Path) -> dict[str, set[str]]:
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")} for table in tables}


def test_a_store_keeps_its_configuration_and_what_was_agreed(path: Path) -> None:
    with RunStore.create(path, '{"seed": 3}') as store:
        store.set_meta("phase", "train")
        store.set_meta("phase", "stop")
    with RunStore.open(path) as store:
        assert store.meta("config") == '{"seed": 3}'
        assert store.meta("phase") == "stop"
        assert store.meta("nothing") is None
        assert store.attempt == 1
        assert store.path == path


def test_a_store_is_not_made_over_another(store: RunStore) -> None:
    with pytest.raises(UsageError, match=r"store\.sqlite holds a run already: resume it, or choose another folder"):
        RunStore.create(store.path, "{}")
    assert store.meta("config") == '{"name": "test"}'


def test_there_must_be_a_store_to_open(path: Path) -> None:
    with pytest.raises(UsageError, match=r"store\.sqlite holds no run: there is no such file"):
        RunStore.open(path)
    assert not path.exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened: see that the folder exists and may be written"):
        RunStore.create(tmp_path / "missing" / "store.sqlite", "{}")


def test_a_store_that_was_never_begun_is_no_run_and_can_be_begun(path: Path) -> None:
    """What a kill between making the file and the first commit leaves: a database without a table."""
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL").close()
    with pytest.raises(UsageError, match="holds no run: it was never begun"):
        RunStore.open(path)
    RunStore.create(path, "{}").close()
    RunStore.open(path).close()


def test_a_store_of_a_newer_schema_is_refused_and_untouched(path: Path) -> None:
    RunStore.create(path, "{}").close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreVersionError, match=r"has store schema \d+, this agentrl reads up to \d+: upgrade") as info:
        RunStore.open(path)
    assert info.value.exit_code == 2
    assert "\n" not in str(info.value)
    assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (schema.SCHEMA_VERSION + 1,)


@pytest.mark.parametrize("open_it", [RunStore.open, lambda path: RunStore.create(path, "{}")])
def test_another_programs_database_is_left_alone(path: Path, open_it) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="is an SQLite database, but not a run store"):
        open_it(path)
    assert columns(path) == {"bookmarks": {"url"}}


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"these are not the bytes of a database" * 100)
    with pytest.raises(StoreError, match=r"store\.sqlite: is not a run store"):
        RunStore.open(path)


def test_an_older_store_is_brought_up_to_date_with_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunStore.create(path, '{"seed": 3}') as store:
        serve(store, 0)
        admit(store)
        play_all(store)
    later = (*schema.MIGRATIONS, "ALTER TABLE groups ADD COLUMN note TEXT;\nCREATE TABLE notes (id INTEGER) STRICT;")
    monkeypatch.setattr(schema, "MIGRATIONS", later)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", len(later))
    with RunStore.open(path) as store:
        assert store.ready_count() == 4
        assert store.meta("config") == '{"seed": 3}'
        assert audit(store).violations == []
    assert "note" in columns(path)["groups"]
    with RunStore.create(path.with_name("new.sqlite"), "{}"):
        assert columns(path.with_name("new.sqlite")) == columns(path)  # a new store is a migrated one


def test_an_older_stores_groups_become_the_lineage_of_their_members(path: Path) -> None:
    """Group 1 was trained, 2 taken once in vain and once again, 3 is scored, 4 runs."""
    older_store(
        path,
        6,
        old_group(1, "trained", 1, "dfd")
        + old_group(2, "taken", 2, "dd")
        + old_group(3, "scored", None, "fdd")
        + old_group(4, "running", None, "dr")
        + "INSERT INTO checkpoints (step, version, path, attempt, saved_s) VALUES (1, 2, '/checkpoint', 1, 0);"
        "INSERT INTO lineage (group_id, step, attempt, max_lag, taken_s, undone_attempt) VALUES"
        " (1, 1, 1, 4, 0, NULL), (2, 2, 1, 4, 0, 1), (2, 2, 1, 4, 0, NULL);",
    )
    with RunStore.open(path) as store:
        assert (store.lineage(1), store.lineage(2)) == ([10, 12], [20, 21])
        assert audit(store).violations == []
        assert store.episodes_trained() == 4
        (group,) = store.take(3, 1, max_lag=1) or []
        assert [one.episode_id for one in group.trajectories] == [31, 32], "a member that failed stays out"
        assert group.record is not None
        assert list(group.record) == [1, 2]
        assert store.lineage(3) == [31, 32]
        store.rollback(1)
        assert store.lineage(2) == []
        assert store.ready_count() == 2
        assert audit(store).violations == []


def test_an_older_store_says_which_lost_groups_were_played_again(path: Path) -> None:
    """Groups 1 and 2 were lost, 3 plays 1 again and was lost too."""
    tasks = [json.dumps({"index": 0, "env": "e", "seed": seed}) for seed in (7, 8, 7)]
    lost = [f"('train', '{task}', 1, 'failed', 'engine_failed', 0, 0, " for task in tasks]
    older_store(
        path,
        12,
        "INSERT INTO groups (purpose, task, size, state, reason, started_step, admitted_s, replays, replay_of)"
        f" VALUES {lost[0]} 0, NULL), {lost[1]} 0, NULL), {lost[2]} 1, 1);",
    )
    with RunStore.open(path, clock=Clock()) as store:
        assert store.replays(2) == Replays(played=1, waiting=2, given_up=0)
        assert store.replays(1) == Replays(played=1, waiting=1, given_up=1)
        assert admit(store, limit=2, max_replays=2) == 2
        assert [row.task.seed for row in store.episodes("train")][-4:] == [8, 8, 7, 7]
        assert store.replays(2) == Replays(played=3, waiting=0, given_up=0)


def test_a_store_of_the_first_schema_has_one_learning_role_in_every_turn(path: Path) -> None:
    older_store(path, 1, old_group(1, "failed", None, "d"))
    with RunStore.open(path) as store:
        trajectory = store.trajectory(10)
        assert trajectory.outcomes == {}
        assert [(turn.learns, turn.experts) for turn in trajectory.turns] == [(True, None)]


def test_answers_that_an_older_agentrl_journaled_have_their_fields(path: Path) -> None:
    """It kept gymnasium's info as the environment gave it, and had checked outcomes and history only."""
    with RunStore.create(path, "{}") as store:
        serve(store, 0)
        admit(store)
        (claim, *_) = play_all(store)
    older = {
        "outcome": True,
        "success": 1,
        "stop_reason": "tired",
        "history": [{"role": "user", "content": "anew"}],
        "masked": 1,
        "role": "bob",
        "rewards": {"ann": 2},
        "outcomes": None,
        "unsettled": -1,
        "observation_cut": 7,
        "kept": {"outcome": 3},
    }
    connection = sqlite3.connect(path)
    connection.execute("UPDATE steps SET info = ? WHERE turn_id = 1", (json.dumps(older),))
    connection.commit()
    connection.close()
    with RunStore.open(path) as store:
        first, second = (turn.step for turn in store.trajectory(claim.episode_id).turns)
        assert audit(store).violations == []
    assert first is not None
    assert replace(first, observation=()) == Step(
        observation=(),
        outcome=1.0,
        success=True,
        history=({"role": "user", "content": "anew"},),
        masked=True,
        role="bob",
        rewards={"ann": 2.0},
        unsettled=-1.0,
        observation_cut=7,
        info={"kept": {"outcome": 3}},
    )
    assert second == answer(1, last=True)


def test_a_migration_that_fails_leaves_the_older_store_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunStore.create(path, "{}").close()
    before = columns(path)
    later = (*schema.MIGRATIONS, "CREATE TABLE notes (id INTEGER) STRICT;\nCREATE TABLE groups (id INTEGER);")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", later)
        patch.setattr(schema, "SCHEMA_VERSION", len(later))
        with pytest.raises(StoreError, match="table groups already exists"):
            RunStore.open(path)
    assert columns(path) == before
    RunStore.open(path).close()


@pytest.mark.parametrize(("free", "kind"), [((1 << 20) - 1, DiskFull), (1 << 20, StoreError)])
def test_an_input_output_error_is_a_full_disk_where_less_than_a_mebibyte_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[StoreError]
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert type(named(error, path)) is kind


def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_space(store: RunStore) -> None:
    admit(store)
    claim = store.claim("a", 1, lease_s=30.0)[0]
    store.begin(claim.episode_id, claim.fence, START)
    database = store._db  # pyright: ignore[reportPrivateUsage]
    (pages,) = database.row("PRAGMA page_count") or (0,)
    database.execute(f"PRAGMA max_page_count = {pages + 4}")
    journaled = 0
    with pytest.raises(DiskFull, match="no space left for the run store: free some; what was journaled is kept"):
        while True:
            store.journal_turn(claim.episode_id, claim.fence, turn(journaled, 1, n=500, step=answer(journaled)))
            journaled += 1
    assert journaled > 1
    expected = tuple(turn(index, 1, n=500, step=answer(index)) for index in range(journaled))
    assert store.trajectory(claim.episode_id).turns == expected
    database.execute("PRAGMA max_page_count = 1000000")
    store.journal_turn(claim.episode_id, claim.fence, turn(journaled, 1, n=500))
    assert len(store.trajectory(claim.episode_id).turns) == journaled + 1
    assert audit(store).violations == []


FILL = """
import resource, sys
from agentrl.errors import StoreError
from agentrl.records import Task
from agentrl.store import RunStore
store = RunStore.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
try:
    for n in range(100_000):
        store.set_meta(f"key {n}", "x" * 500)
        print(n, flush=True)
except StoreError as error:
    print(type(error).__name__, error, file=sys.stderr)
"""


def test_a_write_that_the_system_refuses_is_one_line_and_keeps_what_was_written(store: RunStore) -> None:
    """A limit on the file's size makes write() itself fail, as a broken disk does."""
    child = subprocess.run(
        [sys.executable, "-c", FILL, str(store.path)], capture_output=True, text=True, timeout=300, check=False
    )
    written = [int(line) for line in child.stdout.split()]
    assert len(written) > 10
    assert child.stderr.count("\n") == 1
    assert child.stderr.startswith("StoreError") or child.stderr.startswith("DiskFull")
    assert [store.meta(f"key {n}") is not None for n in written] == [True] * len(written)
    assert audit(store).violations == []


def test_threads_may_share_a_handle(store: RunStore) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda step: store.mint_version(step).version, range(200)))
    assert len(set(versions)) == 200
    assert [store.step_of(version) for version in versions] == list(range(200))
