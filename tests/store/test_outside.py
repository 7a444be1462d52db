"""What others do to the file of a live run: hold its lock, damage it. One clear line each, and nothing lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from agentrl.errors import StoreBusy, StoreDamaged, StoreError
from agentrl.run.processes.exit_status import ENDS_THE_RUN, run_role
from agentrl.store import RunStore
from agentrl.store.codec import pack_tokens, unpack_tokens
from agentrl.store.databases import driver, sqlite, transactions

from .play import admit, play_all, serve, turn

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Another process holds the write lock; its process id."""
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield holder.pid
        finally:
            holder.kill()


def test_a_write_waits_for_minutes_while_another_process_holds_the_lock(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty seconds, as a backup may take, must end nothing; reading waits for nobody. Each look takes 20 s here."""
    seconds = itertools.count(step=20)
    with held(store.path) as pid:

        def monotonic() -> float:
            now = next(seconds)
            if now == 40:
                os.kill(pid, signal.SIGKILL)
            return float(now)

        monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=monotonic))
        assert store.meta("config") is not None
        store.set_meta("phase", "train")
    assert store.meta("phase") == "train"
    assert 60 <= driver.BUSY_S <= 300


def test_law_4_a_lock_that_is_never_given_back_ends_in_one_line_that_names_its_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunStore.create(path, "{}").close()
    monkeypatch.setattr(driver, "BUSY_S", 0.2)
    monkeypatch.setattr(sqlite, "BUSY_S", 0.2)
    with RunStore.open(path) as store, held(path) as pid:
        with pytest.raises(StoreBusy) as refused:
            store.set_meta("phase", "train")
        line = str(refused.value)
        assert "\n" not in line
        assert line.startswith(f"{path}: process {pid} (")
        assert "has held the write lock for over 0.2 s" in line
        assert f"kill -9 {pid}" in line
        assert f"agentrl train --resume {path.parent}" in line
        subprocess.run(line[line.index("kill -9") : line.index(f"{pid};") + len(str(pid))].split(), check=True)
        store.hurry(60.0)  # the killed process takes its time to go
        store.set_meta("phase", "train")  # what it said to type was typed
        assert store.meta("phase") == "train"


def test_who_is_in_a_hurry_waits_no_longer(store: RunStore) -> None:
    store.hurry(0.1)
    with held(store.path), pytest.raises(StoreBusy, match=r"for over 0\.1 s"):
        store.set_meta("phase", "stop")


def damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    left = {"half": size // 2, "tenth": size // 10, "a byte": 1, "nothing": 0}
    if how in left:
        os.truncate(path, left[how])
    else:
        with path.open("r+b") as file:
            file.seek({"head": 0, "middle": size // 4}[how])
            file.write(os.urandom(size // 2))


@pytest.mark.parametrize("how", ["half", "tenth", "a byte", "nothing", "head", "middle"])
def test_a_damaged_file_ends_in_one_line_that_names_it_and_says_what_to_do(
    store: RunStore, path: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens it next, as a worker that is started again does; the damage came while the run was live."""
    for _ in range(10):
        admit(store, limit=4, max_lag=99)
        play_all(store)
    store._db.driver.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # pyright: ignore[reportPrivateUsage]
    damage(path, how)

    def use() -> None:
        with RunStore.open(path) as again:
            list(again.reads.trajectories("train"))
            again.buffer.take(1, 40, max_lag=9)

    monkeypatch.setenv("AGENTRL_ERROR_FILE", str(tmp_path / "error"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a child ignores Ctrl-C: this process does not
    assert run_role("worker", use) == ENDS_THE_RUN
    (line,) = (tmp_path / "error").read_text().splitlines()
    assert line.startswith(f"{path}: ")
    assert "put a copy" in line
    assert f"agentrl train --resume {path.parent}" in line
    assert str(path.parent / "checkpoints") in line


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tokens SET data = x'00112233' WHERE turn_id = 1",
        "UPDATE turns SET spans = '[[1,' WHERE id = 1",
        "UPDATE steps SET observation = CAST(x'5bff' AS TEXT) WHERE turn_id = 1",
    ],
)
def test_a_row_that_cannot_be_read_is_damage_too(store: RunStore, path: Path, statement: str) -> None:
    """SQLite keeps no checksums: a page of the right shape may hold anything."""
    admit(store, limit=1)
    play_all(store)
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    with pytest.raises(StoreDamaged, match="is damaged") as refused:
        list(store.reads.trajectories("train"))
    assert "\n" not in str(refused.value)
    with pytest.raises(StoreError):
        store.buffer.take(1, 1, max_lag=9)
    serve(store, 1)  # the rest of it can still be written


def test_every_bit_of_a_turns_tokens_that_changed_is_damage() -> None:
    """Law 1: else it would be another token, or another log-prob, that nobody sampled."""
    one = replace(turn(0, 1, 40), prompt_ids=tuple(range(40)))
    blob = pack_tokens(one)
    same = 0
    for bit in range(8 * len(blob)):
        changed = bytearray(blob)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = unpack_tokens(bytes(changed))
        except zstandard.ZstdError:
            continue
        assert found == (one.prompt_ids, one.token_ids, one.logprobs, {})
        same += 1
    assert same < 32  # bits that a reader passes over, such as the padding of a table


def test_every_page_that_holds_something_else_is_found_before_a_run_goes_on(store: RunStore, path: Path) -> None:
    for _ in range(10):
        admit(store, limit=4, max_lag=99)
        play_all(store)
    store.refuse_damage()
    store._db.driver.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # pyright: ignore[reportPrivateUsage]
    store.close()
    whole = path.read_bytes()
    (size,) = struct.unpack_from(">H", whole, 16)
    noise = random.Random(0)
    for page in range(len(whole) // size):
        path.write_bytes(whole[: page * size] + noise.randbytes(size) + whole[(page + 1) * size :])
        for leftover in (f"{path}-wal", f"{path}-shm"):
            Path(leftover).unlink(missing_ok=True)
        with (
            pytest.raises(StoreDamaged, match="put a copy of it in its place") as refused,
            RunStore.open(path) as again,
        ):
            again.refuse_damage()
        assert "\n" not in str(refused.value), page
