"""Real processes, SIGKILL at random instants: nothing acknowledged is lost, nothing is trained twice (law 2)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from agentrl.records import GroupState
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .play import START, answer, turn
from .victim import GROUPS_PER_STEP, STEPS, turns_of

ROLES = ("work", "work", "learn")
DEADLINE_S = 60.0


class Crew:
    """Two workers and a learner over one store; whoever ends or is killed is started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acks = path.with_name("acks.txt")
        self.children = [self._start(role) for role in ROLES]

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "store.victim", role, str(self._path), str(self._acks)]
        return subprocess.Popen(argv, cwd=Path(__file__).parent.parent)

    def kill(self, index: int) -> None:
        self.children[index].kill()
        self.children[index].wait(DEADLINE_S)

    def start(self, index: int) -> None:
        self.children[index] = self._start(ROLES[index])

    def wait(self) -> list[int]:
        return [child.wait(DEADLINE_S) for child in self.children]

    def acks(self) -> list[list[str]]:
        return [line.split() for line in self._acks.read_text().splitlines()]


def alive_for(crew: Crew, seconds: float) -> bool:
    """Let the run go on for a while; False if it came to its end."""
    try:
        crew.children[2].wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_law_2_trained_exactly_once_whoever_is_killed_whenever(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    RunStore.create(path, "{}").close()
    crew = Crew(path)
    kills = 0
    try:
        deadline = time.monotonic() + DEADLINE_S
        while kills < 12 and alive_for(crew, rng.uniform(0.05, 0.4)):
            assert time.monotonic() < deadline
            whom = rng.choice([[0], [1], [2], [0, 1, 2]])
            for index in whom:
                crew.kill(index)
            kills += 1
            if len(whom) == 3:
                with RunStore.open(path) as store:
                    store.release_all()
                    assert audit(store).violations == []
            for index in whom:
                crew.start(index)
        if crew.children[2].poll() not in (None, 0):  # pragma: no cover
            pytest.fail("the learner failed by itself")
        assert crew.wait() == [0, 0, 0]
    finally:
        for index in range(3):
            crew.kill(index)
    assert kills >= 1
    with RunStore.open(path) as store:
        assert audit(store).violations == []
        check_lineage(store)
        check_acknowledged(store, crew.acks())


def check_lineage(store: RunStore) -> None:
    trained = [store.lineage(step) for step in range(1, STEPS + 1)]
    assert [len(groups) for groups in trained] == [GROUPS_PER_STEP] * STEPS
    assert max(Counter(group for groups in trained for group in groups).values()) == 1
    assert store.counts()[GroupState.TRAINED] == STEPS * GROUPS_PER_STEP


def check_acknowledged(store: RunStore, acks: list[list[str]]) -> None:
    """Each line that a process got out before it died is true of the store."""
    takes: dict[tuple[int, int], list[int]] = {}
    versions = {version for (version,) in store._db.rows("SELECT version FROM versions")}  # pyright: ignore[reportPrivateUsage]
    rows = store._db.rows("SELECT attempt, step, group_id FROM lineage ORDER BY id")  # pyright: ignore[reportPrivateUsage]
    for attempt, step, group in rows:
        takes.setdefault((attempt, step), []).append(group)
    safe = 0
    ended: Counter[int] = Counter()
    for what, *numbers in acks:
        first, *rest = map(int, numbers)
        if what == "rollback":
            assert rest == [safe] or rest[0] > safe  # a checkpoint may stand whose line was cut off by the kill
            safe = rest[0]
        elif what == "take":
            assert takes[first, rest[0]] == rest[1:]
        elif what == "checkpoint":
            safe = first
        elif what == "lost":
            continue
        else:
            trajectory = store.trajectory(first)
            assert trajectory.start == START
            if what == "turn":
                kept = trajectory.turns[rest[0]]
                assert kept.spans[0].version in versions
                assert kept == turn(rest[0], kept.spans[0].version, step=kept.step)
            if what == "step":
                assert trajectory.turns[rest[0]].step == answer(rest[0])
            if what == "finish":
                assert len(trajectory.turns) == turns_of(first)
                assert trajectory.scored
                ended[first] += 1
    assert set(ended.values()) == {1}  # nobody finished an episode that another had finished
