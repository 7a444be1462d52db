"""A handle that only looks: at a live run, and it changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import StoreError, UsageError
from agentrl.records import GroupState, turn_id
from agentrl.store import RunStore, Source

from .play import START, admit, answer, play_all, task, turn
from .test_awaitable import locked


def test_it_sees_what_a_live_writer_writes(store: RunStore) -> None:
    with RunStore.read(store.path) as look:
        assert look.groups.counts() == {}
        admit(store)
        assert look.groups.counts() == {GroupState.WAITING: 4}
        play_all(store)
        assert look.buffer.ready_count() == 4
        assert look.reads.trajectory(1).outcome == 1.0


def test_it_writes_nothing_and_says_so(store: RunStore) -> None:
    with RunStore.read(store.path) as look:
        for write in (
            lambda: look.set_meta("phase", "stop"),
            lambda: look.groups.add_groups([task(0)], size=1, purpose="eval"),
            lambda: look.lineage.retain(99, keep_steps=0, keep_sample=0.0) or look.deaths.release_all(),
        ):
            with pytest.raises(StoreError, match="may not be written"):
                write()
    assert store.meta("phase") is None


def test_a_store_in_a_folder_that_may_not_be_written_is_read() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "store.sqlite"
        with RunStore.create(path, "{}") as store:
            admit(store)
            counts = store.groups.counts()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        child = os.fork()
        if not child:  # no superuser, who may write anywhere
            try:
                if not os.geteuid():
                    os.setuid(65534)
                with RunStore.read(path) as look:
                    os._exit(look.groups.counts() != counts)
            except BaseException as error:
                print(error)
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        path.parent.chmod(0o755)


def test_it_does_not_wait_for_a_lock_and_no_writer_waits_for_it(store: RunStore) -> None:
    store.hurry(0.0)
    with RunStore.read(store.path) as look:
        with look._db.read(), locked(store.path):  # pyright: ignore[reportPrivateUsage]
            assert look.groups.counts() == {}
        with look._db.read():  # pyright: ignore[reportPrivateUsage]
            assert look.groups.counts() == {}
            assert admit(store) == 4


def test_what_is_no_store_of_ours_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        RunStore.read(path)
    assert not path.exists(), "looking makes nothing"
    path.write_bytes(b"not a database at all, but rather long enough for a header" * 3)
    with pytest.raises(StoreError, match="is not a run store"):
        RunStore.read(path)


def test_a_table_for_a_pipe_is_not_cut_to_a_terminals_width(tmp_path: Path) -> None:
    name = "a_source_with_a_name_that_a_narrow_column_would_cut"
    (tmp_path / "run").mkdir()
    with RunStore.create(tmp_path / "run" / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.scores.declare_sources([Source(name=name)])
        admit(store)
        claim, *_ = store.leases.claim("w", 1, lease_s=30.0)
        store.journal.begin(claim.episode_id, claim.fence, START)
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
        store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))
        store.scores.score(turn_id(claim.episode_id, 0, 0), name, 0.5)
    done = CliRunner().invoke(app, ["rewards", str(tmp_path / "run")])
    assert done.exit_code == 0 and name in done.output, done.output
