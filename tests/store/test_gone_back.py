"""After a rollback: what was admitted for later steps waits for its turn, so that nothing of it grows stale (law 5)."""

from __future__ import annotations

import random

import pytest

from agentrl.records import GroupState
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .play import START, Clock, admit, play, serve, task, turn

BATCH, MAX_LAG = 2, 1
AHEAD = (MAX_LAG + 1) * BATCH


def claim(store: RunStore, limit: int = 1000, worker: str = "a"):
    return store.leases.claim(worker, limit, lease_s=1e6, ahead=AHEAD)


def learn(store: RunStore, step: int) -> list[int] | None:
    groups = store.buffer.take(step, BATCH, max_lag=MAX_LAG)
    if groups is None:
        return None
    serve(store, step)
    return [group.id for group in groups]


def six_steps(store: RunStore) -> None:
    """Of which no checkpoint was made; four more groups are admitted and none of them has ended."""
    for step in range(1, 7):
        admit(store)
        for one in claim(store, 2 * BATCH):
            play(store, one)
        assert learn(store, step)
    admit(store)
    assert store.groups.counts() == {GroupState.TAKEN: 12, GroupState.WAITING: 4}


def test_law_5_groups_of_an_abandoned_step_are_played_when_their_turn_comes_and_none_is_lost(store: RunStore) -> None:
    six_steps(store)
    store.lineage.rollback(0, ahead=AHEAD)
    assert claim(store) == [], "what is played now would be trained six steps later"
    for step in range(1, 9):
        assert learn(store, step) == [2 * step - 1, 2 * step]
        for one in claim(store):
            play(store, one)
    assert store.metrics.drops() == {}
    assert store.groups.counts() == {GroupState.TAKEN: 16}
    assert audit(store).violations == []


def test_an_episode_that_is_being_played_is_taken_back_and_goes_on_later(store: RunStore) -> None:
    """Its turns stay; its group's deadline counts anew from when it goes on."""
    six_steps(store)
    one, *_ = claim(store, 1)
    store.journal.begin(one.episode_id, one.fence, START)
    store.journal.journal_turn(one.episode_id, one.fence, turn(0, 7))
    store.lineage.rollback(0, ahead=AHEAD)
    assert store.leases.renew("a", lease_s=1e6) == frozenset()
    for step in range(1, 6):
        assert learn(store, step)
    assert not any(store.buffer.expire(1e12, 600.0))
    again = claim(store)[0]
    assert (again.episode_id, len(again.turns)) == (one.episode_id, 1)
    assert [each.versions for each in again.turns] == [(7, 7, 7)]


def test_what_may_be_trained_next_is_played_on_without_a_break(store: RunStore, clock: Clock) -> None:
    admit(store)
    for one in claim(store)[:6]:
        play(store, one)
    assert learn(store, 1) == [1, 2]
    store.lineage.rollback(0, ahead=AHEAD)
    assert store.leases.renew("a", lease_s=1e6) == {7, 8}


def test_an_evaluation_does_not_wait(store: RunStore) -> None:
    six_steps(store)
    store.lineage.rollback(0, ahead=AHEAD)
    store.groups.add_groups([task(99)], size=1, purpose="eval@0")
    assert [one.purpose for one in claim(store)] == ["eval@0"]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(2))
def test_a_learner_that_goes_back_again_and_again_starves_for_nothing_and_drops_nothing(
    store: RunStore, seed: int
) -> None:
    rng = random.Random(seed)
    step, safe, rollbacks = 0, 0, 0
    for _ in range(400):
        action = rng.choices(["play", "learn", "checkpoint", "go back"], [10, 10, 2, 1])[0]
        if action == "play":
            admit(store)
            for one in claim(store, rng.randint(1, 6)):
                play(store, one)
        elif action == "learn" and learn(store, step + 1):
            step += 1
        elif action == "checkpoint" and step > safe:
            version = store.versions.version_at(step)
            assert version is not None
            store.lineage.checkpoint(step, version, "/checkpoint")
            safe = step
        elif action == "go back":
            store.lineage.rollback(safe, ahead=AHEAD)
            step, rollbacks = safe, rollbacks + 1
    assert rollbacks > 5
    assert step > 20
    assert store.metrics.drops() == {}
    assert audit(store).violations == []
