"""Calls on a full disk: those that wait for space, for how long, what is printed, and which errors are one.

A learner waits where it stands: started again, it would train again what it has trained since its last checkpoint."""

from __future__ import annotations

import errno
import os
import sqlite3
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.errors import DiskFull, RunFailed, StoreError
from agentrl.host import disk_space
from agentrl.host.disk_space import is_full, no_space_on, wait_for_space, watch_disk

FULL = DiskFull("no space left: free some")


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_the_operating_systems_error_is_known() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError) as raised:
        file.write(b"x")
    assert is_full(raised.value)


def test_sqlites_error_is_known(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "db")
    connection.execute("CREATE TABLE t (x)")
    connection.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    connection.close()
    assert is_full(raised.value)
    assert not is_full(sqlite3.OperationalError("No space left on device"))


def test_postgresqls_error_is_known() -> None:
    """A lost connection is none, whatever the server's last words were: it is opened again, and the server asked."""
    errors = pytest.importorskip("psycopg").errors
    assert is_full(errors.DiskFull("could not extend file"))
    assert not is_full(errors.OperationalError("FATAL: No space left on device"))


@each_case(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "in words of any language"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("enforce fail at inline_container.cc"), False),
        (FULL, True),
        (RunFailed("the last: No space left on device"), False),
    ],
)
def test_an_error_says_whether_a_disk_is_full(error: Exception, full: bool) -> None:
    """Of libraries only the words are known; an error of our own was named where it arose."""
    assert is_full(error) is full


class Calls:
    """Calls of a task that find the disk full so many times, and when they were made."""

    def __init__(self, full: int, error: Exception = FULL) -> None:
        self.full, self.error, self.at_s = full, error, list[float]()

    async def __call__(self) -> str:
        self.at_s.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if len(self.at_s) <= self.full:
            raise self.error
        return "written"


async def test_a_task_waits_for_space_and_tells_of_it_once(autojump_clock: MockClock) -> None:
    call, told, began = Calls(3), list[DiskFull](), trio.current_time()
    assert await wait_for_space(call, every_s=2.0, tell=told.append) == "written"
    assert [at_s - began for at_s in call.at_s] == [0.0, 2.0, 4.0, 6.0] and told == [FULL]


@pytest.mark.parametrize(("deadline_s", "calls", "told"), [(0.0, 1, 0), (2.5, 4, 1)])
async def test_law_4_a_task_waits_for_space_until_its_deadline(
    autojump_clock: MockClock, deadline_s: float, calls: int, told: int
) -> None:
    """After 2.5 s, calls at 0, 1, 2 and 3 s were made, and the last is too late; after 0 s nothing is waited for."""
    call, heard = Calls(10**9), list[DiskFull]()
    with pytest.raises(DiskFull, match="no space left"):
        await wait_for_space(call, deadline_s=deadline_s, tell=heard.append)
    assert (len(call.at_s), len(heard)) == (calls, told)


async def test_a_task_waits_for_no_other_error(autojump_clock: MockClock) -> None:
    call = Calls(1, StoreError("damaged"))
    with pytest.raises(StoreError, match="damaged"):
        await wait_for_space(call)
    assert len(call.at_s) == 1


async def test_the_terminal_says_at_once_that_the_disk_is_full_and_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, looks = [300 << 10] * 5 + [1 << 30] * 5, 0

    def usage(_: Path) -> SimpleNamespace:
        nonlocal looks
        looks += 1
        return SimpleNamespace(free=free[min(looks, len(free)) - 1])

    monkeypatch.setattr(disk_space.shutil, "disk_usage", usage)
    said = list[tuple[int, str]]()

    def say(line: str) -> None:
        said.append((looks, line))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(watch_disk, tmp_path, say, every_s=0.001))
        with trio.fail_after(60):
            while looks < 20:  # noqa: ASYNC110
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    (at, first), (again, second) = said
    assert at == 1 and first.startswith(f"no space left on the disk of {tmp_path} (300 KiB): free some; what was")
    assert again == 6 and second == f"the disk of {tmp_path} has space again"


def test_a_disk_that_nobody_can_ask_is_not_called_full(tmp_path: Path) -> None:
    assert no_space_on(tmp_path) == "" == no_space_on(tmp_path / "nowhere")
