"""Making and opening a store: schema versions, wrong files, a full disk. One clear line each, and nothing lost."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.errors import DiskFull, StoreError, UsageError
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.sqlite import named

from .play import START, admit, answer, turn


def test_a_store_keeps_its_configuration_and_what_was_agreed(path: Path) -> None:
    with RunStore.create(path, '{"seed": 3}') as store:
        store.set_meta("phase", "train")
        store.set_meta("phase", "stop")
    with RunStore.open(path) as store:
        assert store.meta("config") == '{"seed": 3}'
        assert store.meta("phase") == "stop"
        assert store.meta("nothing") is None
        assert store.lineage.attempt == 1
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


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"these are not the bytes of a database" * 100)
    with pytest.raises(StoreError, match=r"store\.sqlite: is not a run store"):
        RunStore.open(path)


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
    claim = store.leases.claim("a", 1, lease_s=30.0)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    database = store._db  # pyright: ignore[reportPrivateUsage]
    (pages,) = database.row("PRAGMA page_count") or (0,)
    database.execute(f"PRAGMA max_page_count = {pages + 4}")
    journaled = 0
    with pytest.raises(DiskFull, match="no space left for the run store: free some; what was journaled is kept"):
        while True:
            store.journal.journal_turn(claim.episode_id, claim.fence, turn(journaled, 1, n=500, step=answer(journaled)))
            journaled += 1
    assert journaled > 1
    expected = tuple(turn(index, 1, n=500, step=answer(index)) for index in range(journaled))
    assert store.reads.trajectory(claim.episode_id).turns == expected
    database.execute("PRAGMA max_page_count = 1000000")
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(journaled, 1, n=500))
    assert len(store.reads.trajectory(claim.episode_id).turns) == journaled + 1
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
        versions = list(pool.map(lambda step: store.versions.mint_version(step).version, range(200)))
    assert len(set(versions)) == 200
    assert [store.versions.step_of(version) for version in versions] == list(range(200))
