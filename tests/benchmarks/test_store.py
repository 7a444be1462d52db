"""The work of the store's calls, counted in steps of SQLite's virtual machine: it does not grow with the store."""

from __future__ import annotations

from pathlib import Path

import _store_run as bench
import pytest
from each_case import each_case

from agentrl.store import RunStore

SMALL, LARGE = 1280, 12_800  # ended episodes: 10 and 100 steps of the learner
RUNNING = 32


class Counted:
    """A run under way over a history of `episodes`; counts what each of its calls makes SQLite do."""

    def __init__(self, folder: Path, episodes: int) -> None:
        self._store = RunStore.create(folder / "store.sqlite", "{}")
        run = bench.Run(self._store, episodes, running=RUNNING, waiting=10 * bench.CHUNK)
        self.work = {name: self._count(call) for name, call in run.calls().items()}
        self._store.close()

    def _count(self, call: bench.Call) -> int:
        connection = self._store._db.driver.connection  # pyright: ignore[reportPrivateUsage]
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        connection.set_progress_handler(step, 1)
        call()
        connection.set_progress_handler(None, 0)
        return steps


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """The work of each call in the small store and in the large one."""
    small, large = (Counted(tmp_path_factory.mktemp("store"), n).work for n in (SMALL, LARGE))
    return {name: (n, large[name]) for name, n in small.items()}


NAMES = [
    "worker: claim 16",
    "worker: claim, none left",
    "worker: turn and its answer",
    "worker: finish",
    "worker: renew",
    "supervisor: admit, no place",
    "supervisor: admit one",
    "supervisor: results",
    "supervisor: expire, nothing due",
    "supervisor: expire with quorum",
    "supervisor: counts",
    "supervisor: failures",
    "supervisor: progress",
    "supervisor: replays",
    "supervisor: late_open",
    "learner: take, too few",
    "learner: take a group",
    "learner: checkpoint",
    "learner: retain",
    "resume: rollback",
    "resume: stands_beyond",
    "resume: release_all",
    "resume: reconcile",
    "death: release_worker",
]


@pytest.mark.medium
@each_case("name", NAMES)
def test_a_call_does_the_same_work_with_ten_times_the_episodes(work: dict[str, tuple[int, int]], name: str) -> None:
    small, large = work[name]
    assert large <= small + 40, f"{name}: {small} steps over {SMALL} episodes, {large} over {LARGE}"


def test_every_call_is_among_them(work: dict[str, tuple[int, int]]) -> None:
    assert set(work) == set(NAMES)
    assert all(small > 0 for small, _ in work.values())
