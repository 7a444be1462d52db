"""Admission by one process of the run: at once when there is room, and exactly on from where a dead one stood."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case
from store.fuse import Fuse, Killed
from store.play import bounds, play, serve
from trio.testing import MockClock

from agentrl.env.tasks import Curriculum, Seeds, TaskSource
from agentrl.errors import DiskFull
from agentrl.records import GroupState
from agentrl.rollout.admitter import Admitter
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside

TICK_S = 0.25  # the supervisor's


def pool() -> Curriculum:
    return Curriculum(Seeds("test/Env", size=5), min_plays=2, pause=7)


def admitter(store: RunStore, tasks: TaskSource | None = None, **changes: Any) -> Admitter:
    return Admitter(store, tasks or Seeds("test/Env"), bounds(**changes))


def seeds(store: RunStore) -> list[int]:
    return [row.task.seed for row in store.reads.episodes("train")][::2]


def succeeds(seed: int) -> float:
    return float(seed % 2)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):
        while not condition():  # noqa: ASYNC110  (the store has no event to wait for; the clock is virtual)
            await trio.sleep(0.005)


async def test_law_6_an_episode_that_ends_makes_room_at_once_and_not_at_the_next_tick(
    store: RunStore, autojump_clock: MockClock
) -> None:
    one = admitter(store, max_running=2, max_lag=99)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, Aside(store, inline=True))
        await until(lambda: len(seeds(store)) == 1)
        for group in range(2, 6):
            for claim in store.leases.claim("w", 9, lease_s=1e6):
                play(store, claim)
            ended = trio.current_time()
            await until(lambda group=group: len(seeds(store)) == group)
            assert trio.current_time() - ended < TICK_S / 5
        nursery.cancel_scope.cancel()


async def test_new_weights_make_room_at_once(store: RunStore, autojump_clock: MockClock) -> None:
    one = admitter(store, max_lag=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, Aside(store, inline=True))
        await until(lambda: len(seeds(store)) == 2)
        await trio.sleep(10)
        assert len(seeds(store)) == 2
        served = trio.current_time()
        serve(store, 1)
        await until(lambda: len(seeds(store)) == 4)
        assert trio.current_time() - served < TICK_S / 5
        nursery.cancel_scope.cancel()


def test_of_two_who_prepare_the_same_tasks_only_the_first_starts_them(store: RunStore) -> None:
    """As a supervisor that hung for long, and its next life: the lock of the run keeps them apart, and so does this."""
    room = store.groups.admissible(bounds(), limit=2)
    tasks = [Seeds("test/Env").task(room.first + at) for at in range(2)]
    assert store.groups.admit(tasks, first=room.first, bounds=bounds(), limit=2) == 2
    assert store.groups.admit(tasks, first=room.first, bounds=bounds(), limit=2) == 0
    assert seeds(store) == [0, 1]
    assert store.groups.tasks_started() == 2


def test_room_that_is_gone_by_the_time_of_the_admission_starts_nothing(store: RunStore) -> None:
    room = store.groups.admissible(bounds(), limit=9)
    tasks = [Seeds("test/Env").task(at) for at in range(room.groups)]
    assert room.groups == 4
    assert store.groups.admit(tasks, first=0, bounds=bounds(max_lag=0), limit=9) == 2
    assert store.groups.tasks_started() == 2, "the others are the next ones"


@each_case("seed", range(4))
def test_law_2_a_curriculum_whose_admitter_is_killed_anywhere_chooses_as_one_that_lives(
    tmp_path: Path, seed: int
) -> None:
    def run(path: Path, kills: random.Random | None) -> list[int]:
        with RunStore.create(path, "{}") as store:
            serve(store, 0)
            one = admitter(store, pool(), max_lag=99, max_running=4)
            while len(seeds(store)) < 24:
                if kills is None:
                    one.admit(2)
                else:
                    die_somewhere(store, one, kills)
                    one = admitter(store, pool(), max_lag=99, max_running=4)
                    one.admit(2)
                for claim in store.leases.claim("w", 99, lease_s=1e6):
                    play(store, claim, turns=1, outcome=succeeds(claim.task.seed))
            return seeds(store)[:24]

    assert run(tmp_path / "killed.sqlite", random.Random(seed)) == run(tmp_path / "alive.sqlite", None)


def die_somewhere(store: RunStore, one: Admitter, rng: random.Random) -> None:
    database = store._db  # pyright: ignore[reportPrivateUsage]
    connection = database.driver.connection  # pyright: ignore[reportPrivateUsage]
    database.driver.connection = Fuse(connection, rng.randrange(40), after=rng.random() < 0.5)  # type: ignore[assignment]
    try:
        one.admit(2)
    except Killed:
        pass
    finally:
        database.driver.connection = connection  # pyright: ignore[reportPrivateUsage]
        if connection.in_transaction:
            connection.execute("ROLLBACK")


async def test_a_full_disk_pauses_admission_and_ends_no_run(
    store: RunStore, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, really = [DiskFull("no space left")] * 3, store.groups.admit

    def admit(*args: Any, **kwargs: Any) -> int:
        if full:
            raise full.pop()
        return really(*args, **kwargs)

    monkeypatch.setattr(store.groups, "admit", admit)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admitter(store).run, Aside(store, inline=True))
        await until(lambda: len(seeds(store)) == 4)
        nursery.cancel_scope.cancel()
    assert not full
    assert store.groups.counts() == {GroupState.WAITING: 4}
