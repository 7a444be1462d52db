"""Real processes, SIGKILL at random instants: nothing acknowledged is lost, nothing is trained twice (law 2)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from descriptors import readable

from agentrl.records import GroupState
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .play import START, answer, turn
from .victim import GROUPS_PER_STEP, STEPS, turns_of

ROLES = ("work", "share", "learn")
DEADLINE_S = 300.0
KILLS = 8


class RunProcesses:
    """Two workers and a learner over one store, all writing their lines into one pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader, self._writer = os.pipe()
        self._rest = b""
        self.acks: list[list[str]] = []
        self.children = [self._start(role) for role in ROLES]

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "store.victim", role, str(self._path)]
        return subprocess.Popen(argv, cwd=Path(__file__).parent.parent, stdout=self._writer)

    def kill(self, index: int) -> None:
        self.children[index].kill()
        self.children[index].wait(DEADLINE_S)

    def start(self, index: int) -> None:
        self.children[index] = self._start(ROLES[index])

    def wait(self) -> list[int]:
        return [child.wait(DEADLINE_S) for child in self.children]

    def hear(self, lines: int) -> bool:
        """Let the run go on until so many more lines came; False if it came to its end."""
        until = len(self.acks) + lines
        while len(self.acks) < until and ["stop", str(STEPS)] not in self.acks:
            self._read(DEADLINE_S)
        return ["stop", str(STEPS)] not in self.acks

    def drain(self) -> None:
        """Read what is left in the pipe."""
        while self._read(0):
            pass

    def close(self) -> None:
        for index in range(len(ROLES)):
            self.kill(index)
        os.close(self._reader)
        os.close(self._writer)

    def _read(self, deadline_s: float) -> bool:
        ready = readable(self._reader, deadline_s)
        assert ready or not deadline_s, f"nothing happened for {deadline_s:g} s"
        if not ready:
            return False
        *lines, self._rest = (self._rest + os.read(self._reader, 1 << 16)).split(b"\n")
        self.acks += [line.decode().split() for line in lines]
        return True


@pytest.mark.medium
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_law_2_trained_exactly_once_whoever_is_killed_whenever(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    RunStore.create(path, "{}").close()
    processes = RunProcesses(path)
    try:
        for _ in range(KILLS):
            if not processes.hear(rng.randrange(1, 60)):
                break
            whom = rng.choice([[0], [1], [2], [0, 1, 2]])
            for index in whom:
                processes.kill(index)
            if len(whom) == len(ROLES):
                processes.drain()
                with RunStore.open(path) as store:
                    check_parts(store, processes.acks)
                    store.deaths.release_all()
                    assert audit(store).violations == []
            for index in whom:
                processes.start(index)
        while processes.hear(1):
            pass
        assert processes.wait() == [0, 0, 0]
        processes.drain()
    finally:
        processes.close()
    with RunStore.open(path) as store:
        assert audit(store).violations == []
        check_lineage(store)
        check_acknowledged(store, processes.acks)


def check_parts(store: RunStore, acks: list[list[str]]) -> None:
    """Tokens of a turn under way are there as long as nothing more is said of their episode."""
    latest = {words[1]: words for words in acks if words[0] not in ("rollback", "take", "checkpoint", "stop", "lost")}
    for id, index, n in (map(int, words[1:]) for words in latest.values() if words[0] == "part"):
        trajectory = store.reads.trajectory(id)
        rows = store._db.rows("SELECT TOTAL(n) FROM partials WHERE episode_id = ? AND turn = ?", (id, index))  # pyright: ignore[reportPrivateUsage]
        assert rows[0][0] >= n or len(trajectory.turns) > index or trajectory.stop_reason is not None


def check_lineage(store: RunStore) -> None:
    trained = [store.lineage.episodes_of(step) for step in range(1, STEPS + 1)]
    groups = [{store.reads.trajectory(episode).group_id for episode in episodes} for episodes in trained]
    assert min(map(len, groups)) >= GROUPS_PER_STEP
    assert max(Counter(episode for episodes in trained for episode in episodes).values()) == 1
    assert store.groups.counts()[GroupState.TRAINED] == STEPS * GROUPS_PER_STEP


def check_acknowledged(store: RunStore, acks: list[list[str]]) -> None:
    """Each line that a process got out before it died is true of the store."""
    takes: dict[tuple[int, int], list[int]] = {}
    versions = {version for (version,) in store._db.rows("SELECT version FROM versions")}  # pyright: ignore[reportPrivateUsage]
    rows = store._db.rows("SELECT attempt, step, episode_id FROM lineage ORDER BY id")  # pyright: ignore[reportPrivateUsage]
    for attempt, step, episode in rows:
        takes.setdefault((attempt, step), []).append(episode)
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
        elif what in ("lost", "stop", "part"):
            continue
        else:
            trajectory = store.reads.trajectory(first)
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
