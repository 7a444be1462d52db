"""A task whose group infrastructure ended is played again: each loss once, so often at most, whoever is killed when."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from agentrl.records import StopReason
from agentrl.store import Ending, Replays, RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .fuse import Fuse, Killed
from .play import Clock, admit, play, play_all, serve
from .test_deaths import Workers

FAILED = StopReason.ENGINE_FAILED


def seeds(store: RunStore) -> list[int]:
    """Of the tasks of all training groups, in the order of their admission."""
    return [row.task.seed for row in store.reads.episodes("train")][::2]


def lose(store: RunStore, stop: StopReason = FAILED) -> None:
    play_all(store, stop=stop, outcome=None)


def sound(store: RunStore) -> bool:
    return not audit(store).violations and OutsideAuditor(store.path).look() == []


@pytest.mark.parametrize("stop", [StopReason.SANDBOX_FAILED, StopReason.ENV_FAILED])
def test_a_task_that_infrastructure_lost_is_played_again_before_new_ones(store: RunStore, stop: StopReason) -> None:
    admit(store, limit=2, max_replays=2)
    lose(store, stop)
    assert store.replays.counts(2) == Replays(played=0, waiting=2, exhausted=0)
    assert admit(store, limit=3, max_replays=2) == 3
    assert seeds(store) == [100, 101, 100, 101, 102]
    assert store.replays.counts(2) == Replays(played=2, waiting=0, exhausted=0)
    assert store.groups.tasks_started() == 3 and sound(store)


def test_exceptions_of_a_task_that_is_played_again_count_with_its_first_play(store: RunStore) -> None:
    """One of two tasks raises, in groups of two: half of what was tried, however often it is played."""
    admit(store, limit=1, max_replays=2)
    play_all(store)
    for _ in range(3):
        assert admit(store, limit=1, max_replays=2) == 1
        for claim in store.leases.claim("w", 2, lease_s=1e9):
            detail = "test/Env: step raised KeyError: 'a' (/home/me/env.py:12)"
            failed = Ending(stop_reason=StopReason.ENV_FAILED, detail=detail)
            store.journal.finish(claim.episode_id, claim.fence, failed)
    assert seeds(store) == [100, 101, 101, 101]
    failures = store.metrics.failures()
    assert (failures.failed, failures.raised, failures.well) == (6, 2, 2)


def test_a_group_past_its_deadline_is_played_again_and_one_without_an_outcome_is_not(
    store: RunStore, clock: Clock
) -> None:
    admit(store, limit=1, max_replays=1)
    store.leases.claim("a", 2, lease_s=1e6)
    clock.now += 1201.0
    assert store.buffer.expire(clock(), 600.0).groups == (1,)
    admit(store, limit=1, max_replays=1)
    assert seeds(store) == [100, 100]
    play_all(store, outcome=None)  # played to its end by the policy, and not scored: its own doing
    assert admit(store, limit=1, max_replays=1) == 1
    assert seeds(store) == [100, 100, 101]
    assert sound(store)


def test_the_last_tasks_of_a_finite_source_are_played_again(store: RunStore) -> None:
    admit(store, limit=9, tasks_total=2, max_replays=1)
    lose(store)
    assert admit(store, limit=9, tasks_total=2, max_replays=1) == 2
    lose(store)
    assert admit(store, limit=9, tasks_total=2, max_replays=1) == 0
    assert seeds(store) == [100, 101, 100, 101]


def test_a_quarantined_task_is_not_played_again(store: RunStore) -> None:
    admit(store, limit=2, max_replays=2)
    Workers(store, {1, 2}).until_all_ended()
    assert len(store.deaths.quarantined()) == 1
    assert store.replays.counts(2) == Replays(played=0, waiting=0, exhausted=1)
    admit(store, limit=1, max_replays=2)
    assert seeds(store) == [100, 101, 102]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(2))
def test_law_2_each_loss_is_played_again_once_whoever_is_killed_whenever(tmp_path: Path, seed: int) -> None:
    """Admission is killed at any of its statements, and goes on in a store opened anew; some groups are lost."""
    path, rng = tmp_path / "store.sqlite", random.Random(seed)
    with RunStore.create(path, "{}", clock=Clock()) as store:
        serve(store, 0)
    auditor = OutsideAuditor(path)
    for turn in range(60):
        with RunStore.open(path, clock=Clock()) as store:
            database = store._db  # pyright: ignore[reportPrivateUsage]
            connection = database.driver.connection  # pyright: ignore[reportPrivateUsage]
            database.driver.connection = Fuse(connection, rng.randrange(45), after=rng.random() < 0.5)  # type: ignore[assignment]
            try:
                admit(store, limit=2, groups_per_step=99, max_replays=2)
            except Killed:
                pass
            finally:
                database.driver.connection = connection  # pyright: ignore[reportPrivateUsage]
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            for claim in store.leases.claim("w", 99, lease_s=30.0):
                lost = (claim.group_id * 7 + seed) % 3 == 0
                play(store, claim, stop=FAILED if lost else StopReason.DONE, outcome=None if lost else 1.0)
            assert auditor.look() == [] and not audit(store).violations, turn
    with RunStore.open(path) as store:
        while admit(store, limit=2, groups_per_step=99, max_replays=2):
            play_all(store)
            if not store.replays.counts(2).waiting:
                break
        of = Counter(seeds(store))
        lost = Counter(row.task.seed for row in store.reads.episodes("train") if row.stop_reason == FAILED)
        assert sorted(of) == [100 + n for n in range(len(of))], "no task is skipped"
        assert all(n == min(lost[task] // 2, 2) + 1 for task, n in of.items())
        assert store.replays.counts(2).played > 2
