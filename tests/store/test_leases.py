"""Who plays what: the order of claims, the fate of a dead worker's episodes (laws 2 and 4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.records import WeightVersion
from agentrl.store import RunStore, StoreError

from .play import START, Clock, admit, play, task, turn


def claimed(store: RunStore, worker: str, limit: int = 100, lease_s: float = 30.0) -> list[int]:
    return [claim.episode_id for claim in store.leases.claim(worker, limit, lease_s=lease_s)]


def test_claims_are_evaluation_first_then_the_dead_ones_then_oldest_group_first(store: RunStore, clock: Clock) -> None:
    admit(store, limit=2)  # episodes 1 to 4
    assert claimed(store, "a", 2) == [1, 2]
    store.groups.add_groups([task(0)], size=2, purpose="eval:held_out@0")  # 5 and 6
    assert claimed(store, "a", 1) == [5]
    clock.now += 31.0  # a's lease ran out
    assert claimed(store, "b", 3) == [5, 6, 1]
    assert claimed(store, "b") == [2, 3, 4]
    assert claimed(store, "b") == []


def test_law_4_a_lease_that_is_not_renewed_ends(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    assert claimed(store, "dead", lease_s=10.0) == [1, 2]
    clock.now += 10.0
    assert claimed(store, "alive") == []  # the deadline itself still counts
    clock.now += 0.001
    assert claimed(store, "alive") == [1, 2]


def test_a_late_renewal_keeps_what_nobody_took(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    claims = store.leases.claim("a", 2, lease_s=10.0)
    clock.now += 60.0
    assert claimed(store, "b", 1) == [1]
    assert store.leases.renew("a", lease_s=10.0) == {2}
    assert claimed(store, "b") == []
    play(store, claims[1])


def test_a_worker_does_not_take_its_own_episodes_again(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    assert claimed(store, "a", lease_s=10.0) == [1, 2]
    clock.now += 60.0
    assert claimed(store, "a") == []


def test_law_4_a_worker_under_an_old_name_does_not_keep_its_dead_forerunners_episodes(
    store: RunStore, clock: Clock
) -> None:
    admit(store, limit=1)
    assert claimed(store, "a", lease_s=10.0) == [1, 2]
    with RunStore.open(store.path, clock=clock) as next_life:
        clock.now += 6.0
        assert next_life.leases.renew("a", lease_s=10.0) == frozenset()
        clock.now += 6.0
        assert claimed(next_life, "a") == [1, 2]


def test_versions_are_minted_once_also_after_a_restart(store: RunStore) -> None:
    first = store.versions.mint_version(1, "/weights/1")
    store.close()
    with RunStore.open(store.path) as again:
        second = again.versions.mint_version(1)
        assert second.version > first.version
        assert again.versions.step_of(first.version) == again.versions.step_of(second.version) == 1
        assert str(again.versions.weights_path(first.version)) == "/weights/1"
        assert again.versions.weights_path(second.version) is None


def test_the_current_version_is_the_latest_confirmed(store: RunStore, tmp_path: Path) -> None:
    minted = store.versions.mint_version(1)
    assert store.versions.current_version() == WeightVersion(version=1, step=0)
    store.versions.confirm_version(minted)
    assert store.versions.current_version() == minted
    store.versions.confirm_version(1)  # an engine that came back late serves old weights
    assert store.versions.current_version() == minted
    with pytest.raises(StoreError, match="weight version 99 was never minted"):
        store.versions.confirm_version(99)
    with pytest.raises(StoreError, match="weight version 99 was never minted"):
        store.versions.step_of(99)
    with (
        RunStore.create(tmp_path / "other.sqlite", "{}") as other,
        pytest.raises(StoreError, match="no weight version is confirmed yet"),
    ):
        other.versions.current_version()


def test_progress_moves_with_every_turn(store: RunStore) -> None:
    admit(store, limit=1)
    claim = store.leases.claim("a", 1, lease_s=30.0)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    before = store.metrics.progress()
    store.leases.renew("a", lease_s=30.0)
    assert store.metrics.progress() == before
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    assert store.metrics.progress() != before
