"""A handle that only looks: at a live run, at an older store, and it changes nothing."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import StoreError, StoreVersionError, UsageError
from agentrl.records import GroupState, turn_id
from agentrl.store import RunStore, Source, schema

from .older import old_group, older_store
from .play import START, admit, answer, play_all, task, turn
from .test_awaitable import locked


def test_it_sees_what_a_live_writer_writes(store: RunStore) -> None:
    with RunStore.read(store.path) as look:
        assert look.counts() == {}
        admit(store)
        assert look.counts() == {GroupState.WAITING: 4}
        play_all(store)
        assert look.ready_count() == 4
        assert look.trajectory(1).outcome == 1.0


def test_it_writes_nothing_and_says_so(store: RunStore) -> None:
    with RunStore.read(store.path) as look:
        for write in (
            lambda: look.set_meta("phase", "stop"),
            lambda: look.add_groups([task(0)], size=1, purpose="eval"),
            lambda: look.retain(99, keep_steps=0, keep_sample=0.0) or look.release_all(),
        ):
            with pytest.raises(StoreError, match="may not be written"):
                write()
    assert store.meta("phase") is None


def test_a_store_in_a_folder_that_may_not_be_written_is_read() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "store.sqlite"
        with RunStore.create(path, "{}") as store:
            admit(store)
            counts = store.counts()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        child = os.fork()
        if not child:  # no superuser, who may write anywhere
            try:
                if not os.geteuid():
                    os.setuid(65534)
                with RunStore.read(path) as look:
                    os._exit(look.counts() != counts)
            except BaseException as error:
                print(error)
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        path.parent.chmod(0o755)


def test_it_does_not_wait_for_a_lock_and_no_writer_waits_for_it(store: RunStore) -> None:
    store.hurry(0.0)
    with RunStore.read(store.path) as look:
        with look._db.read(), locked(store.path):  # pyright: ignore[reportPrivateUsage]
            assert look.counts() == {}
        with look._db.read():  # pyright: ignore[reportPrivateUsage]
            assert look.counts() == {}
            assert admit(store) == 4


@pytest.mark.parametrize("version", [6, schema.SCHEMA_VERSION - 1])
def test_a_store_of_an_older_schema_is_read_and_stays_as_it_is(path: Path, version: int) -> None:
    older_store(path, 6, old_group(1, "scored", None, "dd"))
    if version != 6:
        with RunStore.open(path):
            pass
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with RunStore.read(path) as look:
        assert look.ready_count() == 1
        assert [one.outcome for one in look.group(1).trajectories] == [0.0, 1.0]
        with pytest.raises(StoreError, match="may not be written"):
            look.set_meta("phase", "stop")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_an_older_agentrl_goes_on_writing_while_its_store_is_read(path: Path) -> None:
    older_store(path, 6, old_group(1, "scored", None, "dd"))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    with RunStore.read(path) as look:
        writer.execute("INSERT INTO meta VALUES ('phase', 'train')")
        assert look.meta("phase") is None, "it is a copy"
    assert writer.execute("PRAGMA user_version").fetchone() == (6,)
    with RunStore.read(path) as again:
        assert again.meta("phase") == "train"
    writer.close()


def test_what_is_no_store_of_ours_is_named(tmp_path: Path, path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        RunStore.read(path)
    assert not path.exists(), "looking makes nothing"
    path.write_bytes(b"not a database at all, but rather long enough for a header" * 3)
    with pytest.raises(StoreError, match="is not a run store"):
        RunStore.read(path)
    newer = tmp_path / "newer.sqlite"
    RunStore.create(newer, "{}").close()
    older_version = f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}"
    with RunStore.open(newer) as store:
        store._db.execute(older_version)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreVersionError, match="upgrade agentrl"):
        RunStore.read(newer)


def test_commands_that_only_look_migrate_no_store(tmp_path: Path) -> None:
    """`rewards` and `audit`, on a run of an older agentrl."""
    run = tmp_path / "run"
    run.mkdir()
    older_store(run / "store.sqlite", 6, old_group(1, "scored", None, "dd"))
    before = (run / "store.sqlite").read_bytes()
    for command in ("rewards", "audit"):
        done = CliRunner().invoke(app, [command, str(run)])
        assert done.exit_code == 0, done.output
    assert (run / "store.sqlite").read_bytes() == before


def test_a_table_for_a_pipe_is_not_cut_to_a_terminals_width(tmp_path: Path) -> None:
    name = "a_source_with_a_name_that_a_narrow_column_would_cut"
    (tmp_path / "run").mkdir()
    with RunStore.create(tmp_path / "run" / "store.sqlite", "{}") as store:
        store.confirm_version(store.mint_version(0))
        store.declare_sources([Source(name=name)])
        admit(store)
        claim, *_ = store.claim("w", 1, lease_s=30.0)
        store.begin(claim.episode_id, claim.fence, START)
        store.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
        store.journal_step(claim.episode_id, claim.fence, 0, answer(0))
        store.score(turn_id(claim.episode_id, 0, 0), name, 0.5)
    done = CliRunner().invoke(app, ["rewards", str(tmp_path / "run")])
    assert done.exit_code == 0 and name in done.output, done.output
